"""Argument checks that give one sentence in eager, fake and compiled calls.

They read metadata only. Sizes may be symbolic: a comparison of symbolic sizes is passed on as a ``SymBool``, never
branched on.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor

FLOATS: Final = (torch.float32, torch.float16, torch.bfloat16)
HALVES: Final = (torch.float16, torch.bfloat16)
FP8: Final = (torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz)


class _Context(threading.local):
    op: str = "?"
    meta: bool = False


_context = _Context()


@contextmanager
def checking(op: str) -> Iterator[None]:
    """Name the op whose arguments are being checked."""
    before, _context.op = _context.op, op
    try:
        yield
    finally:
        _context.op = before


@contextmanager
def on_meta() -> Iterator[None]:
    """Make ``empty`` allocate nothing: used to learn what an output would look like."""
    before, _context.meta = _context.meta, True
    try:
        yield
    finally:
        _context.meta = before


def message(argument: str, expected: object, got: object) -> str:
    """Return the one sentence every argument error uses."""
    return f"tokenspeed::{_context.op}: {argument}: expected {expected}, got {got}"


def expect(condition: Any, argument: str, expected: object, got: object) -> None:
    """Raise ValueError unless ``condition`` holds; a symbolic condition becomes a guard or a run-time assertion."""
    if condition is True:
        return
    if isinstance(condition, torch.SymBool):
        text = message(argument, expected, got)
        torch._check_value(condition, lambda: text)
    elif not condition:
        raise ValueError(message(argument, expected, got))


def expect_dtype(argument: str, tensor: Tensor | None, dtypes: Sequence[torch.dtype]) -> None:
    """Check a dtype; None passes."""
    if tensor is not None and tensor.dtype not in dtypes:
        names = " or ".join(dict.fromkeys(str(d).removeprefix("torch.") for d in dtypes))
        raise ValueError(message(f"{argument}.dtype", names, str(tensor.dtype).removeprefix("torch.")))


def expect_dim(argument: str, tensor: Tensor | None, *dims: int) -> None:
    """Check the number of dimensions; None passes."""
    if tensor is not None and tensor.dim() not in dims:
        raise ValueError(message(argument, f"{' or '.join(map(str, dims))} dimensions", f"shape {tuple(tensor.shape)}"))


def expect_shape(argument: str, tensor: Tensor | None, shape: Sequence[Any]) -> None:
    """Check a shape, dimension by dimension; None in ``shape`` matches any size; a None tensor passes."""
    if tensor is None:
        return
    expect_dim(argument, tensor, len(shape))
    for got, expected in zip(tensor.shape, shape, strict=True):
        if expected is not None and got is not expected:
            expect(got == expected, f"{argument}.shape", _shape_text(shape), tuple(tensor.shape))


def _shape_text(shape: Sequence[Any]) -> str:
    return "(" + ", ".join("*" if s is None else str(s) for s in shape) + ("," if len(shape) == 1 else "") + ")"


def expect_last_contiguous(argument: str, tensor: Tensor | None) -> None:
    """Check that the last dimension has stride 1 (or a single element); None passes."""
    if tensor is not None and tensor.dim() and not isinstance(tensor.shape[-1], torch.SymInt) and tensor.shape[-1] > 1:
        expect(tensor.stride(-1) == 1, f"{argument}.stride(-1)", 1, tensor.stride(-1))


def expect_choice(argument: str, value: str, choices: Sequence[str]) -> None:
    """Check a string option."""
    if value not in choices:
        raise ValueError(message(argument, " or ".join(map(repr, choices)), repr(value)))


def wide(tensor: Tensor) -> torch.dtype:
    """Return the dtype a reference body computes in: float64 for float64 input (the oracle), else float32."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def empty(shape: Sequence[Any], like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return uninitialised contiguous storage on ``like``'s device, with its dtype unless another is given."""
    device = torch.device("meta") if _context.meta else like.device
    return torch.empty(shape, dtype=like.dtype if dtype is None else dtype, device=device)


def nbytes(*tensors: Tensor | None) -> int:
    """Return how many bytes the elements of the tensors take."""
    return sum(t.numel() * t.element_size() for t in tensors if t is not None)
