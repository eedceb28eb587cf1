"""The host side of the Hopper flash attention: tile sizes, tensor maps, the launch, and what tests compile."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from tskernel.backends.compile_case import CompileCase
from tskernel.backends.cuda import _flash_gluon as device
from tskernel.backends.portable._attention_tiles import multiprocessors
from tskernel.dispatch.platform import CapabilityRequirement
from tskernel.dispatch.signature import same_formats

CAPABILITY: Final = CapabilityRequirement(vendor="nvidia", family="sm90", packages=("triton",))
SIGNATURES: Final = same_formats("q", "kv", dtypes=(torch.bfloat16, torch.float16))
LOG2E: Final = 1.4426950408889634
ALIGNED: Final = ("out_row", "out_head")
FEW_TILES: Final = 4  # per multiprocessor: with fewer, how they fall decides
KEYS_IN_CACHE: Final = 40 << 20  # bytes of keys and values that tiles side by side may read: most of the L2 cache


class Config(NamedTuple):
    """How a program divides its work.

    Consumer warpgroups of 64 rows each; keys per block; stages of the key and value rings and of the queries' one;
    whether consumers take turns to issue products, and keep the values' product in flight beside the softmax; registers
    of a consumer thread.
    """

    consumers: int
    block_n: int
    stages: int
    q_stages: int
    turns: bool
    hold: bool
    registers: int

    @property
    def limit(self) -> int:
        """Registers per thread at entry: what all of the multiprocessor's have to be shared by."""
        return 65536 // (128 * (self.consumers + 1)) // 8 * 8


class Shape(NamedTuple):
    """What a program is made for, next to its tile sizes."""

    width: int
    value_width: int
    group: int
    causal: bool
    window: bool


def padded(width: int) -> int:
    """Return the width of a tile that holds a head: whole 128-byte rows."""
    return max(64, 1 << (width - 1).bit_length())


def packing(group: int) -> int:
    """Return how many query heads of a KV head share a tile of 64 rows: the largest power of two that divides them."""
    return min(64, group & -group)


def choose_config(shape: Shape, rows: int, slots: int) -> Config:
    """Return tile sizes for ``rows`` query rows of all heads on ``slots`` multiprocessors; measured on an H200."""
    wide = max(padded(shape.width), padded(shape.value_width))
    if wide > 128:
        return Config(2, 64, 2, 1, False, False, 240)
    if shape.window and wide <= 64:
        return Config(3, 32, 4, 2, False, False, 160)
    if shape.window:
        return Config(2, 64, 2, 2, False, False, 240)
    if wide > 64:
        return Config(2, 128, 2, 2, False, False, 240)
    if rows < FEW_TILES * slots * 192:
        return Config(2, 128, 3, 2, False, False, 240)
    return Config(3, 128, 2, 2, True, False, 160)


