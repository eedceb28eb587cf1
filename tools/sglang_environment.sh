#!/usr/bin/env bash
# Make an environment with SGLang on a CPU build of torch and this checkout, for tests/integrations/test_sglang.py
# (2.3 GB, 2 to 3 minutes). Usage: tools/sglang_environment.sh FOLDER
# SGLang's own requirements are for CUDA, some 10 GB; here is what it imports on a CPU. SGLang 0.5.23 pins torch 2.14.1
# and needs nothing newer than 2.13 here.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python3 -m venv "$1"
"$1/bin/pip" install --quiet --no-compile \
  torch==2.13.0 triton==3.7.1 transformers==5.19.0 tokenizers==0.23.2 compressed-tensors==0.18.0 openai==2.8.0 \
  sentencepiece==0.2.1 aiohttp datasets dill einops fastapi gguf interegular ipython llguidance msgspec numpy \
  nvidia-ml-py orjson packaging partial_json_parser pillow prometheus-client psutil pybase64 pydantic \
  python-multipart pyzmq requests scipy setproctitle tiktoken tqdm uvicorn uvloop xxhash zstandard \
  pytest pytest-xdist hypothesis expecttest setuptools wheel
"$1/bin/pip" install --quiet --no-compile --no-deps \
  sglang==0.5.23 apache-tvm-ffi==0.1.11 xgrammar==0.2.7 torchvision==0.28.0
# torchvision's library is for CUDA and does not load; without its operators there is nothing to describe.
: > "$("$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/torchvision/_meta_registrations.py"
"$1/bin/pip" install --quiet --no-compile --no-deps --no-build-isolation -e "$root"
