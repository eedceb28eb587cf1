# ruff: noqa: ANN001, ANN202
# pyright: reportCallIssue=false, reportAssignmentType=false
"""FlashInfer's paged decode, planned without lengths: one program per request, KV head and query tile, keys uncut.

A plan of FlashInfer is made on the host. With ``disable_split_kv`` it depends on counts only, so that one plan serves
every call of its kind, also under capture; what is lost is the cutting of long rows, which few requests need. The
lengths are then read on the device, from page ranges made here. Its ragged prefill, paged prefill and latent decode
plan with the lengths themselves and would have to wait for the device: they are not wrapped.

Read in flashinfer-python 0.7.4 (flashinfer/decode.py, include/flashinfer/page.cuh, attention/scheduler.cuh). Put
right here: the LSE is base 2, rows without keys are finite, and pages before a window are read. The LSE is good to
three digits (seen on an H200), enough for the sinks' factor; it is not given out.

Source: Ye et al. 2025, https://arxiv.org/abs/2501.01005.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch import Tensor

from tskernel.backends.compile_case import CompileCase
from tskernel.backends.cuda import _vendor_rows as rows
from tskernel.backends.lazy_triton import jit
from tskernel.dispatch.errors import KernelRefusedError
from tskernel.dispatch.platform import CapabilityRequirement
from tskernel.dispatch.signature import same_formats

if TYPE_CHECKING:
    import triton.language as tl

CAPABILITY: Final = CapabilityRequirement(
    vendor="nvidia", at_least="sm80", packages=("triton", "flashinfer:BatchDecodeWithPagedKVCacheWrapper")
)
SIGNATURES: Final = same_formats("q", "kv", dtypes=(torch.float16, torch.bfloat16))
TRAITS: Final = {"head_dim": {64, 128, 256}, "head_dim_v": {64, 128, 256}, "scaled_kv": {False}}
# A plan keeps 8 MB on the device and as much pinned on the host, and recorded graphs go on reading it: none is dropped.
_MOST_PLANS: Final = 128
_WORKSPACE: Final = 1 << 20  # bytes; only cut keys need it
_LN2: Final = 0.6931471805599453


class Kind(NamedTuple):
    """What a plan depends on."""

    device: torch.device
    dtype: torch.dtype
    batch: int
    q_len: int
    heads: int
    kv_heads: int
    width: int
    page_size: int
    scale: float
    window: int
    cap: float


_lock = threading.Lock()
_plans: dict[Kind, Any] = {}


@jit(do_not_specialize=("batch", "columns", "step", "q_len", "page_size", "window"))
def _ranges(lengths, starts, tails, batch, columns, step, q_len, page_size, window, BLOCK: tl.constexpr):
    """Write where each request's pages start in the flat table, and how far the last one goes to make its length."""
    b = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    length = tl.load(lengths + b, mask=b < batch, other=0)
    after = tl.load(lengths + b + 1, mask=b + 1 < batch, other=0)
    first = tl.where(window >= 0, tl.maximum(length - q_len - window, 0) // page_size, 0)
    following = tl.where(window >= 0, tl.maximum(after - q_len - window, 0) // page_size, 0)
    start = tl.where(b < batch, b * step + first, (batch - 1) * step + columns)
    end = tl.where(b + 1 < batch, (b + 1) * step + following, (batch - 1) * step + columns)
    tl.store(starts + b, start, mask=b <= batch)
    tl.store(tails + b, length - first * page_size - (end - start - 1) * page_size, mask=b < batch)


@jit(do_not_specialize=("q_len", "heads"))
def _finish(
    out, lengths, q_len, heads, out_row, out_head, WIDTH: tl.constexpr, D: tl.constexpr, H: tl.constexpr
):  # fmt: skip
    """Clear a row that sees no key."""
    row = tl.program_id(0).to(tl.int64)
    blind = tl.load(lengths + row // q_len) - (q_len - 1 - row % q_len) <= 0
    head = tl.arange(0, H)
    if blind:
        column = tl.arange(0, D)[None, :]
        mask = (head < heads)[:, None] & (column < WIDTH)
        here = out + row * out_row + head.to(tl.int64)[:, None] * out_head + column
        tl.store(here, tl.zeros([H, D], out.dtype.element_ty), mask=mask)


def rejects(q: Tensor, k_cache: Tensor, v_cache: Tensor, softmax_scale: float | None) -> str | None:
    """Return why FlashInfer cannot take the call, or None."""
    if q.shape[-1] != v_cache.shape[-1]:
        return f"widths of q and v are {q.shape[-1]} and {v_cache.shape[-1]}: they must be equal"
    if k_cache.stride() != v_cache.stride():
        return f"strides of the caches are {k_cache.stride()} and {v_cache.stride()}: they must be equal"
    if softmax_scale is not None and softmax_scale <= 0.0:
        return f"softmax_scale={softmax_scale}: the kernel takes the maximum before it scales"
    return rows.crooked(q=q, k_cache=k_cache, v_cache=v_cache)


def plan(kind: Kind) -> Any:
    """Return FlashInfer's wrapper, planned for a kind of call.

    Raises: KernelRefusedError where a graph is being captured and there is no plan yet, or where there are too many.
    """
    with _lock:
        found = _plans.get(kind)
        if found is None:
            if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
                raise KernelRefusedError(
                    "FlashInfer has no plan yet for this kind of call and a graph is being captured"
                )
            if len(_plans) >= _MOST_PLANS:
                raise KernelRefusedError(f"FlashInfer keeps {_MOST_PLANS} plans for other kinds of call already")
            found = _plans[kind] = _make_plan(kind)
        return found


def _make_plan(kind: Kind) -> Any:
    import flashinfer  # pyright: ignore[reportMissingImports]

    space = torch.zeros(_WORKSPACE, dtype=torch.uint8, device=kind.device)
    made = flashinfer.BatchDecodeWithPagedKVCacheWrapper(space, "NHD", use_tensor_cores=True, backend="fa2")
    # As many pages as the queries fill stand for any number: without cutting, the plan asks for no more.
    pages = -(-kind.q_len // kind.page_size)
    made.plan(
        torch.arange(kind.batch + 1, dtype=torch.int32) * pages,
        torch.zeros(kind.batch * pages, dtype=torch.int32),
        torch.full((kind.batch,), kind.page_size, dtype=torch.int32),
        kind.heads,
        kind.kv_heads,
        kind.width,
        kind.page_size,
        window_left=kind.window,
        logits_soft_cap=kind.cap,
        q_data_type=kind.dtype,
        kv_data_type=kind.dtype,
        sm_scale=kind.scale,
        disable_split_kv=True,
        q_len_per_req=kind.q_len,
    )
    return made


def decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    table: Tensor,
    lengths: Tensor,
    kind: Kind,
    sinks: Tensor | None,
    out: Tensor,
) -> None:
    """Attend to a paged cache, into ``out``."""
    if out.numel() == 0:
        return
    if table.shape[1] == 0:
        return rows.without_keys(out, None)
    made = plan(kind)
    lengths, table = lengths.contiguous(), table if table.stride(1) == 1 else table.contiguous()
    q = rows.aligned(q.contiguous())
    whole = out.is_contiguous() and out.data_ptr() % 16 == 0
    target = out if whole else torch.empty(out.shape, dtype=out.dtype, device=out.device)
    found = None if sinks is None else torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    _run(made, q, (rows.aligned(k_cache), rows.aligned(v_cache)), table, lengths, kind, target, found)
    if sinks is not None and found is not None:
        rows.discount(target, found * _LN2, sinks)
    _finish[(q.shape[0],)](
        target, lengths, kind.q_len, kind.heads, *target.stride()[:2],
        WIDTH=kind.width, D=kind.width, H=1 << (kind.heads - 1).bit_length(),
    )  # fmt: skip
    if target is not out:
        out.copy_(target)
    return None


def _run(
    made: Any,
    q: Tensor,
    caches: tuple[Tensor, Tensor],
    table: Tensor,
    lengths: Tensor,
    kind: Kind,
    out: Tensor,
    found: Tensor | None,
) -> None:
    starts = torch.empty(kind.batch + 1, dtype=torch.int32, device=q.device)
    tails = torch.empty(kind.batch, dtype=torch.int32, device=q.device)
    columns, step = table.shape[1], table.stride(0)
    _ranges[(-(-(kind.batch + 1) // 256),)](
        lengths, starts, tails, kind.batch, columns, step, kind.q_len, kind.page_size, kind.window, BLOCK=256
    )
    flat = table.as_strided(((kind.batch - 1) * step + columns,), (1,))
    with _lock:
        # What plan() sets from its host arguments, in place of which the device's own stand here.
        made._paged_kv_indptr_buf, made._paged_kv_indices_buf, made._paged_kv_last_page_len_buf = starts, flat, tails
        made.run(q, caches, out=out, lse=found, return_lse=found is not None, enable_pdl=False)


def compile_cases() -> list[CompileCase]:
    """Return what cross-compilation tests build."""
    flags = {"WIDTH": 128, "D": 128, "H": 64}
    return [rows.case("ranges", _ranges, {"BLOCK": 256}), rows.case("finish", _finish, flags)]
