"""Which tiles the Triton attention programs use, and how far the keys are cut: chosen from sizes and the chip."""

from __future__ import annotations

from functools import lru_cache
from typing import Final, NamedTuple

import torch

MOST_SEQS: Final = 256  # that a deal handles
SHORT_WINDOW: Final = 512  # under it, a tile has hardly a key that all its rows see
LONG: Final = 256  # blocks of keys: reading them one after another takes longer than all launches and joins


class Config(NamedTuple):
    """Tile sizes and launch options.

    ``splits`` 0 leaves the number of parts to the host's estimate, ``dealt`` None leaves to it whether programs find
    their sequence and part by the true lengths. ``registers``: the most of a thread, 0 for as many as it wants.
    """

    block_m: int
    block_n: int
    warps: int
    stages: int
    splits: int = 0
    dealt: bool | None = None
    registers: int = 0


class Chip(NamedTuple):
    """What programs depend on.

    Attributes:
        hip: AMD.
        shared: bytes of shared memory of a program.
        tensor_memory: Triton keeps further copies of operands in shared memory (sm100).
        fp8_pairs: has the instruction that converts two fp8 to fp16 (sm89 and later).
    """

    hip: bool
    shared: int
    tensor_memory: bool = False
    fp8_pairs: bool = False


class Keys(NamedTuple):
    """What tile sizes depend on: bytes per element, page size (0 = packed), window (-1 = none), values being keys."""

    itemsize: int
    page: int
    window: int
    shared_v: bool = False


class Blocks(NamedTuple):
    """Blocks of keys of a sequence: a bound by what the caller says, by what its table holds, and bytes of one."""

    bound: int
    most: int
    bytes: int


class Cut(NamedTuple):
    """How the keys are cut: parts per sequence on average, and ``spread`` of ``_deal``, 0 without a deal."""

    splits: int
    spread: int


def choose_config(rows: int, width: int, value_width: int, dtype: torch.dtype, kv: Keys, chip: Chip) -> Config:
    """Return tile sizes for ``rows`` packed query rows per KV head of a sequence; measured on an H200."""
    wide = max(width, value_width)
    if dtype == torch.float32:
        c = Config(16 if rows <= 16 else 32, 32 if wide <= 128 else 16, 4, 2)
    elif chip.hip:
        return Config(_tile_rows(rows, 128 if wide <= 128 else 64), 64 if wide <= 128 else 32, 4, 2)
    elif wide > 256:
        c = Config(_tile_rows(rows, 64), 32 if chip.tensor_memory else 64, 8 if rows > 32 else 4, 2)
    elif rows <= 32:
        c = _few_rows(_tile_rows(rows, 32), wide, kv)
    elif kv.page > 0:
        c = Config(64, 64, 4, 3)
    elif 0 <= kv.window < SHORT_WINDOW and wide <= 64:
        c = Config(64, 32, 4, 5)
    elif _whole(width, value_width, kv, chip) and width <= 128:
        # So two programs run at a time, and one multiplies while the other does its softmax.
        c = Config(128, 64, 8, 3 if width == 64 else 2, registers=128)
    else:
        c = Config(128, 64, 8, 3 if wide <= 128 else 2)
    padded = sum(widths(width))
    return _fit(c, padded + (0 if kv.shared_v else max(16, pow2(value_width))), padded, dtype.itemsize, chip.shared)


def _few_rows(block_m: int, wide: int, kv: Keys) -> Config:
    """Return tiles for a decode step: enough bytes in flight, and programs that start while others read."""
    if kv.itemsize == 1:
        return Config(block_m, 64, 2, 3)
    if wide > 128:
        return Config(block_m, 32, 4, 4 if block_m == 16 else 3)
    if wide <= 64 and kv.window < 0:
        return Config(block_m, 64, 4, 3)
    return Config(block_m, 64, 4, 3 if 0 < kv.page < 64 else 4)


def settle(c: Config, programs: int, cut: Cut, slots: int) -> Config:
    """Return tiles with the stages that suit the number of programs that read at once; measured on an H200.

    Three stages leave room for a third program on a multiprocessor: better for parts, which are short, and for tiles of
    32 rows that take several rounds. A program that runs alone has 64 rows instead, half of them empty, for the product
    of a warpgroup, which reads keys and values where they are.
    """
    parts = cut.splits > 1 and cut.spread <= 16
    if c.block_m == 32 and c.stages == 4 and c.block_n == 64 and programs <= slots:
        c = c._replace(block_m=64)
    if c.stages == 4 and c.block_n == 64 and (parts or (c.block_m == 32 and programs > slots)):
        return c._replace(stages=3)
    return c


