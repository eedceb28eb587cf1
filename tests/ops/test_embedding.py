"""What rope must do beyond the generic contract: values, strides, partial rotation, positions, fused cache writes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from layouts import LAYOUTS, laid_out

from tskernel.library import FLOATS
from tskernel.testing import call, compare, kernel_names, oracle

rope_kernels = pytest.mark.parametrize("kernel", kernel_names("apply_rope"))
in_place_kernels = pytest.mark.parametrize("kernel", kernel_names("apply_rope_"))
store_kernels = pytest.mark.parametrize("kernel", kernel_names("apply_rope_store_kvcache_"))
both_styles = pytest.mark.parametrize("is_neox", (True, False), ids=("neox", "interleaved"))

# Each kernel of either form, run on copies, so that one test covers both.
EITHER = [("apply_rope", k) for k in kernel_names("apply_rope")] + [
    ("apply_rope_", k) for k in kernel_names("apply_rope_")
]
either_form = pytest.mark.parametrize(("name", "kernel"), EITHER)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def rotate(name: str, kernel: str, positions: Any, q: Any, k: Any, cache: Any, **options: Any) -> tuple[Any, Any]:
    """Return rotated q and k, from either form, without changing the arguments."""
    if name == "apply_rope":
        return call(name, kernel, positions, q, k, cache, **options)
    q, k = q.clone(), k.clone()
    assert call(name, kernel, positions, q, k, cache, **options) is None
    return q, k


def cos_sin_table(rotary_dim: int, positions: int = 64, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return the usual cache: base 10000."""
    frequency = 10000.0 ** -(torch.arange(0, rotary_dim, 2, dtype=torch.float64) / max(rotary_dim, 1))
    angle = torch.arange(positions, dtype=torch.float64)[:, None] * frequency
    return torch.cat((angle.cos(), angle.sin()), dim=-1).to(dtype)


def complex_rope(positions: torch.Tensor, x: torch.Tensor, rotary_dim: int, is_neox: bool) -> torch.Tensor:
    """Rotate in another way, as an independent oracle: complex numbers times exp(i * angle), in float64."""
    frequency = 10000.0 ** -(torch.arange(0, rotary_dim, 2, dtype=torch.float64) / max(rotary_dim, 1))
    turn = torch.exp(1j * positions.double()[:, None, None] * frequency)
    half, h = rotary_dim // 2, x.double()
    pairs = (h[..., :half], h[..., half:rotary_dim]) if is_neox else (h[..., 0:rotary_dim:2], h[..., 1:rotary_dim:2])
    z = torch.complex(*(p.contiguous() for p in pairs)) * turn
    parts = torch.cat((z.real, z.imag), -1) if is_neox else torch.stack((z.real, z.imag), -1).flatten(-2)
    return torch.cat((parts, h[..., rotary_dim:]), -1)


# ROP-01


@pytest.mark.parametrize("position_dtype", (torch.int32, torch.int64))
@both_styles
@either_form
def test_rop_01_own_strides(name: str, kernel: str, is_neox: bool, position_dtype: torch.dtype) -> None:
    q = torch.full((1000,), float("nan")).as_strided((3, 4, 16), (256, 64, 1)).copy_(torch.randn(3, 4, 16))
    k = torch.full((1000,), float("nan")).as_strided((3, 1, 16), (40, 16, 1)).copy_(torch.randn(3, 1, 16))
    positions = torch.tensor([0, 7, 63], dtype=position_dtype)
    cache = cos_sin_table(16)
    want_q, want_k = complex_rope(positions, q, 16, is_neox), complex_rope(positions, k, 16, is_neox)
    assert not torch.equal(want_k[1], k[1].double())  # the one KV head does turn
    if name == "apply_rope":
        before = q.clone(), k.clone()
        got = call(name, kernel, positions, q, k, cache, is_neox=is_neox)
        compare((q, k), before, exact=True)
        assert all(t.is_contiguous() for t in got)
    else:
        call(name, kernel, positions, q, k, cache, is_neox=is_neox)
        got = q, k
        assert q.untyped_storage().nbytes() == 4000
        whole = torch.empty(0).set_(q.untyped_storage())
        assert int(whole.isnan().sum()) == 1000 - q.numel(), "written beside q"
    compare(got, (want_q, want_k))


