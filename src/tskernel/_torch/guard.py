"""One comparison that says whether tensors look as they did.

Type, dispatch keys under the current modes, dtype, device, sizes, strides.

torch's own guard object (what Dynamo used for its tensor guards) does this in C++ at about 0.15 us a tensor, and since
it compares the dispatch key set *with* thread-local modes applied, every mode, transform, autocast or tracing state,
present or future, differs from the plain eager state in which an entry was made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import peek_interpreter_stack

from tskernel._torch.gate import GATE

Guard = Callable[..., bool]

try:
    from torch._C._dynamo.guards import TensorGuards
except ImportError:  # private in torch: where it is gone, the Python comparison below serves
    TensorGuards = None


def make_guard(tensors: Sequence[Tensor]) -> Guard | None:
    """Return a function that tells whether as many tensors look like these, or None where they cannot be guarded."""
    first = {id(t): i for i, t in reversed(list(enumerate(tensors)))}
    if len(first) == len(tensors):
        return _guard_distinct(tensors)
    # One tensor given for two arguments (offsets of queries and keys, a scale): the C++ guard refuses to see it twice.
    unique = sorted(first.values())
    twins = [(i, first[id(t)]) for i, t in enumerate(tensors) if first[id(t)] != i]
    check = _guard_distinct([tensors[i] for i in unique])
    if check is None:
        return None
    return lambda *now: all(now[i] is now[j] for i, j in twins) and check(*[now[i] for i in unique])


def _guard_distinct(tensors: Sequence[Tensor]) -> Guard | None:
    if not tensors:
        return None
    if TensorGuards is None:
        return _python_guard(tensors)
    sizes: Any = [list(t.shape) for t in tensors]
    strides: Any = [list(t.stride()) for t in tensors]
    guard = TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
    return guard.check if guard.check(*tensors) else None


def _look(tensors: Sequence[Tensor]) -> tuple[object, ...]:
    tls = (torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set())
    state = tuple(k.raw_repr() for k in tls)
    grad = torch.is_grad_enabled()
    return (state, *[(t.__class__, t.shape, t.stride(), t.dtype, t.device, grad and t.requires_grad) for t in tensors])


def _python_guard(tensors: Sequence[Tensor]) -> Guard:
    expected = _look(tensors)
    return lambda *now: _look(now) == expected


def needs_dispatcher(tensors: Sequence[Tensor], *, autocast: bool) -> bool:
    """Whether a call must go through ``torch.ops``.

    Some tensor or mode that the dispatcher, not a kernel, has to see. Where the C++ gate is built, both are asked.
    """
    if GATE is not None and GATE.needs_dispatcher(autocast, *tensors):
        return True
    return python_needs_dispatcher(tensors, autocast=autocast)


def python_needs_dispatcher(tensors: Sequence[Tensor], *, autocast: bool) -> bool:
    """Answer for ``needs_dispatcher`` by torch's state as Python shows it."""
    if (torch._C._dispatch_tls_local_include_set() - _ALWAYS_INCLUDED).raw_repr():
        return True
    if torch._C._len_torch_dispatch_stack() or peek_interpreter_stack() is not None:
        return True
    if torch._C._get_tracing_state() is not None or torch._C._is_torch_function_mode_enabled():
        return True
    if autocast and torch._C._is_any_autocast_enabled():
        return True
    grad = torch.is_grad_enabled()
    return any(t.__class__ not in PLAIN or (grad and t.requires_grad) or not _is_dense(t) for t in tensors)


def _is_dense(t: Tensor) -> bool:
    """Whether the tensor's values are what its memory holds."""
    unusual = t.is_meta or t.is_quantized or t.is_neg() or t.is_conj() or t._is_zerotensor()
    return t.layout is torch.strided and not unusual


PLAIN = frozenset({Tensor, torch.nn.Parameter})
_KEY = torch._C.DispatchKey
_ALWAYS_INCLUDED = torch._C.DispatchKeySet(_KEY.BackendSelect) | torch._C.DispatchKeySet(_KEY.ADInplaceOrView)
