# ruff: noqa: ANN001, ANN202
# pyright: reportCallIssue=false, reportAssignmentType=false
"""Gated activations in Triton, on their own and as the values that are quantized.

Work is cut into units: a span of columns of one row. A program has a tile of units.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from torch import Tensor

from tskernel.backends.lazy_triton import jit
from tskernel.backends.portable import _rows as host
from tskernel.backends.portable._numbers_triton import _columns, _start

if TYPE_CHECKING:
    import triton.language as tl


# fmt: off
@jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@jit
def _activate(gate, up, KIND: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr):
    """Return the activation of fp32 gate and up."""
    if KIND == "silu":
        y = gate / (1.0 + tl.exp(-gate)) * up
    elif KIND == "gelu":
        y = gate * 0.5 * (1.0 + tl.erf(gate * 0.7071067811865476)) * up
    elif KIND == "gelu_tanh":  # (1 + tanh z) / 2 = sigmoid(2 z), which loses nothing where tanh z is near -1
        y = gate * _sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)) * up
    else:
        gate = tl.where(gate > LIMIT, LIMIT, gate)
        up = tl.where(up > LIMIT, LIMIT, up)
        up = tl.where(up < -LIMIT, -LIMIT, up)
        y = gate * _sigmoid(ALPHA * gate) * (up + 1.0)
    return y


@jit
def _values(
    x, first, last, stride, LANES: tl.constexpr, WIDTH: tl.constexpr, KIND: tl.constexpr, UNIT: tl.constexpr,
    ALPHA: tl.constexpr, LIMIT: tl.constexpr,
):
    """Return the fp32 values of columns ``first`` to ``last`` of the rows at ``x [M]``, 0 behind: ``[M, LANES]``."""
    lane = tl.arange(0, LANES)
    column = first[:, None] + lane[None, :]
    inside = column < last[:, None]
    if KIND == "plain":
        y = tl.load(x[:, None] + _columns(column, stride, UNIT), mask=inside, other=0.0).to(tl.float32)
    elif KIND == "swiglu_interleaved":
        pair = 2 * first[:, None] + tl.arange(0, 2 * LANES)[None, :]
        both = tl.load(x[:, None] + _columns(pair, stride, UNIT), mask=pair < 2 * last[:, None], other=0.0)
        gate, up = tl.split(tl.reshape(both, [both.shape[0], LANES, 2]))
        y = _activate(gate.to(tl.float32), up.to(tl.float32), KIND, ALPHA, LIMIT)
    else:
        gate = tl.load(x[:, None] + _columns(column, stride, UNIT), mask=inside, other=0.0).to(tl.float32)
        up = tl.load(x[:, None] + _columns(column + WIDTH, stride, UNIT), mask=inside, other=0.0).to(tl.float32)
        y = _activate(gate, up, KIND, ALPHA, LIMIT)
    return y


@jit
def _place(unit, rows, SPAN: tl.constexpr, WIDTH: tl.constexpr):
    """Return the row of each unit, and its first and last column: none where there is no such row."""
    PARTS: tl.constexpr = (WIDTH + SPAN - 1) // SPAN
    row = unit // PARTS
    first = unit % PARTS * SPAN
    last = tl.where(row < rows, tl.minimum(first + SPAN, WIDTH), 0)
    return row, first, last


@jit(do_not_specialize=("rows",))
def _gated(
    x, out, rows, x_inner, x_outer, x_step, x_column, o_inner, o_outer, o_step, o_column,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, SPAN: tl.constexpr, KIND: tl.constexpr, X_UNIT: tl.constexpr,
    O_UNIT: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr,
):
    """Write the activation of BLOCK units."""
    unit = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row, first, last = _place(unit, rows, SPAN, WIDTH)
    of_x = x + _start(row, x_inner, x_outer, x_step)
    y = _values(of_x, first, last, x_column, SPAN, WIDTH, KIND, X_UNIT, ALPHA, LIMIT)
    column = first[:, None] + tl.arange(0, SPAN)[None, :]
    to = out + _start(row, o_inner, o_outer, o_step)[:, None] + _columns(column, o_column, O_UNIT)
    tl.store(to, y.to(out.dtype.element_ty), mask=column < last[:, None])
# fmt: on


_plans: Final = host.Steps()


def gated(x: Tensor, out: Tensor, kind: str, alpha: float = 0.0, limit: float = 0.0) -> None:
    """Write the activation of ``x [..., 2D]`` to ``out [..., D]``."""
    host.run(_plans, _work, (host.readable(x), host.readable(out)), kind, alpha, limit)


def span_of(width: int) -> int:
    """Return how many columns a unit has: the most, up to a tile, that leave few lanes idle."""
    for span in (2048, 1024, 512, 256):
        if 10 * (-(-width // span) * span) <= 11 * width:
            return span
    return min(256, host.pow2(width))


def _work(x: Tensor, out: Tensor, kind: str, alpha: float, limit: float) -> list[host.Program]:
    width = int(out.shape[-1])
    span, given = span_of(width), (host.row_map(x), host.row_map(out))
    units, tile = host.rows_of(out) * -(-width // span), max(1, host.TILE // span)
    options = {
        "WIDTH": width,
        "BLOCK": tile,
        "SPAN": span,
        "KIND": kind,
        "ALPHA": float(alpha),
        "LIMIT": float(limit),
    }
    options |= {"X_UNIT": given[0].unit, "O_UNIT": given[1].unit, "num_warps": host.warps(tile * span)}
    arguments = (x, out, host.rows_of(out), *given[0], *given[1])
    return [host.Program(_gated, (host.blocks(units, tile),), arguments, options)]


def case(chip: host.Chip, name: str, width: int, kind: str) -> Any:
    """Return what a test without a GPU compiles: contiguous bf16 rows of a width."""
    span = span_of(width)
    tile = max(1, host.TILE // span)
    constants = {"WIDTH": width, "BLOCK": tile, "SPAN": span, "KIND": kind, "ALPHA": 1.702, "LIMIT": 7.0}
    types = {"x": "*bf16", "out": "*bf16"} | {f"{t}_{n}": "1" for t in "xo" for n in ("inner", "column")}
    options = {"num_warps": host.warps(tile * span, hip=chip.hip)}
    return host.compile_case(name, _gated, {**constants, "X_UNIT": True, "O_UNIT": True}, types, options)
