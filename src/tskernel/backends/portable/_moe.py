"""The host side of the Triton experts: how slots are grouped, what is quantized in between, tiles, launches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from tskernel.backends.compile_case import CompileCase
from tskernel.backends.portable import _gemm as gemm
from tskernel.backends.portable import _moe_triton as device
from tskernel.backends.portable import _quantize_triton as quantizing
from tskernel.backends.portable import _route_triton as routing
from tskernel.backends.portable import _rows as host
from tskernel.backends.portable._attention_tiles import chip_of
from tskernel.ops.moe._weights import FP8_BLOCK, PACKED

CAPABILITY: Final = host.CAPABILITY
Chip: Final = host.Chip
FLOAT_DTYPES: Final = host.FLOAT_DTYPES
FEW_SLOTS: Final = 256  # up to so many, each program finds its slots among all ids; beyond, they are sorted first
COLUMNS: Final = 1024  # of a program that adds up choices
TALLEST: Final = 128  # rows of a tile


class Slots(NamedTuple):
    """Which slots each tile has: sorted ones (``order``, ``owners``, ``padded``), or all ``ids`` to look among."""

    total: int
    top_k: int
    block: int
    order: Tensor | None = None
    owners: Tensor | None = None
    padded: Tensor | None = None
    ids: Tensor | None = None
    places: Tensor | None = None


class Expert(NamedTuple):
    """One of the two products of an expert: weight, scale, bias, and the static scale of what it is multiplied with."""

    weight: Tensor
    scale: Tensor | None
    bias: Tensor | None
    input_scale: Tensor | None


class How(NamedTuple):
    """What the device program needs to know of a product, besides the tensors."""

    numbers: gemm.Numbers
    tile: gemm.Tile
    x_how: str
    gated: bool
    kind: str
    alpha: float
    limit: float
    divide: int
    packed: bool


def unreadable(x: Tensor, w13: Tensor, w2: Tensor) -> str | None:
    """Return why this device cannot read the dtype of an operand, or None."""
    return gemm.unreadable(x, w13) or gemm.unreadable(x, w2)


def grouped(topk_ids: Tensor, experts: int, expert_map: Tensor | None) -> Slots:
    """Group the slots of a call: by their ids alone where they are few, else sorted into blocks."""
    tokens, top_k = topk_ids.shape
    count = tokens * top_k
    places = None if expert_map is None else expert_map.contiguous()
    if count <= FEW_SLOTS:
        return Slots(count, top_k, gemm.FEW, ids=topk_ids, places=places)
    each = -(-count // experts)
    block = gemm.FEW if each <= gemm.FEW else 64 if each <= 64 else TALLEST
    order, owners, padded = routing.dispatch(topk_ids, experts, block, places)
    return Slots(count, top_k, block, order=order, owners=owners, padded=padded)


def outputs(
    x: Tensor, first: Expert, second: Expert, slots: Slots, out: Tensor, *, quant: str, activation: str, alpha: float,
    limit: float,
) -> None:  # fmt: skip
    """Write each slot's expert applied to its token to ``out [slots, H]``; rows of slots without one are left alone."""
    inner = second.weight.shape[2] * (2 if quant in PACKED else 1)
    rounded = _rounded(first, quant) is not None or _rounded(second, quant) is not None
    h = torch.empty((slots.total, inner), dtype=torch.float32 if rounded else x.dtype, device=x.device)
    multiply(x, first, h, slots, quant=quant, activation=(activation, alpha, limit), divide=slots.top_k)
    multiply(h, second, out, slots, quant=quant, dtype=x.dtype)


def _rounded(expert: Expert, quant: str) -> torch.dtype | None:
    """Return the format that the rows are rounded to before a product with this weight, if any."""
    if quant in ("none", "w4a16") or (quant == "mxfp4" and expert.input_scale is None):
        return None
    return torch.float8_e4m3fn if quant == "mxfp4" else expert.weight.dtype


