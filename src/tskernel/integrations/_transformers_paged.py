"""The attention function for transformers' continuous batching: the sequences of a step packed into one row.

transformers keeps the pages and hands over, layer by layer, the keys and values of every sequence of the step one
behind the other, with their offsets.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

import tskernel
from tskernel.integrations._transformers_attention import options_of, refuse_arguments


def tskernel_paged_mask(*args: Any, **kwargs: Any) -> None:
    """Give no mask: offsets and the layer's window say what is seen."""


def tskernel_paged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    cache: Any = None,
    cu_seq_lens_q: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend causally within the sequences of one step; the signature is that of transformers' interface.

    Shapes: ``query [1, Hq, T, D]``, ``key [1, Hkv, T, D]``, ``value [1, Hkv, T, Dv]`` -> ``[1, T, Hq, Dv]``. Rows
    behind the last sequence come out undefined; nothing reads them.
    Raises: ValueError outside of continuous batching.
    """
    refuse_arguments(dropout, kwargs)
    if cache is None or cu_seq_lens_q is None or attention_mask is not None or kwargs.get("block_table") is not None:
        raise ValueError(
            "tskernel attention: cache: expected what generate_batch passes for packed sequences, got the inputs of "
            'another forward pass; outside of continuous batching call set_attn_implementation("tskernel")'
        )
    more: dict[str, Any] = dict(kwargs)
    key, value = cache.update(key_states=key, value_states=value, layer_idx=module.layer_idx, kwargs=more)
    queries, heads = query.shape[2], query.shape[1]
    out = tskernel.mha_prefill(
        *(x.squeeze(0).transpose(0, 1) for x in (query, key, value)),
        cu_seq_lens_q.int(),
        more["max_length_q"],
        cu_seqlens_kv=more["cu_seq_lens_k"].int(),
        max_seqlen_kv=more["max_length_k"],
        **options_of(module, scaling, softcap, s_aux).of(sliding_window or 0),
    )
    return out.view(1, queries, heads, value.shape[3]), None
