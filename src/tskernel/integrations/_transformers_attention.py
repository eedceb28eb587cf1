"""The attention function of transformers' interface, by the attention ops: ragged, or paged where there is a cache.

Dense keys ``[B, H, S, D]`` are given to the paged ops as they lie, as *views*: one page per sequence where there is no
padding, one page per token where there is. So neither a static cache nor a padded one is copied.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import tskernel
from tskernel.integrations._transformers_plan import Plan, decode, is_plan


@dataclass(frozen=True)
class _Options:
    """What goes to every op unchanged."""

    scale: float | None
    cap: float
    sinks: Tensor | None

    def of(self, window: int) -> dict[str, Any]:
        """Return the keyword arguments of an op; a window of 0 is none."""
        return {
            "softmax_scale": self.scale,
            "logit_cap": self.cap,
            "sinks": self.sinks,
            "window_left": window - 1 if window else -1,
        }


def tskernel_attention(
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
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend; the signature is that of transformers' ``AttentionInterface``.

    The mask decides what is seen, as with sdpa. Rows of padding tokens come out as 0 under a causal mask; nothing
    reads them.

    Shapes: ``query [B, Hq, Q, D]``, ``key [B, Hkv, K, D]``, ``value [B, Hkv, K, Dv]`` (any strides) -> ``[B, Q, Hq,
    Dv]``.
    Raises: ValueError for a mask that is no plan, dropout, a position bias, or another argument that changes the result
    and has no counterpart in the ops.
    """
    refuse_arguments(dropout, kwargs)
    options = options_of(module, scaling, softcap, s_aux)
    queries, keys = query.shape[2], key.shape[2]
    if attention_mask is None:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        plan = None
        window = sliding_window or 0
    elif is_plan(attention_mask):
        plan = decode(attention_mask, queries, keys)
        causal, window = plan.causal, plan.window
    else:
        raise ValueError(
            "tskernel attention: attention_mask: expected a 2-D padding mask on the model's input, got a mask "
            f"{tuple(attention_mask.shape)} of {attention_mask.dtype}; for your own 4-D masks call "
            'enable(model, fallback="sdpa") or set_attn_implementation("sdpa")'
        )
    if cu_seq_lens_q is not None:
        out = _packed(query, key, value, cu_seq_lens_q, cu_seq_lens_k, causal, window, plan, options)
    else:
        out = _rows(query, key, value, causal, window, plan, options)
    return out.view(query.shape[0], queries, query.shape[1], value.shape[3]), None


def options_of(module: nn.Module, scaling: float | None, softcap: float | None, sinks: Tensor | None) -> _Options:
    """Return what goes to every op; the sinks are those of the module if none are given."""
    sinks = getattr(module, "sinks", None) if sinks is None else sinks
    if sinks is not None and sinks.dtype not in (torch.float32, torch.bfloat16):
        sinks = sinks.float()
    return _Options(scaling, softcap or 0.0, sinks)


# Arguments that change the result and have no counterpart in the ops, and the attention of transformers that has them.
_ELSEWHERE = {
    "position_bias": "sdpa",
    "cache": "sdpa",
    "head_mask": "eager",
    "indices": "eager",
    "block_indices": "eager",
    "alibi": "eager",
    "score_mod": "flex_attention",
    "block_mask": "flex_attention",
}


def refuse_arguments(dropout: float, others: dict[str, Any]) -> None:
    """Raise ValueError for an argument that asks for something the ops do not do."""
    if dropout:
        raise ValueError(
            f"tskernel attention: dropout: expected 0, got {dropout}; the ops are for inference: call model.eval()"
        )
    if others.get("output_attentions"):
        raise ValueError(
            'tskernel attention: output_attentions: expected False, got True; call set_attn_implementation("eager")'
        )
    for name, instead in _ELSEWHERE.items():
        if others.get(name) is not None:
            raise ValueError(
                f"tskernel attention: {name}: expected None; the ops have no such input, call "
                f'set_attn_implementation("{instead}")'
            )


def _flat(x: Tensor) -> Tensor:
    """Return ``[B, H, L, D]`` as packed rows ``[B * L, H, D]``."""
    return x.transpose(1, 2).flatten(0, 1)


def _even(batch: int, length: int, like: Tensor) -> Tensor:
    """Return the offsets of ``batch`` sequences of one length."""
    return torch.arange(batch + 1, dtype=torch.int32, device=like.device) * length


def _offsets(ends: Tensor) -> Tensor:
    return nn.functional.pad(ends, (1, 0))


def _packed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_q: Tensor,
    cu_k: Tensor | None,
    causal: bool,
    window: int,
    plan: Plan | None,
    options: _Options,
) -> Tensor:
    """Attend within the sequences that the caller packed into one row."""
    if query.shape[0] != 1 or (plan is not None and plan.padded):
        raise ValueError(
            "tskernel attention: cu_seq_lens_q: expected one packed row without a padding mask; "
            "give cu_seq_lens_q or a mask, not both"
        )
    if window and not causal:
        raise ValueError(
            "tskernel attention: sliding_window: expected None without a causal mask; "
            "the ops have no window on both sides"
        )
    if plan is not None and plan.packed:
        torch._assert_async(
            (plan.restarts < 2).all(), "tskernel attention: mask: a blockwise mask is no pattern of the attention ops"
        )
    if cu_k is None or cu_k is cu_q:
        offsets: dict[str, Any] = {}
    else:
        offsets = {"cu_seqlens_kv": cu_k.to(torch.int32), "max_seqlen_kv": key.shape[2]}
    return tskernel.mha_prefill(
        _flat(query),
        _flat(key),
        _flat(value),
        cu_q.to(torch.int32),
        query.shape[2],
        is_causal=causal,
        **offsets,
        **options.of(window),
    )