def multiply(
    x: Tensor, expert: Expert, out: Tensor, slots: Slots, *, quant: str,
    activation: tuple[str, float, float] | None = None, divide: int = 1, dtype: torch.dtype | None = None,
) -> None:  # fmt: skip
    """Write the product of each slot's row and its expert's weight, activated if an ``activation`` is given.

    ``dtype`` is what unquantized rows are multiplied in, by default their own.
    """
    x_scale, to = None, _rounded(expert, quant)
    if to is not None:
        x, x_scale = _quantized(x, expert.input_scale, quant, to)
    scale = expert.scale
    if scale is not None and scale.dtype == torch.float8_e8m0fnu:
        scale = scale.view(torch.uint8)
    like = x if dtype is None or to is not None else x.to(dtype)
    kind = gemm.numbers(
        like, expert.weight, scale, quant, scaled=to is not None, native=host.is_native(like.dtype, x.device)
    )
    chip = chip_of(x.device)
    tile = gemm.tile_of(slots.block, kind, expert.weight.element_size(), chip)
    tile = tile._replace(block_m=max(gemm.FEW, host.pow2(slots.block)))
    x_how = "none" if to is None else "group" if quant == "fp8_block" else "row"
    kind = kind._replace(how={"one": "row"}.get(kind.how, kind.how))
    name, alpha, limit = activation or ("", 0.0, 0.0)
    how = How(kind, tile, x_how, activation is not None, name, float(alpha), float(limit), divide, quant in PACKED)
    tensors = (like, expert.weight, out, x_scale, scale, host.unit(expert.bias), *slots[3:])
    host.run(_plans, _work, tensors, how, slots.total, slots.top_k, slots.block)


