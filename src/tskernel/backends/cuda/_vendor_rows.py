# ruff: noqa: ANN001, ANN202
# pyright: reportCallIssue=false, reportAssignmentType=false
"""What vendor attention kernels leave undone, done on the device: rows of no sequence, LSE layout, sinks, stray NaN.

A vendor kernel writes only the rows of its sequences, gives the LSE as ``[heads, rows]`` and reads whole tiles of
values, of which the last one reaches past the last sequence. Nothing here reads a length on the host.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch import Tensor

from tskernel.backends.compile_case import CompileCase
from tskernel.backends.lazy_triton import jit

if TYPE_CHECKING:
    import triton.language as tl

# No vendor kernel wrapped here reads values in tiles of more rows.
TAIL: Final = 256
_BLOCK: Final = 32
_ALIGNMENT: Final = 16  # bytes


class Shield(NamedTuple):
    """What ``shield`` put aside: rows of values, and which of them it replaced."""

    kept: Tensor
    marks: Tensor


@jit(do_not_specialize=("batch", "rows"))
def _shield(
    values, key_ends, kept, marks, batch, rows, v_row, v_head,
    HEADS: tl.constexpr, H: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    slot = tl.program_id(0)
    row = tl.load(key_ends + batch).to(tl.int64) + slot
    tl.store(marks + slot, 0)
    if row < rows:
        head, column = tl.arange(0, H)[:, None], tl.arange(0, D)[None, :]
        mask = (head < HEADS) & (column < WIDTH)
        here = values + row * v_row + head.to(tl.int64) * v_head + column
        x = tl.load(here, mask=mask, other=0.0)
        wide = x.to(tl.float32)
        # inf too: 0 * inf is NaN as well
        stray = tl.max(tl.max(((wide != wide) | (tl.abs(wide) == float("inf"))).to(tl.int32), 1), 0)
        if stray != 0:
            tl.store(kept + (slot * HEADS + head) * WIDTH + column, x, mask=mask)
            tl.store(marks + slot, 1)
            tl.store(here, tl.zeros([H, D], values.dtype.element_ty), mask=mask)


@jit
def _restore(
    values, key_ends, kept, marks, slot, batch, v_row, v_head,
    HEADS: tl.constexpr, H: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    if tl.load(marks + slot) != 0:
        row = tl.load(key_ends + batch).to(tl.int64) + slot
        head, column = tl.arange(0, H)[:, None], tl.arange(0, D)[None, :]
        mask = (head < HEADS) & (column < WIDTH)
        x = tl.load(kept + (slot * HEADS + head) * WIDTH + column, mask=mask)
        tl.store(values + row * v_row + head.to(tl.int64) * v_head + column, x, mask=mask)


@jit
def _clear(
    out, lse, row, chosen, heads, out_row, out_head, lse_row, lse_head, WIDTH: tl.constexpr, D: tl.constexpr,
    BLOCK: tl.constexpr, LSE: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, D)[None, :]
    for head in range(heads):
        here = out + row[:, None] * out_row + tl.full([], head, tl.int64) * out_head + column
        tl.store(here, tl.zeros([BLOCK, D], out.dtype.element_ty), mask=chosen[:, None] & (column < WIDTH))
        if LSE:
            tl.store(lse + row * lse_row + head * lse_head, tl.full([BLOCK], float("-inf"), tl.float32), mask=chosen)


@jit(do_not_specialize=("rows", "batch", "heads", "tiles", "given_row", "given_head"))
def _settle(
    out, lse, given, ends, values, key_ends, kept, marks, rows, batch, heads, tiles, out_row, out_head, lse_row,
    lse_head, given_row, given_head, v_row, v_head, WIDTH: tl.constexpr, D: tl.constexpr, HEADS: tl.constexpr,
    H: tl.constexpr, H_Q: tl.constexpr, BLOCK: tl.constexpr, LSE: tl.constexpr, SHIELD: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    if program < tiles:
        total = tl.load(ends + batch)
        row = program.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        if LSE:
            head = tl.arange(0, H_Q)[None, :].to(tl.int64)
            mask = (row < rows)[:, None] & (head < heads)
            known = mask & (row < total)[:, None]
            x = tl.load(given + row[:, None] * given_row + head * given_head, mask=known, other=float("-inf"))
            tl.store(lse + row[:, None] * lse_row + head * lse_head, x, mask=mask)
        if (program + 1) * BLOCK > total:
            chosen = (row >= total) & (row < rows)
            _clear(out, lse, row, chosen, heads, out_row, out_head, lse_row, lse_head, WIDTH, D, BLOCK, False)
    elif SHIELD:
        _restore(values, key_ends, kept, marks, program - tiles, batch, v_row, v_head, HEADS, H, WIDTH, D)


@jit(do_not_specialize=("heads",))
def _blind(
    out, lse, ends, key_ends, heads, out_row, out_head, lse_row, lse_head, WIDTH: tl.constexpr, D: tl.constexpr,
    BLOCK: tl.constexpr, LSE: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0)
    first = tl.load(ends + b)
    queries = tl.load(ends + b + 1) - first
    keys = tl.load(key_ends + b + 1) - tl.load(key_ends + b)
    if CAUSAL:
        blind = queries - keys
    else:
        blind = tl.where(keys == 0, queries, 0)
    for start in range(0, blind, BLOCK):
        own = start + tl.arange(0, BLOCK)
        row = first.to(tl.int64) + own
        _clear(out, lse, row, own < blind, heads, out_row, out_head, lse_row, lse_head, WIDTH, D, BLOCK, LSE)


@jit(do_not_specialize=("rows", "given_row", "given_head"))
def _discount(
    out, given, sinks, rows, out_row, out_head, given_row, given_head, sink_step, WIDTH: tl.constexpr,
    D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    head = tl.program_id(1).to(tl.int64)
    column = tl.arange(0, D)[None, :]
    inside = row < rows
    lse = tl.load(given + row * given_row + head * given_head, mask=inside, other=0.0)
    sink = tl.load(sinks + head * sink_step).to(tl.float32)
    # A row without keys is 0 already; its LSE of -inf would make the factor NaN where the sink is -inf too.
    share = tl.where(lse == float("-inf"), 1.0, 1.0 / (1.0 + tl.exp(sink - lse)))
    here = out + row[:, None] * out_row + head * out_head + column
    mask = inside[:, None] & (column < WIDTH)
    x = tl.load(here, mask=mask, other=0.0).to(tl.float32) * share[:, None]
    tl.store(here, x.to(out.dtype.element_ty), mask=mask)


@jit(do_not_specialize=("batch", "q_len", "window"))
def _first_key(lengths, ends, first, batch, q_len, window, RAGGED: tl.constexpr, BLOCK: tl.constexpr):
    b = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = b < batch
    if RAGGED:
        q_len = tl.load(ends + b + 1, mask=inside, other=0) - tl.load(ends + b, mask=inside, other=0)
    length = tl.load(lengths + b, mask=inside, other=0)
    tl.store(first + b, tl.maximum(length - q_len - window, 0), mask=inside)


def _pow2(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


def shield(values: Tensor, key_ends: Tensor) -> Shield:
    """Keep NaN and inf behind the last sequence out of its last tile of ``values [Tk, Hkv, Dv]``.

    A vendor kernel multiplies that whole tile, and 0 times NaN is NaN. No sequence owns those rows, and only rows that
    hold such a value are touched: they are zeroed until ``settle`` puts them back.
    """
    rows, heads, width = values.shape
    count = min(TAIL, rows)
    kept = torch.empty((count, heads, width), dtype=values.dtype, device=values.device)
    marks = torch.empty((count,), dtype=torch.int32, device=values.device)
    _shield[(count,)](
        values, key_ends, kept, marks, key_ends.shape[0] - 1, rows, *values.stride()[:2],
        HEADS=heads, H=_pow2(heads), WIDTH=width, D=_pow2(width), num_warps=8,
    )  # fmt: skip
    return Shield(kept, marks)


def settle(
    out: Tensor,
    lse: Tensor | None,
    given: Tensor | None,
    ends: Tensor,
    values: Tensor,
    key_ends: Tensor,
    shielded: Shield | None,
) -> None:
    """Clear the rows of ``out [Tq, Hq, Dv]`` behind the last sequence, fill ``lse`` from ``given``, lift the shield.

    ``lse`` and ``given`` are ``[Tq, Hq]`` of any strides.
    """
    rows, heads, width = out.shape
    tiles = -(-rows // _BLOCK)
    kept, marks = (None, None) if shielded is None else shielded
    count = 0 if kept is None else kept.shape[0]
    lse_strides = (0, 0) if lse is None else lse.stride()
    given_strides = (0, 0) if lse is None or given is None else given.stride()
    _settle[(tiles + count,)](
        out, lse, given, ends, values, key_ends, kept, marks, rows, ends.shape[0] - 1, heads, tiles,
        *out.stride()[:2], *lse_strides, *given_strides, *values.stride()[:2], WIDTH=width, D=_pow2(width),
        HEADS=values.shape[1], H=_pow2(values.shape[1]), H_Q=_pow2(heads), BLOCK=_BLOCK, LSE=lse is not None,
        SHIELD=count > 0, num_warps=8,
    )  # fmt: skip


def clear_blind(out: Tensor, lse: Tensor | None, ends: Tensor, key_ends: Tensor, *, causal: bool) -> None:
    """Make rows that see no key 0 with LSE -inf: with fewer keys than queries, a sequence's first ones."""
    width = out.shape[2]
    _blind[(ends.shape[0] - 1,)](
        out, lse, ends, key_ends, out.shape[1], *out.stride()[:2], *((0, 0) if lse is None else lse.stride()),
        WIDTH=width, D=_pow2(width), BLOCK=_BLOCK, LSE=lse is not None, CAUSAL=causal,
    )  # fmt: skip


