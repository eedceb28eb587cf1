"""Quantized operand pairs for the samples of the GEMM ops."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from tskernel.library import Make


def quantized_pairs(
    make: Make, m: int, n: int, k: int, dtype: torch.dtype, a_lead: tuple[int, ...] = (), b_lead: tuple[int, ...] = ()
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (name, arguments) for every quantization; ``dtype`` is that of a weight-only ``a``."""

    def fp8(*shape: int) -> Tensor:
        return make.randn(shape, torch.float8_e4m3fn)

    def codes(*shape: int) -> Tensor:
        return make.randint(0, 256, shape, torch.uint8)

    def near_one(*shape: int) -> Tensor:
        return make.rand(shape, torch.float32) + 0.5

    def e8m0(*shape: int) -> Tensor:
        return make.randint(125, 130, shape, torch.uint8)

    rows, cols, up = (*a_lead, m), (*b_lead, n), lambda size, block: -(-size // block)
    a, b, plain = fp8(*rows, k), fp8(*cols, k), make.randn((*rows, k), dtype)

    def pair(quant: str, a: Tensor, b: Tensor, a_scale: Tensor | None, b_scale: Tensor) -> tuple[str, dict[str, Any]]:
        name = quant if a_scale is not None or quant == "w4a16" else f"{quant}_weight_only"
        return name, {"a": a, "b": b, "a_scale": a_scale, "b_scale": b_scale, "quant": quant}

    yield pair("fp8_tensor", a, b, near_one(1), near_one(1))
    yield pair("fp8_token", a, b, near_one(*rows, 1), near_one(*cols))
    yield pair("fp8_token", plain, b, None, near_one(*cols, 1))
    tiles = near_one(*b_lead, up(n, 128), up(k, 128))
    yield pair("fp8_block", a, b, near_one(*rows, up(k, 128)), tiles)
    yield pair("mxfp8", a, b, e8m0(*rows, up(k, 32)), e8m0(*cols, up(k, 32)))
    yield pair("mxfp4", codes(*rows, k // 2), codes(*cols, k // 2), e8m0(*rows, up(k, 32)), e8m0(*cols, up(k, 32)))
    yield pair("mxfp4", plain, codes(*cols, k // 2), None, e8m0(*cols, up(k, 32)).view(torch.float8_e8m0fnu))
    a_fp8, b_fp8 = (near_one(*lead, up(k, 16)).to(torch.float8_e4m3fn) for lead in (rows, cols))
    yield pair("nvfp4", codes(*rows, k // 2), codes(*cols, k // 2), a_fp8, b_fp8)
    yield pair("nvfp4", plain, codes(*cols, k // 2), None, b_fp8)
    a8, b8 = (make.randint(-128, 128, (*lead, k), torch.int8) for lead in (rows, cols))
    yield pair("int8", a8, b8, near_one(*rows, 1) / 64, near_one(*cols, 1) / 64)  # sums that fit fp16
    yield pair("w4a16", plain, codes(*cols, k // 2), None, near_one(*cols, 5).to(dtype))


def whole_blocks(make: Make, m: int, n: int, k: int, b_lead: tuple[int, ...] = ()) -> dict[str, Any]:
    """Return fp8_block operands; libraries for them take a K of whole blocks only."""
    a, b = make.randn((m, k), torch.float8_e4m3fn), make.randn((*b_lead, n, k), torch.float8_e4m3fn)
    scales = [make.rand(shape) + 0.5 for shape in ((m, k // 128), (*b_lead, -(-n // 128), k // 128))]
    return {"a": a, "b": b, "a_scale": scales[0], "b_scale": scales[1], "quant": "fp8_block"}
