"""What ``tskernel`` offers: every op as a function, found by name, and the names of selection."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from tskernel.library import load_ops, ops

load_ops()

# Names that callers know from elsewhere.
ALIASES = {"mha_prefill_with_kvcache": "mha_extend_with_kvcache"}


def op_function(name: str) -> Callable[..., Any]:
    """Return the public function of an op, stored in the package so that the next look-up is a plain attribute.

    Raises: AttributeError for a name that no op has.
    """
    op = ops.get(ALIASES.get(name, name))
    if op is None:
        raise AttributeError(f"module 'tskernel' has no attribute {name!r}")
    setattr(sys.modules["tskernel"], name, op.front)
    return op.front


def public_names() -> list[str]:
    """Return what ``dir(tskernel)`` shows."""
    return sorted({*vars(sys.modules["tskernel"]), *ops, *ALIASES})
