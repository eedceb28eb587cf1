"""What is timed on a row: the op as selected, each registered kernel by override, and the peers' own interfaces.

A contender is given a set of inputs and returns a call. What a peer does once per step on the host (FlashInfer's
``plan``, FlashAttention-3's scheduler metadata) or asks for (another layout of the same numbers) happens before the
call is returned, so it is not timed. Packages are imported when a contender is prepared.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from _attention_inputs import Inputs, op_call
from _attention_rows import LATENT, ROPE, Row
from torch import Tensor

from tskernel.dispatch.registry import KernelRegistry
from tskernel.library import ops

Call = Callable[[], Tensor]
WORKSPACE = 384 << 20
# Read at import by FlashAttention-4: compiled kernels are kept on disk, so that the processes that warm up share them.
os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
os.environ.setdefault("FLASHINFER_DISABLE_VERSION_CHECK", "1")


class DeclinedError(Exception):
    """A contender does not offer this row."""


def _tokens_first(out: Tensor, row: Row) -> Tensor:
    return out.reshape(row.query_rows, row.heads, row.value_width)


def _heads_first(out: Tensor, row: Row) -> Tensor:
    return _tokens_first(out.transpose(1, 2), row)


@dataclass(frozen=True)
class Contender:
    """Something to time.

    ``source`` is "selected", "kernel" (one of ours or a wrapped one, by override) or "peer". ``read`` brings a result
    to ``[tokens, heads, width]``. ``dtype`` names another row of the tolerance table, for a peer that rounds its inputs
    further.
    """

    name: str
    source: str
    prepare: Callable[[Inputs], Call]
    read: Callable[[Tensor, Row], Tensor] = _tokens_first
    dtype: torch.dtype | None = None


def tskernel_call(override: str | None, x: Inputs) -> Call:
    """Return a call of the public function, with a kernel forced or with the one that is selected."""
    name, arguments = op_call(x)
    return partial(ops[name].front, **arguments, override=override)


def fitting(x: Inputs) -> tuple[str | None, list[tuple[str, str, str]]]:
    """Return the selected kernel, and (kernel, status, reason) for each one beside the reference."""
    name, arguments = op_call(x)
    told = ops[name].explain(**arguments)
    return told.winner, [(c.name, c.status, c.reason) for c in told.candidates if c.solution != "reference"]


def wraps_library(kernel: str) -> bool:
    """Return whether a kernel calls a library: it needs a package besides Triton, or one that comes with torch."""
    spec = KernelRegistry.get().get_by_name(kernel)
    needs = {package.partition(":")[0] for c in spec.capability for package in c.packages}
    return bool(needs - {"triton"}) or spec.solution in ("torch", "sdpa", "cudnn")


def contenders(x: Inputs) -> Iterator[Contender]:
    """Yield everything that may run the row, ours first."""
    winner, kernels = fitting(x)
    if winner is not None:
        yield Contender("tskernel", "selected", partial(tskernel_call, None))
    for kernel, status, _ in kernels:
        if status != "rejected":
            yield Contender(kernel, "kernel", partial(tskernel_call, kernel))
    yield from peers(x.row)


def peers(row: Row) -> Iterator[Contender]:
    """Yield the peers that offer this kind of row; one may still decline when it is prepared or first called."""
    if row.kind == "prefill":
        yield Contender("fa3", "peer", _fa3_varlen)
        yield Contender("fa3 dense", "peer", _fa3_dense)
        yield Contender("fa4", "peer", _fa4_varlen)
        yield Contender("fa4 dense", "peer", _fa4_dense)
        yield Contender("flashinfer fa3", "peer", _flashinfer_sinks if row.sinks else _flashinfer_ragged)
        if not row.sinks and row.window < 0:
            yield Contender("cudnn", "peer", partial(_sdpa, "CUDNN_ATTENTION"), _heads_first)
            yield Contender("fa2", "peer", partial(_sdpa, "FLASH_ATTENTION"), _heads_first)
    elif row.kind == "mla":
        yield Contender("flashinfer fa3", "peer", partial(_flashinfer_mla, "fa3"))
        yield Contender("flashinfer fa2", "peer", partial(_flashinfer_mla, "fa2"))
        yield Contender("fa3 qv", "peer", _fa3_latent)
    else:
        yield from _paged_peers(row)


def _paged_peers(row: Row) -> Iterator[Contender]:
    if row.fp8:
        yield Contender("fa3 fp8 queries", "peer", _fa3_fp8, dtype=torch.float8_e4m3fn)
    else:
        yield Contender("fa3", "peer", partial(_fa3_paged, scheduled=False))
        yield Contender("fa3 scheduled", "peer", partial(_fa3_paged, scheduled=True))
        yield Contender("fa4", "peer", _fa4_paged)
    if row.kind == "decode" and row.queries == 1:
        for layout in ("NHD", "HND"):
            yield Contender(f"flashinfer {layout}", "peer", partial(_flashinfer_decode, layout))
        if row.window < 0 and not row.fp8:
            yield Contender("cudnn contiguous", "peer", partial(_sdpa, "CUDNN_ATTENTION"), _heads_first)
        return
    for backend in ("fa2", "fa3"):
        yield Contender(f"flashinfer {backend}", "peer", partial(_flashinfer_extend, backend))


# FlashAttention-3: flash_attn_interface


def _windows(row: Row) -> tuple[int, int]:
    return (-1, -1) if row.window < 0 else (row.window, 0)


def _bf16(sinks: Tensor | None) -> Tensor | None:
    return None if sinks is None else sinks.bfloat16()


def _first(function: Callable[..., Any], *arguments: Any, **options: Any) -> Tensor:
    result = function(*arguments, **options)
    return result[0] if isinstance(result, tuple) else result


def _fa3_varlen(x: Inputs) -> Call:
    from flash_attn_interface import flash_attn_varlen_func

    row = x.row
    return partial(
        _first, flash_attn_varlen_func, x.q, x.k, x.v, x.offsets, x.offsets, row.queries, row.queries,
        softmax_scale=row.scale, causal=True, window_size=_windows(row), sinks=_bf16(x.sinks),
    )  # fmt: skip


def _fa3_dense(x: Inputs) -> Call:
    from flash_attn_interface import flash_attn_func

    return partial(
        _first, flash_attn_func, x.dense(x.q), x.dense(x.k), x.dense(x.v), softmax_scale=x.row.scale, causal=True,
        window_size=_windows(x.row), sinks=_bf16(x.sinks),
    )  # fmt: skip


def _fa3_paged(x: Inputs, *, scheduled: bool) -> Call:
    from flash_attn_interface import flash_attn_with_kvcache, get_scheduler_metadata

    row, plan = x.row, None
    if scheduled:
        plan = get_scheduler_metadata(
            row.batch, row.queries, row.keys, row.heads, row.kv_heads, row.width, x.lengths, x.q.dtype,
            page_size=row.page, causal=True, window_size=_windows(row),
        )  # fmt: skip
    return partial(
        _first, flash_attn_with_kvcache, x.dense(x.q), x.k, x.v, cache_seqlens=x.lengths, page_table=x.table,
        softmax_scale=row.scale, causal=True, window_size=_windows(row), scheduler_metadata=plan,
    )  # fmt: skip


def _fa3_fp8(x: Inputs) -> Call:
    """FlashAttention-3 takes fp8 keys only with fp8 queries."""
    from flash_attn_interface import flash_attn_with_kvcache

    return partial(
        _first, flash_attn_with_kvcache, x.dense(x.q.to(torch.float8_e4m3fn)), x.k, x.v, cache_seqlens=x.lengths,
        page_table=x.table, softmax_scale=x.row.scale, causal=True,
    )  # fmt: skip


def _fa3_latent(x: Inputs) -> Call:
    """Give the latent part as ``qv`` and values, the rotary part as queries and keys, each contiguous."""
    from flash_attn_interface import flash_attn_with_kvcache

    q = x.dense(x.q)
    rope, latent = x.k[..., LATENT:].contiguous(), x.k[..., :LATENT].contiguous()
    return partial(
        _first, flash_attn_with_kvcache, q[..., LATENT:].contiguous(), rope, latent, qv=q[..., :LATENT].contiguous(),
        cache_seqlens=x.lengths, page_table=x.table, softmax_scale=x.row.scale, causal=True,
    )  # fmt: skip


# FlashAttention-4: flash_attn.cute


def _open_windows(row: Row) -> tuple[int | None, int | None]:
    return (None, None) if row.window < 0 else (row.window, 0)


def _fa4_varlen(x: Inputs) -> Call:
    from flash_attn.cute import flash_attn_varlen_func

    row = x.row
    return partial(
        _first, flash_attn_varlen_func, x.q, x.k, x.v, cu_seqlens_q=x.offsets, cu_seqlens_k=x.offsets,
        max_seqlen_q=row.queries, max_seqlen_k=row.queries, softmax_scale=row.scale, causal=True,
        window_size=_open_windows(row), learnable_sink=_bf16(x.sinks),
    )  # fmt: skip


def _fa4_dense(x: Inputs) -> Call:
    from flash_attn.cute import flash_attn_func

    return partial(
        _first, flash_attn_func, x.dense(x.q), x.dense(x.k), x.dense(x.v), softmax_scale=x.row.scale, causal=True,
        window_size=_open_windows(x.row), learnable_sink=_bf16(x.sinks),
    )  # fmt: skip


def _fa4_paged(x: Inputs) -> Call:
    from flash_attn.cute import flash_attn_varlen_func

    row = x.row
    return partial(
        _first, flash_attn_varlen_func, x.q, x.k, x.v, cu_seqlens_q=x.offsets, seqused_k=x.lengths,
        page_table=x.table, max_seqlen_q=row.queries, max_seqlen_k=row.keys, softmax_scale=row.scale, causal=True,
        window_size=_open_windows(row), num_splits=0,
    )  # fmt: skip


# FlashInfer


def _workspace(x: Inputs) -> Tensor:
    return torch.empty(WORKSPACE, dtype=torch.uint8, device=x.q.device)


def _options(x: Inputs) -> dict[str, Any]:
    """Return what every plan is told."""
    dtypes = {"q_data_type": x.q.dtype, "kv_data_type": x.k.dtype, "o_data_type": x.q.dtype}
    return {"window_left": x.row.window, "sm_scale": x.row.scale, **dtypes}


def _pages(x: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    """Return the page list as FlashInfer takes it: offsets, pages, tokens in the last page."""
    row = x.row
    if x.table is None:
        raise DeclinedError(f"{row.name} has no page table")
    columns = x.table.shape[1]
    indptr = torch.arange(row.batch + 1, dtype=torch.int32) * columns
    last = torch.full((row.batch,), row.keys - (columns - 1) * row.page, dtype=torch.int32)
    return indptr, x.table.flatten(), last


def _flashinfer_ragged(x: Inputs) -> Call:
    from flashinfer import BatchPrefillWithRaggedKVCacheWrapper

    row = x.row
    wrapper = BatchPrefillWithRaggedKVCacheWrapper(_workspace(x), "NHD", backend="fa3")
    wrapper.plan(x.offsets, x.offsets, row.heads, row.kv_heads, row.width, causal=True, **_options(x))
    return partial(wrapper.run, x.q, x.k, x.v)


def _flashinfer_sinks(x: Inputs) -> Call:
    """FlashInfer has sinks on paged caches only: the packed rows are pages in order."""
    from flashinfer.attention import BatchAttentionWithAttentionSinkWrapper

    row, page = x.row, x.row.page
    if row.queries % page:
        raise DeclinedError(f"sequences of {row.queries} are no whole pages")
    columns, device = row.queries // page, x.q.device
    indptr = torch.arange(row.batch + 1, dtype=torch.int32, device=device) * columns
    indices = torch.arange(row.batch * columns, dtype=torch.int32, device=device)
    last = torch.full((row.batch,), page, dtype=torch.int32, device=device)
    wrapper = BatchAttentionWithAttentionSinkWrapper(
        _workspace(x), "NHD", backend="fa3", q_data_type=x.q.dtype, kv_data_type=x.k.dtype, head_dim_qk=row.width,
        head_dim_vo=row.width, window_left=row.window,
    )  # fmt: skip
    heads = (row.heads, row.kv_heads, row.width)
    wrapper.plan(x.offsets, indptr, indices, last, *heads, page, causal=True, **_options(x))
    caches = (x.k.unflatten(0, (-1, page)), x.v.unflatten(0, (-1, page)))
    return partial(wrapper.run, x.q, caches, x.sinks, row.scale)


def flashinfer_decode_wrapper(x: Inputs, layout: str = "NHD") -> tuple[Any, Callable[[], None]]:
    """Return a wrapper for one decode step and the function that plans it."""
    from flashinfer import BatchDecodeWithPagedKVCacheWrapper

    row = x.row
    wrapper = BatchDecodeWithPagedKVCacheWrapper(_workspace(x), layout, use_tensor_cores=True, backend="fa2")
    heads = (row.heads, row.kv_heads, row.width)
    return wrapper, partial(wrapper.plan, *_pages(x), *heads, row.page, **_options(x))


def _flashinfer_decode(layout: str, x: Inputs) -> Call:
    wrapper, plan = flashinfer_decode_wrapper(x, layout)
    plan()
    caches = (x.k, x.v) if layout == "NHD" else (x.k.transpose(1, 2).contiguous(), x.v.transpose(1, 2).contiguous())
    return partial(wrapper.run, x.q, caches)


def _flashinfer_extend(backend: str, x: Inputs) -> Call:
    from flashinfer import BatchPrefillWithPagedKVCacheWrapper

    row = x.row
    wrapper = BatchPrefillWithPagedKVCacheWrapper(_workspace(x), "NHD", backend=backend)
    heads = (row.heads, row.kv_heads, row.width)
    wrapper.plan(x.offsets.cpu(), *_pages(x), *heads, row.page, causal=True, **_options(x))
    return partial(wrapper.run, x.q, (x.k, x.v))


def _flashinfer_mla(backend: str, x: Inputs) -> Call:
    from flashinfer.mla import BatchMLAPagedAttentionWrapper

    row = x.row
    indptr, indices, _ = _pages(x)
    wrapper = BatchMLAPagedAttentionWrapper(_workspace(x), backend=backend)
    widths = (row.heads, LATENT, ROPE, row.page)
    wrapper.plan(
        x.offsets, indptr.to(indices.device), indices, x.lengths, *widths, True, row.scale, x.q.dtype, x.k.dtype
    )
    cache = x.k.squeeze(2)
    parts = [t[..., a:b].contiguous() for t in (x.q, cache) for a, b in ((0, LATENT), (LATENT, None))]
    return partial(wrapper.run, *parts)


# torch's own attention, on tensors with heads first


def _sdpa(backend: str, x: Inputs) -> Call:
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    keys, values = x.k, x.v
    if x.table is not None:
        keys, values = (t[x.table.long().flatten()].flatten(0, 1) for t in (x.k, x.v))
    q, k, v = (x.dense(t).transpose(1, 2).contiguous() for t in (x.q, keys, values))
    scale, causal, allowed = x.row.scale, x.row.queries > 1, getattr(SDPBackend, backend)

    def call() -> Tensor:
        with sdpa_kernel(allowed):
            return scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=True)

    return call
