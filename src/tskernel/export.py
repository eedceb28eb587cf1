"""Fix kernels in exported programs, so that what torch.export and AOTInductor make needs no selection at run time.

``torch.export.export`` keeps ``tokenspeed`` operators as nodes. ``bind`` writes the kernel chosen for a platform into
each of them; ``torch._inductor.aoti_compile_and_package`` then traces the kernels' bodies in (as does
``run_decompositions(decompose_custom_triton_ops=True)``), and the package runs in a process that never imported this
one. ``save`` and ``load`` say what is missing when a program cannot be read.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tskernel._version import __version__
from tskernel.dispatch.errors import NoKernelFoundError, OverrideError

if TYPE_CHECKING:
    from torch.export import ExportedProgram
    from torch.fx import GraphModule, Node

    from tskernel.dispatch.platform import PlatformInfo

__all__ = ["Binding", "Bindings", "bind", "bindings", "load", "native_library", "save"]

_NOTE_FILE = "tskernel.json"
_NATIVE, _LIBRARY = "tskernel._native", "libtskernel_ops.so"
_FUNCTIONALIZED = "was functionalized before it was bound: call bind() before run_decompositions()"


class Binding(NamedTuple):
    """What one node of a program is bound to.

    ``kernel`` is None where the node selects when it runs. ``inlined`` says whether a compiler traces the kernel's
    body in; a node that is not inlined needs tskernel in the process that runs it, and ``note`` says why.
    """

    node: str
    op: str
    kernel: str | None
    inlined: bool
    note: str = ""


class Bindings(tuple[Binding, ...]):
    """The bindings of a program, in order; ``str`` gives a table."""

    __slots__ = ()

    def __str__(self) -> str:
        rows = [(b.node, b.op, b.kernel or "-", "inlined" if b.inlined else "operator", b.note) for b in self]
        rows.insert(0, ("node", "op", "kernel", "as", "note"))
        widths = [max(len(row[i]) for row in rows) for i in range(5)]
        return "\n".join("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows)


def bind(
    program: ExportedProgram,
    platform: PlatformInfo | str | None = None,
    *,
    overrides: Mapping[str, str] | None = None,
) -> ExportedProgram:
    """Return a copy of an exported program in which every tokenspeed node names the kernel that serves it.

    ``platform`` is where the program will run, as ``PlatformInfo`` or by name ("sm90"); None is the device of the
    example inputs, on this machine. ``overrides`` maps an op's name to a kernel or solution. An override that the
    exported code gave itself is kept; an earlier binding is made anew. The kernel is chosen for all sizes that the
    program admits: one that would have to know a dynamic size is passed over. Weights are shared with ``program``.
    ``bindings`` shows the result.

    Raises: NoKernelFoundError or OverrideError, naming the node, when no kernel can serve it there; ValueError for an
    override of an op that the program does not have.
    """
    import copy

    from tskernel._torch.graphs import choose_for_node, op_nodes
    from tskernel._torch.inline_rules import register_rules
    from tskernel.dispatch.platform import PlatformInfo

    register_rules()
    where = PlatformInfo.named(platform) if isinstance(platform, str) else platform
    chosen = dict(overrides or {})
    module = copy.deepcopy(program.graph_module)
    present: set[str] = set()
    for found in op_nodes(module):
        present.add(found.op.name)
        try:
            spec = choose_for_node(found, where, chosen.get(found.op.name))
        except (NoKernelFoundError, OverrideError) as error:
            raise type(error)(f"node {found.node.name}: {error}") from None
        found.node.kwargs = {**found.node.kwargs, "override": f"{spec.name}:{spec.fingerprint()}"}
    if unknown := sorted(chosen.keys() - present):
        raise ValueError(
            f"overrides: the program has no op {unknown[0]!r}; it has {', '.join(sorted(present)) or 'none'}"
        )
    for graph_module in _graph_modules(module):
        graph_module.recompile()
    return _replace(program, module)


def bindings(program: ExportedProgram) -> Bindings:
    """Return what the tokenspeed nodes of a program are bound to."""
    from tskernel._torch.graphs import functionalized_nodes, op_nodes

    rows = [_binding(found.node, found.name) for found in op_nodes(program.graph_module)]
    rows += [Binding(node.name, name, None, False, _FUNCTIONALIZED) for node, name in functionalized_nodes(program)]
    return Bindings(rows)


def _binding(node: Node, name: str) -> Binding:
    from tskernel.dispatch.ranking import strip_fingerprint
    from tskernel.dispatch.registry import KernelRegistry

    override = node.kwargs.get("override")
    if not isinstance(override, str):
        return Binding(node.name, name, None, False, "not bound: selects when it runs")
    kernel = strip_fingerprint(override)
    if kernel == override:
        return Binding(node.name, name, None, False, f"not bound: the override {override!r} is read when it runs")
    try:
        spec = KernelRegistry.get().get_by_name(kernel)
    except KeyError as error:
        return Binding(node.name, name, kernel, False, str(error.args[0]))
    if override != f"{kernel}:{spec.fingerprint()}":
        return Binding(node.name, name, kernel, False, "bound with another version of this kernel: bind again")
    if spec.traceable and any(_NATIVE in c.packages for c in spec.capability):
        return Binding(node.name, name, kernel, True, f"calls an operator of {_LIBRARY}, which has to be loaded")
    note = "" if spec.traceable else f"{kernel} cannot be traced: the node stays an operator that needs tskernel to run"
    return Binding(node.name, name, kernel, spec.traceable, note)


def native_library() -> Path:
    """Return the library of the native kernels, which a program without Python loads before a package that calls them.

    Raises: FileNotFoundError where tskernel was installed without it.
    """
    import tskernel

    path = Path(tskernel.__file__).with_name(_LIBRARY)
    if not path.exists():
        raise FileNotFoundError(f"{path}: expected a tskernel built with nvcc or hipcc; this one is pure Python")
    return path


def _graph_modules(module: GraphModule) -> Iterator[GraphModule]:
    from torch.fx import GraphModule

    for child in module.modules():
        if isinstance(child, GraphModule):
            yield child


def _replace(program: ExportedProgram, module: GraphModule) -> ExportedProgram:
    """Return the program with another graph module; state and constants are shared."""
    import copy

    return type(program)(
        root=module,
        graph=module.graph,
        graph_signature=copy.deepcopy(program.graph_signature),
        state_dict=program.state_dict,
        range_constraints=copy.deepcopy(program.range_constraints),
        module_call_graph=program.module_call_graph,
        example_inputs=program.example_inputs,
        constants=program.constants,
        verifiers=program.verifiers,
    )


def save(program: ExportedProgram, path: str | Path, **options: Any) -> None:
    """Save a program as ``torch.export.save`` does, with a note of the tskernel that it needs, which ``load`` reads."""
    import torch

    from tskernel._torch.graphs import op_nodes, schema_now

    ops = {found.name: schema_now(found.name) for found in op_nodes(program.graph_module)}
    note = json.dumps({"tskernel": __version__, "torch": torch.__version__, "ops": ops})
    torch.export.save(program, str(path), extra_files={**options.pop("extra_files", {}), _NOTE_FILE: note}, **options)


def load(path: str | Path, **options: Any) -> ExportedProgram:
    """Load a program that holds tokenspeed operators; AOTInductor can inline what ``bind`` wrote into it.

    Importing this package is what ``torch.export.load`` needs to know the operators.
    Raises: FileNotFoundError; RuntimeError that names the versions which saved and which read, and the operators whose
    schema is not the one that was saved.
    """
    import torch

    from tskernel._torch.inline_rules import register_rules

    register_rules()
    extra = options.pop("extra_files", {})
    extra.setdefault(_NOTE_FILE, "")
    try:
        return torch.export.load(str(path), extra_files=extra, **options)
    except FileNotFoundError:
        raise
    except Exception as error:
        raise RuntimeError(f"tskernel {__version__} cannot load {path}: {_explain(path, error)}") from error


def _explain(path: str | Path, error: Exception) -> str:
    """Return why a program does not load, from the note that ``save`` wrote."""
    from tskernel._torch.graphs import schema_now

    note = _read_note(path)
    if note is None:
        return f"{error}. It was not saved by tskernel.export.save, so what it needs is not known"
    now = {name: schema_now(name) for name in note["ops"]}
    changed = [f"{name}: saved {text}, now {now[name]}" for name, text in note["ops"].items() if now[name] != text]
    saved = f"it was saved by tskernel {note['tskernel']} with torch {note['torch']}"
    return f"{saved}; operators that differ: {'; '.join(changed) or 'none'}; torch says: {error}"


def _read_note(path: str | Path) -> dict[str, Any] | None:
    import zipfile

    try:
        with zipfile.ZipFile(path) as archive:
            name = next(n for n in archive.namelist() if n.endswith(f"/{_NOTE_FILE}"))
            return json.loads(archive.read(name))
    except (OSError, ValueError, StopIteration, zipfile.BadZipFile):
        return None
