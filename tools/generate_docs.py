"""Write the documents that follow from the code: docs/ops/<family>.md, docs/status.md and docs/edge-cases.md.

``python tools/generate_docs.py`` writes them, ``--check`` only says which are out of date. tests/test_docs.py calls
the same functions.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pyright: ignore[reportMissingImports]

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
BACKENDS = ("reference", "portable", "cuda", "rocm", "npu")
STATUSES = ("measured", "compiled", "contract-checked")
NOTICE = "<!-- Written by tools/generate_docs.py: change the source and run `make docs`. -->\n\n"


@dataclass(frozen=True)
class EdgeCase:
    """One line of tests/edge_cases.toml. ``gpu`` is "no", "part" or "all"."""

    id: str
    section: str
    title: str
    gpu: str = "no"

    @property
    def prefix(self) -> str:
        """How the names of its tests begin."""
        return "test_" + self.id.lower().replace("-", "_")


@dataclass(frozen=True)
class Fact:
    """One entry of docs/status.toml: what was shown for a kernel, on which hardware, when and by which command."""

    kernel: str
    status: str
    hardware: str
    date: str
    command: str
    note: str = ""


def documents() -> dict[Path, str]:
    """Return every generated document with its text."""
    import tskernel.library

    families: dict[str, list[Any]] = {}
    for op in sorted(tskernel.library.ops.values(), key=lambda op: op.name):
        families.setdefault(op.family, []).append(op)
    pages = {DOCS / "ops" / f"{family}.md": family_page(family, ops) for family, ops in sorted(families.items())}
    pages[DOCS / "status.md"] = status_page(families)
    pages[DOCS / "edge-cases.md"] = edge_case_page()
    return pages


def stale() -> list[Path]:
    """Return the generated documents that differ from what would be written, and pages of families that are gone."""
    wanted = documents()
    left = set((DOCS / "ops").glob("*.md")) - wanted.keys()
    return sorted(left | {path for path, text in wanted.items() if not path.exists() or path.read_text() != text})


def family_page(family: str, ops: list[Any]) -> str:
    """Return the page of one op family, from the ops' schemas and docstrings."""
    contents = "".join(f"- [`{op.name}`](#{op.name}): {summary(op.doc)}\n" for op in ops)
    return f"{NOTICE}# {family}\n\n{contents}\n" + "\n".join(op_section(op) for op in ops)


def op_section(op: Any) -> str:
    """Return the section of one op."""
    schemas = "\n".join(str(op.schemas[form]) for form in op.forms)
    traits = ", ".join(f"`{name}` ({value!r})" for name, value in op.trait_defaults.items())
    facts = [f"- **Traits** (typical value): {traits}."] if traits else []
    if op.mutates:
        facts.append(f"- **Writes**: {', '.join(f'`{name}`' for name in op.mutates)}.")
    return f"## {op.name}\n\n```\n{schemas}\n```\n\n{markdown(op.doc)}" + "".join(f"{fact}\n" for fact in facts)


def summary(doc: str) -> str:
    """Return the first line of a docstring."""
    return inspect.cleandoc(doc).partition("\n")[0].replace("``", "`")


def markdown(doc: str) -> str:
    """Turn a docstring into Markdown: "Shapes:" and the like begin a bold item that runs to the next one."""
    lines = inspect.cleandoc(doc).replace("``", "`").splitlines()
    blocks: list[str] = []
    fresh = True
    for line in lines:
        head = re.match(r"([A-Z][A-Za-z]*(?: [a-z]+)?): (?=\S)", line)
        if not line.strip():
            fresh = True
        elif head:
            blocks.append(f"- **{head[1]}**: {line[head.end() :].strip()}")
            fresh = False
        elif fresh or not blocks:
            blocks.append(line.strip())
            fresh = False
        else:
            blocks[-1] += f" {line.strip()}"
    text = ""
    for index, block in enumerate(blocks):
        joined = index > 0 and block.startswith("- **") and blocks[index - 1].startswith("- **")
        text += ("" if index == 0 else "\n" if joined else "\n\n") + block
    return text + "\n"


def status_page(families: Mapping[str, list[Any]]) -> str:
    """Return the op by backend table and the facts behind it."""
    facts = read_facts()
    rows = [f"| op | {' | '.join(BACKENDS)} |", "| --- |" + " --- |" * len(BACKENDS)]
    for family in sorted(families):
        rows += [f"| {family}.{op.name} | {' | '.join(status_cells(op, facts))} |" for op in families[family]]
    shown = [f"| {f.kernel} | {f.status} | {f.hardware} | {f.date} | `{f.command}` | {f.note} |" for f in facts]
    if shown:
        shown = [
            "| kernel | status | hardware | date | command | note |",
            "| --- | --- | --- | --- | --- | --- |",
            *shown,
        ]
    return (
        f"{NOTICE}# Status\n\n"
        "What has been shown for each kernel, and no more than that. **measured**: its results were compared with the\n"
        "reference on the named hardware. **compiled**: it was built for the architecture, not run.\n"
        "**contract-checked**: its calls were checked against a stand-in for the vendor's interface. **unverified**:\n"
        "none of these. *measured (CPU)* means that tests/test_conformance.py runs the kernel on the CPU on the op's\n"
        "samples. Facts about other hardware stand in `docs/status.toml`.\n\n"
        + "\n".join(rows)
        + "\n\n## Facts\n\n"
        + ("\n".join(shown) if shown else "None about other hardware than the CPU yet.")
        + "\n"
    )


