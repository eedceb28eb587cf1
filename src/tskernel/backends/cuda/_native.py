"""The ops of the native library (csrc/), and what every native kernel declares."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from tskernel.dispatch.platform import CapabilityRequirement

# The module exists where the library was built; importing it loads the library, which registers its ops.
CAPABILITY: Final = CapabilityRequirement(vendor="nvidia", at_least="sm80", packages=("tskernel._native",))
FLOATS: Final = (torch.float32, torch.float16, torch.bfloat16)
ACTIVATIONS: Final = {"silu": 1, "gelu": 2, "gelu_tanh": 3, "swiglu_oai": 4}
MAX_DIMS: Final = 6  # the last one and five with strides of their own
PARTIALS: Final = 512  # maxima that the first of the two launches of a per-tensor scale leaves


_NAMESPACE: Final = "tskernel_native::"


def _names() -> list[str]:
    return [n for n in torch._C._dispatch_get_all_op_names() if n.startswith(_NAMESPACE)]


@functools.cache
def load() -> torch.library.Library:
    """Load the library, unless the process has it already, and make its ops traceable; return what holds their fakes.

    Raises: ImportError where tskernel was installed without it.
    """
    if not _names():
        importlib.import_module("tskernel._native")
    if not _names():
        raise ImportError("tskernel._native loads, but registers no ops: build tskernel again")
    holder = torch.library.Library(_NAMESPACE[:-2], "FRAGMENT")
    for name in _names():  # all of them return nothing and write only what their schemas say
        torch.library.register_fake(name, _nothing, lib=holder)
    return holder


def _nothing(*_: object, **__: object) -> None:
    return None


@functools.cache
def native(name: str) -> Callable[..., Any]:
    """Return an op of the library, loading it at the first call."""
    load()
    return getattr(torch.ops.tskernel_native, name).default


def crooked(**parameters: Tensor | None) -> str | None:
    """Return which vector has gaps between its elements, or None; the kernels read them 16 bytes at a time."""
    for name, p in parameters.items():
        if p is not None and p.dim() == 1 and p.shape[0] > 1 and p.stride(0) != 1:
            return f"{name}.stride(0) is {p.stride(0)}: expected contiguous elements"
    return None


def many_dims(**tensors: Tensor) -> str | None:
    """Return which tensor has more dimensions than the kernels can walk through, or None."""
    for name, t in tensors.items():
        if t.dim() > MAX_DIMS:
            return f"{name} has {t.dim()} dimensions: expected at most {MAX_DIMS}"
    return None


def new(shape: tuple[int, ...], like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return uninitialised contiguous storage on the device of ``like``."""
    return torch.empty(shape, dtype=like.dtype if dtype is None else dtype, device=like.device)
