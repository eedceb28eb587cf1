# ruff: noqa: ANN001, ANN202
# pyright: reportCallIssue=false, reportAssignmentType=false
"""Routing in Triton: the best experts of a token, and the slots of tokens sorted by expert.

Ranks are single numbers, value before index: equal values fall to the lowest index and every choice is one maximum.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from tskernel.backends.lazy_triton import is_traced, jit
from tskernel.backends.portable import _rows as host
from tskernel.backends.portable._numbers_triton import _ordered
from tskernel.ops.moe._placement import max_padded_slots

if TYPE_CHECKING:
    import triton.language as tl

CHUNK: Final = 64  # slots that a program sorts


# fmt: off
@jit
def _rank(value, index, exists):
    """Return what orders like the fp32 values, equal ones by lowest index; the least number where there is none."""
    key = (_ordered(value).to(tl.int64) << 32) | (0x7FFFFFFF - index).to(tl.int64)
    return tl.where(exists, key, -9223372036854775807 - 1)


@jit
def _router_scores(x, SCORE: tl.constexpr):
    """Return the scores of logits ``[tokens, experts]`` that hold no NaN."""
    if SCORE == "sigmoid":
        y = 1.0 / (1.0 + tl.exp(-x))
    elif SCORE == "softmax":
        top = tl.max(x, 1)
        e = tl.exp(x - tl.where(top == float("-inf"), 0.0, top)[:, None])
        total = tl.sum(e, 1)
        y = e / tl.where(total == 0.0, 1.0, total)[:, None]
    else:  # log1p(u) = log(1 + u) * u / ((1 + u) - 1) keeps the digits that 1 + u loses
        u = tl.exp(tl.minimum(x, 20.0))
        w = 1.0 + u
        log1p = tl.where(w == 1.0, u, tl.log(w) * (u / tl.where(w == 1.0, 1.0, w - 1.0)))
        y = tl.sqrt(tl.where(x > 20.0, x, log1p))
    return y


@jit
def _only_chosen_groups(
    choice, key, exists, GROUPS: tl.constexpr, SIZE: tl.constexpr, G: tl.constexpr, S: tl.constexpr,
    KEEP: tl.constexpr, BIASED: tl.constexpr,
):
    """Return the choice with -inf for experts of all but the KEEP best groups."""
    each = tl.reshape(tl.where(exists, choice, float("-inf")), [choice.shape[0], G, S])
    score = tl.max(each, 2)
    if BIASED and SIZE > 1:
        ranks = tl.reshape(key, [choice.shape[0], G, S])
        others = tl.where(ranks == tl.max(ranks, 2)[:, :, None], float("-inf"), each)
        score += tl.max(others, 2)
    group = tl.arange(0, G)[None, :]
    ranks = _rank(score, group, (group < GROUPS) & (score == score))
    chosen = tl.zeros([choice.shape[0], G], tl.int32)
    for _ in range(KEEP):
        hit = ranks == tl.max(ranks, 1)[:, None]
        chosen = tl.where(hit, 1, chosen)
        ranks = tl.where(hit, -9223372036854775807 - 1, ranks)
    kept = tl.where(chosen[:, :, None] > 0, each, float("-inf"))
    return tl.reshape(kept, [choice.shape[0], G * S])


@jit(do_not_specialize=("tokens",))
def _topk(
    logits, bias, weights, ids, tokens, l_row, l_column,
    GROUPS: tl.constexpr, SIZE: tl.constexpr, G: tl.constexpr, S: tl.constexpr, KEEP: tl.constexpr,
    TOP_K: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr, SCORE: tl.constexpr, RENORM: tl.constexpr,
    FACTOR: tl.constexpr, BIASED: tl.constexpr,
):
    """Choose the experts of BLOCK tokens: TOP_K maxima one after the other."""
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    lane = tl.arange(0, G * S)
    expert = (lane // S) * SIZE + lane % S
    exists = ((lane // S < GROUPS) & (lane % S < SIZE))[None, :]
    inside = (token < tokens)[:, None] & exists
    at = token.to(tl.int64)[:, None] * l_row + expert.to(tl.int64)[None, :] * l_column
    x = tl.load(logits + at, mask=inside, other=float("-inf")).to(tl.float32)
    x = tl.where(x == x, tl.minimum(x, 3.4028234663852886e38), float("-inf"))
    score = _router_scores(x, SCORE)
    choice = x
    if BIASED:
        choice = score + tl.load(bias + expert, mask=lane // S < GROUPS, other=0.0).to(tl.float32)[None, :]
        choice = tl.where(choice == choice, choice, float("-inf"))
    key = _rank(choice, expert[None, :], exists)
    if GROUPS > 1:
        choice = _only_chosen_groups(choice, key, exists, GROUPS, SIZE, G, S, KEEP, BIASED)
        key = _rank(choice, expert[None, :], exists)
    column = tl.arange(0, K)[None, :]
    weight = tl.zeros([BLOCK, K], tl.float32)
    chosen = tl.zeros([BLOCK, K], tl.int32)
    for k in range(TOP_K):
        best = tl.max(key, 1)
        hit = key == best[:, None]
        weight = tl.where(column == k, tl.sum(tl.where(hit, score, 0.0), 1)[:, None], weight)
        chosen = tl.where(column == k, (0x7FFFFFFF - (best & 0x7FFFFFFF)).to(tl.int32)[:, None], chosen)
        key = tl.where(hit, -9223372036854775807 - 1, key)
    if RENORM:
        total = tl.sum(weight, 1)
        weight = weight / tl.where(total == 0.0, 1.0, total)[:, None]
    to = token.to(tl.int64)[:, None] * TOP_K + column
    wanted = (token < tokens)[:, None] & (column < TOP_K)
    tl.store(weights + to, weight * FACTOR, mask=wanted)
    tl.store(ids + to, chosen, mask=wanted)


@jit
def _experts_of(ids, places, slot, slots, top_k, i_row, i_column, experts, known, MAPPED: tl.constexpr):
    """Return the local expert of each slot, ``experts`` for those that are skipped."""
    at = (slot // top_k).to(tl.int64) * i_row + (slot % top_k).to(tl.int64) * i_column
    expert = tl.load(ids + at, mask=slot < slots, other=-1).to(tl.int64)
    if MAPPED:
        inside = (expert >= 0) & (expert < known)
        expert = tl.load(places + tl.where(inside, expert, 0), mask=inside, other=-1).to(tl.int64)
    return tl.where((expert >= 0) & (expert < experts), expert, experts).to(tl.int32)


@jit(do_not_specialize=("slots", "chunks", "size"))
def _count(
    ids, places, counts, order, slots, chunks, size, top_k, i_row, i_column, experts, known,
    CHUNK: tl.constexpr, BINS: tl.constexpr, MAPPED: tl.constexpr,
):
    """Count the slots of a chunk by expert, and fill a part of the order with what marks a place as empty."""
    chunk = tl.program_id(0)
    slot = chunk * CHUNK + tl.arange(0, CHUNK)
    expert = _experts_of(ids, places, slot, slots, top_k, i_row, i_column, experts, known, MAPPED)
    each = tl.histogram(expert, BINS)
    index = tl.arange(0, BINS)
    tl.store(counts + index.to(tl.int64) * chunks + chunk, each, mask=(index < experts) & (chunk < chunks))
    share = (size + tl.num_programs(0) - 1) // tl.num_programs(0)
    stop = tl.minimum(size, (chunk + 1) * share)
    for n in range(chunk * share, stop, 256):
        at = n + tl.arange(0, 256)
        tl.store(order + at, tl.zeros([256], tl.int32) + slots, mask=at < stop)


@jit(do_not_specialize=("chunks",))
def _add_up(counts, totals, chunks, BLOCK: tl.constexpr):
    """Turn the counts of an expert into what comes before each chunk, and their sum."""
    of_expert = counts + tl.program_id(0).to(tl.int64) * chunks
    before = 0
    for n in range(0, chunks, BLOCK):
        at = n + tl.arange(0, BLOCK)
        each = tl.load(of_expert + at, mask=at < chunks, other=0)
        tl.store(of_expert + at, before + tl.cumsum(each, 0) - each, mask=at < chunks)
        before += tl.sum(each, 0)
    tl.store(totals + tl.program_id(0), before)


@jit(do_not_specialize=("slots", "chunks", "spans"))
def _place_slots(
    ids, places, counts, totals, order, owners, used, slots, chunks, spans, top_k, i_row, i_column, experts, known,
    CHUNK: tl.constexpr, BINS: tl.constexpr, MAPPED: tl.constexpr, SPAN: tl.constexpr,
):
    """Put the slots of a chunk where they belong, and name the experts of a part of the spans of places."""
    chunk = tl.program_id(0)
    index = tl.arange(0, BINS)
    total = tl.load(totals + index, mask=index < experts, other=0)
    padded = (total + SPAN - 1) // SPAN * SPAN
    ends = tl.cumsum(padded, 0)
    slot = chunk * CHUNK + tl.arange(0, CHUNK)
    expert = _experts_of(ids, places, slot, slots, top_k, i_row, i_column, experts, known, MAPPED)
    lane = tl.arange(0, CHUNK)
    alike = (expert[:, None] == expert[None, :]) & (lane[None, :] < lane[:, None])
    wanted = expert < experts
    before = tl.load(counts + expert.to(tl.int64) * chunks + chunk, mask=wanted, other=0)
    place = tl.gather(ends - padded, expert, 0) + before + tl.sum(alike.to(tl.int32), 1)
    tl.store(order + place, slot, mask=wanted)
    share = (spans + tl.num_programs(0) - 1) // tl.num_programs(0)
    stop = tl.minimum(spans, (chunk + 1) * share)
    for n in range(chunk * share, stop, 8):
        span = n + tl.arange(0, 8)
        owner = tl.sum((ends[None, :] <= (span * SPAN)[:, None]).to(tl.int32), 1)
        tl.store(owners + span, tl.where(owner < experts, owner, -1), mask=span < stop)
    tl.store(used, tl.max(ends, 0), mask=chunk == 0)
# fmt: on


_plans: Final = host.Steps()
_plans_dispatch: Final = host.Steps()


def topk(
    logits: Tensor,
    bias: Tensor | None,
    weights: Tensor,
    ids: Tensor,
    top_k: int,
    score: str,
    renormalize: bool,
    factor: float,
    n_group: int,
    topk_group: int,
) -> None:
    """Write the weights and ids of the best experts."""
    options = (top_k, score, renormalize, float(factor), n_group, topk_group)
    host.run(_plans, _work, (logits, host.unit(bias), weights, ids), *options)


def _sizes(experts: int, n_group: int, top_k: int) -> dict[str, int]:
    """Return the tile of a program: one warp, so that a maximum is a few exchanges, while a row fits."""
    size = experts // n_group
    groups, padded = host.pow2(n_group), host.pow2(size)
    lanes = groups * padded
    block, count = max(1, 128 // lanes), max(1, min(16, lanes // 512))
    tile = {"GROUPS": n_group, "SIZE": size, "G": groups, "S": padded, "K": host.pow2(top_k)}
    return {**tile, "BLOCK": block, "num_warps": count}


def _work(
    logits: Tensor,
    bias: Tensor | None,
    weights: Tensor,
    ids: Tensor,
    top_k: int,
    score: str,
    renormalize: bool,
    factor: float,
    n_group: int,
    topk_group: int,
) -> list[host.Program]:
    sizes = _sizes(int(logits.shape[1]), n_group, top_k)
    constants = {
        **sizes, "KEEP": topk_group, "TOP_K": top_k, "SCORE": score, "RENORM": renormalize, "FACTOR": factor,
        "BIASED": bias is not None,
    }  # fmt: skip
    grid = (host.blocks(logits.shape[0], sizes["BLOCK"]),)
    return [host.Program(_topk, grid, (logits, bias, weights, ids, logits.shape[0], *logits.stride()), constants)]


def dispatch(ids: Tensor, experts: int, block_size: int, places: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return the slots in the order of their experts, the expert of each block of places, and how many are used."""
    slots = ids.shape[0] * ids.shape[1]
    size = max_padded_slots(slots, experts, block_size)
    make = lambda *shape: torch.empty(shape, dtype=torch.int32, device=ids.device)  # noqa: E731
    order, owners, used = make(size), make(size // block_size), make(1)
    counts, totals = make(experts, host.blocks(slots, CHUNK)), make(experts)
    tensors = (ids, None if places is None else places.contiguous(), counts, totals, order, owners, used)
    host.run(_plans_dispatch, _work_dispatch, tensors, experts, block_size)
    return order, owners, used


def _work_dispatch(
    ids: Tensor,
    places: Tensor | None,
    counts: Tensor,
    totals: Tensor,
    order: Tensor,
    owners: Tensor,
    used: Tensor,
    experts: int,
    block_size: int,
) -> list[host.Program]:
    slots, chunks = ids.shape[0] * ids.shape[1], counts.shape[1]
    top_k = torch.sym_max(1, ids.shape[1])
    known = 0 if places is None else places.shape[0]
    where = (top_k, *ids.stride(), experts, known)
    constants = {"CHUNK": CHUNK, "BINS": max(128, host.pow2(experts + 1)), "MAPPED": places is not None, "num_warps": 4}
    first = (ids, places, counts, order, slots, chunks, order.shape[0], *where)
    last = (ids, places, counts, totals, order, owners, used, slots, chunks, owners.shape[0], *where)
    block = 1024 if is_traced(ids) else min(1024, host.pow2(int(chunks)))
    return [
        host.Program(_count, (chunks,), first, constants),
        host.Program(_add_up, (experts,), (counts, totals, chunks), {"BLOCK": block, "num_warps": 4}),
        host.Program(_place_slots, (chunks,), last, {**constants, "SPAN": block_size}),
    ]


def topk_case(chip: host.Chip, name: str, experts: int, top_k: int, *, n_group: int = 1, score: str = "softmax") -> Any:
    """Return what a test without a GPU compiles of ``topk``."""
    sizes = _sizes(experts, n_group, top_k)
    options = {"num_warps": sizes.pop("num_warps")}
    flags = {"SCORE": score, "RENORM": True, "FACTOR": 2.5, "BIASED": n_group > 1, "KEEP": max(1, n_group // 2)}
    types = {"logits": "*bf16", "bias": "*fp32", "weights": "*fp32", "ids": "*i32", "tokens": "i32", "l_column": "1"}
    return host.compile_case(name, _topk, {**sizes, **flags, "TOP_K": top_k}, types, options)


def dispatch_cases(chip: host.Chip) -> list[Any]:
    """Return what a test without a GPU compiles of ``dispatch``: 256 experts, with a map."""
    fixed = {"CHUNK": CHUNK, "BINS": 512, "MAPPED": True}
    numbers = ("slots", "chunks", "size", "spans", "top_k", "i_row", "experts", "known")
    types = dict.fromkeys(("places", "counts", "totals", "order", "owners", "used"), "*i32") | {"ids": "*i64"}
    types |= dict.fromkeys(numbers, "i32") | {"i_column": "1"}
    four = {"num_warps": 4}
    return [
        host.compile_case("count", _count, fixed, types, four),
        host.compile_case("place", _place_slots, {**fixed, "SPAN": 64}, types, four),
        host.compile_case("add up", _add_up, {"BLOCK": 1024}, types, four),
    ]
