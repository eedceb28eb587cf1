"""Bad attention calls are refused with a sentence that says what was expected; and what the ops state about a call."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attention_cases import LATENT, MHA, arguments_for, latent_call, normal, ragged_call

from tskernel.library import FLOATS, ops
from tskernel.testing import SampleMaker

I32 = torch.int32


def attention_arguments(op: str) -> dict[str, Any]:
    """Return a good call."""
    if op in LATENT:
        return latent_call(op, [torch.randn(1, 3, 24)] * 2, [torch.randn(3, 24)] * 2, 16)
    return arguments_for(f"reference/{op}", normal([1, 1], [3, 3]))


PREFILL, EXTEND, DECODE = MHA
MLA_EXTEND, MLA_DECODE = LATENT


@pytest.mark.parametrize(
    ("op", "change", "sentence"),
    [
        (PREFILL, {"q": torch.zeros(2, 64)}, r"q: expected 3 dimensions, got shape \(2, 64\)"),
        (PREFILL, {"q": torch.zeros(2, 4, 8)}, r"k.shape: expected \(\*, \*, 8\), got \(6, 2, 16\)"),
        (PREFILL, {"v": torch.zeros(5, 2, 16)}, r"v.shape: expected \(6, 2, \*\), got \(5, 2, 16\)"),
        (PREFILL, {"q": torch.zeros(2, 4, 16, dtype=torch.float16)}, "k.dtype: expected float16 or float8"),
        (PREFILL, {"q": torch.zeros(2, 4, 16, dtype=torch.int32)}, "q.dtype: expected float32 or float16"),
        (PREFILL, {"v": torch.zeros(6, 2, 16, dtype=torch.float16)}, "v.dtype: expected float32, got float16"),
        (PREFILL, {"cu_seqlens": torch.tensor([0, 1, 2])}, "cu_seqlens.dtype: expected int32, got int64"),
        (
            PREFILL,
            {"cu_seqlens": torch.zeros(0, dtype=I32)},
            r"cu_seqlens.shape: expected at least one offset, got \(0,\)",
        ),
        (PREFILL, {"cu_seqlens_kv": torch.zeros(2, dtype=I32)}, r"cu_seqlens_kv.shape: expected \(3,\), got \(2,\)"),
        (PREFILL, {"window_left": -2}, "window_left: expected -1 or more, got -2"),
        (PREFILL, {"logit_cap": -1.0}, "logit_cap: expected a finite number, at least 0, got -1.0"),
        (PREFILL, {"logit_cap": float("nan")}, "logit_cap: expected a finite number, at least 0, got nan"),
        (PREFILL, {"sinks": torch.zeros(2)}, r"sinks.shape: expected \(4,\), got \(2,\)"),
        (
            PREFILL,
            {"sinks": torch.zeros(4, dtype=torch.float16)},
            "sinks.dtype: expected float32 or bfloat16, got float16",
        ),
        (PREFILL, {"k_scale": torch.ones(4)}, r"k_scale.shape: expected one element or \(2,\), got \(4,\)"),
        (PREFILL, {"q_scale": torch.ones(2)}, r"q_scale.shape: expected one element or \(4,\), got \(2,\)"),
        (PREFILL, {"v_scale": torch.ones(1, dtype=torch.float16)}, "v_scale.dtype: expected float32, got float16"),
        (PREFILL, {"max_seqlen": -1}, "max_seqlen: expected at least 0, got -1"),
        (EXTEND, {"page_table": torch.zeros(3, 2, dtype=I32)}, r"page_table.shape: expected \(2, \*\), got \(3, 2\)"),
        (EXTEND, {"page_table": torch.zeros(2, 2, dtype=torch.int64)}, "page_table.dtype: expected int32, got int64"),
        (EXTEND, {"cache_seqlens": torch.zeros(2)}, "cache_seqlens.dtype: expected int32, got float32"),
        (EXTEND, {"cache_seqlens": torch.zeros(1, dtype=I32)}, r"cache_seqlens.shape: expected \(2,\), got \(1,\)"),
        (
            EXTEND,
            {"k_cache": torch.zeros(0, 4, 2, 16)},
            r"k_cache.shape: expected at least one page, got \(0, 4, 2, 16\)",
        ),
        (
            EXTEND,
            {"v_cache": torch.zeros(4, 2, 2, 16)},
            r"v_cache.shape: expected \(4, 4, 2, \*\), got \(4, 2, 2, 16\)",
        ),
        (EXTEND, {"k_cache": torch.zeros(4, 4, 16, 2).mT}, r"k_cache.stride\(-1\): expected 1, got 2"),
        (DECODE, {"max_seqlen_q": 3}, r"q.shape: expected a multiple of max_seqlen_q=3 rows, got \(2, 4, 16\)"),
        (DECODE, {"max_seqlen_q": 0}, "max_seqlen_q: expected at least 1, got 0"),
        (DECODE, {"max_seqlen_q": 2}, r"page_table.shape: expected \(1, \*\), got \(2, 3\)"),
        (MLA_EXTEND, {"kv_lora_rank": 25}, "kv_lora_rank: expected at most 24, the width of q, got 25"),
        (
            MLA_EXTEND,
            {"kv_cache": torch.zeros(4, 4, 2, 24)},
            r"kv_cache.shape: expected \(\*, \*, 1, 24\), got \(4, 4, 2, 24\)",
        ),
        (MLA_DECODE, {"qk_nope_head_dim": 0}, "qk_nope_head_dim: expected at least 1, got 0"),
        (
            MLA_DECODE,
            {"q": torch.zeros(2, 0, 3, 24)},
            r"q.shape: expected at least one token per request, got \(2, 0, 3, 24\)",
        ),
        (MLA_DECODE, {"q": torch.zeros(2, 3, 24)}, r"q: expected 4 dimensions, got shape \(2, 3, 24\)"),
    ],
)
def test_bad_calls_are_refused(op: str, change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=f"tokenspeed::{op}: {sentence}"):
        ops[op].front(**{**attention_arguments(op), **change})


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"lse_b": torch.zeros(2, 4)}, r"lse_b.shape: expected \(2, 3\), got \(2, 4\)"),
        ({"lse_a": torch.zeros(2, 3).half()}, "lse_a.dtype: expected float32, got float16"),
        ({"out_b": torch.zeros(2, 3, 9)}, r"out_b.shape: expected \(2, 3, 8\), got \(2, 3, 9\)"),
        ({"out_b": torch.zeros(2, 3, 8).half()}, "out_b.dtype: expected float32, got float16"),
        ({"out_a": torch.zeros(3, 8)}, r"out_a.shape: expected at least 3 dimensions, got \(3, 8\)"),
    ],
)
def test_bad_merges_are_refused(change: dict[str, Any], sentence: str) -> None:
    good = {
        "out_a": torch.zeros(2, 3, 8),
        "lse_a": torch.zeros(2, 3),
        "out_b": torch.zeros(2, 3, 8),
        "lse_b": torch.zeros(2, 3),
    }
    with pytest.raises(ValueError, match=f"tokenspeed::attn_merge_state: {sentence}"):
        ops["attn_merge_state"].front(**{**good, **change})


def test_every_head_count_and_option_is_a_trait() -> None:
    op = ops[PREFILL]
    s = normal([2], [2], heads=(6, 2), width=16, value_width=8)
    plain = op.traits_of(op.fill(ragged_call(s)))
    assert plain == {
        "head_dim": 16,
        "head_dim_v": 8,
        "causal": True,
        "window": False,
        "logit_cap": False,
        "sinks": False,
        "scaled_kv": False,
        "gqa_ratio": 3,
        "same_lengths": True,
        "return_lse": False,
    }
    options = {
        "window_left": 0,
        "logit_cap": 1.0,
        "sinks": torch.zeros(6),
        "v_scale": torch.ones(1),
        "is_causal": False,
    }
    loaded = op.traits_of(op.fill({**ragged_call(s), **options, "cu_seqlens_kv": torch.tensor([0, 2], dtype=I32)}))
    changed = {k for k in plain if loaded[k] != plain[k]}
    assert changed == {"causal", "window", "logit_cap", "sinks", "scaled_kv", "same_lengths"}


@pytest.mark.parametrize("op", (*MHA, "mla_prefill", *LATENT))
def test_the_portable_kernel_serves_plain_calls(op: str) -> None:
    for dtype in FLOATS:
        samples = {s.name: s for s in ops[op].sample_calls(SampleMaker(), dtype)}
        assert ops[op].explain(**samples["ordinary"].arguments).winner == f"portable/{op}/torch"


def test_costs_count_what_a_call_must_move() -> None:
    op = ops[DECODE]
    arguments = {
        **arguments_for(f"reference/{DECODE}", normal([1, 1], [100, 100], dtype=torch.bfloat16)),
        "max_seqlen_k": 100,
    }
    cost = op.cost_of(op.fill(arguments))
    assert cost is not None
    assert cost.bytes == 2 * (2 * 4 * 16) * 2 + 2 * 100 * 2 * (16 + 16) * 2
    assert cost.flops == 2 * 2 * 4 * 100 * 32
    for name in (*MHA, "mla_prefill", *LATENT):
        for sample in ops[name].sample_calls(SampleMaker(), torch.bfloat16):
            cost = ops[name].cost_of(ops[name].fill(sample.arguments))
            assert cost is not None and cost.bytes >= 0 and cost.flops >= 0
