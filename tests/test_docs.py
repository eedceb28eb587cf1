"""The documents agree with the code: generated pages are up to date, examples run, every edge case has its test."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import pytest

from tskernel.dispatch.autotune import database
from tskernel.dispatch.registry import KernelRegistry
from tskernel.library import ops
from tskernel.testing import kernel_names

ROOT = Path(__file__).resolve().parent.parent


def load_generator():
    spec = importlib.util.spec_from_file_location("generate_docs", ROOT / "tools" / "generate_docs.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["generate_docs"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


docs = load_generator()
CASES = docs.read_edge_cases()
TESTS = docs.find_tests()


def claims(text):
    """Return what a page says: its lines, and for a table row each entry of each cell."""
    found = set()
    for line in text.splitlines():
        cells = [c.strip() for c in line.strip("|").split("|")] if line.startswith("|") else []
        found |= {(cells[0], entry) for cell in cells for entry in cell.split("<br>") if entry} if cells else {line}
    return found


def test_generated_documents_are_true():
    """A page may lag behind a kernel or op that was added (that edits no page), but nothing on it may be wrong."""
    now = docs.documents()
    for path, text in now.items():
        wrong = claims(path.read_text()) - claims(text) if path.exists() else set()
        assert not wrong, f"{path.relative_to(ROOT)}: run `make docs`; no longer so: {sorted(map(str, wrong))[:3]}"
    gone = set((ROOT / "docs" / "ops").glob("*.md")) - now.keys()
    assert not gone, f"pages of families that are gone: {gone}; run `make docs`"


@pytest.mark.parametrize("case", [pytest.param(case, id=case.id) for case in CASES if case.gpu != "all"])
def test_edge_case_has_a_test(case):
    assert docs.tests_of(case, TESTS), f"no test is named {case.prefix}_..."


def test_edge_cases_are_complete_and_unique():
    ids = [case.id for case in CASES]
    assert len(ids) == len(set(ids)) == 66
    assert {case.id for case in CASES if case.gpu == "all"} == {"LAY-02", "GRA-01", "GRA-02", "STR-01", "TUN-01"}
    assert {case.id for case in CASES if case.gpu == "part"} == {"LIB-08"}


def test_no_test_claims_an_unknown_edge_case():
    families = {case.id.partition("-")[0].lower() for case in CASES}
    prefixes = {case.prefix for case in CASES}
    for name in TESTS:
        match = re.match(r"(test_([a-z0-9]+)_\d\d)(_|$)", name)
        if match and match[2] in families:
            assert match[1] in prefixes, f"{name}: no such edge case"


@pytest.mark.parametrize("page", ["README.md", "docs/selection.md", "docs/numerics.md"])
def test_examples_run(page, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)
    assert blocks
    namespace = {"__name__": "example"}
    try:
        for block in blocks:
            exec(compile(block, page, "exec"), namespace)
    finally:
        database.clear()  # times that an example measured must not rank kernels in other tests


def test_status_is_never_above_the_evidence(tmp_path, monkeypatch):
    monkeypatch.setattr(docs, "DOCS", tmp_path)
    (tmp_path / "status.toml").write_text("")
    for op in ops.values():
        for spec in KernelRegistry.get().list_kernels(op.family, op.name):
            runs_here = spec.name in kernel_names(op.name)
            assert docs.kernel_status(op, spec, docs.read_facts()) == ("measured (CPU)" if runs_here else "unverified")


ENTRY = {
    "kernel": "reference/rmsnorm",
    "status": "measured",
    "hardware": "H200",
    "date": "2026-11-30",
    "command": "pytest",
}


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({}, None),
        ({"kernel": "cuda/rmsnorm/imagined"}, "no kernel 'cuda/rmsnorm/imagined'"),
        ({"status": "fast"}, "expected a status of"),
        ({"hardware": ""}, "needs hardware, date and command"),
        ({"date": ""}, "needs hardware, date and command"),
        ({"command": ""}, "needs hardware, date and command"),
    ],
)
def test_facts_need_evidence(tmp_path, monkeypatch, change, sentence):
    monkeypatch.setattr(docs, "DOCS", tmp_path)
    lines = "".join(f'{key} = "{value}"\n' for key, value in (ENTRY | change).items())
    (tmp_path / "status.toml").write_text(f"[[fact]]\n{lines}")
    if sentence is not None:
        with pytest.raises(ValueError, match=sentence):
            docs.read_facts()
        return
    spec = KernelRegistry.get().get_by_name("reference/rmsnorm")
    assert docs.kernel_status(ops["rmsnorm"], spec, docs.read_facts()) == "measured (CPU), measured (H200)"


def test_docstrings_become_items():
    text = docs.markdown(
        "Do a thing with ``x``.\n\n    More.\n\n    Shapes: ``x [T]``,\n    any strides.\n    Raises: ValueError.\n"
    )
    assert text == "Do a thing with `x`.\n\nMore.\n\n- **Shapes**: `x [T]`, any strides.\n- **Raises**: ValueError.\n"
