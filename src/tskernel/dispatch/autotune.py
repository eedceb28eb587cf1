"""Measured times: how they are taken, keyed, stored and used to rank kernels."""

from __future__ import annotations

import json
import os
import statistics
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from tskernel._version import __version__
from tskernel.dispatch.policy import SelectionPolicy, current_policy
from tskernel.dispatch.ranking import Request
from tskernel.dispatch.registry import KernelRegistry, KernelSpec

if TYPE_CHECKING:
    from tskernel.library import Op

_FORMAT: Final = "tskernel-tuning-1"
_WARMUPS, _REPEATS, _BUDGET_S = 2, 9, 0.2
_COPY_LIMIT = 1 << 30  # bytes: what a call writes is copied before it is timed, and a KV cache can fill the device


def tuning_key(request: Request, arguments: Sequence[Any], form: str) -> str:
    """Return the key of a call kind.

    Op and form, formats, layout and shape class of each tensor, options, device, library versions.

    Sizes are rounded up to powers of two except the last one of a tensor (a head size, a hidden size), which kernels
    are made for.
    """
    parts = [f"{request.operator.name}{'_' + form if form else ''}", str(request.formats or "any")]
    parts += [
        "-" if t is None else _look(t) if isinstance(t, Tensor) else f"{t!r}" for t in _static(request, arguments)
    ]
    platform = request.platform
    return "|".join([*parts, f"{platform.vendor} {platform.arch} {platform.name}", *_versions()])


def _static(request: Request, arguments: Sequence[Any]) -> list[Any]:
    names = request.operator.arguments
    return [
        _bucket(a) if n in request.operator.dynamic and a is not None else a
        for n, a in zip(names, arguments, strict=True)
    ]


def _bucket(size: int) -> int:
    return 1 << (size - 1).bit_length() if size > 1 else size


def _look(tensor: Tensor) -> str:
    layout = "c" if tensor.is_contiguous() else "s"
    sizes = [*(_bucket(s) for s in tensor.shape[:-1]), *tensor.shape[-1:]]
    return f"{str(tensor.dtype).removeprefix('torch.')}{layout}{'x'.join(map(str, sizes))}"


def _versions() -> tuple[str, ...]:
    from importlib.metadata import PackageNotFoundError, version

    try:
        triton = version("triton")
    except PackageNotFoundError:
        triton = "none"
    return (f"tskernel {__version__}", f"torch {torch.__version__}", f"triton {triton}")


class TuningDatabase:
    """Microseconds by key and kernel.

    A kernel is named with its source fingerprint, so that a changed kernel is measured anew.
    """

    def __init__(self) -> None:
        """Start empty."""
        self._lock = threading.Lock()
        self._times: dict[str, dict[str, float]] = {}

    def times(self, key: str) -> Mapping[str, float]:
        """Return what was measured for a key: "<kernel>:<fingerprint>" -> microseconds."""
        return self._times.get(key, {})

    def record(self, key: str, times: Mapping[str, float]) -> None:
        """Add measurements."""
        with self._lock:
            self._times[key] = {**self._times.get(key, {}), **times}

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._times.clear()

    def __len__(self) -> int:
        return len(self._times)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the database; a reader never sees half of it."""
        target = Path(path)
        scratch = target.with_name(f"{target.name}.{os.getpid()}")
        with self._lock:
            scratch.write_text(json.dumps({"format": _FORMAT, "times": self._times}, indent=1, sort_keys=True))
        scratch.replace(target)

    def load(self, path: str | os.PathLike[str]) -> int:
        """Add what a file holds and return how many keys it had.

        A missing, foreign or truncated file is ignored with a message.
        """
        try:
            times = _checked(json.loads(Path(path).read_text()))
        except (OSError, ValueError) as error:
            warnings.warn(f"tskernel: tuning file {path} is ignored: {error}", RuntimeWarning, stacklevel=2)
            return 0
        for key, found in times.items():
            self.record(key, found)
        return len(times)


def _checked(data: Any) -> dict[str, dict[str, float]]:
    if not isinstance(data, dict) or data.get("format") != _FORMAT:
        raise ValueError(
            f"format: expected {_FORMAT}, got {data.get('format') if isinstance(data, dict) else type(data).__name__}"
        )
    times = data.get("times")
    if not isinstance(times, dict) or not all(map(_is_row, times.values())):
        raise ValueError("times: expected microseconds by key and kernel")
    return times


def _is_row(row: Any) -> bool:
    return isinstance(row, dict) and all(isinstance(v, (int, float)) for v in row.values())


database: Final = TuningDatabase()


def label(spec: KernelSpec) -> str:
    """Return a kernel's name in the database."""
    return f"{spec.name}:{spec.fingerprint()}"