@both_styles
@either_form
def test_rop_01_position_0_is_the_identity(name: str, kernel: str, is_neox: bool) -> None:
    q, k = torch.randn(2, 4, 16).bfloat16(), torch.randn(2, 1, 16).bfloat16()
    positions = torch.tensor([0, 0])
    got = rotate(name, kernel, positions, q, k, cos_sin_table(16), is_neox=is_neox)
    compare(got, (q, k), exact=True)


@both_styles
@in_place_kernels
def test_rop_01_in_place_and_out_of_place_agree(kernel: str, is_neox: bool) -> None:
    for dtype in FLOATS:
        q, k = torch.randn(5, 3, 20).to(dtype), torch.randn(5, 2, 20).to(dtype)
        positions, cache = torch.randint(0, 64, (5,)), cos_sin_table(12, dtype=dtype)
        twin = kernel.replace("apply_rope_", "apply_rope")
        if twin not in kernel_names("apply_rope"):
            twin = "reference/apply_rope"
        want = call("apply_rope", twin, positions, q, k, cache, is_neox=is_neox)
        call("apply_rope_", kernel, positions, q, k, cache, is_neox=is_neox)
        compare((q, k), want, exact=True)


# ROP-02


@pytest.mark.parametrize("dtype", FLOATS)
@either_form
def test_rop_02_quarter_turn(name: str, kernel: str, dtype: torch.dtype) -> None:
    q = torch.tensor([[[1.0, 2.0, 3.0, 4.0, 9.0, 9.0]]], dtype=dtype)
    cache = torch.tensor([[0.0, 0.0, 1.0, 1.0]], dtype=dtype)  # cosines, then sines
    for is_neox, want in ((True, [-3.0, -4.0, 1.0, 2.0, 9.0, 9.0]), (False, [-2.0, 1.0, -4.0, 3.0, 9.0, 9.0])):
        got_q, got_k = rotate(name, kernel, torch.tensor([0]), q, 2 * q, cache, is_neox=is_neox)
        assert got_q.tolist() == [[want]]
        assert got_k.tolist() == [[[2 * w for w in want]]]


@pytest.mark.parametrize("rotary_dim", (0, 2, 16))
@both_styles
@either_form
def test_rop_02_rotary_dims(name: str, kernel: str, is_neox: bool, rotary_dim: int) -> None:
    for dtype in FLOATS:
        q, k = torch.randn(4, 3, 16).to(dtype), torch.randn(4, 2, 16).to(dtype)
        positions = torch.tensor([1, 3, 63, 20])
        got = rotate(name, kernel, positions, q, k, cos_sin_table(rotary_dim), is_neox=is_neox)
        compare(got, tuple(complex_rope(positions, x, rotary_dim, is_neox) for x in (q, k)))
        for g, x in zip(got, (q, k), strict=True):
            assert torch.equal(g[..., rotary_dim:], x[..., rotary_dim:])
            assert g.data_ptr() != x.data_ptr()


@both_styles
@either_form
def test_rop_02_tail_is_bit_equal(name: str, kernel: str, is_neox: bool) -> None:
    """NaN payloads, infinities and negative zeros behind rotary_dim keep their bits."""
    bits = torch.tensor([0x7FC1, 0x7F81, -0x8000, 0x7F80, -0x80], dtype=torch.int16)
    x = torch.cat((torch.ones(4, dtype=torch.bfloat16), bits.view(torch.bfloat16)))[None, None]
    got = rotate(name, kernel, torch.tensor([5]), x, x.clone(), cos_sin_table(4), is_neox=is_neox)
    for g in got:
        assert g[0, 0, 4:].view(torch.int16).tolist() == bits.tolist()
        assert bool(g[0, 0, :4].isfinite().all())


# Flat tensors, positions, precision


@both_styles
@either_form
def test_flat_rows_equal_heads(name: str, kernel: str, is_neox: bool) -> None:
    qkv = torch.randn(5, 8 * 16)
    q, k = qkv[:, :64], qkv[:, 64:96]
    positions, cache = torch.tensor([5, 1, 0, 63, 2]), cos_sin_table(8)
    flat = rotate(name, kernel, positions, q, k, cache, is_neox=is_neox, head_size=16)
    heads = rotate(name, kernel, positions, q.view(5, 4, 16), k.view(5, 2, 16), cache, is_neox=is_neox, head_size=16)
    assert (flat[0].shape, flat[1].shape) == (q.shape, k.shape)
    compare(flat, (heads[0].flatten(1), heads[1].flatten(1)), exact=True)


