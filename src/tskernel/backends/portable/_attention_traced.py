"""The host side of the Triton attention programs while a graph is traced: sizes may be symbols, nothing has an address.

Tiles and the number of parts are chosen for the sizes of the example inputs and serve all others too: the device
programs derive their ranges from the true lengths. No number of tokens, pages or sequences is asked for, so none is
guarded on. What a program is compiled for (widths, query heads per KV head, page, scale) is: a compiled function for
which these are symbols too, as with ``dynamic=True``, holds for the values seen.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tskernel.backends.lazy_triton import is_traced, traced
from tskernel.backends.portable import _attention_launch as flash
from tskernel.checks import FP8

_UNKNOWN = 1024  # what stands for a size of which the graph does not even record an example


def attend_for(q: Tensor) -> Callable[..., None]:
    """Return ``flash.attend``, or what does the same while a graph is traced."""
    return _attend if is_traced(q) else flash.attend


def same_start(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors begin at one place of one storage, also where there are no addresses."""
    if a.untyped_storage()._cdata != b.untyped_storage()._cdata:
        return False
    return bool(a.storage_offset() == b.storage_offset())


class _Look(NamedTuple):
    """A tensor of the example inputs, as far as the choice of tiles looks at it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def element_size(self) -> int:
        """Return the bytes of an element."""
        return self.dtype.itemsize


def _example(size: int) -> int:
    """Return an int for a size that may be a symbol, without a guard."""
    if not isinstance(size, torch.SymInt):
        return size
    node = size.node
    return int(node.hint) if node.has_hint() else _UNKNOWN


def _look(x: Tensor | None) -> Any:
    return None if x is None else _Look(tuple(map(_example, x.shape)), x.dtype, x.device)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor | None,
    *,
    max_q: int,
    max_k: int,
    scale: float,
    causal: bool,
    cu_q: Tensor | None = None,
    cu_k: Tensor | None = None,
    table: Tensor | None = None,
    lengths: Tensor | None = None,
    window: int = -1,
    cap: float = 0.0,
    sinks: Tensor | None = None,
    q_scale: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """Record the launches that ``flash.attend`` would make."""
    starts = same_start(k, v) and k.stride() == v.stride()
    shared_v = starts and flash.widths(int(q.shape[-1]))[0] == int(v.shape[-1])
    given = flash._dense(flash.Given(q, k, v, out, lse, cu_q, cu_k, table, lengths, sinks, q_scale, k_scale, v_scale))
    # Nothing is known of where values will be: never read two of a byte as one number.
    numbers = float(scale), causal, int(window), float(cap)
    how = flash.How(max_q, max_k, *numbers, None, shared_v, v.dtype in FP8)
    choice = _choice(how, given)
    floats = flash._floats(choice, given)
    work = torch.empty(floats, dtype=torch.float32, device=q.device) if choice.cut.splits > 1 else None
    for kernel, grid, values, options in flash._launches(how, given, choice, work):
        traced(kernel)[grid](*values, **options)


def _choice(how: flash.How, given: flash.Given) -> flash.Choice:
    """Choose for the example inputs, and let the choice serve all sizes."""
    example = how._replace(max_q=_example(how.max_q), max_k=_example(how.max_k))
    looks = flash.Given(*map(_look, given))
    choice = flash._choose(example, looks)
    if choice.cut.spread:  # a deal is compiled for a number of sequences
        choice = flash._choose(example._replace(config=choice.config._replace(dealt=False)), looks)
    ends = given.lengths if given.lengths is not None else given.cu_k
    batch = 0 if ends is None else ends.shape[0] - (1 if given.lengths is None else 0)
    group = int(given.q.shape[1] // given.k.shape[-2])
    most = how.max_q if given.cu_q is None else torch.sym_max(1, torch.sym_min(how.max_q, given.q.shape[0]))
    tiles = (most * group + choice.config.block_m - 1) // choice.config.block_m
    return choice._replace(tiles=tiles, batch=batch)
