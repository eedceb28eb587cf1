"""Is an optional package there, and does it load? Asked lazily, answered once."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import warnings
from typing import NamedTuple


class PackageProbe(NamedTuple):
    """The answer: ``reason`` says why the package is not usable."""

    available: bool
    reason: str = ""


@functools.cache
def probe_package(name: str) -> PackageProbe:
    """Find and import ``name`` ("module" or "module:attribute").

    A package that is not installed is quiet. One that is installed but does not load counts as unavailable, with one
    warning, since its owner thinks it is in use. The attribute tells a package from an unrelated one of the same name
    (``aiter``).
    """
    module, _, attribute = name.partition(":")
    try:
        found = importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        found = False
    if not found:
        return PackageProbe(False, f"package {module} is not installed")
    try:
        loaded = importlib.import_module(module)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # vendor packages fail in every way, SystemExit included
        why = f"package {module} is installed but does not load: {type(error).__name__}: {error}"
        warnings.warn(why, RuntimeWarning, stacklevel=2)
        return PackageProbe(False, why)
    if attribute and not hasattr(loaded, attribute):
        return PackageProbe(
            False, f"package {module} has no {attribute}: another package of that name, or another version"
        )
    return PackageProbe(True)
