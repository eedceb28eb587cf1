# ruff: noqa: ANN001, ANN202
# pyright: reportCallIssue=false, reportAssignmentType=false, reportOperatorIssue=false
"""Which values of a row are among its k largest, or its nucleus, in Triton: a search for a threshold, digit by digit.

Rows are cut into tiles, so that one row keeps many multiprocessors busy. Each pass weighs what is above the 2^DIGIT
bounds of the digit, and the next one adds up the tiles and chooses: there is no sort, no atomic addition, and the order
of summation is fixed. Values that equal the threshold are kept by lowest index, up to a ``cut``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tskernel.backends.lazy_triton import jit
from tskernel.backends.portable._numbers_triton import _columns, _ordered

if TYPE_CHECKING:
    import triton.language as tl


# fmt: off
@jit
def _cleaned(x, row, tile, x_row, x_column, VOCAB: tl.constexpr, TILE: tl.constexpr, UNIT: tl.constexpr,
             LOGITS: tl.constexpr):
    """Return a tile of a row in fp32, its indices, and which of them there are; NaN is the least value."""
    index = tile * TILE + tl.arange(0, TILE)
    inside = index < VOCAB
    at = x + row.to(tl.int64) * x_row + _columns(index, x_column, UNIT)
    if LOGITS:
        y = tl.load(at, mask=inside, other=float("-inf")).to(tl.float32)
        y = tl.where(y == y, y, float("-inf"))
    else:
        y = tl.load(at, mask=inside, other=0.0).to(tl.float32)
        y = tl.where(y > 0.0, y, 0.0)
    return y, index, inside


@jit
def _peak_of(peaks, row, TILES: tl.constexpr, TILES_PADDED: tl.constexpr):
    """Return the largest value of a row from those of its tiles."""
    tile = tl.arange(0, TILES_PADDED)
    return tl.max(tl.load(peaks + row * TILES + tile, mask=tile < TILES, other=float("-inf")), 0)


@jit
def _shared(y, peak):
    """Return non-negative weights; infinite ones share a row alone."""
    return tl.where(peak == float("inf"), (y == float("inf")).to(tl.float32), y)


@jit
def _scaled(y, peak, temperature):
    """Return ``(y - peak) / temperature``, 0 for the best; a temperature that is not positive counts as 1."""
    t = tl.where(temperature > 0.0, tl.minimum(temperature, 3.4028234663852886e38), 1.0)
    return tl.where(y == peak, 0.0, tl.div_rn(y - peak, t + tl.zeros(y.shape, tl.float32)))


@jit
def _short_keys(y, DROP: tl.constexpr):
    """Return int32 keys that order like values; DROP low bits say nothing."""
    return _ordered(y) >> DROP


@jit
def _among(key, index, limits, row):
    """Return which values are above a row's threshold, or equal to it and up to its cut."""
    threshold, cut = tl.load(limits + 2 * row), tl.load(limits + 2 * row + 1)
    return (key > threshold) | ((key == threshold) & (index <= cut))


@jit
def _weights(
    x, peaks, limits, temperature, row, tile, x_row, x_column, VOCAB: tl.constexpr, TILE: tl.constexpr,
    TILES: tl.constexpr, TILES_PADDED: tl.constexpr, UNIT: tl.constexpr, LOGITS: tl.constexpr, DROP: tl.constexpr,
    COUNT: tl.constexpr,
):
    """Return keys and weights of a tile: 1 each to COUNT, else probabilities or those that logits stand for."""
    y, index, inside = _cleaned(x, row, tile, x_row, x_column, VOCAB, TILE, UNIT, LOGITS)
    peak = _peak_of(peaks, row, TILES, TILES_PADDED)
    if not LOGITS:
        y = _shared(y, peak)
    key = _short_keys(y, DROP)
    if COUNT:
        weight = inside.to(tl.int32)
    elif LOGITS:
        w = tl.exp(_scaled(y, peak, tl.load(temperature + row)))
        weight = tl.where(inside & _among(key, index, limits, row), w, 0.0).to(tl.float64)
    else:
        weight = tl.where(inside, y, 0.0).to(tl.float64)
    return key, weight, index


@jit
def _wanted(amount, temperature, row, VOCAB: tl.constexpr, COUNT: tl.constexpr, LOGITS: tl.constexpr):
    """Return how many (or which share of) values a row keeps, and whether that is all of them."""
    if COUNT:
        k = tl.load(amount + row)
        if LOGITS:
            k = tl.where(tl.load(temperature + row) > 0.0, k, 1)
        off = (k <= 0) | (k >= VOCAB)
        want = k.to(tl.float64)
    else:
        p = tl.load(amount + row)
        off = p >= 1.0
        want = tl.where(p > 0.0, p, 0.0).to(tl.float64)
    return want, off


@jit
def _choose(part, row, prefix, want, step, shift, TILES: tl.constexpr, TILES_PADDED: tl.constexpr,
            DIGIT: tl.constexpr, COUNT: tl.constexpr):
    """Return the lowest key of the digit that reaches enough, what was wanted, whether it is met exactly, the digit."""
    BOUNDS: tl.constexpr = (1 << DIGIT) + 1
    tile, bound = tl.arange(0, TILES_PADDED), tl.arange(0, 2 << DIGIT)
    at = part + (row * TILES + tile)[:, None] * BOUNDS + bound[None, :]
    mass = tl.sum(tl.load(at, mask=(tile < TILES)[:, None] & (bound < BOUNDS)[None, :], other=0.0), 0)
    if not COUNT:  # the first pass weighs the whole row; an amount of 0 would be reached by nothing
        whole = tl.sum(tl.where(bound == 0, mass, 0.0), 0)
        want = tl.where(step == 1, tl.maximum(want * whole, 2.2250738585072014e-308), want)
    digit = tl.max(tl.where((mass >= want) & (bound < BOUNDS - 1), bound, 0), 0)
    exact = tl.sum(tl.where(bound == digit, mass, 0.0), 0) == want
    return prefix + (digit.to(tl.int64) << shift), want, exact, digit