def status_cells(op: Any, facts: list[Fact]) -> Iterator[str]:
    """Yield one cell per backend: each kernel's solution with its status."""
    from tskernel.dispatch.registry import KernelRegistry

    specs = KernelRegistry.get().list_kernels(op.family, op.name)
    for backend in BACKENDS:
        found = [spec for spec in specs if spec.backend == backend]
        yield "<br>".join(f"{spec.solution}: {kernel_status(op, spec, facts)}" for spec in found)


def kernel_status(op: Any, spec: Any, facts: list[Fact]) -> str:
    """Return the status of a kernel: the facts, and whether the conformance suite covers it on the CPU."""
    from tskernel.testing import kernel_names

    told = [f"{fact.status} ({fact.hardware})" for fact in facts if fact.kernel == spec.name]
    if spec.name in kernel_names(op.name) and has_samples(op):
        told.insert(0, "measured (CPU)")
    return ", ".join(dict.fromkeys(told)) or "unverified"


def has_samples(op: Any) -> bool:
    """Whether the op has samples: without them the conformance suite does not call it."""
    from tskernel.testing import SampleMaker

    return any(op.sample_calls(SampleMaker(), dtype) for dtype in op.dtypes[:1])


def read_facts() -> list[Fact]:
    """Read docs/status.toml. Raises: ValueError for an unknown kernel or status, or an entry without evidence."""
    from tskernel.dispatch.registry import KernelRegistry

    known = {spec.name for spec in KernelRegistry.get().list_kernels()}
    facts = [Fact(**entry) for entry in tomllib.loads((DOCS / "status.toml").read_text()).get("fact", [])]
    for fact in facts:
        if fact.kernel not in known:
            raise ValueError(f"docs/status.toml: no kernel {fact.kernel!r} is registered")
        if fact.status not in STATUSES:
            raise ValueError(f"docs/status.toml: {fact.kernel}: expected a status of {STATUSES}, got {fact.status!r}")
        if not (fact.hardware and fact.date and fact.command):
            raise ValueError(f"docs/status.toml: {fact.kernel}: a fact needs hardware, date and command")
    return sorted(facts, key=lambda fact: (fact.kernel, fact.hardware))


def read_edge_cases() -> list[EdgeCase]:
    """Read tests/edge_cases.toml in order."""
    cases = []
    for section, entries in tomllib.loads((ROOT / "tests" / "edge_cases.toml").read_text()).items():
        for id_, entry in entries.items():
            fields = {"title": entry} if isinstance(entry, str) else entry
            gpu = {True: "all", "part": "part", False: "no"}[fields.get("gpu", False)]
            cases.append(EdgeCase(id_, section, fields["title"], gpu))
    return cases


def find_tests() -> dict[str, list[Path]]:
    """Return the test functions below tests/ with the files that hold them. Reads the text; imports nothing."""
    found: dict[str, list[Path]] = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                found.setdefault(node.name, []).append(path)
    return found


def tests_of(case: EdgeCase, tests: Mapping[str, list[Path]]) -> list[tuple[str, Path]]:
    """Return the tests of an edge case."""
    names = sorted(name for name in tests if name == case.prefix or name.startswith(case.prefix + "_"))
    return [(name, path) for name in names for path in tests[name]]


def edge_case_page() -> str:
    """Return the table from each edge case to its tests."""
    tests = find_tests()
    rows = ["| ID | behaviour | tests |", "| --- | --- | --- |"]
    for case in read_edge_cases():
        found = [f"[`{name}`](../{path.relative_to(ROOT).as_posix()})" for name, path in tests_of(case, tests)]
        needs = {"all": "needs an accelerator", "part": "part of it needs an accelerator", "no": ""}[case.gpu]
        shown = "<br>".join([*found, *([f"*{needs}*"] if needs else [])]) or "**none**"
        rows.append(f"| {case.id} | {case.title} | {shown} |")
    return (
        f"{NOTICE}# Edge cases\n\n"
        "The behaviours that every op, every kernel and the dispatcher must have, and the tests that show them. A\n"
        "test belongs to an ID by its name. IDs and titles stand in `tests/edge_cases.toml`.\n\n"
        + "\n".join(rows)
        + "\n"
    )


def main() -> int:
    """Write the documents, or with --check name the stale ones and return 1."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; return 1 if something is out of date")
    check = parser.parse_args().check
    found = stale()
    pages = documents()
    for path in found:
        print(f"{'out of date' if check else 'wrote'}: {path.relative_to(ROOT)}")
        if not check and path in pages:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(pages[path])
        elif not check:
            path.unlink()
    return int(check and bool(found))


if __name__ == "__main__":
    sys.exit(main())
