"""What writing the paged cache must do beyond the generic contract: slot arithmetic, skipped slots, strides, fp8."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tskernel.library import FLOATS, FP8
from tskernel.testing import call, compare, kernel_names

store_kernels = pytest.mark.parametrize("kernel", kernel_names("store_kvcache"))
mla_kernels = pytest.mark.parametrize("kernel", kernel_names("store_mla_kvcache"))
LAYOUTS = ("separate", "interleaved", "head_major", "planes", "padded")


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def poisoned(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.full(shape, float("nan")).to(dtype)


def caches(layout: str, pages: int, page: int, heads: int, dim: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Return K and V caches full of NaN, and the storage that holds them."""
    if layout == "interleaved":
        both = poisoned((pages, page, heads, 2 * dim), dtype)
        return both[..., :dim], both[..., dim:], both
    if layout == "head_major":
        both = poisoned((2, pages, heads, page, dim), dtype)
        return both[0].transpose(1, 2), both[1].transpose(1, 2), both
    if layout == "planes":
        both = poisoned((pages, 2, page, heads, dim), dtype)
        return both[:, 0], both[:, 1], both
    if layout == "padded":
        both = poisoned((2, pages + 1, page + 2, heads + 1, dim + 3), dtype)
        inner = both[:, 1:, 1:-1, :heads, 2 : 2 + dim]
        return inner[0], inner[1], both
    both = poisoned((2, pages, page, heads, dim), dtype)
    return both[0], both[1], both


def expected(cache: torch.Tensor, rows: torch.Tensor, slots: list[int]) -> torch.Tensor:
    """Return what a loop over the tokens would leave in the cache."""
    want = cache.clone()
    for row, slot in zip(rows, slots, strict=True):
        if 0 <= slot < cache.shape[0] * cache.shape[1]:
            want[slot // cache.shape[1], slot % cache.shape[1]] = row
    return want


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.element_size()])


def assert_same_bits(got: torch.Tensor, want: torch.Tensor) -> None:
    compare(bits(got), bits(want), exact=True)


# PAGE-03, the write side


