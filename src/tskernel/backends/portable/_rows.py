"""The host side of the Triton programs of small ops: rows of any strides, launches that are worked out once, fp8.

Nothing here reads contents of tensors, and nothing is tried out: tiles follow from sizes alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from tskernel.backends.compile_case import CompileCase
from tskernel.backends.lazy_triton import is_traced, traced
from tskernel.backends.plans import Plans
from tskernel.backends.portable import _attention_launch as flash
from tskernel.backends.triton_launch import Prepared, prepare
from tskernel.checks import FLOATS
from tskernel.dispatch.platform import Arch, platform_of

CAPABILITY: Final = flash.CAPABILITY
Chip = flash.Chip
FLOAT_DTYPES: Final = FLOATS
TILE: Final = 2048  # elements of a program of an elementwise op
ONE_PASS: Final = 16384  # columns that stay in registers
# What a device function needs to know of an fp8 dtype: its name, bits of the mantissa, bias of the exponent, largest.
FP8: Final = {
    torch.float8_e4m3fn: ("e4m3fn", 448.0),
    torch.float8_e4m3fnuz: ("e4m3fnuz", 240.0),
    torch.float8_e5m2: ("e5m2", 57344.0),
    torch.float8_e5m2fnuz: ("e5m2fnuz", 57344.0),
}


class Program(NamedTuple):
    """A launch: a device function, its grid, its arguments (tensors first to last as they come) and its options."""

    kernel: Any
    grid: tuple[Any, ...]
    arguments: tuple[Any, ...]
    options: dict[str, Any]


class Step(NamedTuple):
    """A prepared launch and which tensors of the call it takes."""

    launch: Prepared
    places: tuple[int, ...]


Work = Callable[..., Sequence[Program]]
Steps = Plans[tuple[Step, ...]]


def run(plans: Steps, work_out: Work, tensors: Sequence[Tensor | None], *options: Any) -> None:
    """Launch the programs that ``work_out(*tensors, *options)`` returns, worked out once per look of the tensors.

    All tensors that the programs take must be among ``tensors``, of which the first is not None.
    """
    first = tensors[0]
    if first is not None and is_traced(first):
        for kernel, grid, arguments, constants in work_out(*tensors, *options):
            traced(kernel)[grid](*arguments, **constants)
        return
    plan = plans.find(options, tensors)
    if plan is None:
        steps = [_step(program, tensors) for program in work_out(*tensors, *options)]
        plan = plans.keep(options, tensors, tuple(steps))
    for launch, places in plan:
        launch(*[tensors[i] for i in places])


def _step(program: Program, tensors: Sequence[Tensor | None]) -> Step:
    given = [a for a in program.arguments if isinstance(a, Tensor)]
    places = tuple(next(i for i, t in enumerate(tensors) if t is a) for a in given)
    return Step(prepare(program.kernel, program.grid, *program.arguments, **program.options), places)


class RowMap(NamedTuple):
    """Where rows begin: row r at ``(r // inner) * outer + (r % inner) * step``; ``column`` is the stride within one."""

    inner: Any
    outer: Any
    step: Any
    column: Any

    @property
    def unit(self) -> bool:
        """Whether elements of a row lie side by side."""
        return bool(self.column == 1)


def readable(x: Tensor) -> Tensor:
    """Return ``x [..., H]`` with at most three dimensions, copied only where its leading ones do not merge."""
    return x if x.dim() <= 3 else x.flatten(0, -3)


def unwritable(**written: Tensor | None) -> str | None:
    """Return why rows of a tensor cannot be written through two strides, or None."""
    for name, x in written.items():
        if x is not None and x.dim() > 3 and not x.is_contiguous():
            return f"{name} has {x.dim()} dimensions that are not contiguous, this kernel takes 3 of any strides"
    return None


def row_map(x: Tensor) -> RowMap:
    """Return where the rows of ``x [..., H]``, of at most three dimensions, begin."""
    column = 1 if x.dim() == 0 else x.stride(-1)
    if x.dim() < 3:
        return RowMap(1, x.stride(0) if x.dim() == 2 else 0, 0, column)
    outer, step = x.stride(0), x.stride(1)
    # Sizes that are symbols are not asked: the general form serves them.
    if not is_traced(x) and (outer == step * x.shape[1] or x.shape[0] == 1):
        return RowMap(1, step, 0, column)
    return RowMap(x.shape[1], outer, step, column)


def rows_of(x: Tensor) -> Any:
    """Return how many rows ``x [..., H]`` has."""
    count: Any = 1
    for size in x.shape[:-1]:
        count = count * size
    return count


def blocks(count: Any, size: int) -> Any:
    """Return how many programs of ``size`` cover ``count``: at least one, which then finds nothing to do."""
    return torch.sym_max(1, (count + size - 1) // size)


def pow2(n: int) -> int:
    """Return the least power of two that is at least ``n``."""
    return 1 << max(0, n - 1).bit_length()


def warps(elements: int, each: int = 16, hip: bool | None = None) -> int:
    """Return how many warps give a thread ``each`` of ``elements``; as few as 8 while there are not four warps."""
    lanes = 64 if (torch.version.hip is not None if hip is None else hip) else 32
    count = pow2(elements) // lanes
    return max(1, min(16, max(count // each, min(4, count // 8))))


def unit(x: Tensor | None) -> Tensor | None:
    """Return ``x``, copied where its last stride is not 1."""
    return None if x is None else flash.unit(x)


def as_bytes(x: Tensor) -> Tensor:
    """Return the bytes of an fp8 or bool tensor: programs write codes, which every part can."""
    return x.view(torch.uint8)


@functools.lru_cache(maxsize=64)
def is_native(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the device converts to this fp8 dtype by itself; elsewhere programs work the code out."""
    if device.type != "cuda":
        return False
    try:
        platform = platform_of(device)
    except (AssertionError, RuntimeError):  # a graph traced for a device that is not here
        return False
    arch = platform.arch or Arch((0,))
    if platform.vendor == "nvidia":
        return dtype in (torch.float8_e4m3fn, torch.float8_e5m2) and arch >= Arch((8, 9))
    if arch >= Arch((9, 5, 0)) and arch < Arch((10,)):
        return dtype in (torch.float8_e4m3fn, torch.float8_e5m2)
    return arch == Arch((9, 4, 2)) and dtype in (torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)


def multiprocessors(device: torch.device) -> int:
    """Return how many multiprocessors a device has."""
    return flash.multiprocessors(device)


def compile_case(
    name: str, function: Any, constants: dict[str, Any], types: dict[str, str], options: dict[str, int]
) -> CompileCase:
    """Return a case: arguments are constants where given, of ``types`` where named, ``i32`` else; those left are 16 n.

    An argument of type ``"1"`` is one that the just-in-time compiler sees as the constant 1.
    """
    declared = getattr(function, "function", None) or function.fn
    names = declared.__code__.co_varnames[: declared.__code__.co_argcount]
    ones = {n: 1 for n, kind in types.items() if kind == "1"}
    nothing = {n: None for n, kind in types.items() if kind == "none"}
    fixed = {**constants, **ones, **nothing}
    signature = {n: "constexpr" if n in fixed else types.get(n, "i32") for n in names}
    plain = [n for n, kind in signature.items() if kind == "i32" and n not in types]
    return CompileCase(name, function, signature, {n: fixed[n] for n in names if n in fixed}, options, plain)
