"""The rows of the small-op benchmark: an op, a width that models have, and a number of tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

DEVICE = "cuda"
BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
TOKENS = (1, 8, 64, 1024, 16384)
MAX_POSITION, PAGE = 32768, 64
Arguments = dict[str, Any]


def randn(*shape: int) -> Tensor:
    """Return standard normal bf16 values on the GPU."""
    return torch.randn(shape, dtype=BF16, device=DEVICE)


@dataclass(frozen=True)
class Case:
    """An op at one width. ``values`` are read or written per token, in bytes; ``make`` gives a call's arguments."""

    op: str
    label: str
    values: int
    make: Callable[[int], Arguments]
    tokens: tuple[int, ...] = TOKENS


class Row(NamedTuple):
    """A case at a number of tokens."""

    case: Case
    tokens: int

    @property
    def name(self) -> str:
        """How the row is called in tables and on the command line."""
        return f"{self.case.op} {self.tokens} x {self.case.label}"

    @property
    def bytes(self) -> int:
        """Return what must be read and written at least; weights and tables are left out."""
        return self.tokens * self.case.values


def norm(op: str, width: int, tokens: tuple[int, ...] = TOKENS) -> Case:
    """Return a norm of rows of ``width``."""
    added = op in ("add_rmsnorm", "fused_add_rmsnorm")

    def make(t: int) -> Arguments:
        weight = torch.rand(width, dtype=BF16, device=DEVICE)
        more = {"residual": randn(t, width)} if added else {"bias": weight.clone()} if op == "layernorm" else {}
        return {"x": randn(t, width), "weight": weight, **more}

    return Case(op, str(width), (8 if added else 4) * width, make, tokens)


def gated(op: str, width: int, tokens: tuple[int, ...] = TOKENS, **options: Any) -> Case:
    """Return a gated activation of ``width`` results per row, quantized if the op does."""
    label = " ".join([str(width), *[str(v) for v in options.values()]])
    values = (5 if "quantize" in op else 6) * width
    return Case(op, label, values, lambda t: {"x": randn(t, 2 * width), **options}, tokens)


def quantize(op: str, width: int, tokens: tuple[int, ...] = TOKENS, **options: Any) -> Case:
    """Return a quantization of rows of ``width``."""

    def make(t: int) -> Arguments:
        scale = {"scale": torch.ones(1, device=DEVICE)} if op == "quantize_fp8" else {}
        return {"x": randn(t, width), **scale, **options}

    label = " ".join([str(width), *[str(v) for v in options.values()]])
    return Case(op, label, (5 if op.endswith("mxfp4") else 6) * width // 2, make, tokens)


def angles(rotary: int) -> Tensor:
    """Return cosines and sines, as FlashInfer wants them: fp32."""
    angle = torch.rand(MAX_POSITION, rotary // 2, device=DEVICE) * 6.28
    return torch.cat((angle.cos(), angle.sin()), -1)


def rope(heads: int, keys: int, width: int) -> Case:
    """Return a rotation in place of queries and keys."""

    def make(t: int) -> Arguments:
        positions = torch.arange(t, device=DEVICE)
        return {
            "positions": positions, "q": randn(t, heads, width), "k": randn(t, keys, width),
            "cos_sin_cache": angles(width),
        }  # fmt: skip

    return Case("apply_rope_", f"({heads}+{keys}) x {width}", 4 * (heads + keys) * width, make)


def store(heads: int, width: int, cache: torch.dtype) -> Case:
    """Return the writing of keys and values into a paged cache."""

    def make(t: int) -> Arguments:
        pages = 2 * -(-t // PAGE)
        caches = [torch.zeros(pages, PAGE, heads, width, dtype=cache, device=DEVICE) for _ in "kv"]
        one = torch.ones(1, device=DEVICE) if cache is FP8 else None
        return {
            "k": randn(t, heads, width), "v": randn(t, heads, width), "k_cache": caches[0], "v_cache": caches[1],
            "slot_mapping": torch.arange(t, device=DEVICE) + PAGE, "k_scale": one, "v_scale": one,
        }  # fmt: skip

    kind = "fp8" if cache is FP8 else "bf16"
    return Case("store_kvcache", f"{heads} x {width} {kind}", 2 * heads * width * (2 + cache.itemsize), make)


def store_mla(latent: int, turned: int) -> Case:
    """Return the writing of MLA's latents into a paged cache."""

    def make(t: int) -> Arguments:
        cache = torch.zeros(2 * -(-t // PAGE), PAGE, 1, latent + turned, dtype=BF16, device=DEVICE)
        slots = torch.arange(t, device=DEVICE) + PAGE
        return {"kv_c": randn(t, latent), "k_pe": randn(t, turned), "kv_cache": cache, "slot_mapping": slots}

    return Case("store_mla_kvcache", f"{latent} + {turned}", 4 * (latent + turned), make)


def _cases() -> Iterator[Case]:
    for width in (2880, 4096, 7168, 8192):
        yield norm("rmsnorm", width)
    yield norm("rmsnorm", 16384, (1, 64, 4096))
    for width in (2880, 4096, 7168, 8192):
        yield norm("fused_add_rmsnorm", width)
    for width in (768, 2048, 2880, 14336):
        yield gated("silu_and_mul", width)
    yield gated("silu_and_mul", 28672, (1, 64, 1024))
    yield gated("swiglu_oai", 2880)
    yield rope(64, 8, 128)
    yield rope(64, 8, 64)
    yield rope(128, 1, 64)
    yield store(8, 128, BF16)
    yield store(8, 128, FP8)
    yield store(8, 64, BF16)
    yield store_mla(512, 64)
    yield quantize("quantize_fp8", 4096)
    for width in (4096, 7168):
        yield quantize("quantize_fp8_dynamic", width, granularity="token")
        yield quantize("quantize_fp8_dynamic", width, granularity="group")
    yield quantize("quantize_fp8_dynamic", 4096, granularity="tensor")
    few = (64, 16384)
    yield quantize("quantize_int8", 4096, few)
    yield quantize("quantize_mxfp8", 4096, few)
    yield quantize("quantize_mxfp4", 4096, few)
    yield gated("silu_and_mul_quantize_fp8", 2048, few, granularity="group")
    yield gated("silu_and_mul_quantize_fp8", 14336, few, granularity="token")
    yield norm("layernorm", 4096, few)
    yield norm("gemma_rmsnorm", 4096, few)
    yield gated("gelu_tanh_and_mul", 14336, few)


def rows(words: Sequence[str] = ()) -> list[Row]:
    """Return the rows of all cases, or those whose name holds one of the words."""
    every = [Row(c, t) for c in _cases() for t in c.tokens]
    return [r for r in every if not words or any(w in r.name for w in words)]
