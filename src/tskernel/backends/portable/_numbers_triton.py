# ruff: noqa: ANN001, ANN202
# pyright: reportCallIssue=false, reportAssignmentType=false, reportOperatorIssue=false
"""Number formats in Triton: fp8, fp4 and e8m0 codes of fp32 values, scales, and where rows begin.

Codes are bytes, and every part can work them out with integers; parts that convert by themselves do (``NATIVE``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tskernel.backends.lazy_triton import jit

if TYPE_CHECKING:
    import triton.language as tl


# fmt: off
@jit
def _start(row, inner, outer, step):
    """Return the offset of a row: those of one group of ``inner`` are ``step`` apart, groups ``outer``."""
    return (row // inner).to(tl.int64) * outer + (row % inner).to(tl.int64) * step


@jit
def _columns(column, stride, UNIT: tl.constexpr):
    """Return offsets within a row; 32 bits do where its elements lie side by side."""
    if UNIT:
        return column
    else:  # Triton wants one type from all returns it reaches
        return column.to(tl.int64) * stride


@jit
def _clamp(y, TOP: tl.constexpr):
    """Clamp to ``[-TOP, TOP]``; NaN stays."""
    y = tl.where(y > TOP, TOP, y)
    return tl.where(y < -TOP, -TOP, y)


@jit
def _round_code(y, M: tl.constexpr, BIAS: tl.constexpr, NUZ: tl.constexpr):
    """Return the code of clamped fp32 values with M bits of mantissa: ties to even, in integers."""
    bits = y.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    carried = size + ((1 << (22 - M)) - 1) + ((size >> (23 - M)) & 1)
    code = (carried >> (23 - M)) - ((127 - BIAS) << M)
    # Below the smallest normal number steps are equal: adding 2^23 of them leaves their number in the last bits.
    MAGIC: tl.constexpr = (127 + 24 - BIAS - M) << 23
    magic = tl.full(bits.shape, MAGIC, tl.int32)
    steps = size.to(tl.float32, bitcast=True) + magic.to(tl.float32, bitcast=True)
    code = tl.where(size < ((128 - BIAS) << 23), steps.to(tl.int32, bitcast=True) - MAGIC, code)
    sign = (bits >> 24) & 0x80
    if NUZ:  # 0x80 is the NaN, there is no negative zero
        sign = tl.where(code == 0, 0, sign)
        code = tl.where(size > 0x7F800000, 0x80, code | sign)
    else:
        code = tl.where(size > 0x7F800000, 0x7F, code | sign)
    return code.to(tl.uint8)


@jit
def _fp8(y, FORMAT: tl.constexpr, NATIVE: tl.constexpr):
    """Return the fp8 code of fp32 values: one rounding, saturating; NaN stays NaN."""
    if FORMAT == "e4m3fn":
        y = _clamp(y, 448.0)
        if NATIVE:
            code = y.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
        else:
            code = _round_code(y, 3, 7, False)
    elif FORMAT == "e4m3fnuz":
        y = _clamp(y, 240.0)
        if NATIVE:
            code = y.to(tl.float8e4b8).to(tl.uint8, bitcast=True)
        else:
            code = _round_code(y, 3, 8, True)
    elif FORMAT == "e5m2":
        y = _clamp(y, 57344.0)
        if NATIVE:
            code = y.to(tl.float8e5).to(tl.uint8, bitcast=True)
        else:
            code = _round_code(y, 2, 15, False)
    else:
        y = _clamp(y, 57344.0)
        if NATIVE:
            code = y.to(tl.float8e5b16).to(tl.uint8, bitcast=True)
        else:
            code = _round_code(y, 2, 16, True)
    return code


@jit
def _fp8_value(code, M: tl.constexpr, BIAS: tl.constexpr, NUZ: tl.constexpr):
    """Return the fp32 values of fp8 codes, given as int32 in 0..255."""
    size = code & 0x7F
    normal = (size << (23 - M)) + ((127 - BIAS) << 23)
    STEP: tl.constexpr = (128 - BIAS - M) << 23
    step = tl.full(code.shape, STEP, tl.int32).to(tl.float32, bitcast=True)
    value = tl.where(size < (1 << M), size.to(tl.float32) * step, normal.to(tl.float32, bitcast=True))
    if NUZ:
        value = tl.where(code == 0x80, float("nan"), value)
    elif M == 3:
        value = tl.where(size == 0x7F, float("nan"), value)
    else:
        value = tl.where(size > 0x7C, float("nan"), tl.where(size == 0x7C, float("inf"), value))
    return tl.where(code >= 0x80, -value, value)


@jit
def _fp4(y):
    """Return the e2m1 codes (int32, 0..15) of fp32 values: ties to the even code, saturating; NaN gives 0."""
    a = tl.abs(y)
    code = (a > 0.25).to(tl.int32) + (a >= 0.75).to(tl.int32) + (a > 1.25).to(tl.int32) + (a >= 1.75).to(tl.int32)
    code += (a > 2.5).to(tl.int32) + (a >= 3.5).to(tl.int32) + (a > 5.0).to(tl.int32)
    return code | ((y.to(tl.int32, bitcast=True) >> 28) & 8)


@jit
def _fp4_value(code):
    """Return the fp32 values of e2m1 codes (int32, 0..15)."""
    size = code & 7
    normal = ((size << 22) + (126 << 23)).to(tl.float32, bitcast=True)
    value = tl.where(size < 2, size.to(tl.float32) * 0.5, normal)
    return tl.where(code >= 8, -value, value)


@jit
def _int8(y):
    """Round to the nearest of -127..127, ties to even; NaN gives 0."""
    y = _clamp(tl.where(y == y, y, 0.0), 127.0) + 12582912.0  # 1.5 * 2^23: the last bits count ones
    return (y.to(tl.int32, bitcast=True) - 0x4B400000).to(tl.int8)


@jit
def _magnitude(y):
    """Return ``|y|`` with NaN as 0 and infinity as the largest fp32: what takes part in a maximum."""
    a = tl.abs(y)
    return tl.where(a <= 3.4028234663852886e38, a, tl.where(a == a, 3.4028234663852886e38, 0.0))


@jit
def _scale_of(amax, TOP: tl.constexpr):
    """Return the scale that maps ``amax`` onto TOP, at least 2^-126."""
    return tl.maximum(tl.div_rn(amax, tl.full(amax.shape, TOP, tl.float32)), 1.1754943508222875e-38)


@jit
def _exponent_of(scale):
    """Return the biased exponent of the smallest power of two that is not below a normal number."""
    return tl.minimum((scale.to(tl.int32, bitcast=True) + 0x7FFFFF) >> 23, 254)


@jit
def _inverse_power(exponent):
    """Return ``2^(127 - exponent)`` for exponents 1 to 254."""
    return tl.where(exponent == 254, 0x400000, (254 - exponent) << 23).to(tl.float32, bitcast=True)


@jit
def _ordered(x):
    """Return int32 keys that order like fp32 values, which hold no NaN; both zeros are equal."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
# fmt: on