def discount(out: Tensor, given: Tensor, sinks: Tensor) -> None:
    """Scale ``out [T, Hq, Dv]`` to what it is with ``sinks [Hq]``, given its LSE ``[T, Hq]`` without them."""
    rows, heads, width = out.shape
    _discount[(-(-rows // _BLOCK), heads)](
        out, given, sinks, rows, *out.stride()[:2], *given.stride(), sinks.stride(0), WIDTH=width, D=_pow2(width),
        BLOCK=_BLOCK,
    )  # fmt: skip


def first_keys(lengths: Tensor, ends: Tensor | None, q_len: int, window: int) -> Tensor:
    """Return, for each sequence, the first key that the window of its first query shows.

    A vendor kernel reads whole tiles of keys and masks; what lies before a window may be freed pages.
    """
    batch = lengths.shape[0]
    first = torch.empty_like(lengths)
    _first_key[(-(-batch // 256),)](
        lengths, ends, first, batch, q_len, window, RAGGED=ends is not None, BLOCK=256, num_warps=4
    )
    return first


def crooked(**tensors: Tensor) -> str | None:
    """Return which tensor has rows that do not start on 16 bytes, judged by strides, or None."""
    for name, x in tensors.items():
        if x.stride(-1) != 1:
            return f"{name}: the last stride is {x.stride(-1)}, the kernel needs 1"
        rows = zip(x.stride()[:-1], x.shape[:-1], strict=True)
        if any(step * x.element_size() % _ALIGNMENT or (step == 0 and n > 1) for step, n in rows):
            return f"{name}: strides {x.stride()} do not keep rows on distinct 16-byte borders"
    return None


def aligned(x: Tensor) -> Tensor:
    """Return ``x``, copied where its memory does not start on 16 bytes."""
    return x if x.data_ptr() % _ALIGNMENT == 0 else x.clone(memory_format=torch.contiguous_format)


def staged(out: Tensor) -> Tensor:
    """Return ``out``, or a buffer to copy from where a vendor kernel could not write its rows in 16-byte pieces."""
    if crooked(out=out) is None and out.data_ptr() % _ALIGNMENT == 0:
        return out
    return torch.empty(out.shape, dtype=out.dtype, device=out.device)


def without_keys(out: Tensor, lse: Tensor | None) -> None:
    """Write the result of a call in which no row sees a key."""
    out.zero_()
    if lse is not None:
        lse.fill_(float("-inf"))


def compile_cases() -> list[CompileCase]:
    """Return what cross-compilation tests build."""
    sizes = {"WIDTH": 128, "D": 128, "BLOCK": _BLOCK}
    kv = {"HEADS": 8, "H": 8}
    every = [
        ("shield", _shield, {**kv, "WIDTH": 128, "D": 128}),
        ("settle", _settle, {**sizes, **kv, "H_Q": 64, "LSE": True, "SHIELD": True}),
        ("blind", _blind, {**sizes, "LSE": True, "CAUSAL": True}),
        ("discount", _discount, sizes),
        ("first key", _first_key, {"RAGGED": True, "BLOCK": 256}),
    ]
    return [case(name, function, constants) for name, function, constants in every]


_KINDS: Final = {
    **dict.fromkeys(("values", "kept", "out"), "*bf16"),
    **dict.fromkeys(("lse", "given", "sinks", "found"), "*fp32"),
    **dict.fromkeys(("ends", "key_ends", "marks", "lengths", "first", "starts", "tails"), "*i32"),
}

_ALIGNED: Final = ("v_row", "v_head", "out_row", "out_head")


def case(name: str, function: Any, constants: dict[str, Any]) -> CompileCase:
    """Return a case whose pointers are known by name."""
    code = (function.function if hasattr(function, "function") else function.fn).__code__
    names = code.co_varnames[: code.co_argcount]
    signature = {n: "constexpr" if n in constants else _KINDS.get(n, "i32") for n in names}
    return CompileCase(name, function, signature, constants, {"num_warps": 8}, _ALIGNED)
