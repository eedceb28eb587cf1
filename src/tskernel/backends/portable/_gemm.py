"""The host side of the Triton matrix products: what a call asks of them, tiles, launches, cases to compile."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from tskernel.backends.compile_case import CompileCase
from tskernel.backends.portable import _gemm_triton as device
from tskernel.backends.portable import _rows as host
from tskernel.backends.portable._attention_tiles import chip_of
from tskernel.checks import FP8
from tskernel.dispatch.platform import Arch, platform_of
from tskernel.ops.gemm._operands import PACKED, columns_of

CAPABILITY: Final = host.CAPABILITY
Chip: Final = host.Chip
FEW: Final = 16  # rows of ``a`` of a decode step
JOIN: Final = 512  # columns of a program of the second launch
TILES: Final = Path(__file__).with_name("_gemm_tiles.json")
_GROUPS: Final = {"fp8_block": 128, "mxfp8": 32, "mxfp4": 32, "nvfp4": 16}
NAMES: Final = {
    torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.int8: "i8", torch.uint8: "u8",
    torch.float8_e4m3fn: "fp8e4nv", torch.float8_e5m2: "fp8e5", torch.float8_e4m3fnuz: "fp8e4b8",
    torch.float8_e5m2fnuz: "fp8e5b16",
}  # fmt: skip


class Numbers(NamedTuple):
    """How operands are read and what the matrix instructions get; the names of the device program's constants."""

    a_kind: str
    b_kind: str
    type: str  # "same": as stored
    how: str
    group: int
    tall: int
    into: bool
    each: bool
    power: bool


class Tile(NamedTuple):
    """Tile sizes and launch options. ``splits`` 0: as many shares of K as fill the device."""

    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int
    splits: int = 1


def unreadable(a: Tensor, b: Tensor) -> str | None:
    """Return why this device cannot read the dtype of an operand, or None."""
    for name, x in (("a", a), ("b", b)):
        if x.dtype not in FP8 or x.device.type == "meta":
            continue
        platform = platform_of(x.device)
        nvidia = platform.vendor == "nvidia"
        if nvidia and x.dtype in (torch.float8_e4m3fnuz, torch.float8_e5m2fnuz):
            return f"{name}: Triton reads {x.dtype} on AMD alone"
        if nvidia and x.dtype == torch.float8_e4m3fn and (platform.arch or Arch((0,))) < Arch((8, 9)):
            return f"{name}: Triton reads {x.dtype} from sm89 on, {platform} is older"
    return None


def numbers(a: Tensor, b: Tensor, b_scale: Tensor | None, quant: str, *, scaled: bool, native: bool) -> Numbers:
    """Return how to read the operands. ``scaled``: ``a`` is quantized too; ``native``: the part multiplies fp8."""
    group, each = _GROUPS.get(quant, 1), False
    if quant == "w4a16" and b_scale is not None:
        group = int(columns_of(b, quant)) // int(b_scale.shape[-1])
        each = group < 16 or group & (group - 1) != 0
    how = {"none": "none", "fp8_tensor": "one", "fp8_token": "row", "int8": "row"}.get(quant, "group")
    packed = ("int4" if quant == "w4a16" else "fp4") if quant in PACKED else "plain"
    kinds = [packed if x.dtype is torch.uint8 else "plain" for x in (a, b)]
    if quant == "none" or (quant == "int8" and scaled):
        kind = "same"
    elif not scaled:
        kind = "fp32" if each else NAMES[a.dtype]
    elif how == "group" and quant != "fp8_block":
        kind = "bf16"  # exact: at most 6 significant bits, and the range of fp32
    else:
        kind = "same" if native and a.dtype == b.dtype else "fp16"
    # A number of 2 or 4 bits times its scale is exact in bf16 and fp32, in fp16 only if the scale is small.
    into = each or (how == "group" and quant not in ("fp8_block", "w4a16") and (kind != "fp16" or quant == "nvfp4"))
    power = quant in ("mxfp8", "mxfp4")
    return Numbers(kinds[0], kinds[1], kind, how, group, 128 if quant == "fp8_block" else 1, into, each, power)


@cache
def _table() -> dict[str, dict[str, list[int]]]:
    return json.loads(TILES.read_text())


def tile_of(rows: int, kind: Numbers, itemsize: int, chip: Chip, *, device_name: str = "") -> Tile:
    """Return the tile for so many rows of ``a`` per matrix: the device's own or the part's, from _gemm_tiles.json."""
    size = "few" if rows <= FEW else "some" if rows <= 64 else "many"
    if kind.b_kind != "plain":
        width = "packed"
    elif kind.how == "group" and not kind.into:
        width = "blocks"  # a second sum for the product of a block
    else:
        width = {1: "bytes", 4: "wide"}.get(itemsize, "halves")
    table = _table()
    found = {**table["hip" if chip.hip else "cuda"], **table.get(device_name, {})}
    tile = Tile(*found[f"{size} {width}"])
    if kind.how == "group" and not kind.each:
        # Between two scales lies one block of K, or whole scales lie in one.
        block_k = max(tile.block_k, kind.group) if kind.into else min(tile.block_k, kind.group)
        tile = tile._replace(block_k=block_k)
    while _shared(tile, kind, itemsize) > chip.shared and tile.stages > 1:
        tile = tile._replace(stages=tile.stages - 1)
    return tile


