"""Calls for the native kernels: larger ones than the ops' own samples, odd widths, and awkward layouts."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from helpers import short
from torch import Tensor

from tskernel.library import Sample
from tskernel.testing import SampleMaker

FP32, BF16, FP8 = torch.float32, torch.bfloat16, torch.float8_e4m3fn


def norm_sizes() -> Iterator[tuple[int, int]]:
    """Yield rows and widths that meet every way to share a row: lanes, one to eight accesses, the long loop."""
    for width in (8, 24, 256, 264, 768, 1000, 2880, 4096, 8192):
        yield 3, width
    for width in (40, 2880, 16384, 20000, 40000, 5, 515, 3333):
        yield 2, width
    yield 270, 1032  # more rows than are given all threads
    yield 270, 521
    yield 600, 96


def extra_samples(op: str, make: SampleMaker, dtype: torch.dtype) -> Iterator[Sample]:
    """Yield calls larger than the op's own samples, and such as begin off a 16-byte boundary."""
    r = make.randn
    if op in ("rmsnorm", "gemma_rmsnorm", "layernorm", "add_rmsnorm", "fused_add_rmsnorm"):
        more = {"residual"} if "add_" in op else set()
        for rows, width in norm_sizes():
            for wdtype in {dtype, FP32}:
                tensors = {n: r((rows, width), dtype) for n in ("x", *more)}
                bias = {"bias": r((width,), wdtype)} if op == "layernorm" else {}
                yield Sample(f"{rows}x{width}", **tensors, weight=r((width,), wdtype), **bias)
        shifted = {n: r((4, 521), dtype)[:, 1:513] for n in ("x", *more)}
        yield Sample("unaligned", **shifted, weight=r((513,), dtype)[1:])
        strided = {n: r((2, 3, 4, 600), dtype)[::1, 1:, ::2, 8:520] for n in ("x", *more)}
        yield Sample("three leading strides", **strided, weight=r((512,), dtype))
    elif op == "qk_rmsnorm":
        for tokens in (3, 300):
            qkv = r((tokens, 12, 128), dtype)
            yield Sample("heads", q=qkv[:, :8], k=qkv[:, 8:10], q_weight=r((128,), dtype), k_weight=r((128,), dtype))
        yield Sample(
            "wide", q=r((3, 1, 576), dtype), k=r((3, 2, 576), dtype), q_weight=r((576,), FP32), k_weight=r((576,), FP32)
        )
    elif op.endswith("_quantize_fp8"):
        for rows, width in ((3, 768), (2, 2880), (300, 256), (2, 9216), (5, 7)):
            x = r((rows, 2 * width), dtype)
            for options in ({}, {"granularity": "group"}, {"granularity": "group", "group_size": 32, "ue8m0": True}):
                yield Sample(f"{rows}x{width}", x=x, **options)
            yield Sample(f"{rows}x{width} scaled", x=x, scale=make.tensor([0.03], FP32), granularity="tensor")
    elif op in ("silu_and_mul", "gelu_and_mul", "gelu_tanh_and_mul", "swiglu_oai"):
        for rows, width in ((3, 768), (2, 3420), (2, 2880), (300, 96), (600, 40), (2, 14336)):
            yield Sample(f"{rows}x{width}", x=r((rows, 2 * width), dtype) * 4)
            if op == "swiglu_oai":
                yield Sample(f"{rows}x{width} alternating", x=r((rows, 2 * width), dtype) * 4, interleaved=True)
        yield Sample("unaligned", x=r((4, 1025), dtype)[:, 1:])
    elif op in ("quantize_fp8_dynamic", "quantize_int8"):
        for rows, width in ((3, 768), (2, 2880), (300, 256), (2, 20000), (1, 40000), (300, 513), (7, 96)):
            x = r((rows, width), dtype) * 3
            for granularity in ("token", "tensor"):
                yield Sample(f"{rows}x{width} {granularity}", x=x, granularity=granularity)
            if op == "quantize_fp8_dynamic":
                for options in ({"group_size": 128}, {"group_size": 64, "ue8m0": True}, {"group_size": 48}):
                    yield Sample(f"{rows}x{width} {options}", x=x, granularity="group", **options)
                yield Sample(f"{rows}x{width} block", x=x, granularity="block")
        if op == "quantize_fp8_dynamic":
            yield Sample("matrices", x=r((2, 3, 130, 260), dtype), granularity="block")
            yield Sample("tensor with gaps", x=r((70, 300), dtype)[:, 8:264], granularity="tensor")
    elif op == "quantize_fp8":
        for rows, width in ((3, 768), (300, 264), (2, 5001)):
            yield Sample("rows", x=r((rows, width), dtype), scale=r((rows, 1), FP32).abs() + 0.01)
            yield Sample("one", x=r((rows, width), dtype), scale=make.tensor(0.02, FP32))
    elif op in ("quantize_mxfp8", "quantize_mxfp4"):
        for rows, width in ((3, 768), (300, 64), (2, 2880), (2, 8192), (3, 8), (3, 40), (5, 34)):
            yield Sample(f"{rows}x{width}", x=r((rows, width), dtype) * 5)
    elif op in ("store_kvcache", "store_mla_kvcache"):
        yield from store_samples(op, make, dtype)
    else:
        yield from rope_samples(op, make, dtype)


