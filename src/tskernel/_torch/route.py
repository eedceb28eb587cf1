"""What an entry point remembers, so that a call like an earlier one is neither checked nor selected again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from tskernel._torch.execute import execute
from tskernel._torch.guard import make_guard
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
    few before, which the function tries in turn; ``_given`` is the same for calls with optional tensors. All looks are
    in ``_seen``, by options and shapes.
    """

    def __init__(self, op: Op, namespace: dict[str, Any] | None = None, *, form: str = "") -> None:
        self.op = op
        self._required = sum(p.type == "Tensor" for p in op.signature.params) + (form == "out")
        self.namespace: dict[str, Any] = {} if namespace is None else namespace
        self._seen: dict[Any, tuple[Look, ...]] = {}
        self.forget()
        KernelRegistry.get().on_change(self.forget)

    def forget(self) -> None:
        """Drop everything that was remembered."""
        self.namespace["_hot"] = self.namespace["_given"] = _COLD
        self._seen.clear()

    def recall(self, options: Any, tensors: Sequence[Tensor]) -> Runner | None:
        """Return the runner of an earlier call that looked the same, and make its look a hot one."""
        key = (options, *[t.shape for t in tensors])
        try:
            looks = self._seen.get(key, ())
        except TypeError:  # an option that cannot be hashed is refused by name later
            return None
        look = next((look for look in looks if look[0](*tensors)), None)
        if look is None:
            return None
        with KernelRegistry.get().lock:
            if look in self._seen.get(key, ()):  # not forgotten meanwhile
                self._heat(look, len(tensors))
        return look[2]

    def _heat(self, look: Look, tensors: int) -> None:
        """Make a look the first to be tried."""
        name = "_hot" if tensors == self._required else "_given"
        check, options, run, more = self.namespace[name]
        others = [other for other in ((check, options, run), *more) if other[0] not in (look[0], _never)]
        self.namespace[name] = (*look, tuple(others[: _HOT - 1]))

    def remember(self, options: Any, tensors: Sequence[Tensor], run: Runner, generation: int) -> None:
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
            self._heat(look, len(tensors))

    def serve(self, form: str, arguments: Sequence[Any], out: Tensor | None, override: str | None, options: Any) -> Any:
        """Serve a call that has no hot look."""
        tensors = [t for t in (*[arguments[i] for i in self.op.signature.tensors], out) if t is not None]
        generation = KernelRegistry.get().generation
        if (run := self._known(options, tensors, arguments)) is not None:
            return run(*arguments) if out is None else run(*arguments, out)
        result, run = execute(self.op, form, arguments, out, override)
        if run is not None:
            self.remember(options, tensors, run, generation)
        return result

    def _known(self, options: Any, tensors: Sequence[Any], arguments: Sequence[Any]) -> Runner | None:
        if not all(isinstance(t, Tensor) for t in tensors) or not self.dynamic_ok(arguments):
            return None
        return self.recall(options, tensors)

    def dynamic_ok(self, arguments: Sequence[Any]) -> bool:
        """Whether the arguments that change from call to call, which no look covers, are plain sizes."""
        values = (arguments[self.op.signature.index(n)] for n in self.op.dynamic)
        return all(v is None or (type(v) is int and v >= 0) for v in values)
