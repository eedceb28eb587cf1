"""Reads our operators out of an FX graph."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from tskernel._torch.execute import INLINE, call_device, token_choice
from tskernel._torch.tracing import choose
from tskernel.dispatch.errors import NoKernelFoundError
from tskernel.dispatch.platform import PlatformInfo, platform_of
from tskernel.dispatch.ranking import check_choice, find_choice, strip_fingerprint
from tskernel.dispatch.registry import KernelSpec

if TYPE_CHECKING:
    from torch.export import ExportedProgram

    from tskernel.library import Op


class OpNode(NamedTuple):
    """A node that calls one form of an op."""

    node: Node
    op: Op
    form: str

    @property
    def name(self) -> str:
        """The operator's name."""
        return f"{self.op.name}_{self.form}" if self.form else self.op.name


def forms_by_name() -> dict[str, tuple[Op, str]]:
    """Return operator name -> (op, form)."""
    from tskernel.library import ops

    return {
        f"tokenspeed::{op.name}{'_' + form if form else ''}": (op, form) for op in ops.values() for form in op.forms
    }


def schema_now(name: str) -> str:
    """Return the schema text of one of our operators, or that there is none."""
    found = forms_by_name().get(f"tokenspeed::{name}")
    return str(found[0].torch_op(found[1])._schema) if found else "not defined"


def _graphs(module: torch.nn.Module) -> Iterator[Any]:
    """Yield the graph of a module and of the branches and loop bodies below it."""
    for child in module.modules():
        if isinstance(child, GraphModule):
            yield child.graph


def op_nodes(module: GraphModule) -> Iterator[OpNode]:
    """Yield the nodes that call our operators."""
    known = forms_by_name()
    for graph in _graphs(module):
        for node in graph.nodes:
            if isinstance(node.target, torch._ops.OpOverload) and node.target.name() in known:
                yield OpNode(node, *known[node.target.name()])


def functionalized_nodes(program: ExportedProgram) -> Iterator[tuple[Node, str]]:
    """Yield (node, operator name) of our operators that a functionalized graph wraps, where they cannot be bound."""
    known = forms_by_name()
    for graph in _graphs(program.graph_module):
        for node in graph.nodes:
            inner = node.args[0] if node.op == "call_function" and node.args else None
            if isinstance(inner, torch._ops.OpOverload) and inner.name() in known:
                yield node, inner.name().removeprefix("tokenspeed::")


def choose_for_node(found: OpNode, platform: PlatformInfo | None, override: str | None) -> KernelSpec:
    """Return the kernel for a node, from the fake inputs that the graph records.

    Raises: NoKernelFoundError, OverrideError.
    """
    op, form = found.op, found.form
    arguments, out = _arguments(found)
    choice = find_choice(op, _own_override(found.node))
    if override is not None and (choice is None or choice[1] != "override="):
        choice = override, "bind(overrides=)"
        check_choice(op, *choice)
    where = platform if platform is not None else platform_of(call_device(op, arguments))
    return choose(op, form, arguments, out, where, choice, for_all_sizes=True)


def _own_override(node: Node) -> str | None:
    """Return the override that the exported code gave; an earlier binding and inline mode's token are none."""
    override = node.kwargs.get("override")
    if not isinstance(override, str):
        return None
    if override.startswith(INLINE):
        return token_choice(override)
    return override if strip_fingerprint(override) == override else None


def _arguments(found: OpNode) -> tuple[list[Any], Any]:
    """Return a node's arguments with fake tensors and symbolic sizes in place of nodes, and its ``out``."""

    def value(node: Node) -> Any:
        if "val" not in node.meta:
            raise NoKernelFoundError(f"the graph does not record what {node.name} looks like")
        return node.meta["val"]

    op = found.op
    args, named = map_arg((found.node.args, found.node.kwargs), value)
    kwargs = dict(named)
    out = kwargs.pop("out", None)
    kwargs.pop("override", None)
    return op.fill({**dict(zip(op.arguments, args, strict=False)), **kwargs}), out
