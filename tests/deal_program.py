# pyright: reportCallIssue=false
"""Deals sequences of many lengths in Triton's interpreter and checks who got what; writes the number of deals."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import torch

from tskernel.backends.lazy_triton import jit
from tskernel.backends.portable._attention_deal import _deal

if TYPE_CHECKING:
    import triton.language as tl

BLOCK = 16
CUTS = ((2, 16), (1, 16), (5, 16), (2, 32), (2, 70))


@jit
def _program(lengths, got, work, batch, spread, most, SEQS: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT: tl.constexpr):
    """Store what each place is dealt."""
    place = tl.program_id(2)
    seq, part, count = _deal(lengths, work, 0, place, place >= 0, batch, spread, most, SEQS, BLOCK_N, SPLIT)
    tl.store(got + 3 * place, seq)
    tl.store(got + 3 * place + 1, part)
    tl.store(got + 3 * place + 2, count)


def deal(lengths: torch.Tensor, splits: int, spread: int, seqs: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return sequence, part and number of parts of each place, and the notes for the join."""
    batch = len(lengths)
    got = torch.full((batch * splits, 3), -7, dtype=torch.int32)
    notes = torch.full((batch, 2), -7, dtype=torch.int32)
    _program[(1, 1, batch * splits)](
        lengths, got, notes.view(torch.float32), batch, spread, 1 << 16, SEQS=seqs, BLOCK_N=BLOCK, SPLIT=splits > 1
    )
    return got, notes


def check(lengths: torch.Tensor, splits: int, spread: int, seqs: int) -> None:
    """Raise unless every part of every sequence has one place, long sequences first."""
    got, notes = deal(lengths, splits, spread, seqs)
    used = got[got[:, 2] > 0]
    assert len(used) == len(got) or (got[len(used) :, 2] == 0).all(), "a hole between places"
    blocks = (lengths.clamp(max=1 << 16) + BLOCK - 1).div(BLOCK, rounding_mode="floor").clamp(min=1)
    order = [blocks[s].item() for s in used[:, 0]]
    assert order == sorted(order, reverse=True), "a longer sequence comes later"
    for s in range(len(lengths)):
        mine = used[used[:, 0] == s]
        assert mine[:, 1].tolist() == list(range(len(mine))) and (mine[:, 2] == len(mine)).all(), "parts of a sequence"
        assert splits == 1 or notes[s].tolist() == [int((used[:, 0] == s).int().argmax()), len(mine)], "a note"
        # No part is over twice the mean share of a place, or over the spread that was asked for.
        share = int(blocks.sum()) * max(32, spread + 16) / (16 * len(lengths) * splits)
        assert splits == 1 or blocks[s] / len(mine) <= share, "a part is too long"
    if len(set(blocks.tolist())) == 1 and splits > 1:
        assert (used[:, 2] == -(-16 * splits // spread)).all(), "equal sequences are not cut as the host would"


def main() -> None:
    """Check equal, random, empty and wrong lengths."""
    ran = 0
    for seed, batch, seqs, cuts in ((0, 2, 64, CUTS), (1, 5, 256, CUTS), (2, 34, 64, CUTS[:1])):
        make = torch.Generator().manual_seed(seed)
        random = torch.randint(0, 3000, (batch,), generator=make, dtype=torch.int32)
        random[0], random[-1] = -5, 2**31 - 1
        giant = torch.full((batch,), 100, dtype=torch.int32)
        giant[batch // 2] = 60000
        for lengths in (torch.full((batch,), 777, dtype=torch.int32), random, giant):
            for splits, spread in cuts:
                check(lengths, splits, spread, seqs)
                ran += 1
    sys.stdout.write(str(ran))


if __name__ == "__main__":
    main()
