"""argmax in two steps: amax over chunks, vectorised where argmax is not, then argmax inside the first best chunk."""

from __future__ import annotations

import torch
from torch import Tensor

from tskernel.dispatch.platform import ANY
from tskernel.dispatch.registry import Priority, register_kernel
from tskernel.dispatch.signature import formats

_CHUNK = 64


def rejects(logits: Tensor) -> str | None:
    """Return why this call does not fit, or None; reads metadata only."""
    vocab = logits.shape[1]
    return None if vocab % _CHUNK == 0 else f"V={vocab} is not a multiple of {_CHUNK}"


@register_kernel(
    "sampling",
    "argmax",
    capability=ANY,
    signatures=formats(logits=(torch.float32, torch.float16, torch.bfloat16)),
    priority=Priority.PORTABLE,
    rejects=rejects,
    traceable=True,
)
def argmax(logits: Tensor) -> Tensor:
    """Look for the winner inside the first chunk that has the largest maximum."""
    inf = float("inf")
    chunks = torch.nan_to_num(logits, nan=-inf, posinf=inf, neginf=-inf).unflatten(1, (-1, _CHUNK))
    first = chunks.amax(-1).argmax(-1)
    inside = chunks.gather(1, first[:, None, None].expand(-1, 1, _CHUNK)).squeeze(1).argmax(-1)
    return (first * _CHUNK + inside).to(torch.int32)
