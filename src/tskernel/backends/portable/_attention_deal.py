# ruff: noqa: ANN001, ANN202
# pyright: reportCallIssue=false, reportAssignmentType=false
"""Which sequence, and which part of its keys, a decode program takes, decided on the device from the true lengths.

The host knows bounds of lengths, not lengths, and launches a number of places per KV head. Every program works out the
same deal of all places: long sequences first, so that none of them starts when the others are done, and in as many
parts as their length asks for. Where all lengths are equal it is the cut that the host would have made.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tskernel.backends.lazy_triton import jit

if TYPE_CHECKING:
    import triton.language as tl


# fmt: off
@jit
def _blocks(lengths, index, batch, most, BLOCK_N: tl.constexpr):
    """Return how many blocks of keys sequences have: one where they have no key, none behind the last sequence."""
    real = index < batch
    length = tl.minimum(tl.load(lengths + index, mask=real, other=0), most)
    return tl.where(real, tl.maximum(1, tl.cdiv(length, BLOCK_N)), 0)


@jit
def _parts(blocks, places, total, spread, SPLIT: tl.constexpr):
    """Return in how many parts to cut sequences if a part may have ``spread`` sixteenths of a place's mean share."""
    if SPLIT:
        return tl.cdiv(blocks * (16 * places), total * spread)
    else:
        return tl.minimum(blocks, 1)


@jit
def _deal(lengths, work, work_deal, mine, noted, batch, spread, most, SEQS: tl.constexpr, BLOCK_N: tl.constexpr,
          SPLIT: tl.constexpr):
    """Return the sequence, the part of it and the number of its parts in place ``mine``: 0 parts if nothing is left.

    There are ``num_programs(2)`` places, at most SEQS sequences of at most ``most`` keys. Parts are made as small as
    ``spread`` sixteenths of a place's mean share, or as the places allow. The ``noted`` program with a sequence's first
    part leaves its place and the number of parts for the join, as int32 pairs behind ``work_deal``.
    """
    places = tl.num_programs(2)
    index = tl.arange(0, SEQS)
    blocks = _blocks(lengths, index, batch, most, BLOCK_N)
    total = tl.sum(blocks, 0)
    if SPLIT:
        tried = spread + tl.arange(0, 16)
        need = tl.sum(tl.cdiv((blocks * (16 * places))[:, None], (total * tried)[None, :]), 0)
        # At twice the mean share the places suffice for sure: a sequence loses less than a part to rounding.
        spread = tl.min(tl.where(need <= places, tried, spread + 16), 0)
    parts = _parts(blocks, places, total, spread, SPLIT)
    # Of equal sequences the earlier one comes first. The sum over those before goes 32 by 32, to stay in registers.
    order = blocks * SEQS + (SEQS - 1 - index)
    start = tl.zeros([SEQS], tl.int32)
    for n in range(0, batch, 32):
        other = n + tl.arange(0, 32)
        theirs = _blocks(lengths, other, batch, most, BLOCK_N)
        before = (theirs * SEQS + (SEQS - 1 - other))[None, :] > order[:, None]
        start += tl.sum(tl.where(before, _parts(theirs, places, total, spread, SPLIT)[None, :], 0), 1)
    here = (start <= mine) & (mine < start + parts)
    seq = tl.sum(tl.where(here, index, 0), 0)
    part = mine - tl.sum(tl.where(here, start, 0), 0)
    count = tl.sum(tl.where(here, parts, 0), 0)
    if SPLIT:
        note = (work + work_deal).to(tl.pointer_type(tl.int32), bitcast=True) + 2 * seq
        first = noted & (part == 0) & (count > 0)
        tl.store(note, mine, mask=first)
        tl.store(note + 1, count, mask=first)
    return seq, part, count
# fmt: on
