"""Arithmetic shared by every op that reads or writes quantized data: scales, saturation, fp4 codes, blocks.

The statements here are in fp32 on purpose, also for float64 inputs. Quantized data are a discrete function of the
fp32 quotient ``x / scale``, so an oracle in float64 would round some values the other way.
"""

from __future__ import annotations

import torch
from torch import Tensor

FP8_MAX: dict[torch.dtype, float] = {
    torch.float8_e4m3fn: 448.0,
    torch.float8_e4m3fnuz: 240.0,
    torch.float8_e5m2: 57344.0,
    torch.float8_e5m2fnuz: 57344.0,
}
FP4_MAX = 6.0
INT8_MAX = 127.0

FP32_TINY = 2.0**-126  # smallest normal: below it, devices that flush subnormals would divide by zero
_E8M0_NAN = 255


def quotient(x: Tensor, divisor: float) -> Tensor:
    """Return ``x / divisor``, rounded once on every device.

    Where the divisor is a number, torch's CUDA kernels multiply by its reciprocal. That is one step off at times, and
    then some ``x / scale`` lies on the other side of a tie.
    """
    return x / torch.full_like(x, divisor)


def fp8_scale(amax: Tensor, fmax: float, ue8m0: bool = False) -> Tensor:
    """Return the fp32 scale that maps ``[-amax, amax]`` onto ``[-fmax, fmax]``; always finite, at least 2^-126.

    A NaN in ``amax`` counts as 0 and an infinity as the largest fp32, so one bad value cannot take its group along.
    With ``ue8m0`` the result is the smallest power of two that is not below ``amax / fmax``.
    """
    amax = torch.nan_to_num(amax.to(torch.float32), nan=0.0)
    scale = quotient(amax, fmax).clamp(min=FP32_TINY)
    if not ue8m0:
        return scale
    # The quotient is exact enough: for every fmax in use, one fp32 step of amax above a power of two survives the
    # division, so rounding the exponent up is the exact ceiling (log2 would need a correctly rounded logarithm).
    exponent = (scale.view(torch.int32) + 0x7FFFFF) >> 23
    return (exponent.clamp(max=254) << 23).view(torch.float32)


def saturate_to_fp8(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Round ``x`` to ``dtype`` (ties to even), clamped to its range; infinities saturate and NaN stays NaN."""
    fmax = FP8_MAX[dtype]
    return x.to(torch.float32).clamp(-fmax, fmax).to(dtype)


def to_e8m0(scale: Tensor) -> Tensor:
    """Return the biased exponent byte of powers of two: ``b = log2(scale) + 127``."""
    return (scale.view(torch.int32) >> 23).to(torch.uint8)


def from_e8m0(byte: Tensor) -> Tensor:
    """Return ``2 ** (b - 127)`` in fp32 for uint8 or float8_e8m0fnu bytes; 255 is NaN."""
    if byte.dtype is torch.float8_e8m0fnu:
        byte = byte.view(torch.uint8)
    b = byte.to(torch.int32)
    bits = torch.where(b == 0, 0x400000, b << 23)  # 2^-127 is an fp32 subnormal
    return torch.where(b == _E8M0_NAN, 0x7FC00000, bits).view(torch.float32)


def round_to_fp4(x: Tensor) -> Tensor:
    """Return the e2m1 code (uint8, 0..15) nearest to each ``x``, ties to even, saturating at 6; NaN gives 0.

    The magnitudes of codes 0..7 are 0, 0.5, 1, 1.5, 2, 3, 4 and 6; code bit 3 is the sign.
    """
    a = x.abs()
    code = (a > 0.25).to(torch.uint8)
    # A midpoint belongs to the even code: upward where the upper neighbour is even, downward otherwise.
    code += a >= 0.75
    code += a > 1.25
    code += a >= 1.75
    code += a > 2.5
    code += a >= 3.5
    code += a > 5.0
    return code | (torch.signbit(x).to(torch.uint8) << 3)


def fp4_to_fp32(code: Tensor) -> Tensor:
    """Return the values of e2m1 codes 0..15; without a lookup table, which would be a host-to-device copy."""
    c = code.to(torch.int32)
    mantissa, exponent = c & 1, (c >> 1) & 3
    halves = torch.where(exponent == 0, mantissa, (mantissa + 2) << (exponent - 1).clamp(min=0))
    value = halves.to(torch.float32) * 0.5
    return torch.where((c & 8) == 0, value, -value)


def pack_nibbles(code: Tensor) -> Tensor:
    """Pack codes ``[..., K]`` (uint8, 0..15, K even) into bytes ``[..., K/2]``, low nibble first."""
    pairs = code.unflatten(-1, (code.shape[-1] // 2, 2))
    return pairs[..., 0] | (pairs[..., 1] << 4)


def unpack_nibbles(data: Tensor) -> Tensor:
    """Unpack bytes ``[..., K/2]`` into codes ``[..., K]`` (uint8, 0..15), low nibble first."""
    return torch.stack((data & 0xF, data >> 4), dim=-1).flatten(-2)


def blocks(x: Tensor, size: int) -> Tensor:
    """Split the last dim into blocks, zero-filling the last one: ``[..., K]`` to ``[..., ceil(K/size), size]``."""
    columns = x.shape[-1]
    count = (columns + size - 1) // size  # used in both lines, so that a symbolic size needs no guard on the tail
    return torch.nn.functional.pad(x, (0, count * size - columns)).unflatten(-1, (count, size))


def spread(scale: Tensor, size: int, block: int, dim: int = -1) -> Tensor:
    """Repeat each scale along ``dim`` for the elements of its block: ``ceil(size/block)`` entries to ``size``."""
    owner = torch.arange(size, device=scale.device) // block
    return scale.index_select(dim, owner)


def block_amax(x: Tensor, size: int) -> Tensor:
    """Return the fp32 absolute maximum of each block of the last dim, NaN counted as 0: ``[..., ceil(K/size)]``."""
    return row_amax(blocks(x, size)).squeeze(-1)


def row_amax(x: Tensor) -> Tensor:
    """Return the fp32 absolute maximum over the last dim (not empty), kept as size 1; NaN counts as 0."""
    return torch.nan_to_num(x.to(torch.float32).abs(), nan=0.0).amax(-1, keepdim=True)


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Round to ``dtype``, in contiguous storage; float64, which only the oracle uses, stays as it is."""
    return (x if x.dtype is torch.float64 else x.to(dtype)).contiguous()


def computing(*tensors: Tensor | None) -> torch.dtype:
    """Return the dtype a reference body computes in: float64 if any argument is, else float32."""
    return torch.float64 if any(t is not None and t.dtype is torch.float64 for t in tensors) else torch.float32


def tensor_amax(x: Tensor) -> Tensor:
    """Return the fp32 absolute maximum of all elements as one element, 0 where there is none; NaN counts as 0."""
    rows = row_amax(x).reshape(-1)
    return torch.nn.functional.pad(rows, (0, 1)).amax(0, keepdim=True)


def block_has_nan(x: Tensor, size: int) -> Tensor:
    """Return which blocks of the last dim hold a NaN: ``[..., ceil(K/size)]``, bool."""
    return torch.isnan(blocks(x, size)).any(-1)


def e8m0_values(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ue8m0 scales as numbers of ``dtype``; a scale that the oracle widened is a number already."""
    return scale if scale.dtype is torch.float64 else from_e8m0(scale).to(dtype)