@pytest.mark.parametrize("page", (1, 16, 48, 64))
@store_kernels
def test_page_03_slot_arithmetic(kernel: str, page: int) -> None:
    """A sequence written through a shuffled page table comes back token by token; v[t] = t, as in the uniform probe."""
    for length in sorted({max(page - 1, 1), page, page + 1, 2 * page}):
        pages = -(-length // page) + 1
        table = torch.randperm(pages)
        token = torch.arange(length)
        slots = table[token // page] * page + token % page
        k_cache, v_cache, _ = caches("separate", pages, page, 2, 8, torch.float32)
        k, v = torch.randn(length, 2, 8), token.float()[:, None, None].expand(length, 2, 8)
        call("store_kvcache", kernel, k, v, k_cache, v_cache, slots)
        read = v_cache[table].reshape(-1, 2, 8)
        compare(read[:length], v, exact=True)
        assert bool(read[length:].isnan().all()), "a slot past the sequence was written"
        compare(k_cache[table].reshape(-1, 2, 8)[:length], k, exact=True)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "slots",
    [
        [-1, 0, 5, -1],  # a skipped one next to a real write of slot 0
        [0, -1, -1, 7],
        [-1, -1, -1, -1],
        [-1, -1, -1, 11],
        [11, 12, 3, 2**62],  # past the cache
        [-5, -(2**63), 2**63 - 1, 4],
        [],
    ],
    ids=("around_0", "after_0", "all_skipped", "last_only", "past_the_end", "extremes", "empty"),
)
@store_kernels
def test_page_03_slot_minus_1_is_skipped(kernel: str, slots: list[int], layout: str) -> None:
    for dtype in (torch.bfloat16, torch.float8_e4m3fn):
        k_cache, v_cache, storage = caches(layout, 3, 4, 2, 6, dtype)
        storage.view(torch.uint8).random_()  # any bits, NaN among them
        k, v = torch.randn(len(slots), 2, 6).to(dtype), torch.randn(len(slots), 2, 6).to(dtype)
        dead = torch.tensor([not 0 <= s < 12 for s in slots], dtype=torch.bool)[:, None, None]
        k, v = (torch.where(dead, torch.full_like(x, float("nan")), x) for x in (k, v))
        want_k, want_v = expected(k_cache, k, slots), expected(v_cache, v, slots)
        beside = storage.clone()
        call("store_kvcache", kernel, k, v, k_cache, v_cache, torch.tensor(slots, dtype=torch.int64))
        assert_same_bits(k_cache, want_k)
        assert_same_bits(v_cache, want_v)
        # Nothing else in the storage moved: put the old bits back where the caches are, and all is as before.
        moved = bits(storage) != bits(beside)
        assert int(moved.sum()) <= 2 * 12 * int((~dead).sum())


@store_kernels
def test_page_03_slots_are_64_bit(kernel: str) -> None:
    """A slot whose low 32 bits name a real one is still past the cache."""
    k_cache, v_cache, _ = caches("separate", 3, 4, 1, 2, torch.float32)
    row = torch.ones(3, 1, 2)
    call("store_kvcache", kernel, row, row, k_cache, v_cache, torch.tensor([2**32 + 1, 2**33, -(2**32) + 2]))
    assert bool(k_cache.isnan().all()) and bool(v_cache.isnan().all())


@mla_kernels
def test_page_03_mla(kernel: str) -> None:
    for dtype in (torch.bfloat16, torch.float8_e4m3fn):
        slots = [7, -1, 0, 12, 3]
        wide = poisoned((3, 4, 2, 14), dtype)
        kv_cache = wide[:, :, 1:, 2:12]
        rows = torch.randn(5, 10).bfloat16()
        rows[[1, 3]] = float("nan")
        buffer = torch.full((5, 30), float("nan")).bfloat16()
        kv_c, k_pe = buffer[:, 1:9].copy_(rows[:, :8]), buffer[:, 20:22].copy_(rows[:, 8:])
        want = expected(kv_cache, rows.to(dtype)[:, None], slots)
        call("store_mla_kvcache", kernel, kv_c, k_pe, kv_cache, torch.tensor(slots))
        assert_same_bits(kv_cache, want)
        assert bool(wide[:, :, 0].isnan().all()) and bool(wide[..., :2].isnan().all())
        assert bool(wide[..., 12:].isnan().all())


# LAY-01


@store_kernels
def test_lay_01_one_kv_head_and_one_token(kernel: str) -> None:
    rows = torch.randn(1, 1, 8)
    k = rows.as_strided((1, 1, 8), (1, 4608, 1))
    buffer = poisoned((3, 4, 8), torch.float32)
    k_cache = buffer.as_strided((3, 4, 1, 8), (32, 8, 1, 1))  # stride 1 on the axis of the one head
    v_cache = poisoned((3, 4, 1, 8), torch.float32)
    call("store_kvcache", kernel, k, rows, k_cache, v_cache, torch.tensor([6]))
    compare(k_cache, v_cache, exact=True)
    compare(buffer[1, 2], rows[0, 0], exact=True)
    assert int(buffer.isnan().sum()) == 88


# Dtypes and scales


@pytest.mark.parametrize("dtype", FP8)
@store_kernels
def test_kv8_02_dtype_decides_the_encoding(kernel: str, dtype: torch.dtype) -> None:
    top = {torch.float8_e4m3fn: 448.0, torch.float8_e4m3fnuz: 240.0}.get(dtype, 57344.0)
    k_cache, v_cache = torch.zeros(2, 1, 1, 4).to(dtype), torch.zeros(2, 1, 1, 4).to(dtype)
    k = torch.tensor([[[1.0, 1e6, -1e6, -0.0]]])
    call("store_kvcache", kernel, k, k, k_cache, v_cache, torch.tensor([1]))
    assert k_cache[1].float().tolist() == [[[1.0, top, -top, 0.0]]]
    if dtype == torch.float8_e4m3fn:
        assert bits(k_cache)[1, 0, 0].tolist() == [0x38, 0x7E, 0xFE, 0x80]
    if dtype == torch.float8_e4m3fnuz:
        assert bits(k_cache)[1, 0, 0].tolist() == [0x40, 0x7F, 0xFF, 0x00]


@pytest.mark.parametrize("layout", LAYOUTS)
@store_kernels
def test_fp8_cache_holds_x_over_scale(kernel: str, layout: str) -> None:
    k, v = torch.randn(5, 2, 6).bfloat16() * 20, torch.randn(5, 2, 6).bfloat16() * 20
    slots = [7, -1, 0, 11, 3]
    one, zero_dim, per_head = torch.tensor([0.3]), torch.tensor(0.3), torch.tensor([0.3, 7.0])
    for k_scale, v_scale in ((one, per_head), (per_head, None), (None, zero_dim)):
        k_cache, v_cache, _ = caches(layout, 3, 4, 2, 6, torch.float8_e4m3fn)
        want = []
        for x, scale, cache in ((k, k_scale, k_cache), (v, v_scale, v_cache)):
            each = torch.ones(1) if scale is None else scale
            stored = (x.float() / each.reshape(-1, 1)).clamp(-448, 448).to(torch.float8_e4m3fn)
            want.append(expected(cache, stored, slots))
        call("store_kvcache", kernel, k, v, k_cache, v_cache, torch.tensor(slots), k_scale=k_scale, v_scale=v_scale)
        assert_same_bits(k_cache, want[0])
        assert_same_bits(v_cache, want[1])


@mla_kernels
def test_mla_fp8_cache_holds_x_over_scale(kernel: str) -> None:
    kv_c, k_pe, scale = torch.randn(3, 8) * 500, torch.randn(3, 2), torch.tensor([0.5])
    kv_cache = poisoned((2, 4, 1, 10), torch.float8_e4m3fn)
    stored = (torch.cat((kv_c, k_pe), -1) / 0.5).clamp(-448, 448).to(torch.float8_e4m3fn)[:, None]
    want = expected(kv_cache, stored, [5, -1, 2])
    call("store_mla_kvcache", kernel, kv_c, k_pe, kv_cache, torch.tensor([5, -1, 2]), scale=scale)
    assert_same_bits(kv_cache, want)


@pytest.mark.parametrize("cache_dtype", FLOATS)
@pytest.mark.parametrize("dtype", FLOATS)
@store_kernels
def test_rows_are_rounded_to_the_cache(kernel: str, dtype: torch.dtype, cache_dtype: torch.dtype) -> None:
    k = torch.randn(3, 2, 6).to(dtype)
    k_cache, v_cache, _ = caches("interleaved", 2, 2, 2, 6, cache_dtype)
    call("store_kvcache", kernel, k, k, k_cache, v_cache, torch.tensor([3, 0, -1]))
    for cache in (k_cache, v_cache):
        compare(cache[1, 1], k[0].to(cache_dtype), exact=True)
        compare(cache[0, 0], k[1].to(cache_dtype), exact=True)


@store_kernels
def test_sliced_rows_of_one_qkv(kernel: str) -> None:
    qkv = torch.full((4, 768), float("nan"))
    qkv[:, 256:] = torch.randn(4, 512)
    k, v = qkv[:, 256:512].view(4, 4, 64), qkv[:, 512:].view(4, 4, 64)
    k_cache, v_cache, _ = caches("interleaved", 2, 3, 4, 64, torch.float32)
    call("store_kvcache", kernel, k, v, k_cache, v_cache, torch.tensor([5, 4, 1, 0]))
    compare(k_cache.reshape(6, 4, 64)[[5, 4, 1, 0]], k, exact=True)
    compare(v_cache.reshape(6, 4, 64)[[5, 4, 1, 0]], v, exact=True)


# Under compilation


def test_lib_04_write_read_write_under_compile_equals_eager() -> None:
    import tskernel

    def step(k: Any, v: Any, k_cache: Any, v_cache: Any, slots: Any) -> Any:
        tskernel.store_kvcache(k, v, k_cache, v_cache, slots)
        seen = k_cache.sum() + v_cache.sum()
        tskernel.store_kvcache(2 * k, v, k_cache, v_cache, slots)
        return seen, k_cache.sum()

    k, v, slots = torch.randn(3, 2, 6), torch.randn(3, 2, 6), torch.tensor([4, -1, 0])
    results = []
    for function in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        both = torch.zeros(3, 2, 2, 12)
        results.append((*function(k, v, both[..., :6], both[..., 6:], slots), both))
    compare(results[1], results[0], exact=True)


# Properties


@settings(max_examples=50, derandomize=True, deadline=None, database=None)
@given(data=st.data())
def test_every_layout_and_mapping_equals_the_loop(data: st.DataObject) -> None:
    kernel = data.draw(st.sampled_from(kernel_names("store_kvcache")))
    layout = data.draw(st.sampled_from(LAYOUTS))
    pages, page, heads, dim = (data.draw(st.integers(1, n)) for n in (4, 5, 3, 9))
    real = data.draw(st.permutations(range(pages * page)))
    slots = [s if data.draw(st.booleans()) else data.draw(st.sampled_from((-1, pages * page, -7))) for s in real]
    slots = slots[: data.draw(st.integers(0, len(slots)))]
    cache_dtype = data.draw(st.sampled_from((torch.float32, torch.bfloat16, torch.float8_e5m2)))
    k_cache, v_cache, _ = caches(layout, pages, page, heads, dim, cache_dtype)
    generator = torch.Generator().manual_seed(pages * 10 + page)
    k, v = (torch.randn(len(slots), heads, dim, generator=generator) for _ in range(2))
    want = [expected(c, x.to(cache_dtype), slots) for c, x in ((k_cache, k), (v_cache, v))]
    call("store_kvcache", kernel, k, v, k_cache, v_cache, torch.tensor(slots, dtype=torch.int64))
    assert_same_bits(k_cache, want[0])
    assert_same_bits(v_cache, want[1])


# Refusals


def test_refusals_name_the_argument() -> None:
    def arguments(**changes: Any) -> dict[str, Any]:
        rows, cache = torch.zeros(3, 2, 8), torch.zeros(4, 5, 2, 8)
        good = {"k": rows, "v": rows, "k_cache": cache, "v_cache": cache.clone()}
        return {**good, "slot_mapping": torch.zeros(3, dtype=torch.int64), **changes}

    fp8 = torch.zeros(3, 2, 8).to(torch.float8_e4m3fn)
    fp8_cache = torch.zeros(4, 5, 2, 8).to(torch.float8_e4m3fn)
    cases: list[tuple[str, dict[str, Any]]] = [
        ("slot_mapping.dtype: expected int64, got int32", {"slot_mapping": torch.zeros(3, dtype=torch.int32)}),
        (r"slot_mapping.shape: expected \(3,\), got \(2,\)", {"slot_mapping": torch.zeros(2, dtype=torch.int64)}),
        (r"k_cache.shape: expected \(\*, \*, 2, 8\), got \(4, 5, 1, 8\)", {"k_cache": torch.zeros(4, 5, 1, 8)}),
        (r"v_cache.shape: expected \(4, 5, \*, \*\), got \(3, 5, 2, 8\)", {"v_cache": torch.zeros(3, 5, 2, 8)}),
        (r"v.shape: expected \(3, 2, \*\), got \(3, 1, 8\)", {"v": torch.zeros(3, 1, 8)}),
        ("v.dtype: expected float32, got float16", {"v": torch.zeros(3, 2, 8, dtype=torch.float16)}),
        ("v_cache.dtype: expected float32, got float8_e4m3fn", {"v_cache": fp8_cache}),
        ("k.dtype: expected float32 or float16 or bfloat16, got float8_e4m3fn", {"k": fp8, "v": fp8}),
        (r"k_scale.shape: expected one element or \(2,\), got \(3,\)", {"k_scale": torch.ones(3)}),
        ("v_scale.dtype: expected float32, got float64", {"v_scale": torch.ones(1).double()}),
        (
            "k_scale: expected None for rows that are fp8 already, got a tensor",
            {"k": fp8, "v": fp8, "k_cache": fp8_cache, "v_cache": fp8_cache.clone(), "k_scale": torch.ones(1)},
        ),
        (
            r"k_cache.shape\[0\]: expected at least one page, got 0",
            {"k_cache": torch.zeros(0, 5, 2, 8), "v_cache": torch.zeros(0, 5, 2, 8)},
        ),
    ]
    for text, changes in cases:
        with pytest.raises(ValueError, match=f"tokenspeed::store_kvcache: {text}"):
            call("store_kvcache", None, **arguments(**changes))
    with pytest.raises(ValueError, match=r"tokenspeed::store_mla_kvcache: kv_cache.shape: expected \(\*, \*, 1, 10\)"):
        tensors = torch.zeros(3, 8), torch.zeros(3, 2), torch.zeros(4, 5, 1, 9), torch.zeros(3, dtype=torch.int64)
        call("store_mla_kvcache", None, *tensors)
