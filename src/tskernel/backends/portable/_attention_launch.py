"""The host side of the Triton attention programs: what a call asks of them, launches, plans for repeated calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from tskernel.backends.plans import Plans
from tskernel.backends.portable import _attention_triton as device
from tskernel.backends.portable._attention_cases import Case, case, join_case, plain_case
from tskernel.backends.portable._attention_tiles import (
    Blocks,
    Chip,
    Config,
    Cut,
    Keys,
    bucket,
    chip_of,
    choose_config,
    choose_cut,
    deal_width,
    estimate_splits,
    multiprocessors,
    pow2,
    program_flags,
    reach,
    settle,
    widths,
)
from tskernel.backends.triton_launch import prepare
from tskernel.checks import FLOATS, FP8
from tskernel.dispatch.platform import Arch, CapabilityRequirement, platform_of
from tskernel.dispatch.signature import formats, same_formats

__all__ = [
    "CAPABILITY",
    "MHA_TRAITS",
    "SIGNATURES",
    "Case",
    "Chip",
    "Config",
    "attend",
    "case",
    "join_case",
    "plain_case",
    "pow2",
    "unit",
    "unreadable",
    "widths",
]

CAPABILITY: Final = (
    CapabilityRequirement(vendor="nvidia", at_least="sm80", packages=("triton",)),
    CapabilityRequirement(vendor="amd", at_least="gfx90a", packages=("triton",)),
)
FP8_READ: Final = (torch.float8_e4m3fn, torch.float8_e5m2)
SIGNATURES: Final = (
    same_formats("q", "kv", dtypes=FLOATS) | formats(q=FLOATS, kv=FP8_READ) | same_formats("q", "kv", dtypes=FP8_READ)
)
MHA_TRAITS: Final = {"head_dim": range(1, 257), "head_dim_v": range(1, 257)}
LOG2E: Final = 1.4426950408889634


class How(NamedTuple):
    """What a call asks for beside its tensors; ``max_k`` is rounded up, and only guides how far keys are cut.

    ``shared_v``: values are the first columns of the keys. ``odd``: an address or stride of the values is odd, so that
    two of a byte cannot be read as one number.
    """

    max_q: int
    max_k: int
    scale: float
    causal: bool
    window: int
    cap: float
    config: Config | None
    shared_v: bool
    odd: bool


class Given(NamedTuple):
    """The tensors of a call, in the order in which the program takes them but for its working memory."""

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor | None
    cu_q: Tensor | None
    cu_k: Tensor | None
    table: Tensor | None
    lengths: Tensor | None
    sinks: Tensor | None
    q_scale: Tensor | None
    k_scale: Tensor | None
    v_scale: Tensor | None


class Choice(NamedTuple):
    """Tiles and cut of a call, and how many rows and sequences they serve."""

    config: Config
    cut: Cut
    tiles: int
    batch: int
    flags: dict[str, Any]


class Plan(NamedTuple):
    """The launches of a decode call and the number of floats that it works in."""

    attend: Callable[..., None]
    join: Callable[..., None] | None
    floats: int


_Launch = tuple[Any, tuple[int, ...], tuple[Any, ...], dict[str, Any]]
_plans: Final = Plans[Plan]()


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor | None,
    *,
    max_q: int,
    max_k: int,
    scale: float,
    causal: bool,
    cu_q: Tensor | None = None,
    cu_k: Tensor | None = None,
    table: Tensor | None = None,
    lengths: Tensor | None = None,
    window: int = -1,
    cap: float = 0.0,
    sinks: Tensor | None = None,
    q_scale: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    config: Config | None = None,
) -> None:
    """Attend ``q [T, Hq, D]`` to packed ``k, v [Tk, Hkv, ...]``, or to paged ones given a table and lengths.

    Without ``cu_q`` every sequence has ``max_q`` query rows. ``max_k`` only guides how far the keys are cut.
    """
    if out.numel() == 0:
        return
    shared_v = k.data_ptr() == v.data_ptr() and k.stride() == v.stride() and widths(q.shape[-1])[0] == v.shape[-1]
    odd = v.dtype in FP8 and (v.data_ptr() % 2 == 1 or any(step % 2 for step in v.stride()[:-1]))
    how = How(max_q, 64 * bucket(-(-max_k // 64)), scale, causal, window, cap, config, shared_v, odd)
    asked = Given(q, k, v, out, lse, cu_q, cu_k, table, lengths, sinks, q_scale, k_scale, v_scale)
    plan = _plans.find(how, asked) if cu_q is None else None
    if plan is not None:
        _follow(plan, asked)
        return
    given = _dense(asked)
    choice = _choose(how, given)
    floats = _floats(choice, given)
    work = torch.empty(floats, dtype=torch.float32, device=q.device) if floats else None
    launches = _launches(how, given, choice, work)
    # The sizes of a prefill hardly come again, those of a decode step do; a copied tensor has another look.
    if cu_q is None and all(a is b for a, b in zip(asked, given, strict=True)):
        first, *rest = [prepare(kernel, grid, *values, **options) for kernel, grid, values, options in launches]
        _follow(_plans.keep(how, asked, Plan(first, rest[0] if rest else None, floats)), asked)
        return
    for kernel, grid, values, options in launches:
        kernel[grid](*values, **options)


def _follow(plan: Plan, given: Given) -> None:
    """Launch what an earlier call has prepared."""
    work = torch.empty(plan.floats, dtype=torch.float32, device=given.q.device) if plan.floats else None
    plan.attend(*[t for t in (*given[:5], work, *given[5:]) if t is not None])
    if plan.join is not None:
        plan.join(*[t for t in (work, given.out, given.lse, given.sinks) if t is not None])


def unit(x: Tensor) -> Tensor:
    """Return ``x``, copied where its last stride is not 1."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _dense(given: Given) -> Given:
    """Return the tensors with unit last strides where the program takes no stride for them."""
    free = {"out", "lse", "q_scale", "k_scale", "v_scale"}
    strided = [n for n, t in given._asdict().items() if n not in free and t is not None and t.stride(-1) != 1]
    return given._replace(**{n: getattr(given, n).contiguous() for n in strided}) if strided else given


