"""What the native sampling kernels share: their workspaces, and which vectors they can read."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from tskernel.backends.cuda._native import new

CHUNKS: Final = 128  # blocks that share a row at most, each of which leaves a word or a maximum
_STATE: Final = 128 + 4 * CHUNKS  # bytes of a row: what its blocks tell each other, and a maximum for each
_FILTER: Final = 2048 * (4 + 8) + 4096 * 8 + 1024 * 4  # counts and masses of the bins, a list, maxima of parts


def workspace(like: Tensor, *, filters: bool) -> Tensor:
    """Return bytes for the rows of ``like``, whose content does not matter."""
    return new((like.shape[0] * (_STATE + (_FILTER if filters else 0)),), like, torch.uint8)
