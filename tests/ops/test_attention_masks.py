"""Which keys a query sees, and how scores become weights: ATT, WIN, SINK, CAP and SCL of the edge-case catalogue."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from attention_cases import (
    INF,
    LATENT,
    MHA,
    NAN,
    PAGED,
    RAGGED,
    Sequences,
    arguments_for,
    check,
    dense,
    kernels_of,
    latent_call,
    normal,
    op_of,
    ragged_call,
    run,
    uniform,
)

from tskernel.dispatch.errors import OverrideError
from tskernel.library import ops
from tskernel.testing import compare

LN2 = math.log(2)
each_mha = pytest.mark.parametrize("kernel", kernels_of(*MHA))
each_ragged = pytest.mark.parametrize("kernel", kernels_of(*RAGGED))
each_paged = pytest.mark.parametrize("kernel", kernels_of(*PAGED))
each_decode = pytest.mark.parametrize("kernel", kernels_of("mha_decode_with_kvcache"))
each_prefill = pytest.mark.parametrize("kernel", kernels_of("mha_prefill"))
each_latent = pytest.mark.parametrize("kernel", kernels_of(*LATENT))
each_latent_extend = pytest.mark.parametrize("kernel", kernels_of("mla_extend_with_kvcache"))
each_mla_prefill = pytest.mark.parametrize("kernel", kernels_of("mla_prefill"))


def mla_prefill_call(s: Sequences, **options: Any) -> dict[str, Any]:
    """Return the arguments of mla_prefill: as mha_prefill's, with both offsets given."""
    a = ragged_call(s, **options)
    kv = {
        "cu_seqlens_kv": a.get("cu_seqlens_kv", a["cu_seqlens"]),
        "max_seqlen_kv": a.get("max_seqlen_kv", a["max_seqlen"]),
    }
    return {**{k: v for k, v in a.items() if k not in ("cu_seqlens", "max_seqlen")}, **kv} | {
        "cu_seqlens_q": a["cu_seqlens"],
        "max_seqlen_q": a["max_seqlen"],
    }


# ATT-01


@pytest.mark.parametrize("width", (64, 128, 256))
@each_ragged
def test_att_01_empty_sequences(kernel: str, width: int) -> None:
    s = uniform([2, 0, 1], [0, 3, 2], width=width)
    check(kernel, arguments_for(kernel, s), [0, 0, 0.5], [-INF, -INF, LN2])


@pytest.mark.parametrize("width", (64, 128, 256))
@each_mla_prefill
def test_att_01_empty_sequences_mla_prefill(kernel: str, width: int) -> None:
    s = uniform([2, 0, 1], [0, 3, 2], heads=(2, 2), width=width)
    check(kernel, mla_prefill_call(s), [0, 0, 0.5], [-INF, -INF, LN2])


@each_latent_extend
def test_att_01_empty_sequences_mla_extend(kernel: str) -> None:
    q = [torch.zeros(n, 3, 24) for n in (2, 0, 1)]
    latents = [torch.arange(n).float()[:, None].expand(n, 24) for n in (0, 3, 2)]
    check(kernel, latent_call(op_of(kernel), q, latents, 16), [0, 0, 0.5], [-INF, -INF, LN2])


@pytest.mark.parametrize("sequences", (0, 1, 3))
@pytest.mark.parametrize("rows", (0, 3))
@each_ragged
def test_att_01_no_sequence_or_all_lengths_zero(kernel: str, sequences: int, rows: int) -> None:
    s = uniform([0] * sequences, [0] * sequences)
    check(kernel, arguments_for(kernel, s, spare=rows), [0] * rows, [-INF] * rows)


@pytest.mark.parametrize("batch", (0, 3))
@each_decode
def test_att_01_decode_of_nothing(kernel: str, batch: int) -> None:
    s = uniform([1] * batch, [0] * batch)
    check(kernel, arguments_for(kernel, s), [0] * batch, [-INF] * batch)


@each_latent
def test_att_01_mla_of_nothing(kernel: str) -> None:
    q = [torch.randn(1, 3, 24) for _ in range(2)]
    latents = [torch.zeros(0, 24)] * 2
    check(kernel, latent_call(op_of(kernel), q, latents, 16), [0, 0], [-INF] * 2)