def unreadable(kv: Tensor) -> str | None:
    """Return why this device cannot read the dtype of the keys, or None."""
    if kv.dtype != torch.float8_e4m3fn or kv.device.type != "cuda":
        return None
    platform = platform_of(kv.device)
    if platform.vendor == "nvidia" and platform.arch is not None and platform.arch < Arch((8, 9)):
        return f"Triton reads {kv.dtype} from sm89 on, {platform} is older"
    return None


def _choose(how: How, given: Given) -> Choice:
    """Return tiles and cut of a call."""
    q, k, v = given.q, given.k, given.v
    (rows, heads, width), value_width, kv_heads = q.shape, v.shape[-1], k.shape[-2]
    most, page = max(1, min(how.max_q, rows)), 0 if given.table is None else k.shape[1]
    ends = given.lengths if given.lengths is not None else given.cu_k
    batch = 0 if ends is None else ends.shape[0] - (given.lengths is None)
    keys, chip = Keys(k.element_size(), page, how.window, how.shared_v), chip_of(q.device)
    group, slots = heads // kv_heads, multiprocessors(q.device)
    c = how.config or choose_config(most * group, width, value_width, q.dtype, keys, chip)
    tiles = -(-most * group // c.block_m)
    programs = batch * kv_heads * tiles
    bound = reach(c, how.max_k, most, how.window)
    cut = Cut(c.splits or estimate_splits(c, programs, bound, slots), 0)
    if given.table is not None and given.cu_q is None and how.window < 0:
        size = c.block_n * (width + (0 if how.shared_v else value_width)) * k.element_size()
        blocks = Blocks(bound, -(-given.table.shape[1] * page // c.block_n), size)
        cut = choose_cut(c, batch, programs, blocks, cut.splits, slots)
    if how.config is None:
        c = settle(c, programs, cut, slots)
    flags = program_flags(c, keys, value_width, chip, q.dtype == torch.float32)
    flags["PAIRS"] &= not how.odd
    return Choice(c, cut, tiles, batch, flags | {"DEALT": deal_width(batch) if cut.spread else 0})


def _floats(choice: Choice, given: Given) -> int:
    """Return how many floats parts, their LSEs and the deal take."""
    if choice.cut.splits == 1:
        return 0
    parts = given.q.shape[0] * given.q.shape[1] * choice.cut.splits
    return parts * (given.v.shape[-1] + 1) + (2 * choice.batch if choice.cut.spread else 0)


def _flags(how: How, given: Given) -> dict[str, Any]:
    """Return the constants of the device program that say what it computes."""
    windowed = how.window >= 0
    # One query token per sequence sees all of its keys.
    causal = how.causal and (given.cu_q is not None or how.max_q > 1)
    unscaled = given.q_scale is None and given.k_scale is None
    return {
        "RAGGED": given.cu_q is not None, "CAUSAL": causal or windowed, "WINDOW": windowed, "CAP": how.cap != 0.0,
        "FUSED": how.cap == 0.0 and how.scale > 0.0 and unscaled, "SINKS": given.sinks is not None,
        "Q_SCALE": given.q_scale is not None, "K_SCALE": given.k_scale is not None,
        "V_SCALE": given.v_scale is not None, "LSE": given.lse is not None, "FP8_Q": given.q.dtype in FP8,
        "SHARED_V": how.shared_v, "SAME": _steps(given.k)[:2] == _steps(given.v)[:2],
    }  # fmt: skip


def _launches(how: How, given: Given, choice: Choice, work: Tensor | None) -> list[_Launch]:
    """Return kernel, grid, arguments and options of the launches of a call."""
    q, k, v, out, lse, table = given.q, given.k, given.v, given.out, given.lse, given.table
    rows, heads, kv_heads = q.shape[0], q.shape[1], k.shape[-2]
    # A program is compiled for these: where a traced size is a symbol, the graph then holds for this value alone.
    width, value_width, group = int(q.shape[2]), int(v.shape[-1]), int(heads // kv_heads)
    page = 0 if table is None else int(k.shape[1])
    c, (splits, spread), ragged = choice.config, choice.cut, given.cu_q is not None
    (main, tail), d_v = widths(width), max(16, pow2(value_width))
    factor = how.scale * LOG2E * (2 / how.cap if how.cap else 1.0)
    # Counts that change from call to call are 0 where unused: there is one program per kind of number, as 1 or 16 n.
    columns, table_row = (0, 0) if table is None else (table.shape[1], table.stride(0))
    out_strides = (*out.stride()[:2], *(lse.stride() if lse is not None else (0, 0)))
    lse_at = rows * heads * splits * value_width if work is not None else 0
    deal_at = lse_at + rows * heads * splits if work is not None and spread else 0
    q_len = 0 if ragged else how.max_q
    span = choice.tiles * (1 if spread else splits)
    places = choice.batch * splits if spread else choice.batch + (1 if ragged else 0)
    grid = (kv_heads, span, places) if choice.flags["KV_FIRST"] else (span, kv_heads, places)
    values = (
        *given[:5], work, *given[5:], factor, how.cap * LOG2E, how.window, rows if ragged else 0, heads, q_len,
        k.shape[0], columns, splits, choice.batch if spread else 0, spread, lse_at, deal_at, *q.stride()[:2],
        *_steps(k), *_steps(v), *out_strides, table_row, *map(_step, (given.q_scale, given.k_scale, given.v_scale)),
    )  # fmt: skip
    options = {
        "D": width, "DV": value_width, "D_MAIN": main, "D_TAIL": tail, "D_V": d_v, "GROUP": group, "PAGE": page,
        "BLOCK_M": c.block_m, "BLOCK_N": c.block_n, "SPLIT": splits > 1, **_flags(how, given), **choice.flags,
        "num_warps": c.warps, "num_stages": c.stages,
    }  # fmt: skip
    launches: list[_Launch] = [(device._attend, grid, values, options)]
    if work is not None:
        parts = (work, out, lse, given.sinks, heads, splits, q_len, lse_at, deal_at, *out_strides)
        flags = {"SINKS": given.sinks is not None, "LSE": lse is not None, "DEALT": spread > 0}
        options = {"DV": value_width, "D_V": d_v, "BLOCK": 16, **flags, "num_warps": 4}
        launches.append((device._join, (heads, rows), parts, options))
    return launches


def _step(scale: Tensor | None) -> int:
    return 0 if scale is None or scale.numel() == 1 else scale.stride(0)


def _steps(x: Tensor) -> tuple[int, ...]:
    """Return the strides of page, row and head; packed keys have no pages."""
    return x.stride()[:3] if x.dim() == 4 else (0, *x.stride()[:2])
