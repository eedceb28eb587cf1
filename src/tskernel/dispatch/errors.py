"""The errors of selection."""

from __future__ import annotations


class NoKernelFoundError(RuntimeError):
    """No registered kernel can run the call; the text lists every candidate with its reason."""


class OverrideError(ValueError):
    """An override names nothing, or a kernel that cannot run here."""


class KernelUnavailableError(RuntimeError):
    """Raised by a kernel at first use when it cannot be built or loaded on this machine."""


class KernelRefusedError(RuntimeError):
    """Raised by a kernel that finds, after its cheap gate, that it cannot run this one call."""


class RegistrationError(ValueError):
    """A kernel was declared wrongly: duplicate name, unknown op or trait, other signature, priority out of range."""
