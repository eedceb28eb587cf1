"""What ``tskernel`` offers: every op as a function, found by name, and the names of selection."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

from tskernel.library import load_ops, ops

load_ops()

# What is loaded when it is asked for, and where it lives.
_SELECTION = "tskernel.dispatch.selection"
FUNCTIONS = {
    "SelectionPolicy": _SELECTION,
    "explain_selection": _SELECTION,
    "kernel_override": _SELECTION,
    "register_oracle": _SELECTION,
    "select_kernel": _SELECTION,
    "warmup_selection": _SELECTION,
    "discover_plugins": "tskernel.plugins",
    "moe_apply": "tskernel.moe",
    "moe_plan": "tskernel.moe",
    "moe_process_weights": "tskernel.moe",
}

# Names that callers know from elsewhere.
ALIASES = {"mha_prefill_with_kvcache": "mha_extend_with_kvcache"}


def op_function(name: str) -> Callable[..., Any]:
    """Return a public function, stored in the package so that the next look-up is a plain attribute.

    Raises: AttributeError for a name that neither an op nor a function has.
    """
    op = ops.get(ALIASES.get(name, name))
    if op is not None:
        found = op.front
    elif name in FUNCTIONS:
        found = getattr(importlib.import_module(FUNCTIONS[name]), name)
    else:
        raise AttributeError(f"module 'tskernel' has no attribute {name!r}")
    setattr(sys.modules["tskernel"], name, found)
    return found


def public_names() -> list[str]:
    """Return what ``dir(tskernel)`` shows."""
    return sorted({*vars(sys.modules["tskernel"]), *ops, *ALIASES, *FUNCTIONS})