@in_place_kernels
def test_flat_slices_are_written_through_their_strides(kernel: str) -> None:
    qkv = torch.randn(5, 128)
    before = qkv.clone()
    positions, cache = torch.tensor([5, 1, 0, 63, 2]), cos_sin_table(16)
    call("apply_rope_", kernel, positions, qkv[:, :64], qkv[:, 64:96], cache, head_size=16)
    compare(qkv[:, :96].view(5, 6, 16), complex_rope(positions, before[:, :96].view(5, 6, 16), 16, True))
    compare(qkv[:, 96:], before[:, 96:], exact=True)


@either_form
def test_positions_outside_the_cache_leave_their_token(name: str, kernel: str) -> None:
    q, k = torch.randn(5, 2, 8), torch.randn(5, 1, 8)
    positions = torch.tensor([-1, 3, 64, 2**62, -(2**63)])
    got = rotate(name, kernel, positions, q, k, cos_sin_table(8))
    for g, x in zip(got, (q, k), strict=True):
        compare(g[1:2], complex_rope(positions[1:2], x[1:2], 8, True))
        compare(g[[0, 2, 3, 4]], x[[0, 2, 3, 4]], exact=True)


@either_form
def test_rows_of_the_cache_that_no_position_names_are_not_read(name: str, kernel: str) -> None:
    cache = torch.full((64, 8), float("nan"))
    cache[5] = cos_sin_table(8)[5]
    q = torch.randn(2, 2, 8)
    got = rotate(name, kernel, torch.tensor([5, -1]), q, q.clone(), cache)
    assert bool(got[0].isfinite().all()) and bool(got[1].isfinite().all())


@pytest.mark.parametrize("cache_dtype", FLOATS)
@either_form
def test_one_rounding_whatever_the_cache_holds(name: str, kernel: str, cache_dtype: torch.dtype) -> None:
    q, k = torch.randn(4, 3, 16).bfloat16(), torch.randn(4, 2, 16).bfloat16()
    positions, cache = torch.tensor([1, 3, 63, 20]), cos_sin_table(16, dtype=cache_dtype)
    got = rotate(name, kernel, positions, q, k, cache)
    want = oracle("apply_rope", positions, q, k, cache)
    compare(got, want)
    missed = torch.cat([(g != w.bfloat16()).flatten() for g, w in zip(got, want, strict=True)])
    assert missed.float().mean().item() < 0.01


# The fused form


def fused_arguments(dtype: torch.dtype, cache_dtype: torch.dtype, flat: bool) -> dict[str, Any]:
    kv = torch.full((3, 4, 2, 32), -7.0).to(cache_dtype)
    qkv = torch.randn(6, 8, 16).to(dtype)
    parts = {"q": qkv[:, :4], "k": qkv[:, 4:6], "v": qkv[:, 6:]}
    return {
        "positions": torch.tensor([5, 1, 0, 63, 2, 9]),
        **({n: t.flatten(1) for n, t in parts.items()} if flat else parts),
        "cos_sin_cache": cos_sin_table(8),
        "k_cache": kv[..., :16],
        "v_cache": kv[..., 16:],
        "slot_mapping": torch.tensor([11, -1, 0, 12, 5, 6]),
    }


@pytest.mark.parametrize("flat", (False, True), ids=("heads", "flat"))
@pytest.mark.parametrize("cache_dtype", (torch.bfloat16, torch.float8_e4m3fn))
@both_styles
@store_kernels
def test_fused_form_equals_rope_then_store(kernel: str, is_neox: bool, cache_dtype: torch.dtype, flat: bool) -> None:
    a = fused_arguments(torch.bfloat16, cache_dtype, flat)
    b = {n: t.clone() for n, t in a.items()}
    scales = {"k_scale": torch.tensor([0.5]), "v_scale": torch.tensor([0.5, 2.0])} if cache_dtype.itemsize == 1 else {}
    call("apply_rope_store_kvcache_", kernel, **a, is_neox=is_neox, **scales)
    rope = (b["positions"], b["q"], b["k"], b["cos_sin_cache"])
    call("apply_rope_", "reference/apply_rope_", *rope, is_neox=is_neox, head_size=16 if flat else None)
    heads = [b[n].view(6, 2, 16) for n in ("k", "v")]
    store = (b["k_cache"], b["v_cache"], b["slot_mapping"])
    call("store_kvcache", "reference/store_kvcache", *heads, *store, **scales)
    for n in a:
        compare(a[n], b[n], exact=kernel.startswith("reference/"))
    assert bool((a["k_cache"].float()[1, :1] == -7).all()), "slot 4 was written"


# Properties


