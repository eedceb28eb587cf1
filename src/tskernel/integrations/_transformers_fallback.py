"""The "tskernel_or_sdpa" attention: as "tskernel", and transformers' sdpa for masks that the ops do not have."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from tskernel.integrations._transformers_attention import tskernel_attention
from tskernel.integrations._transformers_mask import tskernel_mask
from tskernel.integrations._transformers_plan import is_plan, packed_plan


def tskernel_or_sdpa_mask(*args: Any, **kwargs: Any) -> Tensor | None:
    """Return a plan, or the boolean mask of transformers' sdpa where there is no plan for the pattern."""
    try:
        mask = tskernel_mask(*args, **kwargs)
    except ValueError:
        mask = None
    if mask is None or (packed_plan(mask) and not torch.compiler.is_compiling()):
        return sdpa_mask(*args, **{**kwargs, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False})
    return mask


def tskernel_or_sdpa_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Attend with the ops where the mask is a plan, else with sdpa.

    Raises: ValueError for sinks or a soft cap together with a mask that is no plan: sdpa would leave them out silently.
    """
    if attention_mask is None or is_plan(attention_mask):
        return tskernel_attention(module, query, key, value, attention_mask, **kwargs)
    for name in ("s_aux", "softcap"):
        if kwargs.get(name) is not None:
            raise ValueError(
                f"tskernel attention: {name}: expected None with a mask that goes to sdpa, which does not know it; "
                'call set_attn_implementation("eager")'
            )
    return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
