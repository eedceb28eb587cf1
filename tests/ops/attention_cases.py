"""Attention calls made from plain sequences, in every form the ops take, with NaN in memory that must not be read."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from tskernel.dispatch.registry import KernelRegistry
from tskernel.library import ops
from tskernel.testing import call, compare, kernel_names

NAN = float("nan")
INF = float("inf")
RAGGED = ("mha_prefill", "mha_extend_with_kvcache")
PAGED = ("mha_extend_with_kvcache", "mha_decode_with_kvcache")
MHA = ("mha_prefill", *PAGED)
LATENT = ("mla_extend_with_kvcache", "mla_decode_with_kvcache")
GARBAGE = (-1, 2**31 - 1, -(2**31), 12345678)


def kernels_of(*names: str) -> list[str]:
    """Return the kernels of several ops; ``op_of`` tells which op a name belongs to."""
    return [k for n in names for k in kernel_names(n)]


def op_of(kernel: str) -> str:
    """Return the op of a kernel name."""
    return kernel.split("/")[1]


@dataclass
class Sequences:
    """Queries, keys and values of each sequence, ``[length, heads, width]``; the queries are its last tokens."""

    q: list[Tensor]
    k: list[Tensor]
    v: list[Tensor]


def uniform(
    q_lengths: Sequence[int],
    k_lengths: Sequence[int],
    heads: tuple[int, int] = (2, 1),
    width: int = 16,
    dtype: torch.dtype = torch.float32,
) -> Sequences:
    """Return the uniform probe: q is 0 and v counts the keys, so a result is the mean of the visible indices."""
    torch.manual_seed(1)
    q = [torch.zeros(n, heads[0], width, dtype=dtype) for n in q_lengths]
    k = [torch.randn(n, heads[1], width).to(dtype) for n in k_lengths]
    v = [torch.arange(n).to(dtype)[:, None, None].expand(n, heads[1], width) for n in k_lengths]
    return Sequences(q, k, v)


def normal(
    q_lengths: Sequence[int],
    k_lengths: Sequence[int],
    heads: tuple[int, int] = (4, 2),
    width: int = 16,
    value_width: int | None = None,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Sequences:
    """Return normally distributed sequences."""
    make = torch.Generator().manual_seed(seed)

    def each(lengths: Sequence[int], count: int, columns: int) -> list[Tensor]:
        return [torch.randn(n, count, columns, generator=make).to(dtype) for n in lengths]

    return Sequences(
        each(q_lengths, heads[0], width),
        each(k_lengths, heads[1], width),
        each(k_lengths, heads[1], value_width or width),
    )


def offsets(parts: Sequence[Tensor]) -> Tensor:
    """Return int32 row offsets."""
    return torch.tensor([0, *accumulate(len(p) for p in parts)], dtype=torch.int32)


def packed(parts: Sequence[Tensor], like: Tensor, spare: int = 0) -> Tensor:
    """Return the rows of all sequences, then ``spare`` rows of NaN."""
    return torch.cat([*parts, torch.full((spare, *like.shape[1:]), NAN).to(like.dtype)])


def pages(
    parts: Sequence[Tensor], page_size: int, unused: float = NAN, spare_columns: int = 2
) -> tuple[Tensor, Tensor, Tensor]:
    """Return a cache, a page table and the lengths.

    Pages are in shuffled order after page 0, which no sequence uses; unused slots hold ``unused``; columns past a
    length hold what would be out of bounds.
    """
    counts = [-(-len(p) // page_size) for p in parts]
    order = iter((torch.randperm(sum(counts), generator=torch.Generator().manual_seed(5)) + 1).tolist())
    shape = (sum(counts) + 2, page_size, *(parts[0].shape[1:] if parts else (1, 16)))
    dtype = parts[0].dtype if parts else torch.float32
    cache = torch.full(shape, unused).to(dtype)
    columns = max(counts, default=0) + spare_columns
    table = torch.tensor(GARBAGE * columns, dtype=torch.int32)[: columns + 1].repeat(len(parts), 1)[:, 1:].contiguous()
    for b, part in enumerate(parts):
        for c in range(counts[b]):
            table[b, c] = page = next(order)
            rows = part[c * page_size : (c + 1) * page_size]
            cache[page, : len(rows)] = rows
    return cache, table, torch.tensor([len(p) for p in parts], dtype=torch.int32)


def ragged_call(s: Sequences, spare: int = 0, **options: Any) -> dict[str, Any]:
    """Return the arguments of mha_prefill, with NaN rows behind the last sequence where asked."""
    k_offsets = offsets(s.k)
    call_ = {
        "q": packed(s.q, s.q[0] if s.q else torch.zeros(0, 2, 16), spare),
        "k": packed(s.k, s.k[0] if s.k else torch.zeros(0, 1, 16), spare),
        "v": packed(s.v, s.v[0] if s.v else torch.zeros(0, 1, 16), spare),
        "cu_seqlens": offsets(s.q),
        "max_seqlen": max(map(len, s.q), default=0),
    }
    if not torch.equal(call_["cu_seqlens"], k_offsets):
        call_ |= {"cu_seqlens_kv": k_offsets, "max_seqlen_kv": max(map(len, s.k), default=0)}
    return {**call_, **options}


def paged_call(
    op: str, s: Sequences, page_size: int = 4, spare: int = 0, unused: float = NAN, **options: Any
) -> dict[str, Any]:
    """Return the arguments of mha_extend_with_kvcache or mha_decode_with_kvcache."""
    k_cache, table, lengths = pages(s.k, page_size, unused)
    v_cache, _, _ = pages(s.v, page_size, unused)
    result: dict[str, Any] = {
        "q": packed(s.q, s.q[0] if s.q else torch.zeros(0, 2, 16), spare),
        "k_cache": k_cache,
        "v_cache": v_cache,
        "page_table": table,
        "cache_seqlens": lengths,
        "max_seqlen_q": max(map(len, s.q), default=1 if "decode" in op else 0),
        "max_seqlen_k": max(map(len, s.k), default=0),
    }
    if "extend" in op:
        result["cu_seqlens_q"] = offsets(s.q)
    return {**result, **options}


def arguments_for(kernel: str, s: Sequences, *, page_size: int = 4, **options: Any) -> dict[str, Any]:
    """Return the arguments with which any MHA kernel attends the sequences; decode needs equal query lengths."""
    op = op_of(kernel)
    return ragged_call(s, **options) if op == "mha_prefill" else paged_call(op, s, page_size, **options)


def latent_call(
    op: str, q: Sequence[Tensor], latents: Sequence[Tensor], rank: int, *, nope: int = 16, **options: Any
) -> dict[str, Any]:
    """Return the arguments of an absorbed MLA op: ``q [n, H, R + Dr]`` and ``latents [n, R + Dr]`` per sequence."""
    cache, table, lengths = pages([x.unsqueeze(1) for x in latents], 4)
    result: dict[str, Any] = {
        "q": torch.stack(list(q)) if "decode" in op else torch.cat(list(q)),
        "kv_cache": cache,
        "page_table": table,
        "cache_seqlens": lengths,
        "max_seqlen_k": max(map(len, latents), default=0),
        "kv_lora_rank": rank,
        "qk_nope_head_dim": nope,
    }
    if "extend" in op:
        result |= {"cu_seqlens_q": offsets(q), "max_seqlen_q": max(map(len, q), default=0)}
    return {**result, **options}


def run(kernel: str, arguments: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
    """Attend with one kernel into a poisoned buffer; also return the LSE where the kernel gives one.

    Skips the test when the kernel declines the call.
    """
    op = op_of(kernel)
    declared = ops[op]
    buffer = declared.allocate(declared.fill(arguments)).fill_(-7.0)
    out = call(op, kernel, **arguments, out=buffer)
    if not KernelRegistry.get().get_by_name(kernel).lse:
        return out, None
    with_lse, lse = call(op, kernel, **arguments, return_lse=True)
    compare(with_lse, out, exact=True)
    return out, lse


def check(kernel: str, arguments: dict[str, Any], out: Tensor | Sequence[float], lse: Tensor | Sequence[float]) -> None:
    """Run a kernel and compare; a list gives one value per row, for all heads and channels."""
    got, got_lse = run(kernel, arguments)
    flat, rows = got.flatten(0, -3), got.shape[:-2].numel()
    want = (
        out if isinstance(out, Tensor) else torch.tensor(out, dtype=torch.float64).view(rows, 1, 1).expand(flat.shape)
    )
    compare(flat, want)
    if got_lse is not None:
        assert got_lse.dtype == torch.float32
        flat_lse = got_lse.flatten(0, -2)
        want_lse = lse if isinstance(lse, Tensor) else torch.tensor(lse, dtype=torch.float64).view(rows, 1)
        compare(flat_lse, want_lse.expand(flat_lse.shape))


def dense(
    s: Sequences,
    *,
    causal: bool = True,
    window_left: int = -1,
    logit_cap: float = 0.0,
    sinks: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend each sequence and head on its own in float64: written for reading, independent of the reference bodies."""
    outs, lses = [], []
    for q, k, v in zip(s.q, s.k, s.v, strict=True):
        group = q.shape[1] // k.shape[1]
        for i in range(len(q)):
            own = i + len(k) - len(q)
            last = own if causal or window_left >= 0 else len(k) - 1
            first = max(0, own - window_left) if window_left >= 0 else 0
            keys = range(first, last + 1)
            for h in range(q.shape[1]):
                kk, vv = (x[list(keys), h // group].double() for x in (k, v))
                scores = kk @ q[i, h].double() * (1 / math.sqrt(q.shape[2]) if scale is None else scale)
                if logit_cap:
                    scores = logit_cap * torch.tanh(scores / logit_cap)
                total = scores.exp().sum()
                lses.append(total.log())
                if sinks is not None:
                    total = total + sinks[h].double().exp()
                outs.append((scores.exp() @ vv) / total if len(keys) else torch.zeros(v.shape[2], dtype=torch.float64))
    rows, heads = sum(map(len, s.q)), s.q[0].shape[1]
    return torch.stack(outs).view(rows, heads, -1), torch.stack(lses).view(rows, heads)
