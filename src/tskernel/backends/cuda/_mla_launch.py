"""The host side of the Hopper latent attention: what it takes, tensor maps, launches, and what tests compile."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from tskernel.backends.compile_case import CompileCase, descriptor
from tskernel.backends.cuda import _mla_few_gluon as few
from tskernel.backends.cuda import _mla_gluon as device
from tskernel.backends.plans import Plans
from tskernel.backends.portable._attention_tiles import multiprocessors, pow2
from tskernel.backends.triton_launch import Prepared, prepare
from tskernel.dispatch.platform import CapabilityRequirement
from tskernel.dispatch.signature import same_formats

CAPABILITY: Final = CapabilityRequirement(vendor="nvidia", family="sm90", packages=("triton",))
SIGNATURES: Final = same_formats("q", "kv", dtypes=(torch.bfloat16, torch.float16))
TRAITS: Final = {"kv_lora_rank": {512}, "rope_dim": {64}, "logit_cap": {False}}
LOG2E: Final = 1.4426950408889634
BLOCK: Final = 64  # keys of a block, and query rows of a tile where there are many
# Query rows of a tile where there are few, and pieces of keys in the ring: all that shared memory holds.
FEW: Final = {16: 8, 32: 7}
MOST_REQUESTS: Final = 4096
MOST_ADDRESSES: Final = 512  # whose tensor maps are remembered


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


class _Address(NamedTuple):
    """What a tensor map needs of a tensor, without keeping the tensor."""

    address: int
    dtype: torch.dtype

    def data_ptr(self) -> int:
        """Return the address."""
        return self.address


@lru_cache(maxsize=16)
def _layout(rank: int) -> Any:
    from triton.experimental.gluon import language as gl

    return gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=rank)


def _map(x: Tensor, shape: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...]) -> Any:
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    return TensorDescriptor(_Address(x.data_ptr(), x.dtype), list(shape), list(strides), list(box), _layout(len(box)))


class View:
    """How tensors of one dtype are described to the copy engine: as ``shape`` by ``strides``, in boxes.

    Next to that a tensor map depends on nothing but the address, so maps are remembered by it.
    """

    def __init__(self, shape: tuple[int, ...], strides: tuple[int, ...], boxes: tuple[tuple[int, ...], ...]) -> None:
        """Keep the sizes; no map is made."""
        self._shape, self._strides, self._boxes = shape, strides, boxes
        self._known: dict[int, tuple[Any, ...]] = {}

    def maps(self, x: Tensor) -> tuple[Any, ...]:
        """Return a tensor map for each kind of box."""
        at = x.data_ptr()
        found = self._known.get(at)
        if found is None:
            found = tuple(_map(x, self._shape, self._strides, box) for box in self._boxes)
            if len(self._known) >= MOST_ADDRESSES:
                self._known = {}
            self._known[at] = found
        return found


def _boxes(height: int, page: int) -> tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...]]:
    """Return the boxes of queries and of keys, for tiles of ``height`` rows.

    Keys: 64 of a page, or a whole smaller page. Wide tiles load half of the latent part, and the rotary part; tiles of
    few rows 64 columns.
    """
    keys = min(page, BLOCK)
    if height != BLOCK:
        return ((height, 64),), ((1, keys, 64),)
    return ((BLOCK, 256), (BLOCK, 64)), ((1, keys, 256 if page >= BLOCK else 64), (1, keys, 64))


class _Launches(NamedTuple):
    """The two launches of calls that look the same: tensor maps, and sizes of what passes between them."""

    queries: View
    cache: View
    decode: Prepared
    join: Prepared
    parts: int
    notes: int


_launches: Plans[_Launches] = Plans()


def height_of(rows: int) -> int:
    """Return how many of a request's query rows make a tile."""
    return next((height for height in FEW if rows <= height), BLOCK)


def lanes_of(tiles: int, slots: int) -> int:
    """Return how many of a request's tiles to work on at once, a divisor of all that leaves few of ``slots`` idle."""
    return max(n for n in range(1, tiles + 1) if tiles % n == 0 and 16 * (slots % n) <= slots)


