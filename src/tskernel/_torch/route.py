"""What an entry point remembers, so that a call like an earlier one is neither checked nor selected again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from tskernel._torch.execute import execute
from tskernel._torch.guard import PLAIN, make_guard
from tskernel._torch.runners import Runner
from tskernel.dispatch.overrides import any_scope_open
from tskernel.dispatch.registry import KernelRegistry

if TYPE_CHECKING:
    from tskernel.library import Op

_LIMIT = 1024  # looks that an entry point remembers
_HOT = 4  # and those it tries first: a layer calls a matrix product with this many shapes of weights

Look = tuple[Any, Any, Any]  # guard of the tensors, everything else that decides the call, runner


def _never(*_: Any) -> bool:
    return False


_COLD = (_never, None, None, ())


class Route:
    """One entry point of an op (public function or one torch operator), with its memory.

    ``namespace`` is the generated function's globals. ``_hot`` in it is the look of the last call and then those of a
    few before, which the function tries in turn; ``_out`` and ``_given`` are the same for calls with ``out`` and with
    optional tensors. All looks are in ``_seen``, by options and shapes.
    """

    def __init__(self, op: Op, namespace: dict[str, Any] | None = None) -> None:
        self.op = op
        self.namespace: dict[str, Any] = {} if namespace is None else namespace
        self._tensors = op.signature.tensors
        self._sizes = tuple(op.signature.index(n) for n in op.dynamic)
        self._lock = KernelRegistry.get().lock
        self._seen: dict[Any, tuple[Look, ...]] = {}
        self.forget()
        KernelRegistry.get().on_change(self.forget)

    def forget(self) -> None:
        """Drop everything that was remembered."""
        self.namespace.update(_hot=_COLD, _out=_COLD, _given=_COLD)
        self._seen.clear()

    def recall(self, options: Any, arguments: Sequence[Any], out: Any, hot: str) -> Runner | None:
        """Return the runner of an earlier call that looked the same, and make its look the first to be tried."""
        tensors = []
        for i in self._tensors:
            value = arguments[i]
            if value is not None:
                if value.__class__ not in PLAIN:
                    return None
                tensors.append(value)
        if out is not None:
            if out.__class__ not in PLAIN:
                return None
            tensors.append(out)
        for i in self._sizes:  # no look covers them
            value = arguments[i]
            if value is not None and (type(value) is not int or value < 0):
                return None
        key = (options, *[t.shape for t in tensors])
        try:
            looks = self._seen.get(key, ())
        except TypeError:  # an option that cannot be hashed is refused by name later
            return None
        for look in looks:
            if look[0](*tensors):
                with self._lock:
                    if look in self._seen.get(key, ()):  # not forgotten meanwhile
                        self._heat(look, hot)
                return look[2]
        return None

    def _heat(self, look: Look, hot: str) -> None:
        """Make a look, which is none of those that are tried first, the first of them."""
        check, options, run, more = self.namespace[hot]
        before = () if check is _never else ((check, options, run), *more[: _HOT - 2])
        self.namespace[hot] = (*look, before)

    def remember(self, options: Any, tensors: Sequence[Tensor], run: Runner, generation: int, hot: str) -> None:
        """Remember what served a call, unless a registration or an override came between or one is open."""
        guard = make_guard(tensors)
        registry = KernelRegistry.get()
        with registry.lock:
            if guard is None or any_scope_open() or registry.generation != generation:
                return
            if len(self._seen) >= _LIMIT:
                self._seen.clear()
            look = (guard, options, run)
            key = (options, *[t.shape for t in tensors])
            self._seen[key] = (look, *self._seen.get(key, ())[: _HOT - 1])  # same shapes, other strides
            self._heat(look, hot)

    def serve(
        self, form: str, arguments: Sequence[Any], out: Tensor | None, override: str | None, options: Any, hot: str
    ) -> Any:
        """Check, select and run a call, and remember its look."""
        generation = KernelRegistry.get().generation
        result, run = execute(self.op, form, arguments, out, override)
        if run is not None:
            tensors = [t for t in (*[arguments[i] for i in self._tensors], out) if t is not None]
            self.remember(options, tensors, run, generation, hot)
        return result
