"""Selection without sorting: which elements, largest first, reach a target weight, in four passes over their bits."""

from __future__ import annotations

import torch
from torch import Tensor

_DIGIT = 8  # 256 bins a row: a histogram never outgrows the row it is of by much
_BINS = 1 << _DIGIT
_SIGN = 1 << 31
_SMALLEST = 2.0**-1022


def ordered_keys(x: Tensor) -> Tensor:
    """Return int32 keys that order like the fp32 values, which hold no NaN; -0 and +0 are equal."""
    bits = (x + 0.0).view(torch.int32)
    return torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


def _bin_reaching(mass: Tensor, above: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return the bin at which the mass from the top reaches the target ``[B, 1]``, and the mass above it."""
    reached = mass.flip(1).cumsum(1) + above
    from_top = (reached < target).sum(1, keepdim=True).clamp(max=_BINS - 1)
    before = reached.gather(1, (from_top - 1).clamp(min=0))
    return _BINS - 1 - from_top, torch.where(from_top > 0, before, above)


def keep_largest(keys: Tensor, weights: Tensor, target: Tensor) -> Tensor:
    """Return the mask of the shortest prefix, largest key first and equals by index, that weighs ``target [B, 1]``.

    ``weights`` are fp64, not negative, equal for equal keys unless 0. The first element with a weight is always kept;
    where the whole row does not reach the target, all of it is.
    """
    target = target.clamp(min=_SMALLEST)  # 0 would be reached by no element at all
    unsigned = keys ^ -_SIGN  # the bits, read as an unsigned number, order like the keys
    above, prefix, live = torch.zeros_like(target), torch.zeros_like(target, dtype=torch.int64), weights
    for shift in range(32 - _DIGIT, -1, -_DIGIT):
        digit = ((unsigned >> shift) & (_BINS - 1)).to(torch.int64)
        mass = weights.new_zeros((keys.shape[0], _BINS)).scatter_add(1, digit, live)
        chosen, above = _bin_reaching(mass, above, target)
        prefix = (prefix << _DIGIT) | chosen
        live = live.masked_fill(digit != chosen, 0.0)
    last = (prefix - _SIGN).to(torch.int32)
    equal = keys == last
    each = live.amax(1, keepdim=True)
    rank = equal.to(torch.int32).cumsum(1, dtype=torch.int32) - 1
    return (keys > last) | (equal & (above + rank * each < target))
