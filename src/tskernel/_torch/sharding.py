"""DTensor rules from the ops' ``shard`` declarations.

Loaded when a DTensor first reaches an op: importing DTensor costs half a second.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from tskernel.library import Op

_done: set[str] = set()


def ensure_rules(arguments: Sequence[Any]) -> None:
    """Register the rules of all ops if one of the arguments is a DTensor."""
    module = sys.modules.get("torch.distributed.tensor")
    if module is not None and any(isinstance(a, module.DTensor) for a in arguments):
        register_sharding_rules()


def register_sharding_rules() -> None:
    """Register every op's DTensor sharding rules.

    Call it before passing DTensors straight to ``torch.ops.tokenspeed``.
    """
    from torch.distributed.tensor.experimental import register_sharding

    from tskernel.library import ops

    for op in ops.values():
        for form in op.forms:
            key = f"{op.name}:{form}"
            if op.shard and key not in _done:
                register_sharding(op.torch_op(form))(_rule(op, form))
                _done.add(key)


def cut_dims(op: Op, strategy: Mapping[str, Any], shapes: Mapping[str, Sequence[int]], ranks: int) -> dict[str, Any]:
    """Return name -> dimension that a strategy cuts, for arguments and outputs of these shapes; empty where it cannot.

    A dimension of size 1 is broadcast and stays whole (a scale, the one KV head). Scales and biases are cut with what
    they belong to, or the strategy does not apply (one scale for a block of 128 rows). Unlike sizes (query and KV
    heads) are cut only into equal parts, and never the last dimension of rows that an op of free rank works on. Where
    an argument stands as "absent" the strategy is for calls without it (each rank would add the bias to its sum).
    """
    if any(dim == "absent" and name in shapes for name, dim in strategy.items()):
        return {}
    cut: dict[str, Any] = {}
    for name, dim in strategy.items():
        if dim == "absent":
            continue
        size = _size(shapes.get(name, ()), dim)
        if dim == "partial" or size > 1:
            cut[name] = dim if dim == "partial" or dim >= 0 else dim + len(shapes[name])
    sizes = {n: shapes[n][d] for n, d in cut.items() if d != "partial"}
    required = {p.name for p in op.signature.params if p.type == "Tensor" and not p.name.endswith("scale")}
    owners = {size for n, size in sizes.items() if n in required}
    leader = next(n for n in strategy if n in shapes)
    if leader not in cut or (leader in op.vmap and cut[leader] == len(shapes[leader]) - 1):
        return {}
    if not owners.issuperset(sizes.values()) or (len(owners) > 1 and any(size % ranks for size in owners)):
        return {}
    return cut


def _size(shape: Sequence[int], dim: Any) -> int:
    """Return the size of a dimension, 1 where there is none."""
    return shape[dim] if dim != "partial" and -len(shape) <= dim < len(shape) else 1


def output_shapes(op: Op, form: str, result: Any) -> dict[str, tuple[int, ...]]:
    """Return output name -> shape of a result; strategies call the outputs return, return1, return2 and lse."""
    parts = result if isinstance(result, tuple) else () if result is None else (result,)
    names = ("return", "lse") if form == "lse" else tuple(_output(i) for i in range(len(parts)))
    return {n: tuple(t.shape) for n, t in zip(names, parts, strict=True)}


def _rule(op: Op, form: str) -> Any:
    def rule(*args: Any, **kwargs: Any) -> list[tuple[list[Any], list[Any]]]:
        named = {**dict(zip(op.arguments, args, strict=False)), **kwargs}
        specs = {n: v for n, v in named.items() if type(v).__name__ == "DTensorSpec"}
        shapes = {n: tuple(v.shape) for n, v in specs.items() if n != "out"}
        ranks = next(iter(specs.values())).mesh.size()
        shapes |= output_shapes(op, form, _result_on_meta(op, form, named))
        cuts = [c for s in op.shard.values() if (c := cut_dims(op, s, shapes, ranks))]
        if form == "out":  # a sum that is still to be made cannot be written to the caller's tensor
            cuts = [c for c in cuts if "partial" not in c.values()]
        strategies = [{}, *cuts]
        return [_placements(op, form, s, args, kwargs) for s in strategies]

    return rule


def _result_on_meta(op: Op, form: str, named: Mapping[str, Any]) -> Any:
    """Return what a call would give, without data."""

    def like(value: Any) -> Any:
        if type(value).__name__ != "DTensorSpec":
            return value
        meta = value.tensor_meta
        return torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device="meta")

    arguments = op.fill({n: like(v) for n, v in named.items() if n in op.arguments})
    return op.allocate(arguments, return_lse=form == "lse")


def _placements(
    op: Op, form: str, strategy: Mapping[str, Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[list[Any], list[Any]]:
    """Return (output placements, input placements) of one strategy; what it does not name is replicated."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    def place(name: str) -> Any:
        dim = strategy.get(name)
        return Replicate() if dim is None else Partial() if dim == "partial" else Shard(dim)

    def given(value: Any, name: str) -> Any:
        return place(name) if type(value).__name__ == "DTensorSpec" else None

    inputs = [given(v, n) for n, v in zip(op.arguments, args, strict=False)]
    inputs += [given(v, "return" if n == "out" else n) for n, v in kwargs.items()]
    if form == "out" or not op.signature.num_returns:
        return [], inputs
    if form == "lse":
        return [place("return"), place("lse")], inputs
    return [place(_output(i)) for i in range(op.signature.num_returns)], inputs


def _output(index: int) -> str:
    return "return" if index == 0 else f"return{index}"
