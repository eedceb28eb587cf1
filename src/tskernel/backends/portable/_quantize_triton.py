# ruff: noqa: ANN001, ANN202
# pyright: reportCallIssue=false, reportAssignmentType=false
"""Quantization in Triton: plain values or activations to fp8, int8 and the MX formats, by given or measured scales.

A unit is what has one scale: a row, a group of its columns, or, where the scale is given, any span of them. Units that
fit stay in registers between measuring and rounding, longer ones are read again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from tskernel.backends.lazy_triton import is_traced, jit
from tskernel.backends.portable import _rows as host
from tskernel.backends.portable._gated_triton import _place, _values, span_of
from tskernel.backends.portable._numbers_triton import (
    _exponent_of,
    _fp4,
    _fp8,
    _fp8_value,
    _int8,
    _inverse_power,
    _magnitude,
    _scale_of,
    _start,
)

if TYPE_CHECKING:
    import triton.language as tl

PARTIALS: Final = 512  # programs that measure a whole tensor
SMALLEST: Final = 2.0**-126


# fmt: off
@jit
def _code(y, FORMAT: tl.constexpr, NATIVE: tl.constexpr):
    """Return the stored number of scaled values; fp4 codes are still one to an element."""
    if FORMAT == "int8":
        code = _int8(y)
    elif FORMAT == "fp4":
        code = _fp4(y)
    else:
        code = _fp8(y, FORMAT, NATIVE)
    return code


@jit
def _put(data, code, row, first, last, WIDTH: tl.constexpr, LANES: tl.constexpr, FORMAT: tl.constexpr):
    """Write codes to dense rows of WIDTH columns; fp4 two to a byte, low nibble first."""
    if FORMAT == "fp4":
        low, high = tl.split(tl.reshape(code, [code.shape[0], LANES // 2, 2]))
        half = tl.multiple_of(first // 2, 8)  # groups of 16 or 32 begin there
        column = half[:, None] + tl.arange(0, LANES // 2)[None, :]
        to = data + row.to(tl.int64)[:, None] * (WIDTH // 2) + column
        tl.store(to, (low | (high << 4)).to(tl.uint8), mask=column < (last // 2)[:, None])
    else:
        column = first[:, None] + tl.arange(0, LANES)[None, :]
        tl.store(data + row.to(tl.int64)[:, None] * WIDTH + column, code, mask=column < last[:, None])


@jit
def _amax_of(
    x, first, last, stride, SPAN: tl.constexpr, LANES: tl.constexpr, WIDTH: tl.constexpr, KIND: tl.constexpr,
    UNIT: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr,
):
    """Return the largest magnitude of units that are longer than LANES."""
    amax = tl.zeros([x.shape[0], LANES], tl.float32)
    for n in range(0, SPAN, LANES):
        stop = tl.minimum(first + n + LANES, last)
        y = _values(x, first + n, stop, stride, LANES, WIDTH, KIND, UNIT, ALPHA, LIMIT)
        amax = tl.maximum(amax, _magnitude(y))
    return tl.max(amax, 1)


@jit
def _scale_and_exponent(
    given, amax, row, part, TOP: tl.constexpr, HOW: tl.constexpr, POWER: tl.constexpr, PARTIALS: tl.constexpr,
):
    """Return the scale of each unit, where it is given or measured, and its exponent where it is a power of two."""
    if HOW == "one":
        scale = tl.full(row.shape, 0.0, tl.float32) + tl.load(given)
    elif HOW == "row":
        scale = tl.load(given + row, mask=part >= 0, other=1.0)
    elif HOW == "partials":
        whole = tl.max(tl.load(given + tl.arange(0, PARTIALS)), 0)
        scale = _scale_of(tl.full(row.shape, 0.0, tl.float32) + whole, TOP)
    else:
        scale = _scale_of(amax, TOP)
    exponent = _exponent_of(scale)
    if POWER:
        scale = (exponent << 23).to(tl.float32, bitcast=True)
    return scale, exponent


@jit
def _divided(y, scale, exponent, POWER: tl.constexpr, SMALLEST: tl.constexpr):
    """Return values over scales, correctly rounded; by a power of two a product is."""
    if POWER:
        y = y * _inverse_power(exponent)[:, None]
    else:
        y = tl.div_rn(y, tl.maximum(scale, SMALLEST)[:, None] + tl.zeros(y.shape, tl.float32))
    return y


@jit
def _put_scale(
    to, scale, exponent, has_nan, unit, row, part, rows, pid, HOW: tl.constexpr, BYTE: tl.constexpr,
    FORMAT: tl.constexpr,
):
    """Write the scale of each unit: one for all, one for each row, or one for each unit."""
    exists = row < rows
    if HOW == "one" or HOW == "partials":
        tl.store(to, tl.max(scale, 0), mask=pid == 0)
    elif HOW == "row":
        tl.store(to + row, scale, mask=exists & (part == 0))
    elif BYTE:
        if FORMAT == "fp4":
            exponent = tl.where(has_nan, 255, exponent)
        tl.store(to + unit, exponent.to(tl.uint8), mask=exists)
    else:
        tl.store(to + unit, scale, mask=exists)


@jit(do_not_specialize=("rows",))
def _quantize(
    x, given, data, scales, rows, x_inner, x_outer, x_step, x_column,
    WIDTH: tl.constexpr, SPAN: tl.constexpr, LANES: tl.constexpr, BLOCK: tl.constexpr, KIND: tl.constexpr,
    UNIT: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, FORMAT: tl.constexpr, NATIVE: tl.constexpr,
    TOP: tl.constexpr, HOW: tl.constexpr, POWER: tl.constexpr, BYTE: tl.constexpr, SMALLEST: tl.constexpr,
    PARTIALS: tl.constexpr,
):
    """Quantize BLOCK units; one where a unit is longer than LANES."""
    pid = tl.program_id(0)
    unit = pid * BLOCK + tl.arange(0, BLOCK)
    row, first, last = _place(unit, rows, SPAN, WIDTH)
    part = tl.where(row < rows, first // SPAN, -1)
    of_x = x + _start(row, x_inner, x_outer, x_step)
    if LANES < SPAN:
        amax = _amax_of(of_x, first, last, x_column, SPAN, LANES, WIDTH, KIND, UNIT, ALPHA, LIMIT)
        scale, exponent = _scale_and_exponent(given, amax, row, part, TOP, HOW, POWER, PARTIALS)
        for n in range(0, SPAN, LANES):
            stop = tl.minimum(first + n + LANES, last)
            y = _values(of_x, first + n, stop, x_column, LANES, WIDTH, KIND, UNIT, ALPHA, LIMIT)
            code = _code(_divided(y, scale, exponent, POWER, SMALLEST), FORMAT, NATIVE)
            _put(data, code, row, first + n, stop, WIDTH, LANES, FORMAT)
        has_nan = scale != scale
    else:
        y = _values(of_x, first, last, x_column, LANES, WIDTH, KIND, UNIT, ALPHA, LIMIT)
        amax = tl.max(_magnitude(y), 1)
        scale, exponent = _scale_and_exponent(given, amax, row, part, TOP, HOW, POWER, PARTIALS)
        code = _code(_divided(y, scale, exponent, POWER, SMALLEST), FORMAT, NATIVE)
        _put(data, code, row, first, last, WIDTH, LANES, FORMAT)
        has_nan = tl.max((y != y).to(tl.int32), 1) > 0
    _put_scale(scales, scale, exponent, has_nan, unit, row, part, rows, pid, HOW, BYTE, FORMAT)


@jit(do_not_specialize=("rows", "tiles"))
def _measure(
    x, partials, rows, tiles, x_inner, x_outer, x_step, x_column,
    WIDTH: tl.constexpr, SPAN: tl.constexpr, BLOCK: tl.constexpr, UNIT: tl.constexpr,
):
    """Write the largest magnitude of every PARTIALS-th tile."""
    amax = tl.zeros([BLOCK, SPAN], tl.float32)
    for t in range(tl.program_id(0), tiles, tl.num_programs(0)):
        row, first, last = _place(t * BLOCK + tl.arange(0, BLOCK), rows, SPAN, WIDTH)
        of_x = x + _start(row, x_inner, x_outer, x_step)
        y = _values(of_x, first, last, x_column, SPAN, WIDTH, "plain", UNIT, 0.0, 0.0)
        amax = tl.maximum(amax, _magnitude(y))
    tl.store(partials + tl.program_id(0), tl.max(tl.max(amax, 1), 0))


@jit
def _quantize_block(
    x, data, scales, planes, height, x_plane, x_row, x_column,
    WIDTH: tl.constexpr, GROUP: tl.constexpr, SIDE: tl.constexpr, UNIT: tl.constexpr, FORMAT: tl.constexpr,
    NATIVE: tl.constexpr, TOP: tl.constexpr, POWER: tl.constexpr,
):
    """Quantize one block of GROUP rows and columns of ``x [planes, height, WIDTH]``."""
    PARTS: tl.constexpr = (WIDTH + GROUP - 1) // GROUP
    part, down, plane = tl.program_id(0) % PARTS, tl.program_id(0) // PARTS, tl.program_id(1).to(tl.int64)
    lane = tl.arange(0, SIDE)
    row = down * GROUP + lane
    row_end = tl.minimum(height, (down + 1) * GROUP)
    end = tl.where((row < row_end) & (plane < planes), tl.minimum((part + 1) * GROUP, WIDTH), 0)
    of_x = x + plane * x_plane + row.to(tl.int64) * x_row
    y = _values(of_x, part * GROUP + tl.zeros([SIDE], tl.int32), end, x_column, SIDE, WIDTH, "plain", UNIT, 0.0, 0.0)
    amax = tl.max(tl.max(_magnitude(y), 1), 0) + tl.zeros([1], tl.float32)
    scale = _scale_of(amax, TOP)
    exponent = _exponent_of(scale)
    if POWER:
        scale = (exponent << 23).to(tl.float32, bitcast=True)
    code = _code(_divided(y, scale, exponent, POWER, 0.0), FORMAT, NATIVE)
    _put(data + plane * height * WIDTH, code, row, part * GROUP + tl.zeros([SIDE], tl.int32), end, WIDTH, SIDE, FORMAT)
    downs = (height + GROUP - 1) // GROUP
    exists = (plane < planes) & (down < downs)
    tl.store(scales + (plane * downs + down) * PARTS + part + tl.arange(0, 1), scale, mask=exists)


@jit(do_not_specialize=("rows",))
def _quantize_nvfp4(
    x, given, data, scales, rows, x_inner, x_outer, x_step, x_column,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, UNIT: tl.constexpr, NATIVE: tl.constexpr,
):
    """Quantize BLOCK groups of 16 by e4m3 scales of what the given scale makes of them."""
    unit = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row, first, last = _place(unit, rows, 16, WIDTH)
    of_x = x + _start(row, x_inner, x_outer, x_step)
    raw = _values(of_x, first, last, x_column, 16, WIDTH, "plain", UNIT, 0.0, 0.0)
    whole = tl.load(given)
    y = raw * tl.where(whole > 3.4028234663852886e38, 3.4028234663852886e38, whole)
    amax = tl.max(_magnitude(y), 1)
    stored = _fp8(tl.div_rn(amax, tl.full(amax.shape, 6.0, tl.float32)), "e4m3fn", NATIVE)
    each = _fp8_value(stored.to(tl.int32), 3, 7, False)[:, None] + tl.zeros(y.shape, tl.float32)
    some = each > 0.0
    code = _fp4(tl.where(some, tl.div_rn(y, tl.where(some, each, 1.0)), 0.0))
    _put(data, code, row, first, last, WIDTH, 16, "fp4")
    has_nan = tl.max((raw != raw).to(tl.int32), 1) > 0
    tl.store(scales + unit, tl.where(has_nan, 0x7F, stored.to(tl.int32)).to(tl.uint8), mask=row < rows)
# fmt: on


_plans: Final = host.Steps()
_plans_block: Final = host.Steps()
_plans_nvfp4: Final = host.Steps()


def quantize(
    x: Tensor,
    given: Tensor | None,
    data: Tensor,
    scales: Tensor,
    *,
    how: str,
    form: str,
    top: float,
    native: bool = False,
    kind: str = "plain",
    group: int | None = None,
    power: bool = False,
    byte: bool = False,
    smallest: float = SMALLEST,
    alpha: float = 0.0,
    limit: float = 0.0,
) -> None:
    """Quantize ``x`` to dense ``data``.

    ``how``: the scale is ``given`` as "one" or per "row", or measured for every "unit", ``group`` columns of a row or
    all, or for the "tensor". ``form`` and ``top`` are the format and its largest number, ``smallest`` is what
    given scales are raised to.
    """
    x = host.readable(x)
    work = None
    if how == "tensor":
        work = torch.empty((_partials(x),), dtype=torch.float32, device=x.device)
    options = (how, form, top, native, kind, group, power, byte, smallest, float(alpha), float(limit))
    host.run(_plans, _work, (x, given, data, scales, work), *options)


def _partials(x: Tensor) -> int:
    """Return how many programs measure all of ``x``: no more than there are tiles, where that is known."""
    if is_traced(x):
        return PARTIALS
    return min(PARTIALS, host.pow2(x.numel() // host.TILE + 1))


def _spans(width: int, how: str, group: int | None) -> tuple[int, int, int]:
    """Return columns of a unit, lanes and units of a tile."""
    if how != "unit":
        span = span_of(width)
        return span, span, max(1, host.TILE // span)
    span = width if group is None else min(group, width)
    if how == "unit" and group in (16, 32):  # packed two to a byte
        span = group
    lanes = host.pow2(span)
    if lanes > host.ONE_PASS:
        return span, 4096, 1
    return span, lanes, max(1, host.TILE // lanes)


def _work(
    x: Tensor,
    given: Tensor | None,
    data: Tensor,
    scales: Tensor,
    work: Tensor | None,
    how: str,
    form: str,
    top: float,
    native: bool,
    kind: str,
    group: int | None,
    power: bool,
    byte: bool,
    smallest: float,
    alpha: float,
    limit: float,
) -> list[host.Program]:
    width = int(x.shape[-1]) // (1 if kind == "plain" else 2)
    span, lanes, tile = _spans(width, how, group)
    rows, where = host.rows_of(x), host.row_map(x)
    tiles = host.blocks(rows * -(-width // span), tile)
    programs, partials = [], 1
    threads = {"num_warps": host.warps(tile * lanes)}
    if work is not None:
        constants = {"WIDTH": width, "SPAN": span, "BLOCK": tile, "UNIT": where.unit, **threads}
        partials = int(work.shape[0])
        programs.append(host.Program(_measure, (partials,), (x, work, rows, tiles, *where), constants))
        given, how = work, "partials"
    constants = {
        "WIDTH": width, "SPAN": span, "LANES": lanes, "BLOCK": tile, "KIND": kind, "UNIT": where.unit,
        "ALPHA": alpha, "LIMIT": limit, "FORMAT": form, "NATIVE": native, "TOP": top, "HOW": how, "POWER": power,
        "BYTE": byte, "SMALLEST": smallest, "PARTIALS": partials, **threads,
    }  # fmt: skip
    programs.append(host.Program(_quantize, (tiles,), (x, given, data, scales, rows, *where), constants))
    return programs


def quantize_block(
    x: Tensor, data: Tensor, scales: Tensor, *, form: str, top: float, native: bool, group: int, power: bool
) -> None:
    """Quantize ``x [..., N, K]`` by scales of its blocks of ``group`` rows and columns."""
    x = host.readable(x)
    host.run(_plans_block, _work_block, (x, data, scales), form, top, native, group, power)


def _work_block(
    x: Tensor, data: Tensor, scales: Tensor, form: str, top: float, native: bool, group: int, power: bool
) -> list[host.Program]:
    width, height = int(x.shape[-1]), x.shape[-2]
    planes, plane = (1, 0) if x.dim() == 2 else (x.shape[0], x.stride(0))
    side = host.pow2(group)
    grid = (host.blocks(height, group) * -(-width // group), torch.sym_max(1, planes))
    constants = {
        "WIDTH": width, "GROUP": group, "SIDE": side, "UNIT": bool(x.stride(-1) == 1), "FORMAT": form,
        "NATIVE": native, "TOP": top, "POWER": power, "num_warps": host.warps(side * side, 32),
    }  # fmt: skip
    return [
        host.Program(
            _quantize_block, grid, (x, data, scales, planes, height, plane, x.stride(-2), x.stride(-1)), constants
        )
    ]


def quantize_nvfp4(x: Tensor, given: Tensor, data: Tensor, scales: Tensor) -> None:
    """Quantize ``x`` to nvfp4; ``scales`` are e4m3 bytes."""
    native = host.is_native(torch.float8_e4m3fn, x.device)
    host.run(_plans_nvfp4, _work_nvfp4, (host.readable(x), given, data, scales), native)


def _work_nvfp4(x: Tensor, given: Tensor, data: Tensor, scales: Tensor, native: bool) -> list[host.Program]:
    width, rows, where = int(x.shape[-1]), host.rows_of(x), host.row_map(x)
    tile = host.TILE // 16
    constants = {
        "WIDTH": width,
        "BLOCK": tile,
        "UNIT": where.unit,
        "NATIVE": native,
        "num_warps": host.warps(16 * tile),
    }
    grid = (host.blocks(rows * -(-width // 16), tile),)
    return [host.Program(_quantize_nvfp4, grid, (x, given, data, scales, rows, *where), constants)]


def quantize_activation(
    x: Tensor,
    scale: Tensor | None,
    kind: str,
    granularity: str,
    group_size: int,
    ue8m0: bool,
    dtype: torch.dtype | None,
    alpha: float = 0.0,
    limit: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Return the activation of ``x`` in fp8, and its scale."""
    dtype = dtype or torch.float8_e4m3fn
    lead, width = x.shape[:-1], x.shape[-1] // 2
    data = torch.empty((*lead, width), dtype=torch.uint8, device=x.device)
    how, group, parts = "unit", None, 1
    if scale is not None:
        scales, how = torch.empty(scale.shape, dtype=torch.float32, device=x.device), "one"
    else:
        if granularity == "group":
            group, parts = group_size, (width + group_size - 1) // group_size
        scales = torch.empty((*lead, parts), dtype=torch.float32, device=x.device)
    form, top = host.FP8[dtype]
    native = host.is_native(dtype, x.device)
    quantize(
        x, scale, data, scales, how=how, form=form, top=top, native=native, kind=kind, group=group, power=ue8m0,
        smallest=0.0, alpha=alpha, limit=limit,
    )  # fmt: skip
    return data.view(dtype), scales


