"""What a transformers model hands from its mask to its attention: which rows are read, as a small 4-D integer tensor.

transformers builds one mask per forward pass and gives it to every layer. The usual one is ``[B, 1, Q, K]`` booleans.
Ours names rows instead: how many keys each sequence sees and, where there is padding, the places of the tokens that
count. It stays a 4-D tensor because only that passes through ``generate``, ``torch.compile`` and the models' own mask
code unchanged. What selects a code path (causal or not, the window, padded or not) is coded in its *shape*, so no
value is read on the host.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# Sizes of dimension 1.
_BIDIRECTIONAL, _CAUSAL, _PACKED = 1, 2, 3
_HEAD = 5


@dataclass(frozen=True)
class Plan:
    """Rows to read. Batch B, queries Q and keys K per sequence as the layer sees them, padding and free slots included.

    ``window`` is the number of keys a token sees, itself included (the Hugging Face meaning), 0 for all. ``packed``
    says that one row may hold several sequences, whose offsets the caller then passes as ``cu_seq_lens_q``.

    Shapes, all int32: ``k_len [B]`` visible keys; ``k_end`` and ``q_end [B]`` running totals of visible keys and of
    real queries; ``row [B]`` 0..B-1; ``restarts [B]`` not 0 where a row holds several sequences. Of padded plans
    only: ``k_table [B, K]``, the places of the visible keys in their own row, in front and in order (causal, with a
    cache); ``k_order [B, K]``, all B*K keys as flat indices, the visible ones in front (not causal); ``order [B,
    Q]``, the same for queries, and ``inverse [B, Q]``, its inverse (causal, several queries).
    """

    causal: bool
    window: int
    packed: bool
    k_len: Tensor
    k_end: Tensor
    q_end: Tensor
    row: Tensor
    restarts: Tensor
    k_table: Tensor | None = None
    k_order: Tensor | None = None
    order: Tensor | None = None
    inverse: Tensor | None = None

    @property
    def padded(self) -> bool:
        """Whether some tokens may be padding."""
        return not (self.k_table is None and self.k_order is None and self.order is None)


def encode(plan: Plan) -> Tensor:
    """Return the plan as int32 ``[B, kind, 1 + window, columns]``; the middle dimensions take no memory."""
    head = torch.stack((plan.k_len, plan.k_end, plan.q_end, plan.row, plan.restarts), 1).to(torch.int32)
    tables = [t.to(torch.int32) for t in (plan.k_table, plan.k_order, plan.order, plan.inverse) if t is not None]
    flat = torch.cat((head, *tables), 1)
    kind = _PACKED if plan.packed else _CAUSAL if plan.causal else _BIDIRECTIONAL
    return flat[:, None, None, :].expand(-1, kind, 1 + plan.window, -1)


def is_plan(mask: Tensor) -> bool:
    """Whether a mask is an encoded plan: every other mask of transformers is boolean or floating."""
    return mask.dtype is torch.int32 and mask.dim() == 4


def packed_plan(mask: Tensor) -> bool:
    """Whether a plan is one whose rows may hold several sequences."""
    return mask.shape[1] == _PACKED


def decode(mask: Tensor, queries: int, keys: int) -> Plan:
    """Return the plan of an encoded one. Raises: ValueError when it was made for other numbers of queries or keys."""
    kind, window = mask.shape[1], mask.shape[2] - 1
    causal = kind != _BIDIRECTIONAL
    flat = mask[:, 0, 0]
    head = [flat[:, i].contiguous() for i in range(_HEAD)]
    tables: dict[str, Tensor] = {}
    if flat.shape[1] > _HEAD:
        sizes = table_sizes(causal, queries, keys)
        if flat.shape[1] != _HEAD + sum(sizes.values()):
            raise ValueError(
                f"tskernel attention: attention_mask: expected the plan of {queries} queries and {keys} keys "
                f"({_HEAD + sum(sizes.values())} columns), got {flat.shape[1]} columns; make the mask of a forward "
                "pass from its own inputs"
            )
        tables = dict(zip(sizes, flat[:, _HEAD:].split(list(sizes.values()), 1), strict=True))
    return Plan(causal, window, kind == _PACKED, *head, **tables)


def table_sizes(causal: bool, queries: int, keys: int) -> dict[str, int]:
    """Return the tables of a padded plan, in order, with their widths."""
    if not causal:
        return {"k_order": keys}
    sizes = {} if keys == queries else {"k_table": keys}
    if queries > 1 or not sizes:
        sizes |= {"order": queries, "inverse": queries}
    return sizes


def make_plan(
    *,
    batch: int,
    queries: int,
    keys: int,
    q_offset: int | Tensor,
    k_offset: int,
    causal: bool,
    window: int,
    valid: Tensor | None,
    restarts: Tensor | None,
    device: torch.device | str,
) -> Plan:
    """Return the plan of one forward pass.

    ``q_offset`` and ``k_offset`` are the positions of the first query and the first key. ``valid`` is the 2-D padding
    mask by position, boolean, or None; ``restarts`` marks rows that hold several sequences, or None.
    """
    row = torch.arange(batch, dtype=torch.int32, device=device)
    none = torch.zeros_like(row)
    if valid is None:
        end = q_offset + (queries - k_offset) if causal else keys
        k_len, q_len = none + end, none + queries
        return Plan(
            causal,
            window,
            restarts is not None,
            k_len,
            k_len.cumsum(0),
            q_len.cumsum(0),
            row,
            none if restarts is None else restarts,
        )
    seen = valid_keys(valid, queries=queries, keys=keys, q_offset=q_offset, k_offset=k_offset, causal=causal)
    asks = _at(valid, torch.arange(queries, device=valid.device) + q_offset)
    k_len, q_len = seen.sum(1), asks.sum(1)
    wanted = table_sizes(causal, queries, keys)
    tables = {name: _TABLES[name](seen if name.startswith("k_") else asks) for name in wanted}
    return Plan(causal, window, False, k_len, k_len.cumsum(0), q_len.cumsum(0), row, none, **tables)


def valid_keys(
    valid: Tensor, *, queries: int, keys: int, q_offset: int | Tensor, k_offset: int, causal: bool
) -> Tensor:
    """Return ``[B, K]``, True for keys that the last query of a sequence may see; arguments as for ``make_plan``."""
    place = torch.arange(keys, device=valid.device)
    seen = _at(valid, place + k_offset)
    return seen & (place < q_offset + (queries - k_offset)) if causal else seen


def _at(valid: Tensor, positions: Tensor) -> Tensor:
    """Return the columns of a padding mask: positions behind its end hold no token yet."""
    last = valid.shape[1] - 1
    return valid.index_select(1, positions.clamp(max=last)) & (positions <= last)


def _places(keep: Tensor) -> Tensor:
    """Return for each element of a boolean matrix its place in the flat order that puts the True ones in front."""
    flat = keep.flatten()
    before = flat.cumsum(0)
    rest = before[-1:] + (~flat).cumsum(0)
    return (torch.where(flat, before, rest) - 1).view(keep.shape)


def _flat_front(keep: Tensor) -> Tensor:
    """Return the flat indices of a boolean matrix with the True ones in front, in order."""
    places = _places(keep).flatten()
    return (
        torch.empty_like(places).scatter_(0, places, torch.arange(places.shape[0], device=keep.device)).view(keep.shape)
    )


def _front(keep: Tensor) -> Tensor:
    """Return for each row the columns that are True, in front and in order; what follows them is not to be read."""
    ones = keep.cumsum(1)
    places = torch.where(keep, ones, ones[:, -1:] + (~keep).cumsum(1)) - 1
    return torch.zeros_like(places).scatter_(
        1, places, torch.arange(keep.shape[1], device=keep.device).expand_as(places)
    )


_TABLES = {"k_table": _front, "k_order": _flat_front, "order": _flat_front, "inverse": _places}


def in_one_run(seen: Tensor) -> Tensor:
    """Return whether the True ones of each row stand next to each other."""
    starts = seen & ~torch.nn.functional.pad(seen, (1, 0))[:, :-1]
    return starts.sum(1) <= 1
