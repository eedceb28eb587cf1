"""Stands in for SGLang's kernels for CPUs, which no package index has: SGLang imports their names, and calls none here.

On the path of processes that run SGLang on a CPU, where the real package is not installed.
"""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_: Any, **__: Any) -> None:
        raise NotImplementedError(f"sgl_kernel.{name} is not installed; this test must not need it")

    return missing