def _rows(
    query: Tensor, key: Tensor, value: Tensor, causal: bool, window: int, plan: Plan | None, options: _Options
) -> Tensor:
    """Attend, one sequence per row of the batch."""
    queries, keys = query.shape[2], key.shape[2]
    if plan is not None and plan.packed:
        if not torch.compiler.is_compiling():
            raise ValueError(_PACKED)
        torch._assert_async((plan.restarts == 0).all(), _PACKED)
    if plan is None and causal and queries != 1 and queries != keys:
        raise ValueError(
            f"tskernel attention: attention_mask: expected a mask for {queries} causal queries over {keys} keys, "
            "got None: where they stand is not known; models must make it with transformers' create_causal_mask"
        )
    if not causal or (plan is None and queries == 1):
        return _everything(query, key, value, plan, options)
    if queries == keys:
        return _prefill(query, key, value, window, plan, options)
    if plan is None:  # unreachable: one query without a mask is served above
        raise ValueError("tskernel attention: attention_mask: expected a plan, got None")
    return _with_cache(query, key, value, window, plan, options)


_PACKED = (
    "tskernel attention: position_ids: expected one sequence per row, got several; pass cu_seq_lens_q (int32 offsets) "
    "to the model's forward, or an attention_mask if each row is one sequence"
)


def _everything(query: Tensor, key: Tensor, value: Tensor, plan: Plan | None, options: _Options) -> Tensor:
    """Attend to all keys that are not padding."""
    (batch, _, queries, _), keys = query.shape, key.shape[2]
    cu_q = _even(batch, queries, query)
    k, v = _flat(key), _flat(value)
    offsets: dict[str, Any] = (
        {} if queries == keys else {"cu_seqlens_kv": _even(batch, keys, query), "max_seqlen_kv": keys}
    )
    if plan is not None and plan.k_order is not None:
        order = plan.k_order.flatten()
        k, v = k.index_select(0, order), v.index_select(0, order)
        offsets = {"cu_seqlens_kv": _offsets(plan.k_end), "max_seqlen_kv": keys}
    return tskernel.mha_prefill(_flat(query), k, v, cu_q, queries, is_causal=False, **offsets, **options.of(0))


def _prefill(query: Tensor, key: Tensor, value: Tensor, window: int, plan: Plan | None, options: _Options) -> Tensor:
    """Attend causally where queries and keys are the same tokens: padding is packed away, so that it costs nothing."""
    batch, _, length, _ = query.shape
    q, k, v = _flat(query), _flat(key), _flat(value)
    if plan is None or plan.order is None or plan.inverse is None:
        return tskernel.mha_prefill(q, k, v, _even(batch, length, query), length, **options.of(window))
    order = plan.order.flatten()
    q, k, v = (x.index_select(0, order) for x in (q, k, v))
    out = tskernel.mha_prefill(q, k, v, _offsets(plan.q_end), length, **options.of(window))
    return out.index_select(0, plan.inverse.flatten())


def _with_cache(query: Tensor, key: Tensor, value: Tensor, window: int, plan: Plan, options: _Options) -> Tensor:
    """Attend causally from the last tokens to a cache that holds them, and perhaps free slots behind them."""
    (batch, _, queries, _), keys = query.shape, key.shape[2]
    if plan.k_table is None:
        k_pages, v_pages, table = key.transpose(1, 2), value.transpose(1, 2), plan.row.unsqueeze(1)
        if k_pages.stride(-1) != 1 or v_pages.stride(-1) != 1:
            k_pages, v_pages = k_pages.contiguous(), v_pages.contiguous()
    else:
        k_pages, v_pages, row_pages = token_pages(key, value)
        table = plan.row.unsqueeze(1) * row_pages + plan.k_table
    q, more = _flat(query), options.of(window)
    if queries == 1:
        return tskernel.mha_decode_with_kvcache(q, k_pages, v_pages, table, plan.k_len, keys, **more)
    if plan.order is None or plan.inverse is None:
        return tskernel.mha_extend_with_kvcache(
            q, _even(batch, queries, q), k_pages, v_pages, table, plan.k_len, queries, keys, **more
        )
    q = q.index_select(0, plan.order.flatten())
    out = tskernel.mha_extend_with_kvcache(
        q, _offsets(plan.q_end), k_pages, v_pages, table, plan.k_len, queries, keys, **more
    )
    return out.index_select(0, plan.inverse.flatten())


def token_pages(key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, int]:
    """Return views ``[pages, 1, H, D]`` in which token s of row b is page ``b * n + s``, and that n.

    With heads in front of tokens, a page's address does not depend on the head: pages overlap, and those that would
    start in another head's rows are never named by a page table.
    """
    per_row = _tokens_per_row(key)
    if per_row is None or per_row != _tokens_per_row(value):
        key, value = key.contiguous(), value.contiguous()
        per_row = key.shape[1] * key.shape[2]
    return _as_pages(key, per_row), _as_pages(value, per_row), per_row


def _tokens_per_row(x: Tensor) -> int | None:
    """Return how many token strides apart two rows of the batch are, or None where that is no whole number."""
    batch, _, length, _ = x.shape
    if x.stride(3) != 1 or length == 1:  # the stride of one token means nothing
        return None
    if batch == 1:
        return length
    return x.stride(0) // x.stride(2) if x.stride(2) and x.stride(0) % x.stride(2) == 0 else None


def _as_pages(x: Tensor, per_row: int) -> Tensor:
    batch, heads, length, width = x.shape
    token = x.stride(2) if length > 1 else width
    head = x.stride(1)
    return x.as_strided(((batch - 1) * per_row + length, 1, heads, width), (token, token, head, 1))