# ATT-02


@pytest.mark.parametrize("dtype", (torch.float32, torch.float16, torch.bfloat16))
@each_mha
def test_att_02_rows_without_keys(kernel: str, dtype: torch.dtype) -> None:
    s = normal([3, 3], [0, 1], dtype=dtype)
    out, lse = run(kernel, arguments_for(kernel, s))
    assert bool((out[:5] == 0).all())
    compare(out[5], s.v[1][0].repeat_interleave(2, 0))
    if lse is not None:
        assert bool((lse[:5] == -INF).all()) and bool(lse[5].isfinite().all())


@each_prefill
def test_att_02_no_key_without_a_mask(kernel: str) -> None:
    s = uniform([2, 2], [0, 3])
    check(kernel, arguments_for(kernel, s, is_causal=False), [0, 0, 1, 1], [-INF, -INF, math.log(3), math.log(3)])


@each_mha
def test_att_02_no_key_with_sinks(kernel: str) -> None:
    s = uniform([2], [1])
    check(kernel, arguments_for(kernel, s, sinks=torch.tensor([1.0, -INF])), [0, 0], [-INF, 0])


@each_latent
def test_att_02_rows_without_keys_mla(kernel: str) -> None:
    q = [torch.randn(3, 2, 24)]
    latents = [torch.ones(1, 24)]
    out, lse = run(kernel, latent_call(op_of(kernel), q, latents, 16))
    compare(out.flatten(0, -3), torch.tensor([0.0, 0, 1]).view(3, 1, 1).expand(3, 2, 16))
    if lse is not None:
        assert bool((lse.flatten(0, -2)[:2] == -INF).all())


# ATT-03


@each_mha
def test_att_03_more_queries_than_keys(kernel: str) -> None:
    check(kernel, arguments_for(kernel, uniform([5], [2])), [0, 0, 0, 0, 0.5], [-INF, -INF, -INF, 0, LN2])


@each_mha
def test_att_03_more_keys_than_queries(kernel: str) -> None:
    check(kernel, arguments_for(kernel, uniform([2], [5])), [1.5, 2.0], [math.log(4), math.log(5)])
    whole = normal([5], [5])
    last = Sequences([whole.q[0][3:]], whole.k, whole.v)
    compare(run(kernel, arguments_for(kernel, last))[0], dense(whole)[0][3:])


@each_latent
def test_att_03_alignment_mla(kernel: str) -> None:
    for queries, keys, out, lse in (
        (5, 2, [0, 0, 0, 0, 0.5], [-INF, -INF, -INF, 0, LN2]),
        (2, 5, [1.5, 2], [math.log(4), math.log(5)]),
    ):
        latents = [torch.arange(keys).float()[:, None].expand(keys, 24)]
        check(kernel, latent_call(op_of(kernel), [torch.zeros(queries, 3, 24)], latents, 16), out, lse)


@each_mla_prefill
def test_att_03_alignment_mla_prefill(kernel: str) -> None:
    check(kernel, mla_prefill_call(uniform([5], [2], heads=(2, 2))), [0, 0, 0, 0, 0.5], [-INF, -INF, -INF, 0, LN2])
    check(kernel, mla_prefill_call(uniform([2], [5], heads=(2, 2))), [1.5, 2.0], [math.log(4), math.log(5)])
    check(kernel, mla_prefill_call(uniform([2], [5], heads=(2, 2)), is_causal=False), [2, 2], [math.log(5)] * 2)


# ATT-04


@pytest.mark.parametrize("q_len", (1, 2))
@each_decode
def test_att_04_padded_batch(kernel: str, q_len: int) -> None:
    s = normal([q_len] * 8, [3, 1, 5, 2, 4, 0, 0, 0])
    want, want_lse = run(kernel, arguments_for(kernel, Sequences(s.q[:5], s.k[:5], s.v[:5])))
    padded = arguments_for(kernel, s)
    for page in (-1, 0, 2**31 - 1):  # wherever rows of length 0 point
        padded["page_table"][5:] = page
        out, lse = run(kernel, padded)
        compare(out[: 5 * q_len], want)
        assert bool((out[5 * q_len :] == 0).all())
        if lse is not None and want_lse is not None:
            compare(lse[: 5 * q_len], want_lse)
            assert bool((lse[5 * q_len :] == -INF).all())


