"""The host side of the Triton attention programs: tile sizes, how far to cut the keys, launches, what tests compile."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from tskernel.backends.portable import _attention_triton as device
from tskernel.checks import FLOATS, FP8
from tskernel.dispatch.platform import Arch, CapabilityRequirement, platform_of
from tskernel.dispatch.signature import formats, same_formats

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


class Config(NamedTuple):
    """Tile sizes and launch options; ``splits`` 0 leaves the number of parts to the host's estimate."""

    block_m: int
    block_n: int
    warps: int
    stages: int
    splits: int = 0


class Chip(NamedTuple):
    """What tile sizes depend on: AMD or not, bytes of shared memory of a program, and whether it has tensor memory.

    With tensor memory (sm100) Triton keeps further copies of operands in shared memory.
    """

    hip: bool
    shared: int
    tensor_memory: bool = False


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
    elif kv.window >= 0 and wide <= 64:
        c = Config(128, 64, 4, 3)
    else:
        c = Config(128, 64, 8, 3 if wide <= 128 else 2)
    return _fit(c, width + (0 if kv.shared_v else value_width), width, dtype.itemsize, chip.shared)


class Keys(NamedTuple):
    """What tile sizes depend on: bytes per element, page size (0 = packed), window (-1 = none), values being keys."""

    itemsize: int
    page: int
    window: int
    shared_v: bool = False


def _few_rows(block_m: int, wide: int, kv: Keys) -> Config:
    """Return tiles for a decode step: enough bytes in flight, two programs per multiprocessor."""
    if 0 < kv.page < 64:  # a table entry per key, loaded first: fewer, longer rounds
        return Config(block_m, 128 if wide <= 128 else 64, 4, 2)
    if kv.itemsize == 1:
        return Config(block_m, 64, 2, 3)
    return Config(block_m, 64 if wide <= 128 else 32, 4, 4 if block_m == 16 else 3)


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
    return Chip(hip, getattr(have, "shared_memory_per_block_optin", 64 << 10), not hip and have.major == 10)


