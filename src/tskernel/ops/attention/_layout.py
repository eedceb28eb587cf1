"""Ragged and paged tensors as padded ones, by index arithmetic on the device: no length is ever read on the host."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor


def bounded(bound: int, limit: int) -> int:
    """Return the smaller of two lengths, but at least 1; works on symbolic sizes without a guard."""
    return cast("int", torch.sym_max(1, torch.sym_min(bound, limit)))


class Ragged:
    """The places of packed rows in a padded ``[batch, longest]`` grid.

    ``longest`` is a bound, at least 1 so that reductions over it are defined. Rows that belong to no sequence share one
    extra slot behind the grid, which ``pad`` cuts off and ``unpad`` fills.
    """

    def __init__(self, offsets: Tensor, rows: int, bound: int) -> None:
        ends = offsets.to(torch.int64)
        row = torch.arange(rows, device=offsets.device)
        self.batch = offsets.shape[0] - 1
        self.longest = bounded(bound, rows)
        self.lengths = ends.diff()
        sequence = torch.searchsorted(ends[1:].contiguous(), row, right=True)
        position = row - ends.index_select(0, sequence)
        inside = (sequence < self.batch) & (position < self.longest)
        self.slots = torch.where(inside, sequence * self.longest + position, self.batch * self.longest)

    def pad(self, x: Tensor) -> Tensor:
        """Return ``x [rows, ...]`` as ``[batch, longest, ...]``, zero where there is no row."""
        grid = x.new_zeros((self.batch * self.longest + 1, *x.shape[1:])).index_copy(0, self.slots, x)
        return grid.narrow(0, 0, self.batch * self.longest).unflatten(0, (self.batch, self.longest))

    def unpad(self, x: Tensor, fill: float) -> Tensor:
        """Return ``x [batch, longest, ...]`` as ``[rows, ...]``, ``fill`` in rows of no sequence."""
        spare = x.new_full((1, *x.shape[2:]), fill)
        return torch.cat([x.flatten(0, 1), spare]).index_select(0, self.slots)


class Paged:
    """The pages of each sequence, as indices that are safe to gather with.

    ``longest`` is a bound, at least one page. ``known [batch, longest]`` is False where the table has no valid page:
    there the gathered values are those of page 0 and mean nothing.
    """

    def __init__(self, page_table: Tensor, lengths: Tensor, cache: Tensor, bound: int) -> None:
        pages, page_size = cache.shape[:2]
        columns = bounded((bound + page_size - 1) // page_size, page_table.shape[1])
        # One spare column, so that a table without columns can be read like any other.
        table = torch.nn.functional.pad(page_table, (0, 1), value=-1).narrow(1, 0, columns)
        start = torch.arange(columns, device=table.device) * page_size
        known = (start < lengths.unsqueeze(1)) & (table >= 0) & (table < pages)
        self.batch = page_table.shape[0]
        self.longest = columns * page_size
        self.pages = torch.where(known, table, 0).flatten()
        self.known = known.unsqueeze(2).expand(-1, -1, page_size).flatten(1)

    def gather(self, cache: Tensor) -> Tensor:
        """Return ``cache [pages, page_size, ...]`` as ``[batch, longest, ...]``, contiguous."""
        return cache.index_select(0, self.pages).view(self.batch, self.longest, *cache.shape[2:])


def visible_keys(
    q_lengths: Tensor | int,
    k_lengths: Tensor,
    q_longest: int,
    k_longest: int,
    *,
    causal: bool,
    window_left: int = -1,
) -> Tensor:
    """Return ``[batch, q_longest, k_longest]``, True where query i of the sequence may look at its key j.

    The last query stands at the last key. A window bounds both sides: the query's own key and ``window_left`` before
    it.
    """
    k_lengths = k_lengths.to(torch.int64).view(-1, 1, 1)
    q_lengths = q_lengths.view(-1, 1, 1) if isinstance(q_lengths, Tensor) else q_lengths
    query = torch.arange(q_longest, device=k_lengths.device).view(1, -1, 1)
    key = torch.arange(k_longest, device=k_lengths.device).view(1, 1, -1)
    own = query + (k_lengths - q_lengths)
    seen = (key < k_lengths) & (query < q_lengths)
    if causal or window_left >= 0:
        seen = seen & (key <= own)
    if window_left >= 0:
        seen = seen & (key >= own - window_left)
    return seen
