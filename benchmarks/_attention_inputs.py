"""Inputs of an attention call, and the check of a result against the reference on a sample of its rows."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from _attention_rows import LATENT, NOPE, Row
from torch import Tensor

from tskernel.testing import compare, oracle

COLD = 256 << 20  # bytes of inputs to walk over, five times the L2 cache of an H200
SAMPLE = 12  # rows of a result that are checked


@dataclass(frozen=True)
class Inputs:
    """One set of tensors: packed k and v (prefill) or paged caches, and what says where the sequences lie."""

    row: Row
    q: Tensor
    k: Tensor
    v: Tensor
    offsets: Tensor
    table: Tensor | None
    lengths: Tensor | None
    sinks: Tensor | None
    one: Tensor | None  # the scale of fp8 keys and values

    def dense(self, x: Tensor) -> Tensor:
        """Return packed rows as ``[B, rows, heads, width]``."""
        return x.unflatten(0, (self.row.batch, -1))


def draw(shape: tuple[int, ...], device: str, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return standard normal values; fp8 ones are rounded from bf16."""
    made = torch.randn(shape, dtype=torch.bfloat16, device=device)
    return made if dtype == torch.bfloat16 else made.to(dtype)


def make(row: Row, device: str = "cuda") -> Inputs:
    """Return fresh random inputs; pages lie in random order."""
    offsets = torch.arange(row.batch + 1, dtype=torch.int32, device=device) * row.queries
    q = draw((row.query_rows, row.heads, row.width), device)
    # bf16 values, so that peers that want bf16 sinks get the same ones
    sinks = torch.randn(row.heads, device=device).bfloat16().float() if row.sinks else None
    if row.kind == "prefill":
        k, v = (draw((row.query_rows, row.kv_heads, row.width), device) for _ in range(2))
        return Inputs(row, q, k, v, offsets, None, None, sinks, None)
    columns = -(-row.keys // row.page)
    pages = row.batch * columns
    table = torch.randperm(pages, device=device).int().view(row.batch, columns)
    lengths = torch.full((row.batch,), row.keys, dtype=torch.int32, device=device)
    if row.kind == "mla":
        k = draw((pages, row.page, 1, row.width), device)
        return Inputs(row, q, k, k[..., :LATENT], offsets, table, lengths, sinks, None)
    dtype = torch.float8_e4m3fn if row.fp8 else torch.bfloat16
    k, v = (draw((pages, row.page, row.kv_heads, row.width), device, dtype) for _ in range(2))
    one = torch.ones(1, device=device) if row.fp8 else None
    return Inputs(row, q, k, v, offsets, table, lengths, sinks, one)


def copies(row: Row, cold: int = COLD) -> int:
    """Return how many sets outgrow the L2 cache. Prefill reads what was just written, so one set is enough there."""
    return 1 if row.kind == "prefill" else max(2, min(24, math.ceil(cold / max(1, row.bytes))))


def op_call(x: Inputs) -> tuple[str, dict[str, Any]]:
    """Return the op that serves the row, and its arguments."""
    row = x.row
    options: dict[str, Any] = {"window_left": row.window, "sinks": x.sinks, "softmax_scale": row.scale}
    if row.kind == "prefill":
        return "mha_prefill", {
            "q": x.q, "k": x.k, "v": x.v, "cu_seqlens": x.offsets, "max_seqlen": row.queries, **options
        }  # fmt: skip
    paged = {"page_table": x.table, "cache_seqlens": x.lengths, "max_seqlen_k": row.keys}
    if row.kind == "mla":
        q = x.q.unflatten(0, (row.batch, row.queries))
        return "mla_decode_with_kvcache", {
            "q": q, "kv_cache": x.k, **paged, "kv_lora_rank": LATENT, "qk_nope_head_dim": NOPE,
            "softmax_scale": row.scale,
        }  # fmt: skip
    caches = {"q": x.q, "k_cache": x.k, "v_cache": x.v, **paged, **options}
    caches |= {"k_scale": x.one, "v_scale": x.one}
    if row.kind == "extend":
        return "mha_extend_with_kvcache", {**caches, "cu_seqlens_q": x.offsets, "max_seqlen_q": row.queries}
    return "mha_decode_with_kvcache", {**caches, "max_seqlen_q": row.queries}


@dataclass(frozen=True)
class Expected:
    """Some rows of the right result, ``want [n, heads, width]`` for the token numbers ``rows``."""

    rows: Tensor
    want: Tensor

    def check(self, got: Tensor, dtype: torch.dtype | None = None) -> str:
        """Return "" or how ``got [tokens, heads, width]`` differs.

        Results shrink with the number of keys, and the table's absolute bounds are meant for values of about one: both
        sides are brought to unit root mean square, row by row.
        """
        got = got[self.rows]
        unit = self.want.square().mean(dim=(1, 2), keepdim=True).sqrt().clamp_min(1e-30)
        try:
            compare(got.double() / unit, self.want / unit, dtype=dtype or got.dtype)
        except AssertionError as error:
            return str(error)
        return ""


def expected(x: Inputs, sample: int = SAMPLE) -> Expected:
    """Return what the op's reference gives in float64 for rows spread over the requests, first and last included."""
    total = x.row.query_rows
    numbers = sorted({round(i * (total - 1) / max(1, sample - 1)) for i in range(sample)})
    want = torch.cat([_one_row(x, n) for n in numbers])
    return Expected(torch.tensor(numbers, device=x.q.device), want)


def _one_row(x: Inputs, number: int) -> Tensor:
    """Return the result of one query token: as the last token of a sequence that ends at it."""
    row = x.row
    request, query = divmod(number, row.queries)
    end = row.keys - row.queries + query + 1
    q = x.q[number : number + 1]
    cu = torch.tensor([0, 1], dtype=torch.int32, device=q.device)
    if x.table is None:
        begin = request * row.keys
        k, v = (t[begin : begin + end] for t in (x.k, x.v))
    else:
        pages = x.table[request].long()
        k, v = (t[pages].flatten(0, 1)[:end] for t in (x.k, x.v))
    return oracle(
        "mha_prefill", q, k, v, cu, 1,
        cu_seqlens_kv=torch.tensor([0, end], dtype=torch.int32, device=q.device), max_seqlen_kv=end,
        window_left=row.window, sinks=x.sinks, softmax_scale=row.scale, k_scale=x.one, v_scale=x.one,
    )  # fmt: skip
