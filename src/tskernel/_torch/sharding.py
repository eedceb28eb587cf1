"""DTensor rules from the ops' ``shard`` declarations.

Loaded when a DTensor first reaches an op: importing DTensor costs half a second.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

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


def _rule(op: Op, form: str) -> Any:
    def rule(*args: Any, **kwargs: Any) -> list[tuple[list[Any], list[Any]]]:
        specs = {**dict(zip(op.arguments, args, strict=False)), **kwargs}
        strategies: list[Mapping[str, Any]] = [{}, *(s for s in op.shard.values() if _fits_rank(op, s, specs))]
        return [_placements(op, form, s, args, kwargs) for s in strategies]

    return rule


def _fits_rank(op: Op, strategy: Mapping[str, Any], specs: Mapping[str, Any]) -> bool:
    """Whether no tensor of free rank would be cut along its last dimension, which is the one that the op works on."""
    dims = ((specs.get(name), dim) for name, dim in strategy.items() if name in op.vmap)
    return all(spec is None or dim < spec.ndim - 1 for spec, dim in dims)


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
    outputs = (
        [place("return"), place("lse")]
        if form == "lse"
        else [place(_output(i)) for i in range(op.signature.num_returns)]
    )
    return outputs, inputs


def _output(index: int) -> str:
    return "return" if index == 0 else f"return{index}"
