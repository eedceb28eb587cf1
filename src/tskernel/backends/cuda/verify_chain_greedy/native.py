"""verify_chain_greedy in C++: 32 lanes for each draft."""

from __future__ import annotations

import torch
from torch import Tensor

from tskernel._torch.binding import calls
from tskernel.backends.cuda import _native as lib
from tskernel.dispatch.registry import Priority, register_kernel


@register_kernel(
    "sampling",
    "verify_chain_greedy",
    capability=lib.CAPABILITY,
    priority=Priority.PERFORMANT,
)
@calls("tskernel_native::verify_chain_greedy", "draft_tokens", "target_ids", "return0", "return1")
def verify_chain_greedy(draft_tokens: Tensor, target_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Launch the kernel of csrc/verify_chain_greedy.cu."""
    accepted = lib.new((draft_tokens.shape[0],), target_ids, torch.int32)
    tokens = lib.new(tuple(target_ids.shape), target_ids, torch.int32)
    lib.native("verify_chain_greedy")(draft_tokens, target_ids, accepted, tokens)
    return accepted, tokens