@jit(do_not_specialize=("step", "shift", "part_size", "rows"))
def _search(
    x, peaks, limits, amount, temperature, part, state, step, shift, part_size, rows, x_row, x_column,
    VOCAB: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr, TILES_PADDED: tl.constexpr, UNIT: tl.constexpr,
    LOGITS: tl.constexpr, DROP: tl.constexpr, LOWEST: tl.constexpr, DIGIT: tl.constexpr, COUNT: tl.constexpr,
    FIRST: tl.constexpr,
):
    """Choose the digit of the pass before, and weigh a tile for this one, until the amount is met exactly."""
    row, tile = tl.program_id(0) // TILES, tl.program_id(0) % TILES
    BOUNDS: tl.constexpr = (1 << DIGIT) + 1
    if FIRST:
        want, off = _wanted(amount, temperature, row, VOCAB, COUNT, LOGITS)
        prefix, done = tl.full([], LOWEST, tl.int64), off.to(tl.float64)
    else:
        before = state + ((step - 1) * rows + row) * 4
        prefix, want, done = tl.load(before).to(tl.int64), tl.load(before + 1), tl.load(before + 2)
        if done == 0.0:
            of_part = part + ((step - 1) % 2).to(tl.int64) * part_size
            prefix, want, exact, _ = _choose(
                of_part, row, prefix, want, step, shift + DIGIT, TILES, TILES_PADDED, DIGIT, COUNT)
            done = (exact & COUNT).to(tl.float64)
    now = state + (step * rows + row) * 4
    first = tile == 0
    tl.store(now, prefix.to(tl.float64), mask=first)
    tl.store(now + 1, want, mask=first)
    tl.store(now + 2, done, mask=first)
    if done == 0.0:
        key, weight, _ = _weights(
            x, peaks, limits, temperature, row, tile, x_row, x_column, VOCAB, TILE, TILES, TILES_PADDED, UNIT, LOGITS,
            DROP, COUNT)
        to = part + (step % 2).to(tl.int64) * part_size + (row * TILES + tile) * BOUNDS
        for bound in range(BOUNDS):
            least = tl.minimum(prefix + (tl.full([], bound, tl.int64) << shift), 0x7FFFFFFF).to(tl.int32)
            tl.store(to + bound, tl.sum(tl.where(key >= least, weight, tl.zeros_like(weight)), 0).to(tl.float64))


@jit(do_not_specialize=("step", "part_size", "rows"))
def _settle(
    x, peaks, inner, temperature, part, state, limits, step, part_size, rows, x_row, x_column,
    VOCAB: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr, TILES_PADDED: tl.constexpr, UNIT: tl.constexpr,
    LOGITS: tl.constexpr, DROP: tl.constexpr, DIGIT: tl.constexpr, COUNT: tl.constexpr,
):
    """Write the threshold of a row, and up to which index values that equal it are kept."""
    row = tl.program_id(0)
    BOUNDS: tl.constexpr = (1 << DIGIT) + 1
    before = state + ((step - 1) * rows + row) * 4
    prefix, want, done = tl.load(before).to(tl.int64), tl.load(before + 1), tl.load(before + 2)
    cut = tl.full([], VOCAB, tl.int32)
    if done == 0.0:
        of_part = part + ((step - 1) % 2).to(tl.int64) * part_size
        prefix, want, _, digit = _choose(of_part, row, prefix, want, step, 0, TILES, TILES_PADDED, DIGIT, COUNT)
        tile = tl.arange(0, TILES_PADDED)
        at = of_part + (row * TILES + tile) * BOUNDS + digit
        reached = tl.load(at, mask=tile < TILES, other=0.0)
        above = tl.load(at + 1, mask=tile < TILES, other=0.0)
        equal, higher = reached - above, tl.sum(above, 0)
        if tl.sum(reached, 0) > want:  # not all equal values are needed: find the tile in which there are enough
            upto = higher + tl.cumsum(equal, 0)
            last = tl.sum(((upto < want) & (tile < TILES)).to(tl.int32), 0)
            last = tl.minimum(last, TILES - 1)
            have = higher + tl.sum(tl.where(tile < last, equal, 0.0), 0)
            key, weight, index = _weights(
                x, peaks, inner, temperature, row, last, x_row, x_column, VOCAB, TILE, TILES, TILES_PADDED, UNIT,
                LOGITS, DROP, COUNT)
            weight = tl.where(key == prefix.to(tl.int32), weight, tl.zeros_like(weight)).to(tl.float64)
            earlier = have + tl.cumsum(weight, 0) - weight
            cut = tl.max(tl.where((weight > 0.0) & (earlier < want), index, -1), 0)
    tl.store(limits + 2 * row, prefix.to(tl.int32))
    tl.store(limits + 2 * row + 1, cut)
# fmt: on