def _shared(tile: Tile, kind: Numbers, itemsize: int) -> int:
    """Return a bound of the bytes of shared memory: a stage of both operands as stored, and one as multiplied."""
    each = {"same": itemsize, "fp32": 4}.get(kind.type, 2)
    rows = tile.block_m + tile.block_n
    return rows * tile.block_k * (max(itemsize, each) * (tile.stages - 1) + each)


def splits_of(tile: Tile, tiles: int, k: int, slots: int) -> int:
    """Return into how many shares K is cut: enough to fill the device, each with several blocks."""
    if tile.splits != 0:
        return tile.splits
    blocks = -(-k // tile.block_k)
    return max(1, min(16, 2 * slots // max(1, tiles), blocks // (2 * tile.stages)))


_plans: Final = host.Steps()


def multiply(
    a: Tensor,
    b: Tensor,
    out: Tensor,
    *,
    a_scale: Tensor | None,
    b_scale: Tensor | None,
    bias: Tensor | None,
    alpha: Tensor | None,
    quant: str,
    offsets: Tensor | None = None,
) -> None:
    """Write ``alpha * (a @ b^T) + bias`` to ``out``; see mm, bmm and (given ``offsets``) grouped_mm."""
    if out.numel() == 0:
        return
    scales = [None if s is None else _readable_scale(s) for s in (a_scale, b_scale)]
    bias = host.unit(bias)
    work = None
    how = _how(a, b, scales[1], out, quant, scaled=a_scale is not None, grouped=offsets is not None)
    if how.splits > 1:
        rows = how.splits * (a.shape[0] if a.dim() == 3 else 1) * a.shape[-2]
        work = torch.empty((rows, b.shape[-2]), dtype=torch.float32, device=a.device)
    host.run(_plans, _work, (a, b, out, *scales, alpha, bias, offsets, work), how, quant)


def _readable_scale(scale: Tensor) -> Tensor:
    """Return a scale in a dtype that Triton knows: ue8m0 numbers as bytes."""
    return scale.view(torch.uint8) if scale.dtype == torch.float8_e8m0fnu else scale


class How(NamedTuple):
    """What follows from sizes and dtypes: how operands are read, the tile, the shares of K."""

    numbers: Numbers
    tile: Tile
    splits: int
    swap: bool


@cache
def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else ""


def _how(a: Tensor, b: Tensor, b_scale: Tensor | None, out: Tensor, quant: str, *, scaled: bool, grouped: bool) -> How:
    kind = numbers(a, b, b_scale, quant, scaled=scaled, native=host.is_native(a.dtype, a.device))
    count = -(-out.shape[-2] // b.shape[0]) if grouped else out.shape[-2]
    tile = tile_of(count, kind, b.element_size(), chip_of(a.device), device_name=_device_name(a.device))
    splits = 1
    if not grouped and count <= FEW:
        tiles = (a.shape[0] if a.dim() == 3 else 1) * -(-b.shape[-2] // tile.block_n)
        splits = splits_of(tile, tiles, columns_of(b, quant), host.multiprocessors(a.device))
    return How(kind, tile, splits, tile.block_m <= FEW)


def _work(
    a: Tensor,
    b: Tensor,
    out: Tensor,
    a_scale: Tensor | None,
    b_scale: Tensor | None,
    alpha: Tensor | None,
    bias: Tensor | None,
    offsets: Tensor | None,
    work: Tensor | None,
    how: How,
    quant: str,
) -> Sequence[host.Program]:
    kind, tile, splits, swap = how
    rows, n, k = a.shape[-2], b.shape[-2], columns_of(b, quant)
    groups = 0 if offsets is None else b.shape[0]
    batch = a.shape[0] if a.dim() == 3 else 1
    tiles_n = -(-n // tile.block_n)
    tiles_m = -(-rows // tile.block_m) + (groups + 1 if groups else 0)
    a_steps, b_steps = _steps(a_scale, a, kind), _steps(b_scale, b, kind)
    alpha_step = 0 if alpha is None or alpha.numel() == 1 else alpha.stride(0)
    bias_step = bias.stride(0) if bias is not None and bias.dim() == 2 else 0
    parts = {"HOW": kind.how, "A_SCALED": a_scale is not None, "ALPHA": alpha is not None, "BIAS": bias is not None}
    units = {"A_UNIT": a.stride(-1) == 1, "B_UNIT": b.stride(-1) == 1}
    values = (
        a, b, out, a_scale, b_scale, alpha, bias, offsets, work, rows, n, k, groups, tiles_m, tiles_n, *_three(a),
        *_three(b), *_three(out)[:2], *a_steps, *b_steps, alpha_step, bias_step,
    )  # fmt: skip
    constants = {
        **constants_of(kind, tile, splits=splits, swap=swap, groups=groups, k=k, integer=a.dtype == torch.int8),
        **parts, **units,
        "num_warps": tile.warps, "num_stages": tile.stages,
    }  # fmt: skip
    programs = [host.Program(device._multiply, (tiles_m * tiles_n, batch, splits), values, constants)]
    if work is not None:
        values = (work, out, a_scale, b_scale, alpha, bias, rows, n, *_three(out)[:2], *a_steps[:2], *b_steps[:2],
                  alpha_step, bias_step)  # fmt: skip
        constants = {**parts, "SPLITS": splits, "BLOCK": JOIN, "num_warps": 4}
        programs.append(host.Program(device._join, (-(-n // JOIN), rows, batch), values, constants))
    return programs


def constants_of(
    kind: Numbers, tile: Tile, *, splits: int, swap: bool, groups: int, k: int, integer: bool
) -> dict[str, Any]:
    """Return the constants of the device program, but for those that say which scales and epilogue there are."""
    integer = integer and kind.type == "same"
    return {
        "A_KIND": kind.a_kind, "B_KIND": kind.b_kind, "TYPE": kind.type, "SUM": "i32" if integer else "fp32",
        "GROUP": kind.group, "TALL": kind.tall, "INTO": kind.into, "EACH": kind.each, "POWER": kind.power,
        "GROUPS": host.pow2(groups + 1) if groups else 0, "SPLITS": splits, "SWAP": swap,
        "TAIL": k % tile.block_k != 0, "BAND": 8, "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n,
        "BLOCK_K": tile.block_k,
    }  # fmt: skip


def _three(x: Tensor) -> tuple[int, int, int]:
    """Return the strides of matrix, row and column."""
    row, column = x.stride()[-2:]
    return (x.stride(0) if x.dim() == 3 else 0, row, column)


def _steps(scale: Tensor | None, x: Tensor, kind: Numbers) -> tuple[int, int, int]:
    """Return the strides of a scale's matrix, row and group; 0 where one serves all."""
    if scale is None:
        return (0, 0, 0)
    if kind.how == "one":
        return (scale.stride(0) if scale.numel() > 1 else 0, 0, 0)
    if kind.how == "row":  # [.., rows] or [.., rows, 1]
        lead = x.dim() - 2
        return (scale.stride(0) if lead else 0, scale.stride(lead), 0)
    return _three(scale)


def case(
    chip: Chip, name: str, rows: int, quant: str, a: torch.dtype, b: torch.dtype, *, scaled: bool = True,
    splits: int = 1, groups: int = 0,
) -> CompileCase:  # fmt: skip
    """Return what a test without a GPU compiles: contiguous operands, a bf16 result, bias and alpha."""
    native = chip.fp8_pairs or (chip.hip and chip.shared > 100 << 10)
    group = torch.empty(1, 64 if quant == "w4a16" else 1, device="meta")
    left, right = (torch.empty(1, 2048, dtype=d, device="meta") for d in (a, b))
    kind = numbers(left, right, group, quant, scaled=scaled, native=native)
    tile = tile_of(rows, kind, b.itemsize, chip)
    constants = constants_of(
        kind, tile, splits=splits, swap=tile.block_m <= FEW, groups=groups, k=8192, integer=a == torch.int8
    )
    constants |= {
        "HOW": kind.how,
        "A_SCALED": scaled and quant != "none",
        "ALPHA": True,
        "BIAS": True,
        "A_UNIT": True,
        "B_UNIT": True,
    }
    scale = {"mxfp8": "*u8", "mxfp4": "*u8", "nvfp4": "*fp8e4nv"}.get(quant, "*fp32")
    types = {"a": f"*{NAMES[a]}", "b": f"*{NAMES[b]}", "out": "*bf16", "bias": "*bf16", "alpha": "*fp32"}
    types |= {"a_scale": scale if constants["A_SCALED"] else "none", "b_scale": scale if quant != "none" else "none"}
    types |= {"offsets": "*i32" if groups else "none", "work": "*fp32" if splits > 1 else "none", "m": "i32"}
    types |= {"tiles_m": "i32", "tiles_n": "i32", "groups": "i32", "a_column": "1", "b_column": "1"}
    types |= {f"{x}_scale_{step}": "i32" for x in "ab" for step in ("batch", "row", "column")}
    return host.compile_case(
        name, device._multiply, constants, types, {"num_warps": tile.warps, "num_stages": tile.stages}
    )
