"""Tensors of given values in awkward memory layouts; what lies beside them is NaN."""

from __future__ import annotations

import torch
from torch import Tensor

LAYOUTS = ("contiguous", "transposed", "sliced", "offset")


def laid_out(values: Tensor, layout: str) -> Tensor:
    """Return a view with the values of ``values``: own storage, another stride order, or in a poisoned buffer."""
    if layout == "contiguous":
        return values.contiguous()
    if layout == "transposed":
        return values.mT.contiguous().mT if values.dim() > 1 else values.contiguous()
    if layout == "sliced":
        wider = torch.full((*values.shape[:-1], values.shape[-1] + 9), float("nan")).to(values.dtype)
        view = wider[..., 5 : 5 + values.shape[-1]]
    elif layout == "offset":
        view = torch.full((values.numel() + 2,), float("nan")).to(values.dtype)[1:-1].view(values.shape)
    else:
        raise ValueError(layout)
    return view.copy_(values)


def guarded(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return a buffer of -7 with a row more at both ends, and the rows between, which start off any alignment."""
    flat = torch.full((1 + (shape[0] + 2) * shape[1],), -7.0).to(dtype)[1:]
    whole = flat.view(shape[0] + 2, shape[1])
    return whole, whole[1:-1]


def assert_guards(whole: Tensor) -> None:
    """Check that the rows around the result still hold -7."""
    edge = torch.cat((whole[0], whole[-1])).float()
    assert bool((edge == -7.0).all()), "a guard row was written"