def join_sizes(batch: int, rows: int, tiles: int, slots: int) -> dict[str, int]:
    """Return rows that a program of the join takes, parts that it reads together, and warps that share those.

    With equal lengths a tile is cut into ``slots / tiles`` parts. Nine and more are too many for the registers of a
    thread: then the four warps share the parts of one row, else each has a row of its own. A program takes more rows
    where all would not run at the same time, eight to a multiprocessor: mostly they only find that nothing was cut.
    """
    parts = min(64, max(4, pow2(max(1, slots // (batch * tiles)))))
    spread = 4 if parts > 8 else 1
    take = 4 // spread
    while take < height_of(rows) and 2 * batch * -(-rows // take) > 8 * slots:
        take *= 2
    return {"TAKE": take, "PARTS": parts, "SPREAD": spread}


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
    q, lens = _aligned(q.contiguous()), lens.contiguous()
    kv, table = _aligned(kv), table if table.stride(-1) == 1 else table.contiguous()
    tensors = (q, kv, to, table, lens, lse)
    ready = _launches.find((scale, plan), tensors)
    if ready is None:
        ready = _launches.keep((scale, plan), tensors, _prepare(q, kv, table, lens, to, lse, scale, plan))
    part = torch.empty(ready.parts, dtype=torch.float16, device=q.device)
    notes = torch.empty(ready.notes, dtype=torch.float32, device=q.device)
    shares = torch.empty(q.shape[0] + 2, dtype=torch.int32, device=q.device)
    results = (to,) if lse is None else (to, lse)
    ready.decode(*ready.queries.maps(q), *ready.cache.maps(kv), *results, part, notes, shares, table, lens)
    ready.join(part, notes, shares, *results, lens)
    if to is not out:
        out.copy_(to)


def _aligned(x: Tensor) -> Tensor:
    return x.clone() if x.data_ptr() % 16 else x


def _views(q: Tensor, kv: Tensor, height: int) -> tuple[View, View]:
    """Describe queries as rows, and the cache as pages of rows."""
    pages, page, _, width = kv.shape
    queries, keys = _boxes(height, page)
    # The stride of a single page means nothing and need not be a valid one.
    strides = (kv.stride(0) if pages > 1 else page * kv.stride(1), kv.stride(1), 1)
    return View((q.numel() // width, width), (width, 1), queries), View((pages, page, width), strides, keys)


def _prepare(
    q: Tensor, kv: Tensor, table: Tensor, lens: Tensor, out: Tensor, lse: Tensor | None, scale: float, plan: Plan
) -> _Launches:
    """Work out what follows from sizes and strides."""
    batch, q_len, heads, _ = q.shape
    rows, slots = q_len * heads, multiprocessors(q.device)
    height = height_of(rows)
    tiles, columns = -(-rows // height), table.shape[1]
    queries, cache = _views(q, kv, height)
    strides = (*out.stride()[:3], *((0, 0, 0) if lse is None else lse.stride()))
    lanes = lanes_of(tiles, slots)
    # The program for few rows has one tile.
    line = (tiles // lanes, lanes) if height == BLOCK else (tiles,)
    constants = _constants(kv.shape[1], batch, plan, lse is not None)
    sizes = join_sizes(batch, rows, tiles, slots)
    kinds = (torch.float16, torch.float32, torch.int32)
    part, notes, shares = (torch.empty(0, dtype=kind, device=q.device) for kind in kinds)
    decode = prepare(
        _program(height), (slots,), *queries.maps(q), *cache.maps(kv), out, lse, part, notes, shares, table, lens,
        scale * LOG2E, batch, columns, table.stride(0), *line, rows, heads, q_len, *strides,
        **constants, **_ring(height), num_warps=4,
    )  # fmt: skip
    join = prepare(
        device.DECLARED["join"], (-(-rows // sizes["TAKE"]), batch, 2),
        part, notes, shares, out, lse, lens, columns, lanes, slots, rows, heads, *strides,
        HEIGHT=height, PAGE=kv.shape[1], LSE=lse is not None, **sizes, num_warps=4, launch_pdl=True,
    )  # fmt: skip
    return _Launches(queries, cache, decode, join, 2 * slots * height * 512, 2 * slots * height * 3)


def _program(height: int) -> Any:
    return device.DECLARED["decode"] if height == BLOCK else few.DECLARED["decode"]


def _ring(height: int) -> dict[str, int]:
    return {} if height == BLOCK else {"HEIGHT": height, "GROUPS": FEW[height]}


def _nothing(out: Tensor, lse: Tensor | None) -> None:
    out.zero_()
    if lse is not None:
        lse.fill_(float("-inf"))


def _constants(page: int, batch: int, plan: Plan, lse: bool) -> dict[str, Any]:
    return {"PAGE": page, "BLOCK_B": max(32, pow2(batch)), "LEAST": plan.least, "EXTRA": plan.extra, "LSE": lse}


def decode_case(name: str, *, page: int, height: int = BLOCK, batch: int = 64, lse: bool = True) -> CompileCase:
    """Return what tests compile of the main program: bf16, tiles of ``height`` rows."""
    constants = {**_constants(page, batch, DEFAULT, lse), **_ring(height)}
    queries, keys = _boxes(height, page)
    names = ("q", "q_rope", "kv", "kv_rope") if height == BLOCK else ("q", "kv")
    maps = {n: descriptor("bf16", b, _layout(len(b))) for n, b in zip(names, queries + keys, strict=True)}
    return _case(name, _program(height), maps, constants, {"num_warps": 4})


def join_case(name: str, *, batch: int, rows: int) -> CompileCase:
    """Return what tests compile of the join: bf16, on 132 multiprocessors."""
    height = height_of(rows)
    sizes = join_sizes(batch, rows, -(-rows // height), 132)
    constants = {"HEIGHT": height, "PAGE": 64, "LSE": True, **sizes}
    return _case(name, device.DECLARED["join"], {}, constants, {"num_warps": 4, "launch_pdl": True})


def _case(
    name: str,
    function: Any,
    kinds: dict[str, str],
    constants: dict[str, Any],
    options: dict[str, Any],
) -> CompileCase:
    kinds = kinds | {"out": "*bf16", "lse": "*fp32", "table": "*i32", "lens": "*i32", "factor": "fp32"}
    kinds |= {"part": "*fp16", "notes": "*fp32", "shares": "*i32"}
    code = function.function.__code__
    arguments = code.co_varnames[: code.co_argcount]
    signature = {n: "constexpr" if n in constants else kinds.get(n, "i32") for n in arguments}
    return CompileCase(name, function, signature, constants, options, ("out_seq", "out_token", "out_head"))
