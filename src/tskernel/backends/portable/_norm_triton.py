# ruff: noqa: ANN001, ANN202
# pyright: reportCallIssue=false, reportAssignmentType=false
"""The norms of rows in Triton: a row that fits stays in registers, a longer one is read again.

Source: Zhang & Sennrich 2019, https://arxiv.org/abs/1910.07467; Ba, Kiros & Hinton 2016, https://arxiv.org/abs/1607.06450.
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
def _scaled(h, scale, weight, bias, column, WIDTH: tl.constexpr, GEMMA: tl.constexpr, BIAS: tl.constexpr):
    """Return ``h * scale * weight + bias`` in fp32."""
    w = tl.load(weight + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    if GEMMA:
        w += 1.0
    y = h * scale * w[None, :]
    if BIAS:
        y += tl.load(bias + column, mask=column < WIDTH, other=0.0).to(tl.float32)[None, :]
    return y


@jit
def _rows_once(
    x, residual, weight, bias, out, total, row, rows,
    x_inner, x_outer, x_step, x_column, r_inner, r_outer, r_step, r_column,
    o_inner, o_outer, o_step, o_column, t_inner, t_outer, t_step, t_column,
    WIDTH: tl.constexpr, BLOCK_N: tl.constexpr, EPS: tl.constexpr, X_UNIT: tl.constexpr, R_UNIT: tl.constexpr,
    O_UNIT: tl.constexpr, T_UNIT: tl.constexpr, ADD: tl.constexpr, LAYER: tl.constexpr, GEMMA: tl.constexpr,
    BIAS: tl.constexpr,
):
    """Norm a tile of whole rows."""
    column = tl.arange(0, BLOCK_N)
    inside = (row < rows)[:, None] & (column < WIDTH)[None, :]
    at = _start(row, x_inner, x_outer, x_step)[:, None] + _columns(column, x_column, X_UNIT)[None, :]
    h = tl.load(x + at, mask=inside, other=0.0)
    if ADD:
        at = _start(row, r_inner, r_outer, r_step)[:, None] + _columns(column, r_column, R_UNIT)[None, :]
        added = h.to(tl.float32) + tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
        h = added.to(x.dtype.element_ty)
        at = _start(row, t_inner, t_outer, t_step)[:, None] + _columns(column, t_column, T_UNIT)[None, :]
        tl.store(total + at, h, mask=inside)
    h = h.to(tl.float32)
    if LAYER:
        h = tl.where(inside, h - (tl.sum(h, 1) / WIDTH)[:, None], 0.0)
    scale = tl.rsqrt(tl.sum(h * h, 1) / WIDTH + EPS)[:, None]
    y = _scaled(h, scale, weight, bias, column, WIDTH, GEMMA, BIAS)
    at = _start(row, o_inner, o_outer, o_step)[:, None] + _columns(column, o_column, O_UNIT)[None, :]
    tl.store(out + at, y.to(out.dtype.element_ty), mask=inside)


@jit
def _deviations(h, column, mean, WIDTH: tl.constexpr, LAYER: tl.constexpr):
    """Return what is squared."""
    if LAYER:
        h = tl.where(column < WIDTH, h - mean, 0.0)
    return h


@jit
def _row_again(
    x, residual, weight, bias, out, total, row, rows,
    x_inner, x_outer, x_step, x_column, r_inner, r_outer, r_step, r_column,
    o_inner, o_outer, o_step, o_column, t_inner, t_outer, t_step, t_column,
    WIDTH: tl.constexpr, BLOCK_N: tl.constexpr, EPS: tl.constexpr, X_UNIT: tl.constexpr, R_UNIT: tl.constexpr,
    O_UNIT: tl.constexpr, T_UNIT: tl.constexpr, ADD: tl.constexpr, LAYER: tl.constexpr, GEMMA: tl.constexpr,
    BIAS: tl.constexpr,
):
    """Norm one row that does not fit: a sum is written on the first way through, and read from where it was written."""
    of_x = x + _start(row, x_inner, x_outer, x_step)
    of_out = out + _start(row, o_inner, o_outer, o_step)
    first = tl.zeros([BLOCK_N], tl.float32)
    if ADD or LAYER:
        for n in range(0, WIDTH, BLOCK_N):
            column = n + tl.arange(0, BLOCK_N)
            inside = (column < WIDTH) & (row < rows)
            h = tl.load(of_x + _columns(column, x_column, X_UNIT), mask=inside, other=0.0)
            if ADD:
                from_r = residual + _start(row, r_inner, r_outer, r_step) + _columns(column, r_column, R_UNIT)
                added = h.to(tl.float32) + tl.load(from_r, mask=inside, other=0.0).to(tl.float32)
                h = added.to(x.dtype.element_ty)
                to = total + _start(row, t_inner, t_outer, t_step) + _columns(column, t_column, T_UNIT)
                tl.store(to, h, mask=inside)
                first += h.to(tl.float32) * h.to(tl.float32)
            else:
                first += h.to(tl.float32)
        if ADD:
            tl.debug_barrier()
    mean = tl.sum(first, 0) / WIDTH
    squares = first
    if not ADD:
        squares = tl.zeros([BLOCK_N], tl.float32)
        for n in range(0, WIDTH, BLOCK_N):
            column = n + tl.arange(0, BLOCK_N)
            inside = (column < WIDTH) & (row < rows)
            h = tl.load(of_x + _columns(column, x_column, X_UNIT), mask=inside, other=0.0).to(tl.float32)
            h = _deviations(h, column, mean, WIDTH, LAYER)
            squares += h * h
    scale = tl.rsqrt(tl.sum(squares, 0) / WIDTH + EPS)
    for n in range(0, WIDTH, BLOCK_N):
        column = n + tl.arange(0, BLOCK_N)
        inside = (column < WIDTH) & (row < rows)
        if ADD:
            from_t = total + _start(row, t_inner, t_outer, t_step) + _columns(column, t_column, T_UNIT)
            h = tl.load(from_t, mask=inside, other=0.0).to(tl.float32)
        else:
            h = tl.load(of_x + _columns(column, x_column, X_UNIT), mask=inside, other=0.0).to(tl.float32)
        h = _deviations(h, column, mean, WIDTH, LAYER)
        y = tl.reshape(_scaled(h[None, :], scale, weight, bias, column, WIDTH, GEMMA, BIAS), [BLOCK_N])
        tl.store(of_out + _columns(column, o_column, O_UNIT), y.to(out.dtype.element_ty), mask=inside)


@jit(do_not_specialize=("rows",))
def _norm(
    x, residual, weight, bias, out, total, rows,
    x_inner, x_outer, x_step, x_column, r_inner, r_outer, r_step, r_column,
    o_inner, o_outer, o_step, o_column, t_inner, t_outer, t_step, t_column,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, BLOCK_N: tl.constexpr, EPS: tl.constexpr, X_UNIT: tl.constexpr,
    R_UNIT: tl.constexpr, O_UNIT: tl.constexpr, T_UNIT: tl.constexpr, ADD: tl.constexpr, LAYER: tl.constexpr,
    GEMMA: tl.constexpr, BIAS: tl.constexpr,
):
    """Norm BLOCK rows per program; one where a row is longer than BLOCK_N."""
    if BLOCK_N < WIDTH:
        _row_again(
            x, residual, weight, bias, out, total, tl.program_id(0), rows,
            x_inner, x_outer, x_step, x_column, r_inner, r_outer, r_step, r_column,
            o_inner, o_outer, o_step, o_column, t_inner, t_outer, t_step, t_column,
            WIDTH, BLOCK_N, EPS, X_UNIT, R_UNIT, O_UNIT, T_UNIT, ADD, LAYER, GEMMA, BIAS)
    else:
        row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        _rows_once(
            x, residual, weight, bias, out, total, row, rows,
            x_inner, x_outer, x_step, x_column, r_inner, r_outer, r_step, r_column,
            o_inner, o_outer, o_step, o_column, t_inner, t_outer, t_step, t_column,
            WIDTH, BLOCK_N, EPS, X_UNIT, R_UNIT, O_UNIT, T_UNIT, ADD, LAYER, GEMMA, BIAS)


@jit(do_not_specialize=("q_rows", "k_rows", "q_blocks"))
def _norm_two(
    q, k, q_weight, k_weight, q_out, k_out, q_rows, k_rows, q_blocks,
    q_inner, q_outer, q_step, q_column, k_inner, k_outer, k_step, k_column,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, BLOCK_N: tl.constexpr, EPS: tl.constexpr, Q_UNIT: tl.constexpr,
    K_UNIT: tl.constexpr,
):
    """Norm heads of queries in the first ``q_blocks`` programs and of keys in the others; the results are dense."""
    block = tl.program_id(0)
    if block < q_blocks:
        _rows_once(
            q, q, q_weight, q_weight, q_out, q_out, block * BLOCK + tl.arange(0, BLOCK), q_rows,
            q_inner, q_outer, q_step, q_column, 1, 0, 0, 1, 1, WIDTH, 0, 1, 1, 0, 0, 1,
            WIDTH, BLOCK_N, EPS, Q_UNIT, True, True, True, False, False, False, False)
    else:
        _rows_once(
            k, k, k_weight, k_weight, k_out, k_out, (block - q_blocks) * BLOCK + tl.arange(0, BLOCK), k_rows,
            k_inner, k_outer, k_step, k_column, 1, 0, 0, 1, 1, WIDTH, 0, 1, 1, 0, 0, 1,
            WIDTH, BLOCK_N, EPS, K_UNIT, True, True, True, False, False, False, False)
# fmt: on


_plans: Final = host.Steps()
_plans_two: Final = host.Steps()


def norm(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    eps: float,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    total: Tensor | None = None,
    layer: bool = False,
    gemma: bool = False,
) -> None:
    """Write the norm of ``x [..., H]`` to ``out``; with ``residual``, that of their sum, which goes to ``total``."""
    x, out = host.readable(x), host.readable(out)
    residual = None if residual is None else host.readable(residual)
    total = None if total is None else host.readable(total)
    tensors = (x, residual, host.unit(weight), host.unit(bias), out, total)
    host.run(_plans, _work, tensors, eps, layer, gemma)


def tile(width: int, hip: bool | None = None) -> dict[str, int]:
    """Return the tile of rows of a width: about 1024 elements or one row, up to what registers hold."""
    padded = host.pow2(width)
    fits = padded <= host.ONE_PASS
    columns, rows = (padded, max(1, 1024 // padded)) if fits else (host.ONE_PASS // 2, 1)
    return {"BLOCK": rows, "BLOCK_N": columns, "num_warps": host.warps(rows * columns, hip=hip)}


def _work(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    total: Tensor | None,
    eps: float,
    layer: bool,
    gemma: bool,
) -> list[host.Program]:
    width = int(x.shape[-1])
    sizes = tile(width)
    given = [host.row_map(x if t is None else t) for t in (x, residual, out, total)]
    flags = {"ADD": residual is not None, "LAYER": layer, "GEMMA": gemma, "BIAS": bias is not None}
    units = {f"{n}_UNIT": m.unit for n, m in zip("XROT", given, strict=True)}
    maps = [number for m in given for number in m]
    arguments = (x, residual, weight, bias, out, total, host.rows_of(x), *maps)
    grid = (host.blocks(host.rows_of(x), sizes["BLOCK"]),)
    return [host.Program(_norm, grid, arguments, {"WIDTH": width, "EPS": float(eps), **units, **flags, **sizes})]


def norm_two(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, q_out: Tensor, k_out: Tensor, eps: float
) -> None:
    """Write the rmsnorm of the rows of ``q`` and of ``k``, which have one width, in one launch."""
    tensors = (
        *map(host.readable, (q, k)),
        host.unit(q_weight),
        host.unit(k_weight),
        *map(host.readable, (q_out, k_out)),
    )
    host.run(_plans_two, _work_two, tensors, eps)


def _work_two(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, q_out: Tensor, k_out: Tensor, eps: float
) -> list[host.Program]:
    width = int(q.shape[-1])
    sizes, maps = tile(width), (host.row_map(q), host.row_map(k))
    q_blocks, k_blocks = (host.blocks(host.rows_of(t), sizes["BLOCK"]) for t in (q, k))
    numbers = (host.rows_of(q), host.rows_of(k), q_blocks, *maps[0], *maps[1])
    units = {"Q_UNIT": maps[0].unit, "K_UNIT": maps[1].unit}
    options = {"WIDTH": width, "EPS": float(eps), **units, **sizes}
    return [
        host.Program(_norm_two, (q_blocks + k_blocks,), (q, k, q_weight, k_weight, q_out, k_out, *numbers), options)
    ]


def case(chip: host.Chip, name: str, width: int, kind: str = "*bf16", **flags: bool) -> Any:
    """Return what a test without a GPU compiles of ``norm``: contiguous rows of a width."""
    given: dict[str, Any] = {"WIDTH": width, "EPS": 1e-6, **dict.fromkeys(("ADD", "LAYER", "GEMMA", "BIAS"), False)}
    units = dict.fromkeys(("X_UNIT", "R_UNIT", "O_UNIT", "T_UNIT"), True)
    sizes = tile(width, chip.hip)
    options = {"num_warps": sizes.pop("num_warps")}
    types = dict.fromkeys(("x", "residual", "out", "total"), kind) | dict.fromkeys(("weight", "bias"), "*bf16")
    types |= {f"{t}_{n}": "1" for t in "xrot" for n in ("inner", "column")}
    return host.compile_case(name, _norm, {**given, **units, **sizes, **flags}, types, options)