def store_samples(op: str, make: SampleMaker, dtype: torch.dtype) -> Iterator[Sample]:
    r, slots = make.randn, make.permutation(64, torch.int64)[:9]
    for cache_dtype in (dtype, BF16, FP32, FP8, torch.float8_e5m2, torch.float8_e4m3fnuz):
        for scale in (None, make.tensor([0.5], FP32)):
            if op == "store_mla_kvcache":
                cache = r((4, 16, 1, 576), cache_dtype)
                yield Sample(
                    short(cache_dtype),
                    kv_c=r((9, 512), dtype),
                    k_pe=r((9, 64), dtype),
                    kv_cache=cache,
                    slot_mapping=slots,
                    scale=scale,
                )
                continue
            caches = r((2, 4, 16, 8, 128), cache_dtype)
            for heads, width in ((8, 128), (3, 40)):
                k, v = r((9, heads, width), dtype), r((9, heads, width), dtype)
                both = {"k_cache": caches[0, :, :, :heads, :width], "v_cache": caches[1, :, :, :heads, :width]}
                yield Sample(short(cache_dtype), k=k, v=v, **both, slot_mapping=slots, k_scale=scale, v_scale=scale)


def rope_samples(op: str, make: SampleMaker, dtype: torch.dtype) -> Iterator[Sample]:
    r = make.randn
    for tokens, heads, size, rotary, neox in (
        (9, 16, 128, 128, True),
        (9, 5, 128, 64, False),
        (3, 4, 80, 48, True),
        (2, 3, 64, 64, False),
    ):
        for angle_dtype in (dtype, FP32):
            angle = make.randn((40, rotary // 2), FP32)
            args = {
                "positions": make.randint(-1, 41, (tokens,)),
                "q": r((tokens, heads, size), dtype),
                "k": r((tokens, 2, size), dtype),
                "cos_sin_cache": torch.cat((angle.cos(), angle.sin()), -1).to(angle_dtype),
                "is_neox": neox,
            }
            if op.endswith("store_kvcache_"):
                for cache_dtype, scale in ((dtype, None), (FP8, make.tensor([0.5, 0.25], FP32))):
                    caches = r((2, 4, 16, 2, size), cache_dtype)
                    slots = make.permutation(64, torch.int64)[:tokens]
                    slots[::4] = -1
                    stored = {"v": r((tokens, 2, size), dtype), "k_cache": caches[0], "v_cache": caches[1]}
                    yield Sample("large", **args, **stored, slot_mapping=slots, k_scale=scale, v_scale=scale)
            else:
                yield Sample("large", **args)


LAYOUTS = ("offset", "sliced", "padded", "transposed", "spread")


def laid_out(values: Tensor, layout: str) -> Tensor:
    """Return a view with the values of ``values``; what lies between its elements is NaN."""
    *lead, width = values.shape

    def poisoned(*shape: int) -> Tensor:
        return torch.full(shape, float("nan"), device=values.device).to(values.dtype)

    if layout == "offset":
        view = poisoned(values.numel() + 2)[1:-1].view(values.shape)  # off by one element
    elif layout == "sliced":
        view = poisoned(*lead, width + 9)[..., 5 : 5 + width]  # rows at odd places
    elif layout == "padded":
        view = poisoned(*lead, width + 16)[..., 8 : 8 + width]  # rows at 16-byte boundaries
    elif layout == "transposed":
        view = poisoned(width, *lead).movedim(0, -1)
    else:
        view = poisoned(*lead, 2 * width)[..., ::2]
    return view.copy_(values)


def layout_samples(op: str, make: SampleMaker, dtype: torch.dtype, widths: tuple[int, ...]) -> Iterator[Sample]:
    """Yield small calls whose tensors of rows all have one awkward layout, for even and odd widths."""
    for width in widths:
        for layout in LAYOUTS:
            yield Sample(f"{width} {layout}", **_laid_out_arguments(op, make, dtype, width, layout))


def _laid_out_arguments(
    op: str, make: SampleMaker, dtype: torch.dtype, width: int, layout: str
) -> dict[str, Tensor | bool]:
    def rows(*shape: int) -> Tensor:
        return laid_out(make.randn(shape, dtype), layout)

    if "rope" in op:
        angle = make.randn((40, width // 2), FP32)
        found: dict[str, Tensor | bool] = {
            "positions": make.randint(0, 40, (5,)),
            "q": rows(5, 3, width), "k": rows(5, 2, width),
            "cos_sin_cache": laid_out(torch.cat((angle.cos(), angle.sin()), -1), layout),
        }  # fmt: skip
        if op.endswith("store_kvcache_"):
            caches = {n: rows(3, 4, 2, width) for n in ("k_cache", "v_cache")}
            found |= {"v": rows(5, 2, width), **caches, "slot_mapping": make.permutation(12, torch.int64)[:5]}
        return found
    if op == "qk_rmsnorm":
        weights = {n: make.randn((width,), dtype) for n in ("q_weight", "k_weight")}
        return {"q": rows(5, 3, width), "k": rows(5, 2, width), **weights}
    if op == "store_kvcache":
        both = {"k": rows(5, 2, width), "v": rows(5, 2, width)}
        caches = {n: rows(3, 4, 2, width) for n in ("k_cache", "v_cache")}
        return {**both, **caches, "slot_mapping": make.permutation(12, torch.int64)[:5]}
    if op == "store_mla_kvcache":
        both = {"kv_c": rows(5, width), "k_pe": rows(5, width)}
        return {**both, "kv_cache": rows(3, 4, 1, 2 * width), "slot_mapping": make.permutation(12, torch.int64)[:5]}
    if "_and_mul" in op or op.startswith("swiglu"):
        return {"x": rows(3, 2, 2 * width)}
    found = {"x": rows(3, 2, width)}
    if op == "quantize_fp8":
        found["scale"] = make.tensor([0.02], FP32)
    if "norm" in op:
        found["weight"] = make.randn((width,), dtype)
    if "add_" in op:
        found["residual"] = rows(3, 2, width)
    if op == "layernorm":
        found["bias"] = make.randn((width,), dtype)
    return found
