"""The tiles and cuts that the Triton attention programs choose: the fastest on an H200, within bounds."""

from __future__ import annotations

import pytest
import torch

from tskernel.backends.portable import _attention_tiles as tiles
from tskernel.backends.portable._attention_tiles import Blocks, Chip, Config, Cut, Keys

H200, SLOTS = Chip(False, 227 << 10, False, True), 132


def chosen(batch: int, context: int, group: int, kv_heads: int, width: int, *, page: int = 64, window: int = -1,
           q_len: int = 1, fp8: bool = False, ragged: bool = False) -> tuple[Config, Cut]:  # fmt: skip
    """Return tiles and cut as the host code chooses them."""
    keys = Keys(1 if fp8 else 2, page, window)
    c = tiles.choose_config(q_len * group, width, width, torch.bfloat16, keys, H200)
    programs = batch * kv_heads * -(-q_len * group // c.block_m)
    bound = tiles.reach(c, context, q_len, window)
    cut = Cut(tiles.estimate_splits(c, programs, bound, SLOTS), 0)
    if page and not ragged and window < 0:
        blocks = Blocks(bound, -(-context // c.block_n), 2 * c.block_n * width * keys.itemsize)
        cut = tiles.choose_cut(c, batch, programs, blocks, cut.splits, SLOTS)
    return tiles.settle(c, programs, cut, SLOTS), cut


@pytest.mark.parametrize(
    ("got", "tile", "cut"),
    [
        (chosen(1, 8192, 8, 8, 128), (16, 64, 4, 3), Cut(16, 0)),
        (chosen(1, 131072, 8, 8, 128), (16, 64, 4, 3), Cut(33, 0)),
        (chosen(8, 8192, 8, 8, 128), (16, 64, 4, 3), Cut(4, 0)),
        (chosen(32, 2048, 4, 8, 128, page=16), (16, 64, 4, 3), Cut(1, 0)),
        (chosen(64, 4096, 8, 8, 128), (16, 64, 4, 4), Cut(1, 16)),
        (chosen(64, 4096, 8, 8, 128, fp8=True), (16, 64, 2, 3), Cut(1, 0)),
        (chosen(256, 1024, 8, 8, 64), (16, 64, 4, 3), Cut(1, 0)),
        (chosen(64, 4096, 8, 8, 64, window=127), (16, 64, 4, 4), Cut(1, 0)),
        (chosen(128, 4096, 8, 1, 128), (16, 64, 4, 4), Cut(1, 0)),
        (chosen(16, 4096, 8, 8, 128, q_len=4), (64, 64, 4, 4), Cut(1, 0)),
        (chosen(64, 32768, 8, 8, 128, q_len=4, ragged=True), (32, 64, 4, 3), Cut(1, 0)),
        (chosen(16, 8192, 8, 8, 128, q_len=64, ragged=True), (64, 64, 4, 3), Cut(1, 0)),
        (chosen(1, 8192, 8, 8, 128, q_len=8192, page=0), (128, 64, 8, 2), Cut(1, 0)),
        (chosen(1, 8192, 8, 8, 96, q_len=8192, page=0), (128, 64, 8, 3), Cut(1, 0)),
        (chosen(1, 8192, 1, 16, 256, q_len=8192, page=0), (128, 64, 8, 2), Cut(1, 0)),
        (chosen(4, 4096, 8, 8, 64, q_len=4096, page=0), (128, 64, 8, 3), Cut(1, 0)),
        (chosen(4, 4096, 8, 8, 64, q_len=4096, page=0, window=127), (64, 32, 4, 5), Cut(1, 0)),
        (chosen(64, 16384, 8, 8, 128), (16, 64, 4, 4), Cut(2, 62)),
    ],
)
def test_what_was_fastest_is_chosen(got: tuple[Config, Cut], tile: tuple[int, ...], cut: Cut) -> None:
    assert (got[0][:4], got[1]) == (tile, cut)


@pytest.mark.parametrize(
    ("width", "chip", "registers", "flags"),
    [
        (64, H200, 128, {"NEAR"}),
        (96, H200, 0, set()),
        (128, H200, 128, {"NEAR"}),
        (256, H200, 0, {"AHEAD"}),
        (576, H200, 0, {"APART"}),
        (128, Chip(False, 227 << 10, True, True), 0, set()),
        (256, Chip(True, 160 << 10), 0, set()),
        (576, Chip(False, 163 << 10), 0, set()),
    ],
)
def test_only_sm90_runs_what_was_measured_there(width: int, chip: Chip, registers: int, flags: set[str]) -> None:
    values, keys = (512, Keys(2, 64, -1, True)) if width == 576 else (width, Keys(2, 0, -1))
    c = tiles.choose_config(65536, width, values, torch.bfloat16, keys, chip)
    found = tiles.program_flags(c, keys, width, values, chip)
    assert (c.registers, {n for n in ("AHEAD", "APART", "NEAR") if found[n]}) == (registers, flags)


def test_what_a_deal_cannot_count_is_not_dealt() -> None:
    c = Config(16, 64, 4, 4)
    assert tiles.choose_cut(c, 64, 512, Blocks(1 << 12, 1 << 12, 32768), 1, SLOTS).spread > 16
    assert tiles.choose_cut(c, 64, 512, Blocks(1 << 12, 1 << 24, 32768), 1, SLOTS).spread == 0
    assert tiles.choose_cut(c, 257, 2056, Blocks(64, 64, 32768), 1, SLOTS) == Cut(1, 0)
    assert tiles.choose_cut(c._replace(dealt=False), 64, 512, Blocks(64, 64, 32768), 1, SLOTS) == Cut(1, 0)
    assert tiles.choose_cut(c._replace(dealt=True), 4, 8, Blocks(2, 2, 32768), 3, SLOTS) == Cut(3, 16)
