# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
"""vLLM on ``torch.ops.tokenspeed``: attention, norms, activations, rotary embeddings, experts, fp8.

A plugin that vLLM finds by itself (entry point ``vllm.general_plugins``). It does nothing unless asked:

    TSKERNEL_VLLM=1 vllm serve MODEL --attention-backend TOKENSPEED

``TSKERNEL_VLLM`` is ``1`` for everything, or names parts: ``attention,mla,norm,activation,rope,moe,fp8,mxfp4``.
Attention is registered as a backend, which vLLM then uses if it is chosen (on CPU there is nothing to choose: it takes
the place of vLLM's own). docs/drop-in.md says what is replaced and what is not.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Final

__all__ = ["PARTS", "SWITCH", "register", "wanted"]

SWITCH: Final = "TSKERNEL_VLLM"
PARTS: Final = ("attention", "mla", "norm", "activation", "rope", "moe", "fp8", "mxfp4")
_OFF: Final = ("", "0", "false", "off")
_ALL: Final = ("1", "true", "on", "all")
_MODULES: Final = "tskernel.integrations._vllm_"

_installed: dict[str, str] = {}


def wanted() -> tuple[str, ...]:
    """Return the parts that ``TSKERNEL_VLLM`` asks for.

    Raises: ValueError for a word that is no part.
    """
    words = os.environ.get(SWITCH, "").lower()
    if words in _OFF:
        return ()
    if words in _ALL:
        return PARTS
    parts = [word.strip() for word in words.split(",") if word.strip()]
    for part in parts:
        if part not in PARTS:
            raise ValueError(f"{SWITCH}: expected 1, 0 or some of {', '.join(PARTS)}, got {part!r}")
    return tuple(parts)


def register() -> None:
    """Register the parts that ``TSKERNEL_VLLM`` asks for with vLLM; vLLM calls this in each of its processes.

    Harmless to repeat. One line of the log says what was registered and what was not, and why.
    Raises: ValueError for a ``TSKERNEL_VLLM`` that names no part; RuntimeError where a part was asked for by name
    and this vLLM has no place for it.
    """
    parts = [part for part in wanted() if part not in _installed]
    if not parts:
        return
    version = import_module("vllm").__version__  # by name: to pyright this file is "vllm"
    failed: dict[str, str] = {}
    for part in parts:
        try:
            _installed[part] = _installer(part)()
        except (ImportError, AttributeError, TypeError, AssertionError) as error:
            failed[part] = f"{type(error).__name__}: {error}"
    if failed and os.environ[SWITCH].lower() not in _ALL:
        reasons = "; ".join(f"{part}: {why}" for part, why in failed.items())
        raise RuntimeError(f"tskernel cannot replace what {SWITCH} names in vLLM {version}: {reasons}")
    done = "; ".join(f"{part}: {what}" for part, what in _installed.items())
    left = "".join(f"; NOT {part}, it stays vLLM's: {why}" for part, why in failed.items())
    _say(f"tskernel in vLLM {version}: {done or 'nothing'}{left}")


def _installer(part: str) -> Callable[[], str]:
    module = "layers" if part in ("norm", "activation", "rope") else part
    return getattr(import_module(_MODULES + module), f"install_{part}")


def _say(line: str) -> None:
    """Log a line as vLLM does; vLLM loads plugins before it sets up its log in some processes."""
    from vllm.logger import init_logger

    if logging.getLogger("vllm").handlers:
        init_logger("vllm.tskernel").info(line)
    else:
        sys.stderr.write(f"{line}\n")