def quantize_floats(
    x: Tensor, *, granularity: str, group_size: int, ue8m0: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return ``x`` in fp8 by scales of its own, and those."""
    lead, width = x.shape[:-1], x.shape[-1]
    parts = (width + group_size - 1) // group_size
    shape = (1,) if granularity == "tensor" else (*lead, 1) if granularity == "token" else (*lead, parts)
    if granularity == "block":
        shape = (*lead[:-1], (lead[-1] + group_size - 1) // group_size, parts)
    data = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    scales = torch.empty(shape, dtype=torch.float32, device=x.device)
    (form, top), native = host.FP8[dtype], host.is_native(dtype, x.device)
    if granularity == "block":
        quantize_block(x, data, scales, form=form, top=top, native=native, group=group_size, power=ue8m0)
    else:
        how, group = "tensor" if granularity == "tensor" else "unit", group_size if granularity == "group" else None
        quantize(x, None, data, scales, how=how, form=form, top=top, native=native, group=group, power=ue8m0)
    return data.view(dtype), scales


def case(chip: host.Chip, name: str, width: int, *, form: str, top: float, how: str = "unit", **given: Any) -> Any:
    """Return what a test without a GPU compiles: contiguous bf16 rows of a width."""
    kind, group = given.pop("kind", "plain"), given.pop("group", None)
    span, lanes, tile = _spans(width, how, group)
    constants = {
        "WIDTH": width, "SPAN": span, "LANES": lanes, "BLOCK": tile, "KIND": kind, "UNIT": True, "ALPHA": 1.702,
        "LIMIT": 7.0, "FORMAT": form, "NATIVE": False, "TOP": top, "HOW": how, "POWER": False, "BYTE": False,
        "SMALLEST": SMALLEST, "PARTIALS": PARTIALS, **given,
    }  # fmt: skip
    scales = "*u8" if constants["BYTE"] else "*fp32"
    types = {"x": "*bf16", "given": "*fp32", "data": "*i8" if form == "int8" else "*u8", "scales": scales}
    types |= {"x_inner": "1", "x_column": "1", "rows": "i32"}
    return host.compile_case(name, _quantize, constants, types, {"num_warps": host.warps(tile * lanes, hip=chip.hip)})


def native_case(chip: host.Chip) -> Any:
    """Return a case of the conversion that a part has by itself: gfx942 has other formats than the others."""
    if chip.hip and chip.shared < 100 << 10:
        return case(chip, "token, converted by the part", 4096, form="e4m3fnuz", top=240.0, NATIVE=True)
    return case(chip, "token, converted by the part", 4096, form="e4m3fn", top=448.0, NATIVE=chip.hip or chip.fp8_pairs)


def block_case(chip: host.Chip) -> Any:
    """Return a case of blocks of 128 x 128."""
    constants = {"WIDTH": 7168, "GROUP": 128, "SIDE": 128, "UNIT": True, "FORMAT": "e4m3fn", "NATIVE": False}
    types = {"x": "*bf16", "data": "*u8", "scales": "*fp32", "x_column": "1"}
    options = {"num_warps": host.warps(128 * 128, 32, hip=chip.hip)}
    return host.compile_case("blocks", _quantize_block, {**constants, "TOP": 448.0, "POWER": False}, types, options)


def nvfp4_case(chip: host.Chip) -> Any:
    """Return a case of nvfp4."""
    constants = {"WIDTH": 4096, "BLOCK": host.TILE // 16, "UNIT": True, "NATIVE": False}
    types = {"x": "*bf16", "given": "*fp32", "data": "*u8", "scales": "*u8", "x_inner": "1", "x_column": "1"}
    options = {"num_warps": host.warps(host.TILE, hip=chip.hip)}
    return host.compile_case("width 4096", _quantize_nvfp4, constants, types, options)