def _fit(c: Config, both: int, width: int, itemsize: int, shared: int) -> Config:
    """Shrink tiles until queries, keys and values fit into shared memory."""

    def need() -> int:
        return (c.block_m * width + c.stages * c.block_n * both) * itemsize

    while need() > shared and c.stages > 2:
        c = c._replace(stages=c.stages - 1)
    while need() > shared and c.block_n > 16:
        c = c._replace(block_n=c.block_n // 2)
    while need() > shared and c.block_m > 16:
        c = c._replace(block_m=c.block_m // 2)
    return c


def _tile_rows(rows: int, limit: int) -> int:
    return max(16, min(limit, pow2(rows)))


@lru_cache(maxsize=4096)
def choose_splits(programs: int, blocks: int, slots: int, extra: int, alone: float) -> int:
    """Return into how many parts to cut the keys so that all are read soonest.

    The unit is the time in which a multiprocessor reads a block of keys: it reads them one program after another, by a
    factor of ``alone`` slower when it has only one. A part costs ``extra`` for writing and reading its result, the join
    a launch and something for each part. More than 64 parts never pay.
    """
    if programs == 0 or programs >= 2 * slots:
        return 1

    def cost(splits: int) -> float:
        rounds = -(-programs * splits // slots)
        reading = rounds * -(-blocks // splits) * (alone if rounds == 1 else 1.0)
        return reading + (rounds * extra + 4 + splits / 4 if splits > 1 else 0)

    return min(range(1, max(1, min(64, blocks // 2)) + 1), key=cost)


def choose_cut(c: Config, batch: int, programs: int, blocks: Blocks, splits: int, slots: int) -> Cut:
    """Return how to cut the keys of a decode step whose lengths may differ: into ``splits`` where they are equal.

    Dealing costs every program some instructions: it must read 200 times as long. Whole sequences are dealt only where
    there are several rounds of programs; and only where one may be very long, twice as many places as sequences let it
    be cut: sequences under the mean length, or under half of a multiprocessor's share, then still stay whole.
    """
    if not 2 <= batch <= MOST_SEQS or c.dealt is False:
        return Cut(splits, 0)
    cycles = 300 + 3 * deal_width(batch) * batch // (32 * c.warps)
    spread = 16
    if c.dealt is None:
        # A multiprocessor reads about 19 bytes per cycle.
        if blocks.bound * blocks.bytes < 19 * 200 * cycles * splits:
            return Cut(splits, 0)
        if splits == 1 and blocks.bound >= LONG:
            splits, spread = 2, max(32, 16 * programs // slots)
        elif splits == 1 and programs <= slots:
            return Cut(splits, 0)
    fits = max(16 * splits * batch, batch * (spread + 16), MOST_SEQS) * blocks.most < 1 << 30
    return Cut(splits, spread if fits else 0)


def deal_width(batch: int) -> int:
    """Return how many sequences a deal is compiled for: two programs serve every batch."""
    return 64 if batch <= 64 else MOST_SEQS


@lru_cache(maxsize=64)
def multiprocessors(device: torch.device) -> int:
    """Return how many multiprocessors a device has."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


@lru_cache(maxsize=64)
def chip_of(device: torch.device) -> Chip:
    """Return what a device offers a program."""
    if device.type != "cuda":
        return Chip(False, 99 << 10)
    have = torch.cuda.get_device_properties(device)
    hip = torch.version.hip is not None
    shared = getattr(have, "shared_memory_per_block_optin", 64 << 10)
    return Chip(hip, shared, not hip and have.major == 10, not hip and (have.major, have.minor) >= (8, 9))


def bucket(blocks: int) -> int:
    """Round up to one of eight sizes per power of two: a growing length must not ask for a new choice each step."""
    step = 1 << max(0, blocks.bit_length() - 4)
    return -(-blocks // step) * step


def reach(c: Config, max_k: int, most: int, window: int) -> int:
    """Return how many blocks of keys a tile may see, from bounds of keys and queries per sequence."""
    keys = max_k if window < 0 else min(max_k, window + most + c.block_n)
    return bucket(-(-max(1, keys) // c.block_n))


def estimate_splits(c: Config, programs: int, blocks: int, slots: int) -> int:
    """Return into how many parts to cut ``blocks`` blocks of keys for tiles of ``c``."""
    # With two stages a program has little in flight; large tiles compute more than they read.
    alone = 1.5 if c.stages == 2 and c.block_m <= 32 else 1.05
    return choose_splits(programs, blocks, slots, c.block_m // 32, alone)


def pow2(n: int) -> int:
    """Return the least power of two that is at least ``n``."""
    return 1 << (n - 1).bit_length()


@lru_cache(maxsize=256)
def widths(width: int) -> tuple[int, int]:
    """Return the powers of two that cover a width with least waste: one, or one and a smaller one behind it."""
    main = max(16, pow2(width + 1) // 2)
    tail = max(16, pow2(width - main)) if width > main else 0
    return (main, tail) if tail < main else (2 * main, 0)


def _warpgroups(chip: Chip) -> bool:
    """Whether four warps multiply together (sm90): no other part before sm100 has as much shared memory."""
    return not chip.hip and not chip.tensor_memory and chip.shared > 200 << 10


def _whole(width: int, value_width: int, kv: Keys, chip: Chip) -> bool:
    """Whether a prefill on sm90 has rows without a rest: what the programs for them were measured with."""
    plain = kv.page == 0 and kv.window < 0 and kv.itemsize == 2
    return plain and width == value_width and width in (64, 128, 256) and _warpgroups(chip)


def program_flags(
    c: Config, kv: Keys, width: int, value_width: int, chip: Chip, q_float32: bool = False
) -> dict[str, bool]:
    """Return the constants of the device program that only say how it computes, not what."""
    few = c.block_m <= 32 and value_width <= 256
    short = 0 <= kv.window < SHORT_WINDOW
    half = few and kv.itemsize == 1 and not q_float32
    return {
        "PHASES": c.block_m > 32 and value_width <= 256 and not short,
        "NARROW": c.block_m > 32 and short,
        "HALF": half,
        "PAIRS": half and not kv.shared_v and value_width % 2 == 0,
        "NATIVE": chip.fp8_pairs,
        "WIDE": few,
        "AHEAD": _whole(width, value_width, kv, chip) and width == 256 and c[:3] == (128, 64, 8),
        "APART": _warpgroups(chip) and value_width > 256 and kv.page > 0 and kv.itemsize == 2 and c[:3] == (64, 64, 8),
        "NEAR": c.registers > 0,
        # Tiles of one KV head one after another share its keys in the cache; under a window they share few.
        "KV_FIRST": kv.page > 0 or kv.window >= 0 or value_width <= 64,
    }
