"""Watches which operators run, and asks each why its kernel was chosen."""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from tskernel.dispatch.explanation import Candidate, Explanation
from tskernel.library import ops

_BANDS = ((16, "plugin"), (12, "specialized"), (8, "performant"), (4, "portable"), (0, "reference"))


class Observer(TorchDispatchMode):
    """Counts calls of our operators and explains the first call of each."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, int] = {}
        self.explanations: dict[str, Explanation] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Look at a call and pass it on."""
        if func.namespace == "tokenspeed":
            name = func._opname
            self.calls[name] = self.calls.get(name, 0) + 1
            if name not in self.explanations and name in ops:
                self.explanations[name] = ops[name].explain(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def reason(explanation: Explanation) -> str:
    """Return in a few words why the winner won."""
    best = next((c for c in explanation.candidates if c.name == explanation.winner), None)
    if best is None:
        return "no kernel fits"
    band = next(name for least, name in _BANDS if best.priority >= least)
    better = [c for c in explanation.candidates if c.status == "rejected" and c.priority > best.priority]
    fits = [c for c in explanation.candidates if c.status in ("fits", "depends")]
    text = f"{band}, priority {best.priority}"
    if fits:
        text += f"; then {short_name(fits[0])}"
    if better:
        text += f"; not {short_name(better[0])}: {better[0].reason}"
    return text + f" (and {len(better) - 1} more)" if len(better) > 1 else text


def short_name(kernel: Candidate) -> str:
    """Return a kernel's name without its op: ``portable/torch``."""
    return kernel.backend if kernel.solution == kernel.backend else f"{kernel.backend}/{kernel.solution}"


def winner(explanation: Explanation) -> str:
    """Return the short name of the kernel that was chosen."""
    return next((short_name(c) for c in explanation.candidates if c.name == explanation.winner), "none")
