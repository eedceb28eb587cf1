"""Inline mode: the chosen kernel's body is traced into the compiled graph instead of one opaque node.

``TOKEN`` is what the public functions pass as ``override`` while tracing. It carries a fingerprint of everything selection reads, and
as a constant of the graph it enters every compile cache's key: without it a cached graph would keep serving a kernel that is no longer
the choice.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from tskernel.dispatch.registry import KernelRegistry

TOKEN: str | None = None


@contextmanager
def inline() -> Iterator[None]:
    """Trace the bodies of chosen kernels into graphs that are compiled inside the block, where the kernel is traceable.

    Process-wide while open: compilation is. A graph compiled inside keeps its kernels; a change of registry, policy or override
    compiles anew.
    """
    from tskernel._torch.inline_rules import register_rules

    global TOKEN
    register_rules()
    before, TOKEN = TOKEN, f"inline:{registry_fingerprint()}"
    registry = KernelRegistry.get()
    registry.on_change(_refresh)
    try:
        yield
    finally:
        TOKEN = before
        registry.forget_listener(_refresh)


def _refresh() -> None:
    global TOKEN
    if TOKEN is not None:
        TOKEN = f"inline:{registry_fingerprint()}"


def registry_fingerprint() -> str:
    """Return a hash of all that selection reads: kernels and their sources, overrides, devices, torch."""
    from tskernel.dispatch.overrides import active_override

    registry = KernelRegistry.get()
    parts = [torch.__version__, os.environ.get("CUDA_VISIBLE_DEVICES", ""), str(device_names())]
    parts += [f"{s.name}:{s.priority}:{s.fingerprint()}" for s in registry.list_kernels()]
    parts += [f"{m}={active_override(f, m)}" for f, m in registry.list_operators()]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]


def device_names() -> list[str]:
    """Return the names of the visible GPUs, without initialising a device that nobody uses yet."""
    if not torch.cuda.is_initialized():
        return []
    return [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
