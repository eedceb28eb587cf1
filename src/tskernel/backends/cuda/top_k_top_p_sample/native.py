"""top_k_top_p_sample in C++: the filters by histograms, the draw among the few tokens listed or in one more look."""

from __future__ import annotations

import torch
from torch import Tensor

from tskernel.backends.cuda import _native as lib
from tskernel.backends.cuda._native_vocab import workspace
from tskernel.dispatch.registry import Priority, register_kernel
from tskernel.dispatch.signature import formats


def rejects(top_k: Tensor, top_p: Tensor, temperature: Tensor, seed: Tensor, offset: Tensor) -> str | None:
    """Return why this call does not fit, or None."""
    return lib.crooked(top_k=top_k, top_p=top_p, temperature=temperature, seed=seed, offset=offset)


@register_kernel(
    "sampling",
    "top_k_top_p_sample",
    capability=lib.CAPABILITY,
    signatures=formats(logits=lib.FLOATS),
    priority=Priority.PERFORMANT,
    rejects=rejects,
)
def top_k_top_p_sample(
    logits: Tensor, top_k: Tensor, top_p: Tensor, temperature: Tensor, seed: Tensor, offset: Tensor
) -> Tensor:
    """Launch the kernels of csrc/top_k_top_p_sample.cu."""
    out = lib.new((logits.shape[0],), logits, torch.int32)
    scratch = workspace(logits, filters=True)
    lib.native("top_k_top_p_sample")(logits, top_k, top_p, temperature, seed, offset, out, scratch)
    return out
