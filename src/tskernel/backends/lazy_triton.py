"""Triton and Gluon kernels that are declared without importing Triton.

A kernel file registers on every machine, also where Triton is not installed, and importing it costs nothing. Write::

    from typing import TYPE_CHECKING

    from tskernel.backends.lazy_triton import jit

    if TYPE_CHECKING:
        import triton.language as tl

    @jit
    def _kernel(x_ptr, n, BLOCK: tl.constexpr): ...

``_kernel[grid](...)`` then imports Triton, puts ``tl`` and ``triton`` into the file's globals and compiles as usual.
``@jit(do_not_specialize=("n",))`` takes Triton's own options. ``@gluon_jit`` declares a Gluon kernel and also puts
``gluon``, ``gl`` (its language) and ``hopper`` (``tma``, ``mbarrier``, ``warpgroup_mma``, ...) there.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any, Final, NamedTuple, overload

from torch import Tensor

from tskernel._torch.guard import PLAIN
from tskernel.dispatch.errors import KernelUnavailableError

_lock = threading.RLock()


class JitOptions(NamedTuple):
    """What Triton's and Gluon's ``jit`` are given.

    ``do_not_specialize`` names integer arguments of which neither 1 nor a multiple of 16 gets a program of its own,
    ``do_not_specialize_on_alignment`` those, and pointers, of which only the latter does not.
    """

    do_not_specialize: tuple[str, ...] = ()
    do_not_specialize_on_alignment: tuple[str, ...] = ()
    noinline: bool | None = None


DEFAULTS: Final = JitOptions()


class LazyKernel:
    """A device function that becomes a Triton one when it is first needed."""

    def __init__(self, function: Callable[..., Any], options: JitOptions = DEFAULTS) -> None:
        """Keep the function; nothing is compiled.

        Raises: ValueError where an option names an argument that the function does not have.
        """
        self.function = function
        self.options = options
        self._resolved: Any = None
        _check_names(function, options)

    def resolve(self) -> Any:
        """Return the Triton function; the device functions that its file names are resolved with it.

        Raises: KernelUnavailableError where Triton is missing or does not load.
        """
        with _lock:
            if self._resolved is None:
                scope = self.function.__globals__
                names = self._import()
                scope.update(names)
                self._resolved = self._declare(names)
                _resolve_all(scope)
            return self._resolved

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        """Return the launcher for a grid."""
        return self.resolve()[grid]

    def _import(self) -> dict[str, Any]:
        triton = _import_triton()
        return {"triton": triton, "tl": triton.language}

    def _declare(self, names: dict[str, Any]) -> Any:
        return names["triton"].jit(self.function, **self.options._asdict())


class LazyGluonKernel(LazyKernel):
    """A device function that becomes a Gluon one when it is first needed."""

    def resolve(self) -> Any:
        """Return the Gluon function; the device functions that its file names are resolved with it.

        Raises: KernelUnavailableError where Triton or its Gluon is missing or does not load.
        """
        return super().resolve()

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        """Return the launcher for a grid.

        Raises: KernelUnavailableError under Triton's interpreter, which does not run Gluon.
        """
        kernel = self.resolve()
        if self.function.__globals__["triton"].knobs.runtime.interpret:
            raise KernelUnavailableError("Triton's interpreter (TRITON_INTERPRET=1) does not run Gluon kernels")
        return kernel[grid]

    def _import(self) -> dict[str, Any]:
        names = super()._import()
        try:
            from triton.experimental import gluon
            from triton.experimental.gluon import language
            from triton.experimental.gluon.language.nvidia import hopper
        except ImportError as error:
            raise KernelUnavailableError(
                f"Gluon does not load from Triton {names['triton'].__version__}, needs 3.6 or later: {error}"
            ) from error
        return {**names, "gluon": gluon, "gl": language, "hopper": hopper}

    def _declare(self, names: dict[str, Any]) -> Any:
        return names["gluon"].jit(self.function, **self.options._asdict())


@overload
def jit(function: Callable[..., Any], /) -> LazyKernel: ...
@overload
def jit(
    *,
    do_not_specialize: tuple[str, ...] = (),
    do_not_specialize_on_alignment: tuple[str, ...] = (),
    noinline: bool | None = None,
) -> Callable[[Callable[..., Any]], LazyKernel]: ...
def jit(
    function: Callable[..., Any] | None = None,
    /,
    *,
    do_not_specialize: tuple[str, ...] = (),
    do_not_specialize_on_alignment: tuple[str, ...] = (),
    noinline: bool | None = None,
) -> LazyKernel | Callable[[Callable[..., Any]], LazyKernel]:
    """Declare a Triton kernel or device function; use as ``@jit`` or ``@jit(...)``.

    Arguments: those of ``JitOptions``, arguments of the function by name.
    Raises: ValueError where an option names an argument that the function does not have.
    """
    options = JitOptions(do_not_specialize, do_not_specialize_on_alignment, noinline)
    return _declarator(LazyKernel, function, options)


@overload
def gluon_jit(function: Callable[..., Any], /) -> LazyGluonKernel: ...
@overload
def gluon_jit(
    *,
    do_not_specialize: tuple[str, ...] = (),
    do_not_specialize_on_alignment: tuple[str, ...] = (),
    noinline: bool | None = None,
) -> Callable[[Callable[..., Any]], LazyGluonKernel]: ...
def gluon_jit(
    function: Callable[..., Any] | None = None,
    /,
    *,
    do_not_specialize: tuple[str, ...] = (),
    do_not_specialize_on_alignment: tuple[str, ...] = (),
    noinline: bool | None = None,
) -> LazyKernel | Callable[[Callable[..., Any]], LazyKernel]:
    """Declare a Gluon kernel or device function; use as ``@gluon_jit`` or ``@gluon_jit(...)``.

    Arguments and errors: as ``jit``.
    """
    options = JitOptions(do_not_specialize, do_not_specialize_on_alignment, noinline)
    return _declarator(LazyGluonKernel, function, options)


def resolved(kernel: Any) -> Any:
    """Return the Triton function of a kernel.

    A file's names hold Triton's own functions once one of them was resolved, declared ones before.
    """
    return kernel.resolve() if isinstance(kernel, LazyKernel) else kernel


def is_traced(tensor: Tensor) -> bool:
    """Whether a kernel's host code runs to be recorded into a graph: there are no addresses then, sizes may be symbols.

    It launches what ``traced`` returns then, and nothing that was prepared.
    """
    return type(tensor) not in PLAIN


def traced(kernel: Any) -> Any:
    """Return what to launch while a graph is traced: torch's wrapper, which records the launch instead of making it."""
    from torch.library import wrap_triton

    return wrap_triton(resolved(kernel))


def _declarator(kind: type[LazyKernel], function: Callable[..., Any] | None, options: JitOptions) -> Any:
    return kind(function, options) if function is not None else lambda declared: kind(declared, options)


def _resolve_all(scope: dict[str, Any]) -> None:
    """Put the compilable functions where the file names declared ones: the compiler looks them up by name."""
    for name, value in list(scope.items()):
        if isinstance(value, LazyKernel):
            with contextlib.suppress(KernelUnavailableError):  # no Gluon: the file's Triton kernels work without it
                scope[name] = value.resolve()


def _check_names(function: Callable[..., Any], options: JitOptions) -> None:
    arguments = function.__code__.co_varnames[: function.__code__.co_argcount]
    for option, names in (
        ("do_not_specialize", options.do_not_specialize),
        ("do_not_specialize_on_alignment", options.do_not_specialize_on_alignment),
    ):
        for name in names:
            if name not in arguments:
                raise ValueError(
                    f"{function.__qualname__}: {option}: expected arguments among {', '.join(arguments)}; got {name!r}"
                )


def _import_triton() -> Any:
    try:
        import triton
        import triton.language
    except ImportError as error:
        raise KernelUnavailableError(f"Triton does not load: {error}") from error
    return triton