def _quantized(x: Tensor, scale: Tensor | None, quant: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return rows rounded to a format, and their scales: one, one per row, or one per 128 columns."""
    form, top = ("int8", 127.0) if dtype == torch.int8 else host.FP8[dtype]
    group = FP8_BLOCK if quant == "fp8_block" else None
    parts = 1 if group is None else -(-x.shape[1] // group)
    data = torch.empty(x.shape, dtype=torch.int8 if dtype == torch.int8 else torch.uint8, device=x.device)
    scales = torch.empty((1,) if scale is not None else (x.shape[0], parts), dtype=torch.float32, device=x.device)
    native = dtype != torch.int8 and host.is_native(dtype, x.device)
    given, how = (None, "unit") if scale is None else (scale.reshape(1), "one")
    quantizing.quantize(x, given, data, scales, how=how, form=form, top=top, native=native, group=group, smallest=0.0)
    return data.view(dtype), scales


_plans: Final = host.Steps()


def _work(
    x: Tensor, w: Tensor, out: Tensor, x_scale: Tensor | None, w_scale: Tensor | None, bias: Tensor | None,
    order: Tensor | None, owners: Tensor | None, padded: Tensor | None, ids: Tensor | None, places: Tensor | None,
    how: How, count: int, top_k: int, block: int,
) -> Sequence[host.Program]:  # fmt: skip
    tile, n = how.tile, out.shape[1]
    k = w.shape[2] * (2 if how.packed else 1)
    tiles_m = count if owners is None else owners.shape[0]
    tiles_n = -(-n // (tile.block_n // 2 if how.gated else tile.block_n))
    x_steps = (0, 0) if x_scale is None or x_scale.numel() == 1 else (x_scale.stride(0), x_scale.stride(1))
    values = (
        x, w, out, x_scale, w_scale, bias, order, owners, padded, ids, places, count, n, k, w.shape[0], tiles_m,
        tiles_n, how.divide, max(1, top_k), 0 if places is None else places.shape[0],
        *((0, 0) if ids is None else ids.stride()), *x.stride(), *w.stride(), *x_steps, *_scale_steps(w_scale),
        0 if bias is None else bias.stride(0),
    )  # fmt: skip
    constants = {
        **constants_of(how, count=count, block=block, k=k, integer=x.dtype == torch.int8, found=owners is None),
        "MAPPED": places is not None, "BIAS": bias is not None, "X_UNIT": x.stride(1) == 1,
        "W_UNIT": w.stride(2) == 1, "num_warps": tile.warps, "num_stages": tile.stages,
    }  # fmt: skip
    return [host.Program(device._experts, (tiles_m * tiles_n,), values, constants)]


def _scale_steps(scale: Tensor | None) -> tuple[int, int, int]:
    """Return the strides of a weight's scale: expert, row, group; 0 where one serves all."""
    if scale is None:
        return (0, 0, 0)
    steps = (*scale.stride(), 0, 0)
    return (steps[0], steps[1], steps[2])


def constants_of(how: How, *, count: int, block: int, k: int, integer: bool, found: bool) -> dict[str, Any]:
    """Return the constants of the device program, but for those that say what tensors there are."""
    kind, tile = how.numbers, how.tile
    integer = integer and kind.type == "same"
    return {
        "SORTED": not found, "SPAN": block, "SLOTS": host.pow2(max(16, count)) if found else 0, "GATED": how.gated,
        "KIND": how.kind, "ALPHA": how.alpha, "LIMIT": how.limit, "X_HOW": how.x_how, "HOW": kind.how,
        "B_KIND": kind.b_kind, "TYPE": kind.type, "SUM": "i32" if integer else "fp32", "GROUP": kind.group,
        "TALL": kind.tall, "INTO": kind.into, "EACH": kind.each, "POWER": kind.power,
        "SWAP": tile.block_m <= gemm.FEW, "TAIL": k % tile.block_k != 0, "BAND": 8, "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n, "BLOCK_K": tile.block_k,
    }  # fmt: skip


_combine_plans: Final = host.Steps()


def combine(
    y: Tensor, weights: Tensor, out: Tensor, *, used: str = "all", ids: Tensor | None = None,
    places: Tensor | None = None, experts: int = 0,
) -> None:  # fmt: skip
    """Write ``sum_k weights[t, k] * y[t, k]`` of ``y [T, top_k, H]``.

    ``used``: of "all" choices, of those whose id is not "negative", or of those that are "local": below ``experts``,
    after the map ``places``.
    """
    host.run(_combine_plans, _combine_work, (y, weights, ids, places, out), used, experts)


def _combine_work(
    y: Tensor, weights: Tensor, ids: Tensor | None, places: Tensor | None, out: Tensor, used: str, experts: int
) -> Sequence[host.Program]:
    tokens, top_k, width = y.shape
    block = min(COLUMNS, max(64, host.pow2(width)))
    values = (
        y, weights, ids, places, out, tokens, width, top_k, 0 if places is None else places.shape[0], experts,
        *y.stride(), *weights.stride(), *((0, 0) if ids is None else ids.stride()), *out.stride(),
    )  # fmt: skip
    constants = {
        "USED": used, "MAPPED": places is not None, "UNIT": y.stride(2) == 1 and out.stride(1) == 1, "BLOCK": block,
        "num_warps": host.warps(block, 8),
    }  # fmt: skip
    return [host.Program(device._combine, (tokens, -(-width // block)), values, constants)]


def case(
    chip: Chip,
    name: str,
    block: int,
    quant: str,
    x: torch.dtype,
    w: torch.dtype,
    *,
    gated: bool = False,
    found: int = 0,
) -> CompileCase:
    """Return what a test without a GPU compiles: contiguous operands, bf16 results, biases."""
    native = chip.fp8_pairs or (chip.hip and chip.shared > 100 << 10)
    left, right = (torch.empty(1, 2048, dtype=d, device="meta") for d in (x, w))
    scaled = quant not in ("none", "mxfp4", "w4a16")
    kind = gemm.numbers(left, right, None, quant, scaled=scaled, native=native)
    kind = kind._replace(how={"one": "row"}.get(kind.how, kind.how))
    tile = gemm.tile_of(block, kind, w.itemsize, chip)._replace(block_m=block)
    x_how = "none" if not scaled else "group" if quant == "fp8_block" else "row"
    how = How(kind, tile, x_how, gated, "swiglu_oai" if gated else "", 1.702, 7.0, 8, quant in PACKED)
    constants = constants_of(how, count=found, block=block, k=8192, integer=x == torch.int8, found=found > 0)
    constants |= {"MAPPED": found > 0, "BIAS": True, "X_UNIT": True, "W_UNIT": True}
    scale = "none" if quant == "none" else "*u8" if quant == "mxfp4" else "*fp32"
    types = {"x": f"*{gemm.NAMES[x]}", "w": f"*{gemm.NAMES[w]}", "out": "*bf16", "bias": "*bf16", "w_scale": scale}
    types |= {"x_scale": "*fp32" if scaled else "none", "x_column": "1", "w_column": "1"}
    types |= dict.fromkeys(("order", "owners", "padded"), "none" if found else "*i32")
    types |= dict.fromkeys(("ids", "places"), "*i32" if found else "none")
    numbers = ("slots", "tiles_m", "tiles_n", "experts", "divide", "top_k", "known", "id_row", "id_column")
    types |= dict.fromkeys((*numbers, "w_scale_expert", "w_scale_row", "w_scale_column"), "i32")
    types |= dict.fromkeys(("x_scale_row", "x_scale_column"), "i32")
    return host.compile_case(
        name, device._experts, constants, types, {"num_warps": tile.warps, "num_stages": tile.stages}
    )


def combine_case(chip: Chip, name: str, width: int, *, used: str) -> CompileCase:
    """Return what a test without a GPU compiles of the weighted sum: bf16 outputs of contiguous rows."""
    block = min(COLUMNS, host.pow2(width))
    constants = {"USED": used, "MAPPED": used == "local", "UNIT": True, "BLOCK": block}
    types = {"y": "*bf16", "weights": "*fp32", "ids": "*i32", "out": "*bf16", "tokens": "i32", "top_k": "i32"}
    types |= {"places": "*i32" if used == "local" else "none", "y_column": "1", "out_column": "1"}
    types |= dict.fromkeys(("known", "experts", "weight_row", "weight_column", "id_row", "id_column"), "i32")
    return host.compile_case(name, device._combine, constants, types, {"num_warps": host.warps(block, 8, hip=chip.hip)})
