"""The host side of the Hopper latent attention: what it takes, tensor maps, launches, and what tests compile."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from tskernel.backends.compile_case import CompileCase, descriptor
from tskernel.backends.cuda import _mla_gluon as device
from tskernel.dispatch.platform import CapabilityRequirement
from tskernel.dispatch.signature import same_formats

CAPABILITY: Final = CapabilityRequirement(vendor="nvidia", family="sm90", packages=("triton",))
SIGNATURES: Final = same_formats("q", "kv", dtypes=(torch.bfloat16, torch.float16))
TRAITS: Final = {"kv_lora_rank": {512}, "rope_dim": {64}, "logit_cap": {False}}
LOG2E: Final = 1.4426950408889634
BLOCK: Final = 64  # query rows of a tile and keys of a block
MOST_REQUESTS: Final = 4096


class Plan(NamedTuple):
    """How blocks are shared out: a chunk has at least ``least``; a second piece in a program costs about ``extra``."""

    least: int = 2
    extra: int = 4


DEFAULT: Final = Plan()


def unsuitable(q: Tensor, kv_cache: Tensor) -> str | None:
    """Return why the tensor maps of the program cannot describe the call, or None; reads metadata only."""
    pages, page = kv_cache.shape[:2]
    if page not in (16, 32) and (page == 0 or page % BLOCK):
        return f"page size is {page}; the program loads pages of 16, 32 or a multiple of {BLOCK} tokens"
    if q.shape[0] > MOST_REQUESTS:
        return f"the batch has {q.shape[0]} requests; a program shares out at most {MOST_REQUESTS}"
    steps = [kv_cache.stride(1), *([kv_cache.stride(0)] if pages > 1 else [])]
    if kv_cache.stride(-1) != 1 or any(s <= 0 or s % 8 for s in steps):
        return (
            f"kv_cache has strides {tuple(kv_cache.stride())}; a tensor map needs rows of consecutive elements at "
            "multiples of 16 bytes"
        )
    return None


@lru_cache(maxsize=64)
def multiprocessors(device: torch.device) -> int:
    """Return how many multiprocessors a device has."""
    return torch.cuda.get_device_properties(device).multi_processor_count


@lru_cache(maxsize=16)
def _layout(rank: int) -> Any:
    from triton.experimental.gluon import language as gl

    return gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=rank)


def _map(x: Tensor, shape: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...]) -> Any:
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    return TensorDescriptor(x, list(shape), list(strides), list(box), _layout(len(box)))


def _query_maps(q: Tensor) -> tuple[Any, Any]:
    """Describe ``q [B, q_len, H, 576]`` as rows: boxes of half the latent part, and of the rotary part."""
    q = q.contiguous()
    q = q.clone() if q.data_ptr() % 16 else q
    shape, strides = (q.numel() // q.shape[-1], q.shape[-1]), (q.shape[-1], 1)
    return _map(q, shape, strides, (BLOCK, 256)), _map(q, shape, strides, (BLOCK, 64))


def _boxes(page: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the boxes of keys: 64 of a page, or a whole smaller page; half the latent part, and the rotary part."""
    return ((1, BLOCK, 256), (1, BLOCK, 64)) if page >= BLOCK else ((1, page, 64), (1, page, 64))


def _cache_maps(kv: Tensor) -> tuple[Any, Any]:
    """Describe ``kv [pages, page, 1, 576]`` as pages of rows."""
    kv = kv.clone() if kv.data_ptr() % 16 else kv
    pages, page, _, width = kv.shape
    # The stride of a single page means nothing and need not be a valid one.
    strides = (kv.stride(0) if pages > 1 else page * kv.stride(1), kv.stride(1), 1)
    first, second = (_map(kv, (pages, page, width), strides, box) for box in _boxes(page))
    return first, second


def join_rows(rows: int) -> int:
    """Return how many of all rows a program of the join takes: few while there are few, for speed, then more."""
    return 1 if rows <= 2048 else 4 if rows <= 8192 else 16


