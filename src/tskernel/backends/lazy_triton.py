"""Triton kernels that are declared without importing Triton.

A kernel file registers on every machine, also where Triton is not installed, and importing it costs nothing. Write::

    from typing import TYPE_CHECKING

    from tskernel.backends.lazy_triton import jit

    if TYPE_CHECKING:
        import triton.language as tl

    @jit
    def _kernel(x_ptr, n, BLOCK: tl.constexpr): ...

``_kernel[grid](...)`` then imports Triton, puts ``tl`` and ``triton`` into the file's globals and compiles as usual.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from tskernel.dispatch.errors import KernelUnavailableError

_lock = threading.RLock()


class LazyKernel:
    """A device function that becomes a Triton one when it is first needed."""

    def __init__(self, function: Callable[..., Any]) -> None:
        """Keep the function; nothing is compiled."""
        self.function = function
        self._resolved: Any = None

    def resolve(self) -> Any:
        """Return the Triton function; the device functions that its file names are resolved with it.

        Raises: KernelUnavailableError where Triton is missing or does not load.
        """
        with _lock:
            if self._resolved is None:
                scope = self.function.__globals__
                triton = _import_triton()
                scope["triton"], scope["tl"] = triton, triton.language
                self._resolved = triton.jit(self.function)
                for name, value in list(scope.items()):
                    if isinstance(value, LazyKernel):
                        scope[name] = value.resolve()
            return self._resolved

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        """Return the launcher for a grid."""
        return self.resolve()[grid]


def jit(function: Callable[..., Any]) -> LazyKernel:
    """Declare a Triton kernel or device function."""
    return LazyKernel(function)


def traced(kernel: Any) -> Any:
    """Return what to launch while a graph is traced: torch's wrapper, which records the launch instead of making it."""
    from torch.library import wrap_triton

    return wrap_triton(kernel.resolve() if isinstance(kernel, LazyKernel) else kernel)


def _import_triton() -> Any:
    try:
        import triton
        import triton.language
    except ImportError as error:
        raise KernelUnavailableError(f"Triton does not load: {error}") from error
    return triton
