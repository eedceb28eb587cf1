"""Registers an op with torch.library: schema, fake, implementation, autocast and vmap, for each of its forms."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.library import Library

from tskernel._torch.validate import refuse_gradient

if TYPE_CHECKING:
    from tskernel.library import Op

# Kept for the life of the process: a Library that is collected takes its operators with it.
LIBRARY = Library("tokenspeed", "FRAGMENT")
_TAGS = (torch.Tag.pt2_compliant_tag,)
_CASTABLE = frozenset({torch.float32, torch.float16, torch.bfloat16})


def _autocast_devices() -> tuple[str, ...]:
    """Return the devices that can be under autocast here; a registration costs, and most builds have two."""
    other = torch._C._get_privateuse1_backend_name() != "privateuseone"  # an out-of-tree device names itself first
    return ("CPU", "CUDA", *(["PrivateUse1"] if other else []), *(["XPU"] if torch.xpu._is_compiled() else []))


def define(op: Op) -> None:
    """Define all forms of an op. One implementation serves every device: the selector looks at the tensors."""
    for form in op.forms:
        name = f"{op.name}_{form}" if form else op.name
        LIBRARY.define(op.schemas[form], tags=_TAGS)
        LIBRARY.impl(name, _lazy(op, form), "CompositeExplicitAutograd")
        _register_fake(name, _fake(op, form), op.module)
        for device in _autocast_devices() if op.autocast else ():
            LIBRARY.impl(name, _autocast(op, form, device), f"Autocast{device}")
    if op.vmap:
        torch.library.register_vmap(f"tokenspeed::{op.name}", _vmap(op), lib=LIBRARY)


def _register_fake(name: str, fake: Callable[..., Any], source: str) -> None:
    """Register a fake.

    ``Library._register_fake`` looks its caller's source up, which for all ops costs a third of the import budget.
    """
    try:
        entry = torch._library.simple_registry.singleton.find(f"tokenspeed::{name}")  # pyright: ignore
        # The name is new, since it was defined just before: looking for an older fake would only cost.
        handle = entry.fake_impl.register(fake, source, lib=LIBRARY, allow_override=True)
        LIBRARY._registration_handles.append(handle)
    except AttributeError:
        LIBRARY._register_fake(name, fake)


def _lazy(op: Op, form: str) -> FunctionType:
    """Return an implementation that gets its code at the first call, which keeps that out of import time.

    The registered function is changed in place: a wrapper around the real one would pack and unpack every call.
    """

    def build() -> FunctionType:
        from tskernel._torch.front import build_impl

        return build_impl(op, form, stub)

    stub = FunctionType(_first_call.__code__, {"_build": build}, f"{op.name}_impl")
    return stub


def _first_call(*args: Any, **kwargs: Any) -> Any:
    return _build()(*args, **kwargs)  # noqa: F821  # pyright: ignore[reportUndefinedVariable]  a stub's own global


def _fake(op: Op, form: str) -> Callable[..., Any]:
    def fake(*args: Any, override: str | None = None, out: Tensor | None = None, **kwargs: Any) -> Any:
        from tskernel.library import validate

        arguments = op.fill({**dict(zip(op.arguments, args, strict=False)), **kwargs})
        refuse_gradient(op, arguments)
        validate(op, arguments, form, out)
        return None if form == "out" or op.mutates else op.allocate(arguments, return_lse=form == "lse")

    return fake


def _autocast(op: Op, form: str, device: str) -> Callable[..., Any]:
    keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, f"Autocast{device}"))
    kind = {"PrivateUse1": torch._C._get_privateuse1_backend_name()}.get(device, device.lower())
    cast = frozenset(op.autocast)

    def autocast(*args: Any, **kwargs: Any) -> Any:
        dtype = torch.get_autocast_dtype(kind)
        positional = [_cast(a, dtype) if n in cast else a for a, n in zip(args, op.arguments, strict=False)]
        keywords = {n: _cast(a, dtype) if n in cast else a for n, a in kwargs.items()}
        with torch._C._ExcludeDispatchKeyGuard(keys):
            return op.torch_op(form)(*positional, **keywords)

    return autocast


def _cast(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, Tensor) and value.dtype in _CASTABLE else value


def _vmap(op: Op) -> Callable[..., Any]:
    """Return the batching rule of an op whose named arguments take further leading dimensions as they are."""

    def rule(info: Any, in_dims: tuple[Any, ...], *args: Any, **kwargs: Any) -> Any:
        moved = []
        for name, value, dim in zip(op.arguments, args, in_dims, strict=False):
            if dim is not None and name not in op.vmap:
                raise NotImplementedError(
                    f"tokenspeed::{op.name}: vmap over {name}: expected only {', '.join(op.vmap)} to be batched; "
                    "loop instead"
                )
            batched = value if dim is None or not isinstance(value, Tensor) else value.movedim(dim, 0)
            if dim is None and name in op.vmap and isinstance(value, Tensor):
                batched = value.expand(info.batch_size, *value.shape)
            moved.append(batched)
        result = op.torch_op()(*moved, **kwargs)
        return result, tuple(0 for _ in result) if isinstance(result, tuple) else 0

    return rule