def attend(
    q: Tensor,
    kv: Tensor,
    table: Tensor,
    lens: Tensor,
    out: Tensor,
    lse: Tensor | None,
    scale: float,
    plan: Plan = DEFAULT,
) -> None:
    """Attend ``q [B, q_len, H, 576]`` to the latent vectors ``kv [pages, page, 1, 576]`` of each request.

    Token j of a request sees the first ``len - (q_len - 1 - j)`` keys. Writes ``out [B, q_len, H, 512]`` and
    ``lse [B, q_len, H]``, any strides. Two launches; nothing on the host depends on the lengths.
    """
    if out.numel() == 0:
        return
    if kv.shape[0] == 0 or table.shape[1] == 0:
        _nothing(out, lse)
        return
    to = out if out.stride(-1) == 1 else torch.empty_like(out, memory_format=torch.contiguous_format)
    (batch, q_len, heads, _), page = q.shape, kv.shape[1]
    table, lens = table if table.stride(-1) == 1 else table.contiguous(), lens.contiguous()
    rows, slots = q_len * heads, multiprocessors(q.device)
    tiles, columns = -(-rows // BLOCK), table.shape[1]
    part = torch.empty((2 * slots, BLOCK, 512), dtype=torch.float32, device=q.device)
    part_lse = torch.empty((2 * slots, BLOCK), dtype=torch.float32, device=q.device)
    strides = (*to.stride()[:3], *((0, 0, 0) if lse is None else lse.stride()))
    constants = _constants(page, batch, plan, lse is not None)
    device.DECLARED["decode"][(slots,)](
        *_query_maps(q), *_cache_maps(kv), to, lse, part, part_lse, table, lens, scale * LOG2E, batch, columns,
        table.stride(0), tiles, rows, heads, q_len, *strides, **constants, num_warps=4,
    )  # fmt: skip
    take = join_rows(batch * rows)
    device.DECLARED["join"][(-(-rows // take), batch)](
        part, part_lse, to, lse, lens, batch, columns, tiles, slots, rows, heads, *strides, **constants,
        TAKE=take, BLOCK_K=_pow2(slots), num_warps=4,
    )  # fmt: skip
    if to is not out:
        out.copy_(to)


def _nothing(out: Tensor, lse: Tensor | None) -> None:
    out.zero_()
    if lse is not None:
        lse.fill_(float("-inf"))


def _pow2(n: int) -> int:
    return 1 << (n - 1).bit_length()


def _constants(page: int, batch: int, plan: Plan, lse: bool) -> dict[str, Any]:
    return {"PAGE": page, "BLOCK_B": max(128, _pow2(batch)), "LEAST": plan.least, "EXTRA": plan.extra, "LSE": lse}


def case(name: str, program: str, *, page: int, batch: int = 64, lse: bool = True) -> CompileCase:
    """Return what tests compile: bf16, one of the two programs."""
    kinds = {"q": descriptor("bf16", (BLOCK, 256), _layout(2)), "q_rope": descriptor("bf16", (BLOCK, 64), _layout(2))}
    boxes = _boxes(page)
    kinds |= {n: descriptor("bf16", b, _layout(3)) for n, b in zip(("kv", "kv_rope"), boxes, strict=True)}
    kinds |= {"out": "*bf16", "lse": "*fp32", "part": "*fp32", "part_lse": "*fp32", "table": "*i32", "lens": "*i32"}
    kinds |= {"factor": "fp32"}
    function = device.DECLARED[program]
    code = function.function.__code__
    arguments = code.co_varnames[: code.co_argcount]
    given = {**_constants(page, batch, DEFAULT, lse), "TAKE": 4, "BLOCK_K": 256}
    constants = {n: v for n, v in given.items() if n in arguments}
    signature = {n: "constexpr" if n in constants else kinds.get(n, "i32") for n in arguments}
    aligned = ("out_seq", "out_token", "out_head")
    return CompileCase(name, function, signature, constants, {"num_warps": 4}, aligned)
