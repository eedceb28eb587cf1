# ruff: noqa: ANN001, ANN202
# pyright: reportCallIssue=false, reportAssignmentType=false, reportGeneralTypeIssues=false
"""Sampling in Triton: rows of a vocabulary cut into tiles, so that one row keeps many multiprocessors busy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from tskernel.backends.lazy_triton import is_traced, jit
from tskernel.backends.portable import _rows as host
from tskernel.backends.portable._filter_triton import (
    _among,
    _cleaned,
    _peak_of,
    _scaled,
    _search,
    _settle,
    _shared,
    _short_keys,
)
from tskernel.backends.portable._numbers_triton import _columns
from tskernel.backends.portable._route_triton import _rank

if TYPE_CHECKING:
    import triton.language as tl

TILE: Final = 4096
COUNTING, WEIGHING = 4, 3  # bits of a digit: bounds are weighed one after the other


# fmt: off
@jit
def _peaks(
    x, peaks, x_row, x_column, VOCAB: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr, UNIT: tl.constexpr,
    LOGITS: tl.constexpr,
):
    """Write the largest value of a tile."""
    row, tile = tl.program_id(0) // TILES, tl.program_id(0) % TILES
    y, _, _ = _cleaned(x, row, tile, x_row, x_column, VOCAB, TILE, UNIT, LOGITS)
    tl.store(peaks + tl.program_id(0), tl.max(y, 0))


@jit
def _best(
    x, best, ids, x_row, x_column, VOCAB: tl.constexpr, TILE: tl.constexpr, PARTS: tl.constexpr, UNIT: tl.constexpr,
):
    """Find the largest logit of a part of a row: its rank, or its index where the row has one part."""
    row, part = tl.program_id(0) // PARTS, tl.program_id(0) % PARTS
    TILES: tl.constexpr = (VOCAB + TILE - 1) // TILE
    most = tl.full([TILE], -9223372036854775807 - 1, tl.int64)
    for tile in range(part, TILES, PARTS):
        y, index, inside = _cleaned(x, row, tile, x_row, x_column, VOCAB, TILE, UNIT, True)
        most = tl.maximum(most, _rank(y, index, inside))
    top = tl.max(most, 0)
    if PARTS == 1:
        tl.store(ids + row, (0x7FFFFFFF - (top & 0x7FFFFFFF)).to(tl.int32))
    else:
        tl.store(best + tl.program_id(0), top)


@jit
def _winner(best, ids, PARTS: tl.constexpr, PADDED: tl.constexpr):
    """Write the index of the best rank of a row; 0 where there is none."""
    row, part = tl.program_id(0), tl.arange(0, PADDED)
    top = tl.max(tl.load(best + row * PARTS + part, mask=part < PARTS, other=-9223372036854775807 - 1), 0)
    index = (0x7FFFFFFF - (top & 0x7FFFFFFF)).to(tl.int32)
    tl.store(ids + row, tl.where(top == -9223372036854775807 - 1, 0, index))


@jit
def _kept(
    x, peaks, limits, amount, row, tile, x_row, x_column, VOCAB: tl.constexpr, TILE: tl.constexpr,
    TILES: tl.constexpr, TILES_PADDED: tl.constexpr, UNIT: tl.constexpr, DROP: tl.constexpr, MIN_P: tl.constexpr,
):
    """Return the weights of a tile, 0 for those that are not kept."""
    y, index, inside = _cleaned(x, row, tile, x_row, x_column, VOCAB, TILE, UNIT, False)
    peak = _peak_of(peaks, row, TILES, TILES_PADDED)
    y = _shared(y, peak)
    if MIN_P:
        share = tl.load(amount + row)
        share = tl.where(share > 1.0, 1.0, share).to(tl.float64)
        best = tl.where(peak == float("inf"), 1.0, peak).to(tl.float64)
        keep = y.to(tl.float64) >= best * share
    else:
        keep = _among(_short_keys(y, DROP), index, limits, row)
    return tl.where(keep & inside, y, 0.0)


@jit
def _sums(
    x, peaks, limits, amount, sums, x_row, x_column, VOCAB: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr,
    TILES_PADDED: tl.constexpr, UNIT: tl.constexpr, DROP: tl.constexpr, MIN_P: tl.constexpr,
):
    """Write the sum of what a tile keeps."""
    row, tile = tl.program_id(0) // TILES, tl.program_id(0) % TILES
    y = _kept(
        x, peaks, limits, amount, row, tile, x_row, x_column, VOCAB, TILE, TILES, TILES_PADDED, UNIT, DROP, MIN_P)
    tl.store(sums + tl.program_id(0), tl.sum(y, 0))


@jit
def _write(
    x, peaks, limits, amount, sums, out, x_row, x_column, o_row, o_column, VOCAB: tl.constexpr, TILE: tl.constexpr,
    TILES: tl.constexpr, TILES_PADDED: tl.constexpr, UNIT: tl.constexpr, DROP: tl.constexpr, MIN_P: tl.constexpr,
    O_UNIT: tl.constexpr,
):
    """Write what a tile keeps over the sum of the row."""
    row, tile = tl.program_id(0) // TILES, tl.program_id(0) % TILES
    y = _kept(
        x, peaks, limits, amount, row, tile, x_row, x_column, VOCAB, TILE, TILES, TILES_PADDED, UNIT, DROP, MIN_P)
    part = tl.arange(0, TILES_PADDED)
    total = tl.sum(tl.load(sums + row * TILES + part, mask=part < TILES, other=0.0), 0)
    y = tl.div_rn(y, tl.where(total == 0.0, 1.0, total) + tl.zeros([TILE], tl.float32))
    index = tile * TILE + tl.arange(0, TILE)
    to = out + row.to(tl.int64) * o_row + _columns(index, o_column, O_UNIT)
    tl.store(to, y.to(out.dtype.element_ty), mask=index < VOCAB)


@jit
def _gumbel(seed, stream, tile, TILE: tl.constexpr):
    """Return the noise of a tile's tokens: word ``id % 4`` of the Philox call ``id // 4`` of the stream."""
    call = (tile * (TILE // 4) + tl.arange(0, TILE // 4)).to(tl.uint32)
    none = call * 0
    low, high = (stream & 0xFFFFFFFF).to(tl.uint32), ((stream >> 32) & 0xFFFFFFFF).to(tl.uint32)
    w0, w1, w2, w3 = tl.philox(seed, call, none, none + low, none + high)
    word = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), [TILE])
    v = tl.minimum((word.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.99999994039535522)
    w = 1.0 - v
    # log1p(-v) = log(1 - v) * v / (1 - (1 - v)) keeps the digits that 1 - v loses
    log1p = tl.where(w == 1.0, -v, tl.log(w) * (v / tl.where(w == 1.0, 1.0, 1.0 - w)))
    return -tl.log(-log1p)


@jit
def _race(
    x, peaks, of_k, of_p, temperature, seeds, streams, best, x_row, x_column, VOCAB: tl.constexpr,
    TILE: tl.constexpr, TILES: tl.constexpr, TILES_PADDED: tl.constexpr, UNIT: tl.constexpr, DROP: tl.constexpr,
):
    """Write the rank of the best score of the kept tokens of a tile."""
    row, tile = tl.program_id(0) // TILES, tl.program_id(0) % TILES
    y, index, inside = _cleaned(x, row, tile, x_row, x_column, VOCAB, TILE, UNIT, True)
    key = _short_keys(y, DROP)
    keep = inside & (y > float("-inf")) & _among(key, index, of_k, row) & _among(key, index, of_p, row)
    top = tl.full([], -9223372036854775807 - 1, tl.int64)
    if tl.max(keep.to(tl.int32), 0) > 0:
        peak = _peak_of(peaks, row, TILES, TILES_PADDED)
        scaled = _scaled(y, peak, tl.load(temperature + row))
        score = scaled + _gumbel(tl.load(seeds + row), tl.load(streams + row), tile, TILE)
        top = tl.max(_rank(score, index, keep), 0)
    tl.store(best + tl.program_id(0), top)


@jit(do_not_specialize=("rows",))
def _penalties(
    logits, prompt, counts, presence, frequency, repetition, rows, l_row, l_column, p_row, p_column, c_row, c_column,
    VOCAB: tl.constexpr, SPAN: tl.constexpr, L_UNIT: tl.constexpr, P_UNIT: tl.constexpr, C_UNIT: tl.constexpr,
):
    """Lower the logits of a span of tokens that were seen before."""
    PARTS: tl.constexpr = (VOCAB + SPAN - 1) // SPAN
    row = tl.program_id(0) // PARTS
    column = tl.program_id(0) % PARTS * SPAN + tl.arange(0, SPAN)
    inside, far = (column < VOCAB) & (row < rows), row.to(tl.int64)
    to = logits + far * l_row + _columns(column, l_column, L_UNIT)
    x = tl.load(to, mask=inside, other=0.0).to(tl.float32)
    in_prompt = tl.load(prompt + far * p_row + _columns(column, p_column, P_UNIT), mask=inside, other=0)
    count = tl.load(counts + far * c_row + _columns(column, c_column, C_UNIT), mask=inside, other=0)
    factor = tl.load(repetition + row, mask=row < rows, other=1.0)
    worse = tl.where(x > 0.0, tl.div_rn(x, factor + tl.zeros([SPAN], tl.float32)), x * factor)
    x = tl.where((in_prompt != 0) | (count > 0), worse, x)
    x -= tl.load(frequency + row, mask=row < rows, other=0.0) * count.to(tl.float32)
    x -= tl.load(presence + row, mask=row < rows, other=0.0) * (count > 0).to(tl.float32)
    tl.store(to, x.to(logits.dtype.element_ty), mask=inside)


@jit(do_not_specialize=("rows",))
def _verify(
    draft, target, accepted, tokens, rows, d_row, d_column, t_row, t_column,
    DRAFTED: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr,
):
    """Accept the drafts of BLOCK rows up to the first token that differs."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    column = tl.arange(0, PADDED)
    there = (row < rows)[:, None]
    at = row.to(tl.int64)[:, None] * t_row + column.to(tl.int64)[None, :] * t_column
    wanted = tl.load(target + at, mask=there & (column <= DRAFTED)[None, :], other=-1).to(tl.int64)
    at = row.to(tl.int64)[:, None] * d_row + column.to(tl.int64)[None, :] * d_column
    given = tl.load(draft + at, mask=there & (column < DRAFTED)[None, :], other=-1).to(tl.int64)
    agrees = (given == wanted) & (given >= 0)
    length = tl.min(tl.where(agrees, DRAFTED, tl.minimum(column, DRAFTED)[None, :]), 1)
    tl.store(accepted + row, length, mask=row < rows)
    to = tokens + row.to(tl.int64)[:, None] * (DRAFTED + 1) + column[None, :]
    kept = tl.where(column[None, :] <= length[:, None], wanted, -1)
    tl.store(to, kept.to(tl.int32), mask=there & (column <= DRAFTED)[None, :])
# fmt: on


_plans_argmax: Final = host.Steps()
_plans_renorm: Final = host.Steps()
_plans_sample: Final = host.Steps()
_plans_penalties: Final = host.Steps()
_plans_verify: Final = host.Steps()


def _tiles(x: Tensor) -> dict[str, Any]:
    """Return the constants of a program that has a tile of a row: short rows have short tiles."""
    vocab = int(x.shape[1])
    tile = min(TILE, max(128, host.pow2(vocab)))
    tiles = -(-vocab // tile)
    return {
        "VOCAB": vocab,
        "TILE": tile,
        "TILES": tiles,
        "TILES_PADDED": host.pow2(tiles),
        "UNIT": bool(x.stride(1) == 1),
    }


def _without(constants: dict[str, Any], *names: str) -> dict[str, Any]:
    return {n: v for n, v in constants.items() if n not in names}


def _key_bits(dtype: torch.dtype) -> int:
    """Return how many leading bits of an fp32 number tell values of a dtype apart."""
    return {torch.bfloat16: 16, torch.float16: 19}.get(dtype, 32)


def argmax(logits: Tensor) -> Tensor:
    """Return the index of the largest logit of each row."""
    parts = _parts(logits)
    rows = logits.shape[0]
    ids = torch.empty((rows,), dtype=torch.int32, device=logits.device)
    best = torch.empty((rows, parts), dtype=torch.int64, device=logits.device) if parts > 1 else None
    host.run(_plans_argmax, _work_argmax, (logits, best, ids), parts)
    return ids


def _parts(logits: Tensor) -> int:
    """Return how many programs share a row: about four to a multiprocessor in all."""
    tiles = -(-int(logits.shape[1]) // TILE)
    if is_traced(logits):
        return min(tiles, 32)
    most = -(-4 * host.multiprocessors(logits.device) // max(1, logits.shape[0]))
    return 1 if most <= 1 or tiles == 1 else min(tiles, host.pow2(most))


def _work_argmax(logits: Tensor, best: Tensor | None, ids: Tensor, parts: int) -> list[host.Program]:
    sizes = _tiles(logits)
    constants = {**_without(sizes, "TILES", "TILES_PADDED"), "PARTS": parts, "num_warps": host.warps(sizes["TILE"])}
    arguments = (logits, best, ids, *logits.stride())
    programs = [host.Program(_best, (torch.sym_max(1, logits.shape[0]) * parts,), arguments, constants)]
    if parts > 1:
        padded = {"PARTS": parts, "PADDED": host.pow2(parts), "num_warps": 1}
        programs.append(host.Program(_winner, (logits.shape[0],), (best, ids), padded))
    return programs


def renorm(probs: Tensor, amount: Tensor, out: Tensor, kind: str) -> None:
    """Write what "top_k", "top_p" or "min_p" keeps of each row, over its sum."""
    rows, sizes = probs.shape[0], _tiles(probs)
    tiles, make = sizes["TILES"], torch.empty
    peaks, sums = (make((rows, tiles), dtype=torch.float32, device=probs.device) for _ in range(2))
    limits = part = state = None
    if kind != "min_p":
        limits, part, state = _memory(probs, COUNTING if kind == "top_k" else WEIGHING, _key_bits(probs.dtype) - 1)
    host.run(_plans_renorm, _work_renorm, (probs, host.unit(amount), peaks, limits, part, state, sums, out), kind)


def _memory(x: Tensor, digit: int, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return room for thresholds and cuts, for what tiles weigh in two passes, and for the state of all passes."""
    rows, tiles, passes = x.shape[0], _tiles(x)["TILES"], -(-bits // digit)
    limits = torch.empty((rows, 2), dtype=torch.int32, device=x.device)
    part = torch.empty((2, rows, tiles, (1 << digit) + 1), dtype=torch.float64, device=x.device)
    return limits, part, torch.empty((passes, rows, 4), dtype=torch.float64, device=x.device)


def _work_renorm(
    probs: Tensor,
    amount: Tensor,
    peaks: Tensor,
    limits: Tensor | None,
    part: Tensor | None,
    state: Tensor | None,
    sums: Tensor,
    out: Tensor,
    kind: str,
) -> list[host.Program]:
    sizes, bits = _tiles(probs), _key_bits(probs.dtype)
    threads = {"num_warps": host.warps(sizes["TILE"])}
    grid = (torch.sym_max(1, probs.shape[0]) * sizes["TILES"],)
    constants = {**_without(sizes, "TILES_PADDED"), "LOGITS": False, **threads}
    programs = [host.Program(_peaks, grid, (probs, peaks, *probs.stride()), constants)]
    if limits is not None and part is not None and state is not None:
        memory = (part, state)
        programs += _threshold(probs, peaks, None, amount, None, memory, limits, kind == "top_k", bits - 1)
    constants = {**sizes, "DROP": 32 - bits, "MIN_P": kind == "min_p", **threads}
    given = (probs, peaks, limits, amount, sums)
    programs.append(host.Program(_sums, grid, (*given, *probs.stride()), constants))
    last = {**constants, "O_UNIT": bool(out.stride(1) == 1)}
    return [*programs, host.Program(_write, grid, (*given, out, *probs.stride(), *out.stride()), last)]


def _threshold(
    x: Tensor,
    peaks: Tensor,
    inner: Tensor | None,
    amount: Tensor,
    temperature: Tensor | None,
    memory: tuple[Tensor, Tensor],
    limits: Tensor,
    count: bool,
    bits: int,
) -> list[host.Program]:
    """Return the passes that find the threshold of each row, for keys of ``bits`` that tell values apart."""
    (part, state), sizes, rows = memory, _tiles(x), x.shape[0]
    digit = COUNTING if count else WEIGHING
    passes, logits = -(-bits // digit), temperature is not None
    # What does not vary between values is dropped; a sign keeps its bit.
    known = {**sizes, "LOGITS": logits, "DROP": 32 - bits - (0 if logits else 1), "DIGIT": digit, "COUNT": count}
    known["num_warps"] = host.warps(sizes["TILE"])
    lowest = -(1 << (bits - 1)) if logits else 0
    size = rows * sizes["TILES"] * ((1 << digit) + 1)
    grid, programs = (torch.sym_max(1, rows) * sizes["TILES"],), []
    for step in range(passes):
        numbers = (step, digit * (passes - 1 - step), size, rows, *x.stride())
        constants = {**known, "LOWEST": lowest, "FIRST": step == 0}
        given = (x, peaks, inner, amount, temperature, part, state)
        programs.append(host.Program(_search, grid, (*given, *numbers), constants))
    given = (x, peaks, inner, temperature, part, state, limits, passes, size, rows, *x.stride())
    return [*programs, host.Program(_settle, (torch.sym_max(1, rows),), given, known)]


def sample(logits: Tensor, top_k: Tensor, top_p: Tensor, temperature: Tensor, seed: Tensor, offset: Tensor) -> Tensor:
    """Return a token for each row."""
    rows, tiles, bits = logits.shape[0], _tiles(logits)["TILES"], _key_bits(logits.dtype)
    ids = torch.empty((rows,), dtype=torch.int32, device=logits.device)
    peaks = torch.empty((rows, tiles), dtype=torch.float32, device=logits.device)
    best = torch.empty((rows, tiles), dtype=torch.int64, device=logits.device)
    of_k, of_p = _memory(logits, COUNTING, bits), _memory(logits, WEIGHING, bits)
    given = map(host.unit, (top_k, top_p, temperature, seed, offset))
    host.run(_plans_sample, _work_sample, (logits, *given, peaks, *of_k, *of_p, best, ids))
    return ids


def _work_sample(
    logits: Tensor, top_k: Tensor, top_p: Tensor, temperature: Tensor, *rest: Tensor
) -> list[host.Program]:
    seed, offset, peaks, of_k, part_k, state_k, of_p, part_p, state_p, best, ids = rest
    sizes, bits = _tiles(logits), _key_bits(logits.dtype)
    threads = {"num_warps": host.warps(sizes["TILE"])}
    grid, at = (torch.sym_max(1, logits.shape[0]) * sizes["TILES"],), logits.stride()
    constants = {**_without(sizes, "TILES_PADDED"), "LOGITS": True, **threads}
    programs = [host.Program(_peaks, grid, (logits, peaks, *at), constants)]
    programs += _threshold(logits, peaks, None, top_k, temperature, (part_k, state_k), of_k, True, bits)
    programs += _threshold(logits, peaks, of_k, top_p, temperature, (part_p, state_p), of_p, False, bits)
    given = (logits, peaks, of_k, of_p, temperature, seed, offset, best, *at)
    programs.append(host.Program(_race, grid, given, {**sizes, "DROP": 32 - bits, **threads}))
    padded = {"PARTS": sizes["TILES"], "PADDED": sizes["TILES_PADDED"], "num_warps": 1}
    return [*programs, host.Program(_winner, (torch.sym_max(1, logits.shape[0]),), (best, ids), padded)]


def penalties(
    logits: Tensor, prompt: Tensor, counts: Tensor, presence: Tensor, frequency: Tensor, repetition: Tensor
) -> None:
    """Lower the logits of tokens that were seen before, in place."""
    given = map(host.unit, (presence, frequency, repetition))
    host.run(_plans_penalties, _work_penalties, (logits, host.as_bytes(prompt), counts, *given))


def _work_penalties(
    logits: Tensor, prompt: Tensor, counts: Tensor, presence: Tensor, frequency: Tensor, repetition: Tensor
) -> list[host.Program]:
    rows, vocab = logits.shape[0], int(logits.shape[1])
    span = min(host.TILE, host.pow2(vocab))
    units = {f"{n}_UNIT": bool(t.stride(1) == 1) for n, t in zip("LPC", (logits, prompt, counts), strict=True)}
    constants = {"VOCAB": vocab, "SPAN": span, **units, "num_warps": host.warps(span)}
    numbers = (rows, *logits.stride(), *prompt.stride(), *counts.stride())
    grid = (torch.sym_max(1, rows) * -(-vocab // span),)
    tensors = (logits, prompt, counts, presence, frequency, repetition)
    return [host.Program(_penalties, grid, (*tensors, *numbers), constants)]


def verify(draft: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return how many tokens of each draft are accepted, and the tokens that follow."""
    make = lambda shape: torch.empty(shape, dtype=torch.int32, device=target.device)  # noqa: E731
    accepted, tokens = make((target.shape[0],)), make(target.shape)
    # The draft may have no element at all; the target always has some.
    host.run(_plans_verify, _work_verify, (target, draft, accepted, tokens))
    return accepted, tokens


def _work_verify(target: Tensor, draft: Tensor, accepted: Tensor, tokens: Tensor) -> list[host.Program]:
    drafted, rows = int(draft.shape[1]), draft.shape[0]
    padded = host.pow2(drafted + 1)
    block = max(1, 256 // padded)
    numbers = (rows, *draft.stride(), *target.stride())
    constants = {"DRAFTED": drafted, "PADDED": padded, "BLOCK": block, "num_warps": 1 if padded <= 256 else 4}
    return [host.Program(_verify, (host.blocks(rows, block),), (draft, target, accepted, tokens, *numbers), constants)]


def _case(name: str, function: Any, constants: dict[str, Any], chip: host.Chip, **types: str) -> Any:
    """Return a case of contiguous rows of 128256 numbers."""
    whole = {"VOCAB": 128256, "TILE": TILE, "TILES": 32, "TILES_PADDED": 32, "UNIT": True, "DROP": 16, **constants}
    declared = (getattr(function, "function", None) or function.fn).__code__
    names = declared.co_varnames[: declared.co_argcount]
    kinds = {
        "x": "*bf16", "logits": "*bf16", "out": "*bf16", "peaks": "*fp32", "sums": "*fp32", "limits": "*i32",
        "inner": "*i32", "of_k": "*i32", "of_p": "*i32", "temperature": "*fp32", "part": "*fp64", "state": "*fp64",
        "best": "*i64", "ids": "*i32", "seeds": "*i64", "streams": "*i64", "amount": "*fp32", "x_column": "1",
        "o_column": "1", "step": "i32", "shift": "i32", "part_size": "i32", "rows": "i32",
    }  # fmt: skip
    types = {n: k for n, k in {**kinds, **types}.items() if n in names}
    constants = {n: v for n, v in whole.items() if n in names}
    return host.compile_case(name, function, constants, types, {"num_warps": host.warps(TILE, hip=chip.hip)})


def argmax_cases(chip: host.Chip) -> list[Any]:
    """Return what a test without a GPU compiles of ``argmax``."""
    return [_case("shared rows", _best, {"PARTS": 8}, chip)]


def filter_cases(chip: host.Chip) -> list[Any]:
    """Return what a test without a GPU compiles of the search for a threshold."""
    count = {"LOGITS": False, "DIGIT": COUNTING, "COUNT": True, "LOWEST": 0, "FIRST": False}
    weigh = {"LOGITS": True, "DIGIT": WEIGHING, "COUNT": False, "LOWEST": -(1 << 31), "FIRST": False, "DROP": 0}
    return [
        _case("settle", _settle, count, chip),
        _case("weigh", _search, weigh, chip, x="*fp32"),
        _case("count", _search, count, chip, inner="none", amount="*i32", temperature="none"),
    ]


def renorm_cases(chip: host.Chip) -> list[Any]:
    """Return what a test without a GPU compiles of what filters write."""
    return [_case("write", _write, {"MIN_P": False, "O_UNIT": True}, chip)]


def race_cases(chip: host.Chip) -> list[Any]:
    """Return what a test without a GPU compiles of the draw."""
    return [_case("race", _race, {}, chip)]


def penalty_cases(chip: host.Chip) -> list[Any]:
    """Return what a test without a GPU compiles of penalties."""
    flags = {"SPAN": host.TILE, "L_UNIT": True, "P_UNIT": True, "C_UNIT": True}
    types = dict.fromkeys(("presence", "frequency", "repetition"), "*fp32") | {"prompt": "*u8", "counts": "*i32"}
    types |= dict.fromkeys(("l_column", "p_column", "c_column"), "1")
    return [_case("a span", _penalties, flags, chip, **types)]


def verify_cases(chip: host.Chip) -> list[Any]:
    """Return what a test without a GPU compiles of the verification of drafts."""
    types = {"draft": "*i64", "target": "*i32", "accepted": "*i32", "tokens": "*i32", "d_column": "1", "t_column": "1"}
    return [_case("four tokens", _verify, {"DRAFTED": 4, "PADDED": 8, "BLOCK": 32}, chip, **types)]