@pytest.mark.parametrize("kernel", kernels_of("mla_decode_with_kvcache"))
def test_att_04_padded_batch_mla(kernel: str) -> None:
    torch.manual_seed(0)
    q = [torch.randn(1, 3, 24) for _ in range(8)]
    latents = [torch.randn(n, 24) for n in (3, 1, 5, 2, 4, 0, 0, 0)]
    want, _ = run(kernel, latent_call(op_of(kernel), q[:5], latents[:5], 16))
    out, lse = run(kernel, latent_call(op_of(kernel), q, latents, 16))
    compare(out[:5], want)
    assert bool((out[5:] == 0).all())
    if lse is not None:
        assert bool((lse[5:] == -INF).all())


# ATT-05


@each_ragged
def test_att_05_rows_past_the_last_sequence(kernel: str) -> None:
    s = normal([2, 3], [2, 3])
    want, want_lse = run(kernel, arguments_for(kernel, s))
    bounds = {"max_seqlen": 100} if "prefill" in kernel else {"max_seqlen_q": 100, "max_seqlen_k": 1000}
    arguments = arguments_for(kernel, s, spare=3, **bounds)
    assert bool(arguments["q"][5:].isnan().all())
    out, lse = run(kernel, arguments)
    compare(out[:5], want)
    assert bool((out[5:] == 0).all())
    if lse is not None and want_lse is not None:
        compare(lse[:5], want_lse)
        assert bool((lse[5:] == -INF).all())


@pytest.mark.parametrize("kernel", [k for k in kernels_of(*RAGGED) if k.startswith(("reference", "portable"))])
def test_att_05_a_bound_that_is_too_small_harms_no_other_sequence(kernel: str) -> None:
    """A caller's mistake; where rows are padded it must not spill into the next sequence or out of the buffer."""
    s = normal([2, 5, 3], [2, 5, 3])
    bound = {"max_seqlen": 3} if "prefill" in kernel else {"max_seqlen_q": 3}
    out, _ = run(kernel, {**arguments_for(kernel, s), **bound})
    want = dense(s)[0]
    compare(out[:2], want[:2])
    compare(out[7:], want[7:])


@each_prefill
def test_att_05_masked_and_cross_calls(kernel: str) -> None:
    for options in ({"window_left": 1}, {"is_causal": False}):
        s = normal([2, 3], [4, 3])
        causal = options.get("is_causal", True)
        want, _ = dense(s, causal=bool(causal), window_left=int(options.get("window_left", -1)))
        out, _ = run(kernel, ragged_call(s, spare=3, **options))
        compare(out[:5], want)
        assert bool((out[5:] == 0).all())


@each_mla_prefill
def test_att_05_mla_prefill(kernel: str) -> None:
    s = normal([2, 3], [2, 3], heads=(2, 2), width=24, value_width=16)
    out, _ = run(kernel, mla_prefill_call(s, spare=3) | {"max_seqlen_q": 64, "max_seqlen_kv": 64})
    compare(out[:5], dense(s)[0])
    assert bool((out[5:] == 0).all())


@each_latent_extend
def test_att_05_mla_extend(kernel: str) -> None:
    q, latents = [torch.randn(n, 3, 24) for n in (2, 3)], [torch.randn(n, 24) for n in (2, 5)]
    want, _ = run(kernel, latent_call(op_of(kernel), q, latents, 16))
    arguments = latent_call(op_of(kernel), q, latents, 16)
    arguments["q"] = torch.cat([arguments["q"], torch.full((3, 3, 24), NAN)])
    out, _ = run(kernel, arguments)
    compare(out[:5], want)
    assert bool((out[5:] == 0).all())


# WIN-01