def _bucket(blocks: int) -> int:
    """Round up to one of eight sizes per power of two: a growing length must not ask for a new estimate each step."""
    step = 1 << max(0, blocks.bit_length() - 4)
    return -(-blocks // step) * step


def unit(x: Tensor) -> Tensor:
    """Return ``x``, copied where its last stride is not 1."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _dense(x: Tensor | None) -> Tensor | None:
    return x if x is None or x.stride(-1) == 1 else x.contiguous()


def unreadable(kv: Tensor) -> str | None:
    """Return why this device cannot read the dtype of the keys, or None."""
    if kv.dtype != torch.float8_e4m3fn or kv.device.type != "cuda":
        return None
    platform = platform_of(kv.device)
    if platform.vendor == "nvidia" and platform.arch is not None and platform.arch < Arch((8, 9)):
        return f"Triton reads {kv.dtype} from sm89 on, {platform} is older"
    return None


def _splits_of(c: Config, programs: int, max_k: int, most: int, window: int, device: torch.device) -> int:
    reach = max_k if window < 0 else min(max_k, window + most + c.block_n)
    blocks = _bucket(-(-max(1, reach) // c.block_n))
    # With two stages a program has little in flight; large tiles compute more than they read.
    alone = 1.5 if c.stages == 2 and c.block_m <= 32 else 1.05
    return choose_splits(programs, blocks, multiprocessors(device), c.block_m // 32, alone)


def _step(scale: Tensor | None) -> int:
    return 0 if scale is None or scale.numel() == 1 else scale.stride(0)


def pow2(n: int) -> int:
    """Return the least power of two that is at least ``n``."""
    return 1 << (n - 1).bit_length()


@lru_cache(maxsize=256)
def _widths(width: int) -> tuple[int, int]:
    """Return the powers of two that cover a width with least waste: one, or one and a smaller one behind it."""
    main = max(16, pow2(width + 1) // 2)
    tail = max(16, pow2(width - main)) if width > main else 0
    return (main, tail) if tail < main else (2 * main, 0)


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
    q, k, v = unit(q), unit(k), unit(v)
    cu_q, cu_k, table, lengths, sinks = map(_dense, (cu_q, cu_k, table, lengths, sinks))
    (rows, heads, width), most = q.shape, max(1, min(max_q, q.shape[0]))
    value_width, kv_heads = v.shape[-1], k.shape[-2]
    group, page = heads // kv_heads, 0 if table is None else k.shape[1]
    batch = lengths.shape[0] if lengths is not None else cu_k.shape[0] - 1 if cu_k is not None else 0
    main, tail = _widths(width)
    shared_v = k.data_ptr() == v.data_ptr() and k.stride() == v.stride() and main == value_width
    keys = Keys(k.element_size(), page, window, shared_v)
    c = config or choose_config(most * group, width, value_width, q.dtype, keys, chip_of(q.device))
    tiles = -(-most * group // c.block_m)
    splits = c.splits or _splits_of(c, batch * kv_heads * tiles, max_k, most, window, q.device)
    part, part_lse = _parts(q, splits, value_width)
    plain = cap == 0.0 and scale > 0.0 and q_scale is None and k_scale is None
    ragged = cu_q is not None
    flags = {
        "RAGGED": ragged, "CAUSAL": causal or window >= 0, "WINDOW": window >= 0, "CAP": cap != 0.0, "FUSED": plain,
        "SINKS": sinks is not None, "Q_SCALE": q_scale is not None, "K_SCALE": k_scale is not None,
        "V_SCALE": v_scale is not None, "LSE": lse is not None, "FP8_Q": q.dtype in FP8,
        "SHARED_V": shared_v,
        "PHASES": c.block_m > 32 and value_width <= 256,
    }  # fmt: skip
    factor = scale * LOG2E * (2 / cap if cap else 1.0)
    # Counts that change from call to call are 0 where unused: there is one program per kind of number, as 1 or 16 n.
    columns, table_row = (0, 0) if table is None else (table.shape[1], table.stride(0))
    out_strides = (*out.stride()[:2], *(lse.stride() if lse is not None else (0, 0)))
    device._attend[(kv_heads, tiles * splits, batch + ragged)](
        q, k, v, out, lse, part, part_lse, cu_q, cu_k, table, lengths, sinks, q_scale, k_scale, v_scale,
        factor, cap * LOG2E, window, rows * ragged, heads, max_q * (not ragged), k.shape[0], columns, splits,
        *q.stride()[:2], *_steps(k), *_steps(v), *out_strides, table_row, *map(_step, (q_scale, k_scale, v_scale)),
        D=width, DV=value_width, D_MAIN=main, D_TAIL=tail, D_V=max(16, pow2(value_width)), GROUP=group, PAGE=page,
        BLOCK_M=c.block_m, BLOCK_N=c.block_n, SPLIT=splits > 1, **flags, num_warps=c.warps, num_stages=c.stages,
    )  # fmt: skip
    if part is not None and part_lse is not None:
        _join(part, part_lse, out, lse, sinks, out_strides)


def _steps(x: Tensor) -> tuple[int, ...]:
    """Return the strides of page, row and head; packed keys have no pages."""
    return x.stride()[:3] if x.dim() == 4 else (0, *x.stride()[:2])


def _parts(q: Tensor, splits: int, width: int) -> tuple[Tensor | None, Tensor | None]:
    if splits == 1:
        return None, None
    shape = (*q.shape[:2], splits)
    return (
        torch.empty((*shape, width), dtype=torch.float32, device=q.device),
        torch.empty(shape, dtype=torch.float32, device=q.device),
    )


def _join(
    part: Tensor, part_lse: Tensor, out: Tensor, lse: Tensor | None, sinks: Tensor | None, strides: tuple[int, ...]
) -> None:
    """Join the parts ``[T, Hq, splits, Dv]`` into ``out``."""
    rows, heads, splits, width = part.shape
    device._join[(heads, rows)](
        part, part_lse, out, lse, sinks, heads, splits, *strides, DV=width, D_V=max(16, pow2(width)), BLOCK=16,
        SINKS=sinks is not None, LSE=lse is not None, num_warps=4,
    )  # fmt: skip


class Case(NamedTuple):
    """What a test without a GPU compiles: a device function, its argument types, constants and launch options."""

    name: str
    function: Any
    signature: dict[str, str]
    constants: dict[str, Any]
    config: Config


def case(
    chip: Chip,
    name: str,
    *,
    rows: int,
    group: int,
    width: int,
    value_width: int | None = None,
    page: int = 0,
    kv: str = "bf16",
    splits: int = 1,
    ones: bool = False,
    **flags: bool,
) -> Case:
    """Return a bf16 case with ``rows`` query rows per KV head; ``flags`` are those of the device program.

    ``ones``: every count is 1, which the compiler then sees as a constant.
    """
    value_width = width if value_width is None else value_width
    main, tail = _widths(width)
    keys = Keys(1 if "fp8" in kv else 2, page, 0 if flags.get("WINDOW") else -1, flags.get("SHARED_V", False))
    c = choose_config(rows, width, value_width, torch.bfloat16, keys, chip)
    given = {
        "RAGGED": page == 0,
        "CAUSAL": True,
        "FUSED": True,
        "LSE": True,
        "PHASES": c.block_m > 32 and value_width <= 256,
        **flags,
    }
    sizes = {"D": width, "DV": value_width, "D_MAIN": main, "D_TAIL": tail, "D_V": max(16, pow2(value_width))}
    tiles = {"GROUP": group, "BLOCK_M": c.block_m, "BLOCK_N": c.block_n, "SPLIT": splits > 1, "PAGE": page}
    kinds = {"q": "*bf16", "k": f"*{kv}", "v": f"*{kv}", "out": "*bf16", "lse": "*fp32", "sinks": "*fp32"}
    kinds |= dict.fromkeys(("cu_q", "cu_k", "table", "lengths"), "*i32")
    kinds |= dict.fromkeys(("part", "part_lse", "q_scale", "k_scale", "v_scale"), "*fp32")
    kinds |= {"scale": "fp32", "cap": "fp32"}
    function = device.DECLARED["attend"]
    code = function.function.__code__
    arguments = code.co_varnames[: code.co_argcount]
    constants = {n: sizes.get(n, tiles.get(n, given.get(n, False))) for n in arguments if n.isupper()}
    if ones:
        constants |= dict.fromkeys(("rows", "heads", "q_len", "pages", "columns"), 1)
    signature = {n: "constexpr" if n in constants else kinds.get(n, "i32") for n in arguments}
    return Case(name, function, signature, constants, c)


def plain_case(name: str, program: str, constants: dict[str, Any], halves: set[str]) -> Case:
    """Return a case of a function whose pointers are fp32 but for ``halves``, and end before its strides."""
    function = device.DECLARED[program]
    code = function.function.__code__
    arguments = code.co_varnames[: code.co_argcount]
    pointers = {"a", "b", "out", "lse", "lse_a", "lse_b", "part", "part_lse", "sinks"}
    signature = {
        n: "constexpr" if n.isupper() else "i32" if n not in pointers else "*bf16" if n in halves else "*fp32"
        for n in arguments
    }
    return Case(name, function, signature, constants, Config(16, 16, 4, 2))


def join_case() -> Case:
    """Return the program that joins parts."""
    flags = {"SINKS": True, "LSE": True}
    return plain_case("join", "join", {"DV": 128, "D_V": 128, "BLOCK": 16, **flags}, {"out"})
