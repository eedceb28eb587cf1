"""Build tskernel: a pure wheel, plus csrc/ where a CUDA or ROCm compiler and such a torch are at hand.

Everything else is declared in pyproject.toml. csrc/build.py says what TSKERNEL_BUILD and TSKERNEL_ARCHS choose.
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Any

from setuptools import setup

CSRC = Path(__file__).resolve().parent / "csrc"


def native_options() -> tuple[str, dict[str, Any]]:
    """Return a sentence that says what is built, and the matching arguments of setup()."""
    if not (CSRC / "build.py").exists():
        return "a pure Python wheel (no csrc/)", {}
    sys.path.insert(0, str(CSRC))
    native = importlib.import_module("build")  # csrc/build.py
    return native.choose(os.environ.get("TSKERNEL_BUILD", "auto"))


SENTENCE, OPTIONS = native_options()
print(f"tskernel: building {SENTENCE}", file=sys.stderr)
setup(**OPTIONS)
