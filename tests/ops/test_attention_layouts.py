"""Heads, widths, pages, strides and fp8 caches: GQA, DIM, PAGE, LAY and KV8 of the edge-case catalogue."""

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
    Sequences,
    arguments_for,
    check,
    dense,
    kernels_of,
    latent_call,
    normal,
    op_of,
    pages,
    run,
    uniform,
)
from torch import Tensor

from tskernel.dispatch.errors import OverrideError
from tskernel.library import ops
from tskernel.testing import call, compare

E4M3FN, E4M3FNUZ = torch.float8_e4m3fn, torch.float8_e4m3fnuz
each_mha = pytest.mark.parametrize("kernel", kernels_of(*MHA))
each_paged = pytest.mark.parametrize("kernel", kernels_of(*PAGED))
each_decode = pytest.mark.parametrize("kernel", kernels_of("mha_decode_with_kvcache"))
each_latent = pytest.mark.parametrize("kernel", kernels_of(*LATENT))
each_scaled = pytest.mark.parametrize("kernel", [f"reference/{op}" for op in MHA])


# GQA-01


@pytest.mark.parametrize("heads", ((28, 4), (48, 2), (71, 1), (9, 3), (5, 5)))
@each_mha
def test_gqa_01_query_heads_read_their_kv_head(kernel: str, heads: tuple[int, int]) -> None:
    s = normal([2], [3], heads=heads)
    s.v = [torch.arange(heads[1]).float()[:, None].expand(3, heads[1], 16)]
    out, _ = run(kernel, arguments_for(kernel, s))
    compare(out, (torch.arange(heads[0]) * heads[1] // heads[0]).double()[:, None].expand(2, heads[0], 16))
    if heads[0] in (28, 48):
        assert float(out[0, {28: 13, 48: 24}[heads[0]], 0]) == pytest.approx(1)


@pytest.mark.parametrize("op", MHA)
def test_gqa_01_three_heads_over_two_are_refused(op: str) -> None:
    arguments = arguments_for(f"reference/{op}", normal([1], [3], heads=(3, 2)))
    buffer = torch.full((1, 3, 16), -7.0)
    k = "k" if op == "mha_prefill" else "k_cache"
    with pytest.raises(
        ValueError, match=rf"tokenspeed::{op}_out: q.shape: expected a multiple of the 2 heads of {k}, got \(1, 3, 16\)"
    ):
        ops[op].front(**arguments, out=buffer)
    assert bool((buffer == -7).all())


# DIM-01


def in_wider(x: Tensor) -> Tensor:
    """Return the same values as a slice of a wider buffer of NaN."""
    buffer = torch.full((*x.shape[:-1], x.shape[-1] + 8), NAN).to(x.dtype)
    buffer[..., 3 : 3 + x.shape[-1]] = x
    return buffer[..., 3 : 3 + x.shape[-1]]


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize(
    ("width", "value_width"), ((40, 40), (72, 72), (80, 80), (96, 96), (192, 128), (256, 256), (16, 48))
)
@each_mha
def test_dim_01_unusual_widths(kernel: str, width: int, value_width: int, dtype: torch.dtype) -> None:
    s = normal([2, 2], [5, 3], width=width, value_width=value_width, dtype=dtype)
    for x in (*s.q, *s.k):
        x[..., :-1] = 0  # the only product is that of the last channel
    arguments = arguments_for(kernel, s)
    for name in ("q", "k", "v", "k_cache", "v_cache"):
        if name in arguments:
            arguments[name] = in_wider(arguments[name])
    want, want_lse = dense(s)
    check(kernel, arguments, want, want_lse)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@each_latent
def test_dim_01_latent_cache_in_a_wider_buffer(kernel: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    latents = [torch.randn(n, 72, dtype=dtype) for n in (5, 3)]
    q = [torch.randn(2, 3, 72, dtype=dtype) for _ in latents]
    s = Sequences(q, [x[:, None] for x in latents], [x[:, None, :40] for x in latents])
    arguments = latent_call(op_of(kernel), q, latents, 40)
    arguments |= {"kv_cache": in_wider(arguments["kv_cache"]), "q": in_wider(arguments["q"])}
    want, want_lse = dense(s, scale=1 / math.sqrt(16 + 32))
    check(kernel, arguments, want, want_lse)


# PAGE-01


def tables() -> tuple[Tensor, Tensor]:
    """Return one table with garbage behind its pages, and one without a spare column."""
    return torch.tensor([[2, 0, -1, 2**31 - 1], [1, 3, -1, -1]], dtype=torch.int32), torch.tensor(
        [[2, 0], [1, 3]], dtype=torch.int32
    )


@each_paged
def test_page_01_only_used_entries_are_read(kernel: str) -> None:
    s = normal([1, 1], [5, 8])
    arguments = arguments_for(kernel, s)
    torch.manual_seed(0)
    arguments |= {n: torch.randn(4, 4, 2, 16) for n in ("k_cache", "v_cache")}
    got = [run(kernel, {**arguments, "page_table": t}) for t in tables()]
    rows = {
        n: torch.stack([c[t.tolist()].flatten(0, 1) for t in tables()[1]])
        for n, c in arguments.items()
        if n.endswith("_cache")
    }
    want, _ = dense(
        Sequences(s.q, [rows["k_cache"][0, :5], rows["k_cache"][1]], [rows["v_cache"][0, :5], rows["v_cache"][1]])
    )
    for out, lse in got:
        compare(out, want)
        if lse is not None and got[0][1] is not None:
            compare(lse, got[0][1])


@each_paged
def test_page_01_a_bound_past_the_table(kernel: str) -> None:
    s = normal([1, 1], [5, 8])
    arguments = arguments_for(kernel, s, max_seqlen_k=1000)
    compare(run(kernel, arguments)[0], dense(s)[0])
    arguments["page_table"] = arguments["page_table"][:, :2].t().contiguous().t()
    compare(run(kernel, arguments)[0], dense(s)[0])


@each_latent
def test_page_01_mla(kernel: str) -> None:
    arguments = latent_call(op_of(kernel), [torch.randn(1, 3, 24)] * 2, [torch.randn(5, 24), torch.randn(8, 24)], 16)
    arguments["kv_cache"] = torch.randn(4, 4, 1, 24)
    a, b = (run(kernel, {**arguments, "page_table": t})[0] for t in tables())
    compare(a, b)
    assert bool(a.isfinite().all())


# PAGE-02


@pytest.mark.parametrize("poisoned", ("k_cache", "v_cache", "both"))
@each_paged
def test_page_02_nan_in_unused_slots(kernel: str, poisoned: str) -> None:
    s = normal([2, 2, 1], [5, 8, 0]) if "extend" in kernel else normal([1, 1, 1], [5, 8, 0])
    clean, dirty = (arguments_for(kernel, s, unused=u) for u in (0.0, NAN))
    want = run(kernel, clean)
    if poisoned != "both":
        other = {"k_cache": "v_cache", "v_cache": "k_cache"}[poisoned]
        dirty[other] = clean[other]
    got = run(kernel, dirty)
    compare(got[0], want[0], exact=True)
    if got[1] is not None and want[1] is not None:
        compare(got[1], want[1], exact=True)


@pytest.mark.parametrize("dtype", (E4M3FN, E4M3FNUZ, torch.float8_e5m2))
@pytest.mark.parametrize("kernel", [f"reference/{op}" for op in PAGED])
def test_page_02_fp8_nan_in_unused_slots(kernel: str, dtype: torch.dtype) -> None:
    s = normal([1, 1], [5, 8])
    s = Sequences(s.q, [x.to(dtype) for x in s.k], [x.to(dtype) for x in s.v])
    dirty = arguments_for(kernel, s, unused=NAN)
    if dtype == E4M3FN:
        assert int(dirty["k_cache"].view(torch.uint8)[0, 0, 0, 0]) == 0x7F
    compare(run(kernel, dirty), run(kernel, arguments_for(kernel, s, unused=0.0)), exact=True)


@each_latent
def test_page_02_mla(kernel: str) -> None:
    torch.manual_seed(0)
    q, latents = [torch.randn(1, 3, 24) for _ in range(2)], [torch.randn(5, 24), torch.randn(0, 24)]
    dirty = latent_call(op_of(kernel), q, latents, 16)
    assert bool(dirty["kv_cache"].isnan().any())
    compare(run(kernel, dirty)[0], run(kernel, {**dirty, "kv_cache": dirty["kv_cache"].nan_to_num(0.0)})[0], exact=True)


# PAGE-03


@pytest.mark.parametrize("page_size", (1, 16, 48, 64))
@each_paged
def test_page_03_lengths_around_a_page_border(kernel: str, page_size: int) -> None:
    lengths = [page_size - 1, page_size, page_size + 1, 2 * page_size]
    arguments = arguments_for(kernel, uniform([1] * 4, lengths, width=8), page_size=page_size)
    for b, n in enumerate(lengths):  # one filled page more, which must not count
        arguments["page_table"][b, -(-n // page_size)] = arguments["k_cache"].shape[0] - 1
    for name in ("k_cache", "v_cache"):
        arguments[name][-1] = 1000.0
    lse = [math.log(n) if n else -INF for n in lengths]
    check(kernel, arguments, [max(0, n - 1) / 2 for n in lengths], lse)


@pytest.mark.parametrize("page_size", (1, 16, 48, 64))
@each_latent
def test_page_03_mla(kernel: str, page_size: int) -> None:
    lengths = [page_size - 1, page_size, page_size + 1, 2 * page_size]
    latents = [torch.arange(n).float()[:, None].expand(n, 12) for n in lengths]
    arguments = latent_call(op_of(kernel), [torch.zeros(1, 2, 12)] * 4, latents, 8)
    arguments["kv_cache"], arguments["page_table"], _ = pages([x[:, None] for x in latents], page_size)
    check(kernel, arguments, [max(0, n - 1) / 2 for n in lengths], [math.log(n) if n else -INF for n in lengths])


# LAY-01


@pytest.mark.parametrize("stride", (1, 4608))
@each_decode
def test_lay_01_stride_of_a_size_1_dimension(kernel: str, stride: int) -> None:
    s = normal([1], [6], heads=(4, 1))
    arguments = arguments_for(kernel, s)
    want, want_lse = run(kernel, arguments)
    q, k = arguments["q"], arguments["k_cache"]
    odd = {"q": q.as_strided(q.shape, (stride, *q.stride()[1:]))}
    for name in ("k_cache", "v_cache"):
        a, b, _, d = k.stride()
        odd[name] = arguments[name].as_strided(k.shape, (a, b, stride, d))
    assert odd["q"].stride(0) == stride and odd["k_cache"].stride(2) == stride
    got, got_lse = run(kernel, {**arguments, **odd})
    compare(got, want, exact=True)
    if got_lse is not None and want_lse is not None:
        compare(got_lse, want_lse, exact=True)


@each_paged
def test_lay_01_caches_in_other_layouts(kernel: str) -> None:
    """Interleaved K and V, heads before tokens, K and V of a page side by side."""
    s = normal([2, 2], [5, 6])
    arguments = arguments_for(kernel, s)
    want, _ = run(kernel, arguments)
    both = torch.stack((arguments["k_cache"], arguments["v_cache"]))
    interleaved = torch.cat(tuple(both), -1)
    heads_first = both.transpose(2, 3).contiguous().transpose(2, 3)
    beside = both.transpose(0, 1).contiguous().transpose(0, 1)
    for k, v in ((interleaved[..., :16], interleaved[..., 16:]), heads_first.unbind(), beside.unbind()):
        assert not k.is_contiguous()
        compare(run(kernel, {**arguments, "k_cache": k, "v_cache": v})[0], want, exact=True)


@each_mha
def test_lay_01_queries_in_other_layouts(kernel: str) -> None:
    s = normal([2, 2], [5, 6])
    arguments = arguments_for(kernel, s)
    want, _ = run(kernel, arguments)
    q = arguments["q"]
    for view in (q.transpose(0, 1).contiguous().transpose(0, 1), in_wider(q), q.repeat_interleave(2, 0)[::2]):
        compare(run(kernel, {**arguments, "q": view})[0], want, exact=True)


# KV8-01


def scaled(s: Sequences, k_scale: Tensor | float, v_scale: Tensor | float) -> Sequences:
    """Return fp8 sequences dequantized: stored value times the scale of its head."""

    def times(x: Tensor, scale: Tensor | float) -> Tensor:
        return x.double() * torch.as_tensor(scale, dtype=torch.float64).reshape(-1, 1)

    return Sequences([q.double() for q in s.q], [times(k, k_scale) for k in s.k], [times(v, v_scale) for v in s.v])


def quantized(
    dtype: torch.dtype = E4M3FN, q_lengths: tuple[int, ...] = (2, 2), k_lengths: tuple[int, ...] = (6, 3)
) -> Sequences:
    """Return sequences with fp8 keys and values."""
    s = normal(q_lengths, k_lengths)
    return Sequences(s.q, [(k * 2).to(dtype) for k in s.k], [(v * 2).to(dtype) for v in s.v])


@pytest.mark.parametrize(
    ("k_scale", "v_scale"),
    (
        (0.25, 0.5),
        (torch.tensor([0.25]), torch.tensor(0.5)),
        (torch.tensor([0.25, 1.5]), torch.tensor([2.0, 0.125])),
        (torch.tensor([0.25, 1.5]), 0.5),
    ),
    ids=("float", "tensor", "per_head", "mixed"),
)
@each_scaled
def test_kv8_01_scaled_caches(kernel: str, k_scale: Any, v_scale: Any) -> None:
    s = quantized()
    want, want_lse = dense(scaled(s, k_scale, v_scale), logit_cap=2.0)
    check(kernel, arguments_for(kernel, s, k_scale=k_scale, v_scale=v_scale, logit_cap=2.0), want, want_lse)


@each_scaled
def test_kv8_01_lse_has_no_value_scale(kernel: str) -> None:
    s = quantized()
    a, b = (run(kernel, arguments_for(kernel, s, k_scale=0.5, v_scale=v)) for v in (1.0, 3.0))
    compare(b[1], a[1], exact=True)
    compare(b[0], a[0].double() * 3)


@each_scaled
def test_kv8_01_fp8_queries_give_bf16(kernel: str) -> None:
    s = quantized()
    s.q = [q.to(E4M3FN) for q in s.q]
    q_scale = torch.tensor([0.5, 1.0, 2.0, 0.25])
    wide = scaled(s, 0.5, 2.0)
    wide.q = [q * q_scale.double()[:, None] for q in wide.q]
    want, want_lse = dense(wide)
    out, lse = run(kernel, arguments_for(kernel, s, q_scale=q_scale, k_scale=0.5, v_scale=2.0))
    assert out.dtype == torch.bfloat16
    compare(out, want)
    compare(lse, want_lse)


@pytest.mark.parametrize("op", MHA)
def test_kv8_01_a_kernel_without_scales_declines(op: str) -> None:
    kernel = f"portable/{op}/torch"
    with pytest.raises(OverrideError, match="scaled_kv"):
        ops[op].front(**arguments_for(kernel, normal([1], [3]), k_scale=0.5), override=kernel)


# KV8-02


@pytest.mark.parametrize(("dtype", "one"), ((E4M3FN, 1.0), (E4M3FNUZ, 0.5)))
@each_scaled
def test_kv8_02_the_dtype_is_the_encoding(kernel: str, dtype: torch.dtype, one: float) -> None:
    def stored(byte: int) -> Sequences:
        s = uniform([1], [3])
        row = torch.full((3, 1, 16), byte, dtype=torch.uint8).view(dtype)
        return Sequences(s.q, [row], [row])

    check(kernel, arguments_for(kernel, stored(0x38)), [one], [math.log(3)])
    check(
        kernel,
        arguments_for(kernel, stored(0x7E if dtype == E4M3FN else 0x7F)),
        [448.0 if dtype == E4M3FN else 240.0],
        [math.log(3)],
    )
    out, _ = run(kernel, arguments_for(kernel, stored(0x80)))
    assert bool((out == 0).all() if dtype == E4M3FN else out.isnan().all())


@pytest.mark.parametrize("dtype", (E4M3FN, E4M3FNUZ))
@pytest.mark.parametrize("op", MHA)
def test_kv8_02_a_kernel_for_other_formats_declines(op: str, dtype: torch.dtype) -> None:
    kernel = f"portable/{op}/torch"
    with pytest.raises(OverrideError, match=str(dtype).removeprefix("torch.")):
        ops[op].front(**arguments_for(kernel, quantized(dtype)), override=kernel)


@pytest.mark.parametrize("dtype", (E4M3FN, torch.float8_e5m2))
@each_latent
def test_kv8_02_latent_cache_at_scale_one(kernel: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    q, latents = [torch.randn(1, 3, 24) for _ in range(2)], [torch.randn(n, 24).to(dtype) for n in (5, 2)]
    got = call(op_of(kernel), kernel, **latent_call(op_of(kernel), q, latents, 16))
    plain = latent_call(op_of(kernel), q, [x.float() for x in latents], 16)
    compare(got, ops[op_of(kernel)].front(**plain, override="reference"))
