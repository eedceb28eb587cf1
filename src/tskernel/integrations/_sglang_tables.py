# pyright: reportMissingImports=false
"""Where a batch's keys and values lie in SGLang's pools, as page tables made on the device.

SGLang keeps the place of every token (``req_to_token``); a page table needs that of the first token of each page. A
pool that keeps layers with a window apart gets a second table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

KVLEN_OF_PADDING = 1  # of requests that only fill up a recorded batch; they read the first slot, which is no token's


@dataclass
class Metadata:
    """A batch, for all layers: ``offsets`` is None where each request has one new token."""

    lengths: Tensor
    table: Tensor
    max_seq_len: int
    offsets: Tensor | None = None
    max_query_len: int = 1
    fresh: bool = False
    window_table: Tensor | None = None
    window_slots: Tensor | None = None

    def to(self, buffers: Metadata, slots: int) -> Metadata:
        """Copy into the buffers of a recorded batch; return views of these, as long as this batch."""
        requests, columns = self.table.shape
        buffers.lengths[:requests].copy_(self.lengths)
        buffers.table[:requests, :columns].copy_(self.table)
        view = Metadata(buffers.lengths[:requests], buffers.table[:requests], buffers.max_seq_len)
        if self.window_table is not None and buffers.window_table is not None:
            buffers.window_table[:requests, :columns].copy_(self.window_table)
            view.window_table = buffers.window_table[:requests]
        if self.window_slots is not None and buffers.window_slots is not None:
            buffers.window_slots[:slots].copy_(self.window_slots)
            buffers.window_slots[slots:].zero_()
            view.window_slots = buffers.window_slots[:slots]
        return view


class Tables:
    """Makes a batch's ``Metadata`` from what SGLang has of it on the host and on the device, without waiting."""

    def __init__(self, runner: Any, apart: bool) -> None:
        self.page_size, self.apart = runner.page_size, apart
        self.pool = runner.token_to_kv_pool
        # A view: what SGLang writes to the pool of requests is seen here.
        self.first_tokens = runner.req_to_token_pool.req_to_token[:, :: self.page_size]
        self.context = runner.req_to_token_pool.req_to_token.shape[1]

    def decode(self, batch: Any) -> Metadata:
        """Return what a batch with one new token per request needs."""
        return self._metadata(batch)

    def extend(self, batch: Any) -> Metadata:
        """Return what a batch needs whose requests have any number of new tokens."""
        metadata = self._metadata(batch)
        new = batch.extend_seq_lens
        metadata.offsets = torch.nn.functional.pad(torch.cumsum(new, 0, dtype=torch.int32), (1, 0))
        on_host, prefixes = batch.extend_seq_lens_cpu, batch.extend_prefix_lens_cpu
        metadata.max_query_len = max(on_host) if on_host else len(batch.out_cache_loc)
        metadata.fresh = prefixes is not None and not any(prefixes)
        return metadata

    def buffers(self, max_requests: int, max_tokens: int, device: Any) -> Metadata:
        """Return the tensors that recorded batches read; they keep their addresses."""
        columns = self.first_tokens.shape[1]
        table = torch.zeros((max_requests, columns), dtype=torch.int32, device=device)
        return Metadata(
            torch.full((max_requests,), KVLEN_OF_PADDING, dtype=torch.int32, device=device), table, self.context,
            window_table=torch.zeros_like(table) if self.apart else None,
            window_slots=torch.zeros(max_tokens, dtype=torch.int64, device=device) if self.apart else None,
        )  # fmt: skip

    def _metadata(self, batch: Any) -> Metadata:
        requests, lengths = batch.batch_size, batch.seq_lens_cpu
        longest = self.context if lengths is None else int(lengths[:requests].max())
        columns = -(-longest // self.page_size)
        first = self.first_tokens[:, :columns].index_select(0, batch.req_pool_indices[:requests])
        metadata = Metadata(batch.seq_lens[:requests].to(torch.int32), self._pages(first), longest)
        if self.apart:
            # What has left the window has no place there any more; it is masked, but must not be read at page -1.
            inside = self.pool.translate_loc_from_full_to_swa(first).clamp(min=0)
            metadata.window_table = self._pages(inside).to(torch.int32)
            if batch.out_cache_loc is not None:
                metadata.window_slots = self.pool.translate_loc_from_full_to_swa(batch.out_cache_loc)
        return metadata

    def _pages(self, first: Tensor) -> Tensor:
        return first if self.page_size == 1 else first.div(self.page_size, rounding_mode="floor")