def order(fits: Sequence[KernelSpec], request: Request, arguments: Sequence[Any], form: str) -> Sequence[KernelSpec]:
    """Return fitting kernels in the order they are tried.

    HEURISTIC: a measured time decides between equal priorities. AUTOTUNE: it decides over all, once there is one.
    """
    if not len(database) or len(fits) < 2:
        return fits
    times = database.times(tuning_key(request, arguments, form))
    if not times:
        return fits
    tuned = current_policy() is SelectionPolicy.AUTOTUNE
    unmeasured = float("inf")
    place = {s.name: i for i, s in enumerate(fits)}

    def key(spec: KernelSpec) -> tuple[float, float, int]:
        return (0 if tuned else -spec.priority_of(request.traits), times.get(label(spec), unmeasured), place[spec.name])

    return sorted(fits, key=key)


def wants_measuring(request: Request, fits: Sequence[KernelSpec], arguments: Sequence[Any], form: str) -> bool:
    """Whether the AUTOTUNE policy would measure this call now.

    Several kernels fit, none is forced or timed already, no capture is running, and what the call writes is small
    enough to copy.
    """
    if current_policy() is not SelectionPolicy.AUTOTUNE or request.choice is not None or len(fits) < 2:
        return False
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return False
    written = (a for n, a in zip(request.operator.arguments, arguments, strict=True) if n in request.operator.mutates)
    if sum(t.numel() * t.element_size() for t in written) > _COPY_LIMIT:
        return False
    return not database.times(tuning_key(request, arguments, form))


def measure(run: Callable[[Sequence[Any]], Any], arguments: Sequence[Any]) -> float:
    """Return the median microseconds of a call, timed on the device for a GPU."""
    device = next(a.device for a in arguments if isinstance(a, Tensor))
    for _ in range(_WARMUPS):
        run(arguments)
    return _gpu_time(run, arguments) if device.type == "cuda" else _host_time(run, arguments)


def _host_time(run: Callable[[Sequence[Any]], Any], arguments: Sequence[Any]) -> float:
    taken: list[float] = []
    while len(taken) < _REPEATS and sum(taken) < _BUDGET_S:
        start = time.perf_counter()
        run(arguments)
        taken.append(time.perf_counter() - start)
    return statistics.median(taken) * 1e6


def _gpu_time(run: Callable[[Sequence[Any]], Any], arguments: Sequence[Any]) -> float:
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(_REPEATS)]
    for start, end in events:
        start.record()
        run(arguments)
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in events) * 1e3


def tune(op: Op, *args: Any, form: str = "", **kwargs: Any) -> dict[str, float]:
    """Time every kernel that takes this call, record the times, and return them: kernel -> microseconds.

    Written arguments are copied first, so tuning leaves the caller's tensors as they are. A kernel that fails is left
    out.
    """
    from tskernel._torch.execute import call_request, time_kernels

    arguments = op.fill({**dict(zip(op.arguments, args, strict=False)), **kwargs})
    request = call_request(op, arguments, form, None)
    times, specs = time_kernels(op, request, arguments, form), KernelRegistry.get().get_by_name
    database.record(tuning_key(request, arguments, form), {label(specs(n)): t for n, t in times.items()})
    KernelRegistry.get().bump()
    return times
