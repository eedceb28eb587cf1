# pyright: reportMissingImports=false
"""SGLang on ``torch.ops.tokenspeed``: attention, norms, gated activations and rotary embeddings.

A plugin that SGLang finds by itself (entry point ``sglang.srt.plugins``). It does nothing unless asked:

    TSKERNEL_SGLANG=1 sglang serve --model-path MODEL --attention-backend tokenspeed

``TSKERNEL_SGLANG`` is ``1`` for everything, or names parts: ``attention,norm,activation,rope``. Attention is
registered as a backend, which SGLang then uses if it is chosen. docs/drop-in.md says what is replaced and what is not.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Final

__all__ = ["PARTS", "SWITCH", "load", "register", "wanted"]

SWITCH: Final = "TSKERNEL_SGLANG"
PARTS: Final = ("attention", "norm", "activation", "rope")
_OFF: Final = ("", "0", "false", "off")
_ALL: Final = ("1", "true", "on", "all")
_MODULES: Final = "tskernel.integrations._sglang_"

_installed: dict[str, str] = {}


def wanted() -> tuple[str, ...]:
    """Return the parts that ``TSKERNEL_SGLANG`` asks for.

    Raises: ValueError for a word that is no part.
    """
    words = os.environ.get(SWITCH, "").strip().lower()
    if words in _OFF:
        return ()
    if words in _ALL:
        return PARTS
    parts = [word.strip() for word in words.split(",") if word.strip()]
    for part in parts:
        if part not in PARTS:
            raise ValueError(f"{SWITCH}: expected 1, 0 or some of {', '.join(PARTS)}, got {part!r}")
    return tuple(parts)


def load() -> None:
    """Register the parts that ``TSKERNEL_SGLANG`` asks for; SGLang calls this in each of its processes.

    SGLang logs the exception of a plugin and goes on without it, so that a server would run on other kernels than
    asked for. Therefore a mistake ends the process.
    Raises: SystemExit with the sentence that ``register`` would raise.
    """
    try:
        _register()
    except (ValueError, RuntimeError) as error:
        raise SystemExit(f"tskernel: {error}") from error


def register() -> None:
    """Register the parts that ``TSKERNEL_SGLANG`` asks for, from a program of your own, before it makes an engine.

    Harmless to repeat, and beside ``load``. One line says what was registered and what was not, and why.
    Raises: ValueError for a ``TSKERNEL_SGLANG`` that names no part; RuntimeError where a part was asked for by name
    and this SGLang has no place for it.
    """
    if _register():
        from sglang.srt.plugins.hook_registry import HookRegistry

        HookRegistry.apply_hooks()  # what SGLang does after it has loaded its plugins


def _register() -> bool:
    parts = [part for part in wanted() if part not in _installed]
    if not parts:
        return False
    from sglang.version import __version__ as version

    failed: dict[str, str] = {}
    for part in parts:
        try:
            _installed[part] = _installer(part)()
        except (ImportError, AttributeError, TypeError, AssertionError) as error:
            failed[part] = f"{type(error).__name__}: {error}"
    if failed and os.environ[SWITCH].strip().lower() not in _ALL:
        reasons = "; ".join(f"{part}: {why}" for part, why in failed.items())
        raise RuntimeError(f"tskernel cannot replace what {SWITCH} names in SGLang {version}: {reasons}")
    done = "; ".join(f"{part}: {what}" for part, what in _installed.items())
    left = "".join(f"; NOT {part}, it stays SGLang's: {why}" for part, why in failed.items())
    _say(f"tskernel in SGLang {version}: {done or 'nothing'}{left}")
    return True


def _installer(part: str) -> Callable[[], str]:
    module = "attention" if part == "attention" else "layers"
    return getattr(import_module(_MODULES + module), f"install_{part}")


def _say(line: str) -> None:
    """Log a line as SGLang does; SGLang loads plugins before it sets up its log."""
    logger = logging.getLogger("sglang.tskernel")
    if logger.hasHandlers() and logger.isEnabledFor(logging.INFO):
        logger.info(line)
    else:
        sys.stderr.write(f"{line}\n")
