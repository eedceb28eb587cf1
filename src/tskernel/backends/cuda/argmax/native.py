"""argmax in C++: a row is shared by many blocks, whose winners a second launch joins."""

from __future__ import annotations

import torch
from torch import Tensor

from tskernel.backends.cuda import _native as lib
from tskernel.backends.cuda._native_vocab import CHUNKS
from tskernel.dispatch.registry import Priority, register_kernel
from tskernel.dispatch.signature import formats


@register_kernel(
    "sampling",
    "argmax",
    capability=lib.CAPABILITY,
    signatures=formats(logits=lib.FLOATS),
    priority=Priority.PERFORMANT,
)
def argmax(logits: Tensor) -> Tensor:
    """Launch the kernels of csrc/argmax.cu."""
    rows = logits.shape[0]
    out = lib.new((rows,), logits, torch.int32)
    lib.native("argmax")(logits, out, lib.new((rows * CHUNKS,), logits, torch.int64))
    return out