def unsuitable(q: Tensor, k: Tensor, v: Tensor, scales: tuple[Tensor | None, ...], scale: float | None) -> str | None:
    """Return why tensor maps cannot describe the tensors, or the program does not do the arithmetic; else None."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.stride(-1) != 1 or any(s % 8 for s in x.stride()[:-1]) or 0 in x.stride()[:-1]:
            return f"{name} has strides {tuple(x.stride())}; a tensor map needs dense rows at multiples of 16 bytes"
    if any(s is not None for s in scales):
        return "scales of unquantized q, k or v are left to the portable kernel"
    if scale is not None and scale <= 0.0:
        return f"softmax_scale is {scale}; the program takes the maximum before scaling, which needs it positive"
    return None


@lru_cache(maxsize=256)
def _layout(box: tuple[int, ...], dtype: torch.dtype) -> Any:
    from triton.experimental.gluon import language as gl

    kinds = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}
    return gl.NVMMASharedLayout.get_default_for(list(box), kinds[dtype])


def tensor_map(x: Tensor, box: tuple[int, ...]) -> Any:
    """Describe ``x [rows, heads, width]`` to the copy engine, which fills boxes of shared memory; outside is zero."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    if x.data_ptr() % 16:
        x = x.clone()
    return TensorDescriptor(x, list(x.shape), list(x.stride()), list(box), _layout(box, x.dtype))


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor | None,
    cu_q: Tensor,
    cu_k: Tensor,
    *,
    max_k: int,
    scale: float,
    causal: bool,
    window: int = -1,
    cap: float = 0.0,
    sinks: Tensor | None = None,
    config: Config | None = None,
) -> None:
    """Attend packed ``q [Tq, Hq, D]`` to packed ``k, v [Tk, Hkv, ...]``; ``max_k`` only guides the order of tiles."""
    if k.shape[0] == 0 or out.numel() == 0:
        out.zero_()
        if lse is not None:
            lse.fill_(float("-inf"))
        return
    (rows, heads, width), (_, kv_heads, value_width) = q.shape, v.shape
    group = heads // kv_heads
    shape = Shape(width, value_width, group, causal or window >= 0, window >= 0)
    slots = multiprocessors(q.device)
    c = config or choose_config(shape, rows * heads, slots)
    pack, wide, value_wide = packing(group), padded(width), padded(value_width)
    cu_q, cu_k = cu_q.contiguous(), cu_k.contiguous()
    sequences = cu_q.shape[0] - 1
    tiles = rows // (c.consumers * 64 // pack) + sequences + 1
    side_by_side = heads_side_by_side(max_k * (width + value_width) * 2, kv_heads, group // pack)
    programs, turns = share_out(tiles * side_by_side, slots)
    device._attend[(programs, heads // pack // side_by_side)](
        tensor_map(q, (64 // pack, pack, wide)),
        tensor_map(k, (c.block_n, 1, wide)),
        tensor_map(v, (c.block_n, 1, value_wide)),
        out, lse, None if sinks is None else sinks.contiguous(), cu_q, cu_k,
        sequences, tiles, turns, rows, window, scale * LOG2E * (2 / cap if cap else 1.0), cap * LOG2E,
        *out.stride()[:2], *((0, 0) if lse is None else lse.stride()[:2]),
        DV=value_width, HEADS=side_by_side, GROUP=group, PACK=pack, CONSUMERS=c.consumers, Q_STAGES=c.q_stages,
        STAGES=c.stages, CAUSAL=shape.causal, WINDOW=shape.window, CAP=cap != 0.0, FUSED=cap == 0.0,
        SINKS=sinks is not None, LSE=lse is not None,
        TURNS=c.turns, HOLD=c.hold, REGISTERS=c.registers, num_warps=4, maxnreg=c.limit,
    )  # fmt: skip


def share_out(tiles: int, slots: int) -> tuple[int, int]:
    """Return programs per group of heads, and turns of each.

    A program that stays saves the start of the next one. But going back and forth evens out tiles of unlike length only
    over several turns: with fewer, one program per tile leaves that to the hardware.
    """
    if tiles < FEW_TILES * slots:
        return tiles, 1
    return slots, -(-tiles // slots)


@lru_cache(maxsize=256)
def heads_side_by_side(head_bytes: int, kv_heads: int, blocks_per_head: int) -> int:
    """Return how many blocks of heads to work on at once, a divisor of all, so that their keys stay in the cache."""
    most = max(1, KEYS_IN_CACHE // max(1, head_bytes))
    return blocks_per_head * max(n for n in range(1, kv_heads + 1) if kv_heads % n == 0 and n <= max(1, most))


def case(
    name: str, width: int, group: int, config: Config | None = None, value_width: int | None = None, **flags: bool
) -> CompileCase:
    """Return what tests compile: bf16; ``flags`` are those of the device program."""
    value_width = width if value_width is None else value_width
    shape = Shape(width, value_width, group, flags.get("CAUSAL", True), flags.get("WINDOW", False))
    c = config or choose_config(shape, 1 << 24, 132)
    pack = packing(group)
    boxes = {
        "q_desc": (64 // pack, pack, padded(width)),
        "k_desc": (c.block_n, 1, padded(width)),
        "v_desc": (c.block_n, 1, padded(value_width)),
    }
    kinds = {n: f"tensordesc<bf16{list(b)},{_layout(b, torch.bfloat16)!r}>" for n, b in boxes.items()}
    kinds |= {"out": "*bf16", "lse": "*fp32", "sinks": "*fp32", "cu_q": "*i32", "cu_k": "*i32"}
    kinds |= {"factor": "fp32", "cap": "fp32"}
    given: dict[str, Any] = {"CAUSAL": True, "FUSED": not flags.get("CAP", False), "LSE": True, **flags}
    given |= {"DV": value_width, "HEADS": group // pack, "GROUP": group, "PACK": pack, "CONSUMERS": c.consumers}
    given |= {"Q_STAGES": c.q_stages, "STAGES": c.stages, "TURNS": c.turns, "HOLD": c.hold, "REGISTERS": c.registers}
    code = device.DECLARED["attend"].function.__code__
    arguments = code.co_varnames[: code.co_argcount]
    constants = {n: given.get(n, False) for n in arguments if n.isupper()}
    signature = {n: "constexpr" if n in constants else kinds.get(n, "i32") for n in arguments}
    options = {"num_warps": 4, "maxnreg": c.limit}
    return CompileCase(name, device.DECLARED["attend"], signature, constants, options, ALIGNED)