@each_mha
def test_win_01_shows_one_more_key_than_its_number(kernel: str) -> None:
    check(kernel, arguments_for(kernel, uniform([1], [10]), window_left=3), [7.5], [math.log(4)])
    rows = arguments_for(kernel, uniform([6], [6]), window_left=3)
    check(kernel, rows, [0, 0.5, 1, 1.5, 2.5, 3.5], [math.log(n) for n in (1, 2, 3, 4, 4, 4)])


@pytest.mark.parametrize("window", (-1, 0, 3, 4, 5, 8, 9, 100))
@each_mha
def test_win_01_edges(kernel: str, window: int) -> None:
    """Page size 4: windows of one page less one, one page, one page and one; self only; all keys and more."""
    s = normal([3, 3], [9, 3], seed=window + 1)
    want, want_lse = dense(s, window_left=window)
    check(kernel, arguments_for(kernel, s, window_left=window), want, want_lse)


@each_ragged
def test_win_01_bounds_both_sides_without_causal(kernel: str) -> None:
    s = uniform([4], [4])
    check(kernel, arguments_for(kernel, s, window_left=1, is_causal=False), [0, 0.5, 1.5, 2.5], [0, LN2, LN2, LN2])


@each_decode
def test_win_01_prefill_rows_equal_decode(kernel: str) -> None:
    s = normal([7], [7])
    prefill = ops["mha_prefill"].front(**ragged_call(s, window_left=2))
    steps = Sequences(
        [s.q[0][i : i + 1] for i in range(7)], [s.k[0][: i + 1] for i in range(7)], [s.v[0][: i + 1] for i in range(7)]
    )
    compare(run(kernel, arguments_for(kernel, steps, window_left=2))[0], prefill)


@each_mha
def test_win_01_keys_before_every_window_are_not_read(kernel: str) -> None:
    s = normal([2], [11])
    want, _ = dense(s, window_left=2)
    for x in (s.k[0], s.v[0]):
        x[:7] = NAN
    arguments = arguments_for(kernel, s, window_left=2)
    if "page_table" in arguments:
        arguments["page_table"][0, 0] = -1  # a server may have freed the page
    compare(run(kernel, arguments)[0], want)


# SINK-01


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("window", (-1, 3, 10))
@pytest.mark.parametrize(("sink", "out"), ((0.0, 1.2), (math.log(4), 0.75), (-INF, 1.5), (50.0, 0.0)))
@each_mha
def test_sink_01_adds_to_the_denominator_only(
    kernel: str, sink: float, out: float, window: int, dtype: torch.dtype
) -> None:
    sinks = torch.full((2,), sink).to(dtype)
    arguments = arguments_for(kernel, uniform([1], [4]), sinks=sinks, window_left=window)
    exact = 6 / (4 + math.exp(float(sinks[0])))  # ln 4 is no bf16 number
    assert math.isclose(exact, out, rel_tol=1e-2, abs_tol=1e-9)
    check(kernel, arguments, [exact], [math.log(4)])


@each_mha
def test_sink_01_is_neither_scaled_nor_capped(kernel: str) -> None:
    s, sinks = normal([2, 2], [6, 3]), torch.tensor([3.0, -1.0, 0.5, 9.0])
    want, want_lse = dense(s, sinks=sinks, scale=0.1, logit_cap=0.5)
    check(kernel, arguments_for(kernel, s, sinks=sinks, softmax_scale=0.1, logit_cap=0.5), want, want_lse)


@each_mha
def test_sink_01_no_visible_key(kernel: str) -> None:
    check(kernel, arguments_for(kernel, uniform([2], [0]), sinks=torch.zeros(2)), [0, 0], [-INF, -INF])


@pytest.mark.parametrize("op", MHA)
def test_sink_01_a_kernel_without_sinks_declines(op: str) -> None:
    kernel = f"portable/{op}/torch"
    with pytest.raises(OverrideError, match="sinks"):
        ops[op].front(**arguments_for(kernel, uniform([1], [4]), sinks=torch.zeros(2)), override=kernel)


# CAP-01


