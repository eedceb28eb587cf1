"""The layout rules: where files go, how big they are, what may be imported where."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SRC = ROOT / "src" / "tskernel"
FILES = sorted(SRC.rglob("*.py"))
KERNELS = sorted(f for f in (SRC / "backends").glob("*/*/*.py") if not f.name.startswith("_"))
OPS = sorted(f for f in (SRC / "ops").glob("*/*.py") if not f.name.startswith("_"))
# What a kernel or op file may import at module level: everything else is loaded when it is used.
LIGHT = {
    "__future__",
    "collections",
    "typing",
    "dataclasses",
    "functools",
    "math",
    "torch",
    "tskernel",
    "enum",
    "itertools",
    "operator",
}
MAX_FUNCTION, MAX_CORE, MAX_KERNEL, MAX_INIT = 60, 400, 800, 45


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def relative(path: Path) -> str:
    return str(path.relative_to(SRC))


def module_level_imports(tree: ast.Module) -> set[str]:
    """Return the top-level packages imported when the module is, ``if TYPE_CHECKING`` blocks left out."""
    found = set()
    for node in tree.body:
        if isinstance(node, ast.Import):
            found |= {a.name.split(".")[0] for a in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add((node.module or "").split(".")[0])
    return found


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_sizes(path: Path) -> None:
    lines = len(path.read_text().splitlines())
    limit = MAX_INIT if path.name == "__init__.py" else MAX_KERNEL if "backends" in path.parts else MAX_CORE
    assert lines <= limit, f"{lines} lines, at most {limit}"
    for node in ast.walk(parse(path)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            first = node.body[0]
            doc = (
                first.end_lineno - first.lineno + 1
                if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
                else 0
            )
            length = (node.end_lineno or 0) - node.lineno + 1 - doc
            assert length <= MAX_FUNCTION, f"{node.name}: {length} lines, at most {MAX_FUNCTION}"


@pytest.mark.parametrize("path", [f for f in FILES if f.name == "__init__.py"], ids=relative)
def test_init_files_hold_no_logic(path: Path) -> None:
    for node in parse(path).body:
        names = [t.id for t in node.targets if isinstance(t, ast.Name)] if isinstance(node, ast.Assign) else []
        for_types = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING" and not node.orelse
        statements = node.body if isinstance(node, ast.If) and for_types else [node]
        for s in statements:
            assert isinstance(s, (ast.Import, ast.ImportFrom, ast.Expr)) or names == ["__all__"], ast.unparse(s)


@pytest.mark.parametrize("path", [*KERNELS, *OPS], ids=relative)
def test_kernels_and_ops_import_nothing_heavy(path: Path) -> None:
    assert module_level_imports(parse(path)) <= LIGHT


@pytest.mark.parametrize("path", KERNELS, ids=relative)
def test_a_kernels_path_is_its_identity(path: Path) -> None:
    op = path.parent.name
    assert list((SRC / "ops").glob(f"*/{op}.py")), f"no op {op}"
    kernels = [n for n in parse(path).body if isinstance(n, ast.FunctionDef) and n.decorator_list]
    assert [k.name for k in kernels] == [op]
    assert kernels[0].args.kwarg is None, "a kernel states its arguments"


@pytest.mark.parametrize("path", OPS, ids=relative)
def test_an_ops_path_is_its_identity(path: Path) -> None:
    from tskernel.library import ops

    op = ops[path.stem]
    assert op.family == path.parent.name
    assert op.module == f"tskernel.ops.{path.parent.name}.{path.stem}"


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_no_assert_for_user_mistakes(path: Path) -> None:
    assert not [n.lineno for n in ast.walk(parse(path)) if isinstance(n, ast.Assert)]


@pytest.mark.parametrize(
    "path", [f for f in FILES if "backends" not in f.parts and "dispatch" not in f.parts], ids=relative
)
def test_no_vendor_branches_outside_a_backend(path: Path) -> None:
    """A decision by vendor belongs to a capability, not to an if."""
    text = path.read_text()
    assert ".vendor ==" not in text and "torch.version.hip" not in text


def test_no_test_or_kernel_has_its_own_tolerance() -> None:
    for path in [*(ROOT / "tests").rglob("*.py"), *FILES]:
        if path.name in ("testing.py", "test_tree.py"):
            continue
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.Call):
                named = {k.arg for k in node.keywords} & {"rtol", "atol"}
                assert not named or "demo" in path.parts, (
                    f"{path}:{node.lineno} passes {named}: use tskernel.testing.compare"
                )
