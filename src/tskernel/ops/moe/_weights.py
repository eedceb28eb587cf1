"""The number formats of expert weights and activations: their checks and their values."""

from __future__ import annotations

import torch
from torch import Tensor

from tskernel.checks import expect, expect_dim, expect_dtype, expect_shape
from tskernel.ops.quantization._math import (
    FP8_MAX,
    INT8_MAX,
    block_amax,
    fp4_to_fp32,
    fp8_scale,
    from_e8m0,
    row_amax,
    saturate_to_fp8,
    spread,
    unpack_nibbles,
)

QUANTS = ("none", "fp8_tensor", "fp8_token", "fp8_block", "mxfp4", "int8", "w4a16")
PACKED = ("mxfp4", "w4a16")  # two values to a byte along the reduction dimension
FP8_BLOCK = 128
MXFP4_BLOCK = 32

_WEIGHT_DTYPES: dict[str, tuple[torch.dtype, ...]] = {
    "fp8_tensor": (torch.float8_e4m3fn, torch.float8_e4m3fnuz),
    "fp8_token": (torch.float8_e4m3fn, torch.float8_e4m3fnuz),
    "fp8_block": (torch.float8_e4m3fn, torch.float8_e4m3fnuz),
    "mxfp4": (torch.uint8,),
    "int8": (torch.int8,),
    "w4a16": (torch.uint8,),
}
_STATIC_ACTIVATIONS = ("fp8_tensor", "fp8_token", "int8", "mxfp4")


def check_weight(
    name: str, weight: Tensor, scale: Tensor | None, quant: str, x: Tensor, shape: tuple[int, int, int]
) -> None:
    """Check an expert weight of logical ``shape`` (experts, rows, columns) and its scale."""
    experts, rows, columns = shape
    if quant in PACKED:
        expect(columns % 2 == 0, f"{name}.shape", "an even number of values per row", columns)
        columns = columns // 2
    expect_dtype(name, weight, _WEIGHT_DTYPES.get(quant, (x.dtype,)))
    expect_shape(name, weight, (experts, rows, columns))
    if quant == "none":
        expect(scale is None, f"{name}_scale", "None for quant='none'", type(scale).__name__)
    elif scale is None:
        expect(False, f"{name}_scale", f"a Tensor for quant={quant!r}", None)
    else:
        _check_scale(f"{name}_scale", scale, quant, x, shape)


def _check_scale(name: str, scale: Tensor, quant: str, x: Tensor, shape: tuple[int, int, int]) -> None:
    experts, rows, columns = shape
    if quant == "fp8_tensor":
        expect_shape(name, scale, (experts,))
    elif quant in ("fp8_token", "int8"):
        expect_shape(name, scale, (experts, rows))
    elif quant == "fp8_block":
        expect_shape(name, scale, (experts, -(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK)))
    elif quant == "mxfp4":
        expect(
            columns % MXFP4_BLOCK == 0,
            name.removesuffix("_scale") + ".shape",
            "rows of whole blocks of 32 values",
            columns,
        )
        expect_shape(name, scale, (experts, rows, columns // MXFP4_BLOCK))
    else:
        expect_shape(name, scale, (experts, rows, None))
        expect(scale.shape[2] > 0, f"{name}.shape", "at least one group", tuple(scale.shape))
        expect(columns % scale.shape[2] == 0, f"{name}.shape", f"equal groups of {columns} values", tuple(scale.shape))
    bytes_ = (torch.uint8, torch.float8_e8m0fnu)
    expect_dtype(
        name, scale, bytes_ if quant == "mxfp4" else (torch.float32, x.dtype) if quant == "w4a16" else (torch.float32,)
    )


def check_activation_scale(name: str, scale: Tensor | None, quant: str) -> None:
    """Check a static activation scale: one fp32 element, for the formats that quantize activations with one."""
    if scale is not None:
        expect(quant in _STATIC_ACTIVATIONS, name, f"None for quant={quant!r}", "a Tensor")
        expect_dtype(name, scale, (torch.float32,))
        expect_dim(name, scale, 0, 1)
        expect(scale.numel() == 1, f"{name}.shape", "one element", tuple(scale.shape))


def expert_weights(weight: Tensor, scale: Tensor | None, quant: str, experts: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the values ``[N, rows, columns]`` of the given experts' weights; the others are not read."""
    w = weight.index_select(0, experts) if weight.dtype not in FP8_MAX else _select_fp8(weight, experts)
    if scale is None:
        return w.to(dtype)
    s = scale.view(torch.uint8) if scale.dtype == torch.float8_e8m0fnu else scale
    s = s.index_select(0, experts)
    if quant == "fp8_tensor":
        s = s[:, None, None]
    elif quant in ("fp8_token", "int8"):
        s = s[:, :, None]
    elif quant == "fp8_block":
        s = spread(spread(s, w.shape[1], FP8_BLOCK, 1), w.shape[2], FP8_BLOCK, 2)
    elif quant == "mxfp4":
        w, s = fp4_to_fp32(unpack_nibbles(w)), spread(from_e8m0(s), 2 * w.shape[2], MXFP4_BLOCK, 2)
    else:
        w = unpack_nibbles(w).to(torch.int16) - 8
        s = spread(s, w.shape[2], w.shape[2] // s.shape[2], 2)
    return w.to(dtype) * s.to(dtype)


def _select_fp8(weight: Tensor, experts: Tensor) -> Tensor:
    return weight.view(torch.uint8).index_select(0, experts).view(weight.dtype)


def quantized_values(
    x: Tensor, scale: Tensor | None, quant: str, weight_dtype: torch.dtype, dtype: torch.dtype
) -> Tensor:
    """Return rows ``[..., K]`` rounded to the activation format of ``quant`` (its scale multiplied back in).

    Without a static scale, rows are scaled by their own maximum (blocks of 128 for fp8_block), so a row never depends
    on others.
    """
    if quant in ("none", "w4a16") or (quant == "mxfp4" and scale is None):
        return x.to(dtype)
    storage = torch.float8_e4m3fn if quant == "mxfp4" else weight_dtype
    limit = INT8_MAX if quant == "int8" else FP8_MAX[storage]
    rows = x.to(torch.float32)
    if scale is not None:
        s = scale.to(torch.float32).reshape(1)
    elif quant == "fp8_block":
        s = spread(fp8_scale(block_amax(rows, FP8_BLOCK), limit), rows.shape[-1], FP8_BLOCK)
    else:
        s = fp8_scale(row_amax(rows), limit)
    q = rows / s
    q = q.round().clamp(-limit, limit) if quant == "int8" else saturate_to_fp8(q, storage)
    return q.to(dtype) * s.to(dtype)
