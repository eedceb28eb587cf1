"""Inline mode: the chosen kernel's body is traced into the compiled graph instead of one opaque node.

``TOKEN`` is what the public functions pass as ``override`` while tracing. It carries a fingerprint of everything that
selection reads, and as a constant of the graph it enters every compile cache's key: without it a cached graph would
keep serving a kernel that is no longer the choice.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from tskernel.dispatch.registry import KernelRegistry

TOKEN: str | None = None
_devices: tuple[str, ...] = ()


@contextmanager
def inline() -> Iterator[None]:
    """Trace the bodies of chosen kernels into graphs that are compiled inside the block, where the kernel is traceable.

    Call the compiled function inside the block too: outside, the same code compiles once more, with opaque nodes. A
    change of registry, policy or override compiles anew and is right again. Process-wide while open, as compilation
    is; a thread with an override of its own that the others do not share gets opaque nodes.
    """
    from tskernel._torch.inline_rules import register_rules

    global TOKEN, _devices
    register_rules()
    registry = KernelRegistry.get()
    # Found now, since a listener runs under the registry's lock, where nothing may be imported.
    for _, mode in registry.list_operators():
        registry.kernels_of(mode)
    before = TOKEN, _devices
    _devices = device_names()
    TOKEN = new_token()
    registry.on_change(_refresh)
    try:
        yield
    finally:
        registry.forget_listener(_refresh)
        TOKEN, _devices = before
        if TOKEN is not None:
            TOKEN = new_token()


def _refresh() -> None:
    global TOKEN
    TOKEN = new_token()


def new_token() -> str:
    """Return the token of what would be selected now, in this thread."""
    return f"inline:{registry_fingerprint()}"


def registry_fingerprint() -> str:
    """Return a hash of all that selection reads: kernels and their sources, policy, overrides, devices, torch."""
    from tskernel.dispatch.overrides import active_override
    from tskernel.dispatch.policy import describe_policy

    registry = KernelRegistry.get()
    parts = [torch.__version__, os.environ.get("CUDA_VISIBLE_DEVICES", ""), str(_devices), describe_policy()]
    for family, mode in registry.list_operators():
        parts += [f"{s.name}:{s.priority}:{s.priorities}:{s.fingerprint()}" for s in registry.kernels_of(mode)]
        parts.append(f"{mode}={active_override(family, mode)}")
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]


def device_names() -> tuple[str, ...]:
    """Return the names of the visible GPUs, without initialising a device that nobody uses yet."""
    if not torch.cuda.is_initialized():
        return ()
    return tuple(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
