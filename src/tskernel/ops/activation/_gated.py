"""What the gated activations share: their two halves, their checks and their samples."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from tskernel.library import FLOATS, Cost, Make, Sample, empty, expect, expect_dtype, nbytes


def gate_and_up(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the gate half and the up half of ``x [..., 2D]`` in ``dtype``."""
    width = x.shape[-1] // 2
    return x[..., :width].to(dtype), x[..., width:].to(dtype)


def check_gated(x: Tensor) -> None:
    """Check that ``x`` has two halves of at least one column."""
    expect_dtype("x", x, FLOATS)
    expect(x.dim() > 0, "x.shape", "at least one dimension", tuple(x.shape))
    expect(x.shape[-1] > 0, "x.shape", "at least two columns", tuple(x.shape))
    expect(x.shape[-1] % 2 == 0, "x.shape", "an even number of columns (gate half, up half)", tuple(x.shape))


def empty_half(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Allocate the result of a gated activation."""
    return empty((*x.shape[:-1], x.shape[-1] // 2), x, dtype)


def gated_traits(x: Tensor) -> dict[str, object]:
    """Return the traits every gated activation states; ``width`` is D."""
    return {"width": x.shape[-1] // 2, "contiguous": x.is_contiguous()}


def gated_samples(make: Make, dtype: torch.dtype, **options: object) -> Iterator[Sample]:
    """Yield inputs of ordinary, smallest, odd and zero size, and strided ones."""
    for name, shape in {
        "ordinary": (7, 64),
        "one": (1, 2),
        "odd": (3, 5, 1234),
        "empty": (0, 64),
        "row": (30,),
    }.items():
        yield Sample(name, x=make.randn(shape, dtype), **options)
    yield Sample("transposed", x=make.randn((64, 7), dtype).t(), **options)
    yield Sample("sliced", x=make.randn((5, 3, 80), dtype)[:, 1:, 7:71], **options)


def gated_cost(x: Tensor) -> Cost:
    """Count one read of both halves, one write of half the elements, and about four operations per result."""
    return Cost(bytes=nbytes(x) + nbytes(x) // 2, flops=2 * x.numel())
