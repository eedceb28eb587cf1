"""An entry point's memory of its calls in C++; ``route.py`` is the same in Python, and says what is remembered."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from tskernel._torch.binding import Binding, sources
from tskernel._torch.execute import call_device, execute
from tskernel._torch.gate import GATE
from tskernel._torch.runners import Runner, is_dense, plan_of
from tskernel.dispatch.overrides import any_scope_open
from tskernel.dispatch.registry import KernelRegistry

if TYPE_CHECKING:
    from tskernel.library import Op


def slot_kinds(op: Op, *, buffer: str = "", flags: int = 0) -> str:
    """Return the kinds of an entry point's arguments, as csrc/gate/look.h names them.

    The op's own come first, then the result buffer (``buffer`` is its kind, or nothing), then the flags.
    """

    def kind(name: str, is_tensor: bool, optional: bool) -> str:
        if is_tensor:
            return "O" if optional else "T"
        if name in op.dynamic:
            return "M" if optional else "N"
        return "V"

    own = [kind(p.name, p.is_tensor, p.optional) for p in op.signature.params]
    return "".join(own) + buffer + "X" * flags


class NativeRoute:
    """One entry point of an op (public function or one torch operator), with its memory.

    ``memory`` takes every slot by position; it runs what served a call that looked the same, or hands the slots to
    ``miss``.
    """

    def __init__(self, op: Op, kinds: str, miss: Callable[..., Any], *, front: bool) -> None:
        self.op = op
        self.memory: Any = GATE.Memory(kinds, miss, front, bool(op.autocast))
        KernelRegistry.get().on_change(self.memory.forget)

    def serve(
        self, form: str, arguments: Sequence[Any], out: Tensor | None, override: str | None, slots: tuple[Any, ...]
    ) -> Any:
        """Check, select and run a call, and remember how it looked."""
        registry = KernelRegistry.get()
        generation = registry.generation
        result, run = execute(self.op, form, arguments, out, override)
        if run is not None:
            plan = self._plan(form, arguments, out, run, result)
            with registry.lock:
                if not any_scope_open() and registry.generation == generation:
                    self._remember(slots, *plan)
        return result

    def _remember(self, slots: tuple[Any, ...], run: Runner, results: Any, device: Any, *operator: Any) -> None:
        if operator[0] is not None:
            try:
                self.memory.remember(slots, run, results, device, *operator)
                return
            except TypeError:  # an option that the operator has no type for, as None: the kernel's code makes one
                results, operator = None, (None, ())
        self.memory.remember(slots, run, results, device, *operator)

    def _plan(
        self, form: str, arguments: Sequence[Any], out: Tensor | None, run: Runner, result: Any
    ) -> tuple[Any, ...]:
        """Return what to call, the results to allocate before, the device to be on, and an operator to call instead."""
        plan = plan_of(run)
        device = call_device(self.op, arguments) if plan.on_device else None
        results = result if isinstance(result, tuple) else (result,)
        by_look = self.op.sized_by_look and all(type(t) is Tensor for t in results)
        binding = plan.binding if out is None or is_dense(out) else None  # else the runner writes it in two steps
        if binding is not None and (form == "out" or self.op.mutates):
            return plan.run, None, device, *self._operator(binding, allocated=False)
        if binding is not None and by_look:
            return plan.run, results, device, *self._operator(binding, allocated=True)
        if plan.into is not None and by_look:
            return plan.into, results, device, None, ()
        return plan.run, None, device, None, ()

    def _operator(self, binding: Binding, *, allocated: bool) -> tuple[str, tuple[Any, ...]]:
        return binding.operator, sources(binding, (*self.op.arguments, "out"), allocated=allocated)
