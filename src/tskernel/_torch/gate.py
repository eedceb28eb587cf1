"""Finds the C++ gate: the extension ``tskernel._gate``, built from csrc/gate where there is a compiler.

It reads torch's tensors in place, so it serves the torch release it was built against and leaves every other one to
Python. ``TSKERNEL_GATE=python`` does so too.
"""

from __future__ import annotations

import importlib
import os
import warnings
from typing import Any

import torch


def load() -> Any:
    """Return the extension, or None where Python has to serve.

    An extension that is there and does not fit is left alone with one warning, since its owner thinks it is in use.
    """
    if os.environ.get("TSKERNEL_GATE", "") == "python":
        return None
    try:
        module = importlib.import_module("tskernel._gate")
    except ModuleNotFoundError:
        return None
    except ImportError as error:
        return _left_alone(f"does not load: {error}")
    here = torch.__version__.partition("+")[0]
    if module.torch_version != here:
        return _left_alone(f"was built for torch {module.torch_version}, and this is {here}")
    return module


def _left_alone(why: str) -> None:
    text = f"tskernel: the C++ gate {why}; the Python gate serves (build tskernel again, or set TSKERNEL_GATE=python)"
    warnings.warn(text, RuntimeWarning, stacklevel=3)


GATE: Any = load()
