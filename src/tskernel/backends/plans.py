"""Remembers what a kernel's host code worked out for a call, for calls whose tensors look the same.

Tile sizes, grids and prepared launches follow from sizes, strides and dtypes; working them out costs more than many
decode kernels run. A kernel keeps one ``Plans`` and does::

    plan = _plans.find(options, tensors)
    if plan is None:
        plan = _plans.keep(options, tensors, work_out(...))
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Sequence
from typing import Any, Final, Generic, TypeVar

from torch import Tensor

from tskernel._torch.guard import Guard, make_guard

Plan = TypeVar("Plan")
_LIMIT: Final = 1024  # options and sizes of the first tensor that are remembered
_LOOKS: Final = 8  # and how many looks of the other tensors for each


class Plans(Generic[Plan]):
    """Plans by what they depend on: options, and how the tensors look; threads may share it.

    A look is everything but contents and address: type, dtype, device, sizes, strides, which are None. A plan that
    depends on addresses, such as on two tensors being one, needs that among its options.
    """

    def __init__(self) -> None:
        """Begin without any."""
        self._seen: dict[Any, tuple[tuple[Guard, Plan], ...]] = {}
        self._lock = threading.Lock()

    def find(self, options: Hashable, tensors: Sequence[Tensor | None]) -> Plan | None:
        """Return the plan of an earlier call, or None. The first tensor must not be None."""
        given = {i: t for i, t in enumerate(tensors) if t is not None}
        for check, plan in self._seen.get((options, tuple(given), given[0].shape), ()):
            if check(*given.values()):
                return plan
        return None

    def keep(self, options: Hashable, tensors: Sequence[Tensor | None], plan: Plan) -> Plan:
        """Remember a plan and return it. Tensors that torch does not let be compared (fakes) are not remembered."""
        given = {i: t for i, t in enumerate(tensors) if t is not None}
        check = make_guard(list(given.values()))
        if check is not None:
            key = (options, tuple(given), given[0].shape)
            with self._lock:
                if len(self._seen) >= _LIMIT:
                    self._seen.clear()
                self._seen[key] = ((check, plan), *self._seen.get(key, ())[: _LOOKS - 1])
        return plan

    def clear(self) -> None:
        """Forget all plans."""
        with self._lock:
            self._seen.clear()
