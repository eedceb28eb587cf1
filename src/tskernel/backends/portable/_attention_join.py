# ruff: noqa: ANN001, ANN202
# pyright: reportCallIssue=false, reportAssignmentType=false
"""Joining results of attention over different keys: the parts of a cut row, and two states.

Source: Milakov & Gimelshein 2018, https://arxiv.org/abs/1805.02867, section 3.1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tskernel.backends.lazy_triton import jit

if TYPE_CHECKING:
    import triton.language as tl


# fmt: off
@jit
def _join(
    work, out, lse, sinks, heads, splits, q_len, work_lse, work_deal, out_row, out_head, lse_row, lse_head,
    DV: tl.constexpr, D_V: tl.constexpr, BLOCK: tl.constexpr, SINKS: tl.constexpr, LSE: tl.constexpr,
    DEALT: tl.constexpr,
):
    """Join the parts of one row: weights relative to the largest LSE, the sink once.

    The parts of a row lie side by side; where they were DEALT, a sequence's places do.
    """
    token, head, column = tl.program_id(1).to(tl.int64), tl.program_id(0), tl.arange(0, D_V)
    part, part_lse = work, work + work_lse
    if DEALT:
        note = (work + work_deal).to(tl.pointer_type(tl.int32), bitcast=True) + 2 * (token // q_len)
        first, splits, step = tl.load(note).to(tl.int64), tl.load(note + 1), q_len * heads
        first = (first * q_len + token % q_len) * heads + head
    else:
        first, step = (token * heads + head) * splits, 1
    high = tl.full([BLOCK], float("-inf"), tl.float32)
    for n in range(0, splits, BLOCK):
        split = n + tl.arange(0, BLOCK)
        high = tl.maximum(high, tl.load(part_lse + first + split * step, mask=split < splits, other=float("-inf")))
    top = tl.max(high, 0)
    base = tl.where(top == float("-inf"), 0.0, top)
    total = tl.zeros([BLOCK], tl.float32)
    acc = tl.zeros([BLOCK, D_V], tl.float32)
    for n in range(0, splits, BLOCK):
        split = n + tl.arange(0, BLOCK)
        at = first + split * step
        share = tl.load(part_lse + at, mask=split < splits, other=float("-inf"))
        weight = tl.exp(share - base)
        some = (share > float("-inf"))[:, None] & (column[None, :] < DV)
        acc += weight[:, None] * tl.load(part + at[:, None] * DV + column[None, :], mask=some, other=0.0)
        total += weight
    whole = tl.sum(total, 0)
    if LSE:
        tl.store(lse + token * lse_row + head * lse_head, base + tl.log(whole))
    if SINKS:
        whole += tl.exp(tl.load(sinks + head).to(tl.float32) - base)
    value = tl.sum(acc, 0) / tl.where(whole == 0.0, 1.0, whole)
    tl.store(out + token * out_row + head * out_head + column, value.to(out.dtype.element_ty), mask=column < DV)


@jit
def _merge(
    a, lse_a, b, lse_b, out, lse, rows, heads, a_row, a_head, b_row, b_head, la_row, la_head, lb_row, lb_head,
    DV: tl.constexpr, D_V: tl.constexpr, BLOCK: tl.constexpr,
):
    """Weigh the parts relative to the larger LSE; a part without keys is not read."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    column = tl.arange(0, D_V)
    inside = at < rows * heads
    token, head = at // heads, at % heads
    none = float("-inf")
    s_a = tl.load(lse_a + token * la_row + head * la_head, mask=inside, other=none)
    s_b = tl.load(lse_b + token * lb_row + head * lb_head, mask=inside, other=none)
    top = tl.maximum(s_a, s_b)
    base = tl.where(top == none, 0.0, top)
    w_a, w_b = tl.exp(s_a - base), tl.exp(s_b - base)
    total = w_a + w_b
    over = tl.where(total == 0.0, 1.0, total)
    wide = (column < DV)[None, :]
    from_a = a + (token * a_row + head * a_head)[:, None] + column[None, :]
    from_b = b + (token * b_row + head * b_head)[:, None] + column[None, :]
    x = tl.load(from_a, mask=(s_a > none)[:, None] & wide, other=0.0)
    y = tl.load(from_b, mask=(s_b > none)[:, None] & wide, other=0.0)
    value = x.to(tl.float32) * (w_a / over)[:, None] + y.to(tl.float32) * (w_b / over)[:, None]
    tl.store(out + at[:, None] * DV + column[None, :], value.to(out.dtype.element_ty), mask=inside[:, None] & wide)
    tl.store(lse + at, base + tl.log(total), mask=inside)
# fmt: on
