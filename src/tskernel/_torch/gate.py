"""Finds the C++ gate: the extension ``tskernel._gate``, built from csrc/gate where there is a compiler.

It reads torch's tensors in place, so it serves the torch release it was built against and leaves every other one to
Python. ``TSKERNEL_GATE=python`` does so too.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

import torch


def load() -> Any:
    """Return the extension, or None where Python has to serve."""
    if os.environ.get("TSKERNEL_GATE", "") == "python":
        return None
    try:
        module = importlib.import_module("tskernel._gate")
    except ImportError:
        return None
    return module if module.torch_version == torch.__version__.partition("+")[0] else None


GATE: Any = load()