@settings(max_examples=40, derandomize=True, deadline=None, database=None)
@given(data=st.data())
def test_every_shape_and_layout_equals_complex_multiplication(data: st.DataObject) -> None:
    name, kernel = data.draw(st.sampled_from(EITHER))
    tokens, heads = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 4))
    rotary_dim = 2 * data.draw(st.integers(0, 12))
    head_dim = rotary_dim + data.draw(st.integers(0 if rotary_dim else 1, 7))
    dtype, is_neox = data.draw(st.sampled_from(FLOATS)), data.draw(st.booleans())
    generator = torch.Generator().manual_seed(tokens * 100 + heads)
    q = torch.randn(tokens, heads, head_dim, generator=generator).to(dtype)
    k = torch.randn(tokens, 1, head_dim, generator=generator).to(dtype)
    positions = torch.randint(0, 64, (tokens,), generator=generator)
    q_view, k_view = (laid_out(x, data.draw(st.sampled_from(LAYOUTS))) for x in (q, k))
    got = rotate(name, kernel, positions, q_view, k_view, cos_sin_table(rotary_dim), is_neox=is_neox)
    compare(got, tuple(complex_rope(positions, x, rotary_dim, is_neox) for x in (q, k)))


@settings(max_examples=15, derandomize=True, deadline=None, database=None)
@given(st.integers(0, 31), st.integers(0, 31), st.booleans())
def test_scores_depend_on_the_distance_alone(a: int, b: int, is_neox: bool) -> None:
    generator = torch.Generator().manual_seed(a * 32 + b)
    q, k = torch.randn(1, 1, 16, generator=generator), torch.randn(1, 1, 16, generator=generator)

    def score(kernel: str, shift: int) -> torch.Tensor:
        at_a, at_b = torch.tensor([a + shift]), torch.tensor([b + shift])
        turned_q = call("apply_rope", kernel, at_a, q, k, cos_sin_table(16), is_neox=is_neox)[0]
        turned_k = call("apply_rope", kernel, at_b, q, k, cos_sin_table(16), is_neox=is_neox)[1]
        return (turned_q * turned_k).sum()

    for kernel in kernel_names("apply_rope"):
        compare(score(kernel, 0), score(kernel, 32))


# Refusals


@pytest.mark.parametrize("name", ("apply_rope", "apply_rope_"))
def test_refusals_name_the_argument(name: str) -> None:
    def arguments(**changes: Any) -> dict[str, Any]:
        good = {"positions": torch.zeros(3, dtype=torch.int64), "q": torch.zeros(3, 4, 8), "k": torch.zeros(3, 2, 8)}
        return {**good, "cos_sin_cache": torch.zeros(9, 8), **changes}

    cases: list[tuple[str, dict[str, Any]]] = [
        (r"positions.shape: expected \(3,\), got \(4,\)", {"positions": torch.zeros(4, dtype=torch.int64)}),
        ("positions.dtype: expected int64 or int32, got float32", {"positions": torch.zeros(3)}),
        (r"k.shape\[0\]: expected 3 tokens, as q, got 2", {"k": torch.zeros(2, 2, 8)}),
        (r"k.shape: expected \(\*, \*, 8\), got \(3, 2, 16\)", {"k": torch.zeros(3, 2, 16)}),
        ("k.dtype: expected float32, got float16", {"k": torch.zeros(3, 2, 8, dtype=torch.float16)}),
        (r"cos_sin_cache.shape\[1\]: expected an even rotary_dim, got 7", {"cos_sin_cache": torch.zeros(9, 7)}),
        (r"cos_sin_cache.shape\[1\]: expected at most the head size, 8, got 10", {"cos_sin_cache": torch.zeros(9, 10)}),
        ("cos_sin_cache.shape: expected at least one position", {"cos_sin_cache": torch.zeros(0, 8)}),
        (r"q.shape: expected \[T, H, D\], or flat with head_size given, got \(3, 32\)", {"q": torch.zeros(3, 32)}),
        (r"q.shape: expected \(\*, \*, 4\), got \(3, 4, 8\)", {"head_size": 4}),
        (
            r"q.shape\[1\]: expected a multiple of head_size 5, got 32",
            {"q": torch.zeros(3, 32), "k": torch.zeros(3, 10), "head_size": 5},
        ),
        ("head_size: expected at least 1, got 0", {"head_size": 0}),
    ]
    for text, changes in cases:
        with pytest.raises(ValueError, match=f"tokenspeed::{name}: {text}"):
            call(name, None, **arguments(**changes))