@each_mha
def test_cap_01_scale_then_cap_then_softmax(kernel: str) -> None:
    q, k, v = torch.zeros(1, 1, 16), torch.zeros(2, 1, 16), torch.zeros(2, 1, 16)
    q[..., 0], k[0, 0, 0], v[0] = 1.0, 400.0, 1.0
    arguments = arguments_for(kernel, Sequences([q], [k], [v]), logit_cap=2.0, softmax_scale=0.5)
    check(kernel, arguments, [math.e**2 / (math.e**2 + 1)], [math.log(math.e**2 + 1)])
    out, _ = run(kernel, arguments)
    assert abs(float(out[0, 0, 0]) - 0.8808) < 1e-4


@each_mha
def test_cap_01_masked_keys_stay_masked(kernel: str) -> None:
    s = uniform([2], [2])
    s.v[0] = torch.randn(2, 1, 16)
    out, lse = run(kernel, arguments_for(kernel, s, logit_cap=1.0))
    compare(out[0], s.v[0][0].expand(2, 16), exact=True)
    if lse is not None:
        compare(lse[0], torch.zeros(2), exact=True)


@each_mha
def test_cap_01_zero_is_off(kernel: str) -> None:
    s = normal([3], [5])
    compare(
        run(kernel, arguments_for(kernel, s, logit_cap=0.0))[0], run(kernel, arguments_for(kernel, s))[0], exact=True
    )


@each_latent
def test_cap_01_mla(kernel: str) -> None:
    latents = torch.zeros(2, 24)
    latents[0, :16], latents[0, 23] = 1.0, 200.0  # values 1 and 0, keys that differ in the rotary part
    q = torch.zeros(1, 1, 24)
    q[..., 23] = 1.0
    arguments = latent_call(op_of(kernel), [q], [latents], 16, logit_cap=2.0, softmax_scale=1.0)
    check(kernel, arguments, [math.e**2 / (math.e**2 + 1)], [math.log(math.e**2 + 1)])


# SCL-01


@each_mha
def test_scl_01_default_is_the_root_of_the_key_width(kernel: str) -> None:
    s = normal([2], [6], width=128, value_width=64)
    want, want_lse = dense(s, scale=1 / math.sqrt(128))
    check(kernel, arguments_for(kernel, s), want, want_lse)


@each_mha
def test_scl_01_an_explicit_zero_is_zero(kernel: str) -> None:
    s = normal([1], [4])
    s.v = uniform([1], [4], heads=(4, 2)).v
    check(kernel, arguments_for(kernel, s, softmax_scale=0.0), [1.5], [math.log(4)])


@each_mla_prefill
def test_scl_01_mla_prefill(kernel: str) -> None:
    s = normal([3], [5], heads=(2, 2), width=192, value_width=128)
    want, want_lse = dense(s, scale=1 / math.sqrt(192))
    check(kernel, mla_prefill_call(s), want, want_lse)


@each_latent
def test_scl_01_absorbed_equals_expanded(kernel: str) -> None:
    """With W_uk absorbed into q and W_uv applied after, latent attention is mla_prefill at 1/sqrt(128 + 64)."""
    torch.manual_seed(0)
    heads, nope, rope, rank, n = 2, 128, 64, 32, 6
    q_nope, q_rope = torch.randn(n, heads, nope), torch.randn(n, heads, rope)
    latent, k_rope = torch.randn(n, rank), torch.randn(n, rope)
    w_uk, w_uv = torch.randn(heads, rank, nope) / 6, torch.randn(heads, rank, 16)
    k = torch.cat([torch.einsum("tr,hrd->thd", latent, w_uk), k_rope[:, None].expand(n, heads, rope)], -1)
    expanded = Sequences([torch.cat([q_nope, q_rope], -1)], [k], [torch.einsum("tr,hrd->thd", latent, w_uv)])
    want = ops["mla_prefill"].front(**mla_prefill_call(expanded))
    compare(want, dense(expanded, scale=1 / math.sqrt(192))[0])
    absorbed = torch.cat([torch.einsum("thd,hrd->thr", q_nope, w_uk), q_rope], -1)
    arguments = latent_call(op_of(kernel), [absorbed], [torch.cat([latent, k_rope], -1)], rank, nope=nope)
    out, _ = run(kernel, arguments)
    compare(torch.einsum("thr,hrd->thd", out.view(n, heads, rank), w_uv), want)
