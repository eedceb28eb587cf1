"""Run a Gluon kernel on the CPU: partitions are threads, shared memory and registers are torch tensors.

Triton's interpreter does not run Gluon. This one runs the device functions' own source with stand-ins for ``gl`` and
``hopper``, enough for kernels that load by TMA, multiply by warpgroup and wait on barriers: it checks indices, masks,
arithmetic, and that no partition waits for a barrier that nobody completes. It knows nothing of layouts, fences,
named barriers or the order of memory.
"""

from __future__ import annotations

import math
import random
import threading
import time
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

PATIENCE = 60.0  # seconds a partition waits before the test fails
_place = threading.local()


class Barrier:
    """A barrier in shared memory: a phase ends when all have arrived and all announced bytes are there."""

    def __init__(self) -> None:
        self.count = self.pending = self.bytes = self.phase = 0
        self.changed = threading.Condition()

    def update(self, arrivals: int, size: int) -> None:
        with self.changed:
            self.pending -= arrivals
            self.bytes += size
            if self.pending < 0:
                raise AssertionError("more arrivals than the barrier counts")
            if self.pending == 0 and self.bytes == 0:
                self.phase ^= 1
                self.pending = self.count
                self.changed.notify_all()

    def wait(self, phase: int) -> None:
        time.sleep(random.random() * 1e-4)
        with self.changed:
            if not self.changed.wait_for(lambda: self.phase != phase, PATIENCE):
                raise AssertionError("a partition waits for a barrier that nobody completes")


class Shared:
    """Shared memory, or a view of it."""

    def __init__(self, data: Any) -> None:
        self.data = data
        self.dtype, self.layout = getattr(data, "dtype", None), None

    def index(self, i: Any) -> Any:
        found = self.data[int(i)]
        return found if isinstance(found, Barrier) else Shared(found)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.data.shape)

    def reshape(self, shape: Sequence[int]) -> Shared:
        return Shared(self.data.view(*shape))

    def slice(self, start: Any, length: int, dim: int = 0) -> Shared:
        return Shared(self.data.narrow(dim, int(start), length))

    def permute(self, order: Sequence[int]) -> Shared:
        return Shared(self.data.permute(*order))

    def load(self, _layout: Any) -> Tensor:
        return self.data.clone()

    def store(self, value: Tensor) -> None:
        assert value.dtype == self.data.dtype and value.shape == self.data.shape
        self.data.copy_(value)

    def _reinterpret(self, _dtype: Any, shape: Sequence[int], _layout: Any) -> Shared:
        """View ``[rows, width]`` as is, or as boxes of 64 columns by fewer rows, column by column."""
        rows, width = self.data.shape
        if list(shape) == [1, rows, width]:
            return Shared(self.data[None])
        high = shape[-2]
        boxes = [self.data[r : r + high, c : c + 64] for c in range(0, width, 64) for r in range(0, rows, high)]
        boxes = boxes if len(shape) == 3 else [b[None] for b in boxes]
        assert len(boxes) == shape[0]
        return Shared(boxes)


class Pointer:
    """A pointer into a tensor's storage, or a tensor of them."""

    def __init__(self, storage: Tensor, offset: Any = 0) -> None:
        self.storage, self.offset = storage, offset
        self.dtype = types.SimpleNamespace(element_ty=storage.dtype)

    def __add__(self, other: Any) -> Pointer:
        return Pointer(self.storage, self.offset + other)

    def __getitem__(self, key: Any) -> Pointer:
        return Pointer(self.storage, self.offset[key])


class Descriptor:
    """A tensor map: boxes of a tensor, zero outside of it."""

    def __init__(self, x: Tensor, shape: Sequence[int], strides: Sequence[int], box: Sequence[int]) -> None:
        assert x.data_ptr() % 16 == 0
        self.view = torch.as_strided(x, tuple(shape), tuple(strides))
        self.box, self.dtype, self.layout = tuple(box), x.dtype, None
        self.base, self.block_shape = x, self.box
        self.block_type = types.SimpleNamespace(shape=self.box, nbytes=x.itemsize * math.prod(self.box))


def _pointer(x: Tensor) -> Pointer:
    size = x.untyped_storage().nbytes() // x.itemsize
    return Pointer(torch.as_strided(x, (size,), (1,), 0), x.storage_offset())


def _argument(x: Any) -> Any:
    return _pointer(x) if isinstance(x, Tensor) else torch.tensor(x) if isinstance(x, int) else x


def _load(pointer: Pointer, mask: Any = None, other: Any = 0) -> Tensor:
    offset = torch.as_tensor(pointer.offset)
    if mask is None:
        return pointer.storage[offset]
    offset, mask = torch.broadcast_tensors(offset, torch.as_tensor(mask))
    return torch.where(mask, pointer.storage[torch.where(mask, offset, 0)], other)


def _store(pointer: Pointer, value: Tensor, mask: Any = True) -> None:
    offset = torch.as_tensor(pointer.offset)
    offset, value, mask = torch.broadcast_tensors(offset, torch.as_tensor(value), torch.as_tensor(mask))
    pointer.storage[offset[mask]] = value[mask].to(pointer.storage.dtype)


def _copy(descriptor: Descriptor, at: Sequence[Any], barrier: Barrier, to: Shared) -> None:
    """Copy a box; the bytes arrive at the barrier."""
    view, box = descriptor.view, torch.zeros(descriptor.box, dtype=descriptor.dtype)
    start = [int(a) for a in at]
    inside = [
        slice(max(0, -a), max(0, min(b, n - a))) for a, b, n in zip(start, descriptor.box, view.shape, strict=True)
    ]
    source = tuple(slice(a + s.start, a + s.stop) for a, s in zip(start, inside, strict=True))
    if all(s.stop > s.start for s in inside):
        box[tuple(inside)] = view[source]
    assert to.data.numel() == box.numel()
    to.data.copy_(box.view(to.data.shape))
    barrier.update(0, -box.numel() * box.itemsize)


def _write_later(descriptor: Descriptor, at: Sequence[Any], source: Shared) -> None:
    """Remember to copy a box back: what lies in the buffer when the partition waits is what arrives."""
    vars(_place).setdefault("writes", []).append((descriptor, [int(a) for a in at], source))


def _write_now(_outstanding: int) -> None:
    for descriptor, at, source in vars(_place).pop("writes", []):
        assert all(a >= 0 for a in at)
        to = descriptor.view[tuple(slice(a, a + b) for a, b in zip(at, descriptor.box, strict=True))]
        to.copy_(source.data.view(descriptor.box)[tuple(slice(0, n) for n in to.shape)])


_adding = threading.Lock()


def _atomic_add(pointer: Pointer, value: int, sem: str) -> Tensor:
    with _adding:
        before = pointer.storage[int(pointer.offset)].clone()
        pointer.storage[int(pointer.offset)] += value
    return before


def _matrix(x: Any) -> Tensor:
    return (x.data if isinstance(x, Shared) else x).double()


def _multiply(a: Any, b: Shared, acc: Tensor, use_acc: bool = True, is_async: bool = False) -> Tensor:
    return (_matrix(a) @ _matrix(b)).float() + (acc if use_acc else 0.0)


def _specialize(parts: Sequence[tuple[Callable[..., None], Sequence[Any]]], *_: Any) -> None:
    program, failed = vars(_place).copy(), []

    def run(function: Callable[..., None], arguments: Sequence[Any]) -> None:
        vars(_place).update(program)
        try:
            function(*arguments)
            if vars(_place).get("writes"):
                raise AssertionError("a partition ends before its rows are written")
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=part, daemon=True) for part in parts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE * 2)
    if failed:
        raise failed[0]
    assert not any(t.is_alive() for t in threads)


def _allocate(dtype: torch.dtype, shape: Sequence[int], layout: Any) -> Shared:
    if layout == "barrier":
        return Shared([Barrier() for _ in range(shape[0])])
    return Shared(torch.full(tuple(shape), float("nan") if dtype.is_floating_point else -12345, dtype=dtype))


def _init(barrier: Barrier, count: int) -> None:
    barrier.count = barrier.pending = count


def _layout(*_: Any, **__: Any) -> str:
    return "layout"


vars(_layout)["get_default_for"] = _layout


def _pair(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Any, Any], Tensor]:
    return lambda a, b: function(torch.as_tensor(a), torch.as_tensor(b))


GL = types.SimpleNamespace(
    constexpr=lambda x: x,
    static_range=range,
    int32=torch.int32,
    int64=torch.int64,
    float16=torch.float16,
    bfloat16=torch.bfloat16,
    float32=torch.float32,
    program_id=lambda axis: torch.tensor(_place.program[axis]),
    num_programs=lambda axis: torch.tensor(_place.grid[axis]),
    arange=lambda a, b, layout: torch.arange(a, b),
    load=_load,
    store=_store,
    minimum=_pair(torch.minimum),
    maximum=_pair(torch.maximum),
    where=lambda c, a, b: torch.where(torch.as_tensor(c), torch.as_tensor(a), torch.as_tensor(b)),
    sum=lambda x, axis: x.sum(axis),
    max=lambda x, axis: x.amax(axis),
    min=lambda x, axis: x.amin(axis),
    abs=torch.abs,
    exp2=torch.exp2,
    log2=torch.log2,
    zeros=lambda shape, dtype, _layout: torch.zeros(shape, dtype=dtype),
    full=lambda shape, value, dtype, _layout: torch.full(shape, value, dtype=dtype),
    reshape=lambda x, shape: x.reshape(shape),
    atomic_add=_atomic_add,
    zeros_like=torch.zeros_like,
    associative_scan=lambda x, axis, _combine: x.cumsum(axis),
    convert_layout=lambda x, _layout: x,
    inline_asm_elementwise=lambda *_, **__: None,
    allocate_shared_memory=_allocate,
    warp_specialize=_specialize,
    BlockedLayout=_layout,
    DistributedLinearLayout=_layout,
    SliceLayout=_layout,
    NVMMADistributedLayout=_layout,
    NVMMASharedLayout=_layout,
    SwizzledSharedLayout=_layout,
    DotOperandLayout=_layout,
)
HOPPER = types.SimpleNamespace(
    fence_async_shared=lambda: None,
    warpgroup_mma=_multiply,
    warpgroup_mma_wait=lambda num_outstanding, deps: deps[0] if len(deps) == 1 else tuple(deps),
    tma=types.SimpleNamespace(
        async_copy_global_to_shared=_copy, async_copy_shared_to_global=_write_later, store_wait=_write_now
    ),
    mbarrier=types.SimpleNamespace(
        MBarrierLayout=lambda: "barrier",
        init=_init,
        wait=lambda bar, phase: bar.wait(int(phase)),
        expect=lambda bar, size: bar.update(1, size),
        arrive=lambda bar, count, pred=True: bar.update(count, 0) if pred else None,
    ),
)


class Kernel:
    """A device function, launched like a Triton one."""

    def __init__(self, function: Callable[..., None]) -> None:
        self.function = function

    def __getitem__(self, grid: Sequence[int]) -> Callable[..., None]:
        def launch(
            *arguments: Any, num_warps: int, launch_pdl: bool = False, maxnreg: int = 0, **constants: Any
        ) -> None:
            given = [
                _pointer(a) if isinstance(a, Tensor) else torch.tensor(a) if isinstance(a, int) else a
                for a in arguments
            ]
            sizes = (*grid, 1, 1)[:3]
            for z in range(sizes[2]):
                for y in range(sizes[1]):
                    for x in range(sizes[0]):
                        _place.program, _place.grid = (x, y, z), sizes
                        self.function(*given, **constants)

        return launch


def _gather(names: dict[str, Any], scope: dict[str, Any]) -> None:
    """Collect the device functions of a file, and those that they use of other files."""
    for name, value in names.items():
        source = getattr(value, "function", None) or getattr(value, "fn", None)
        if isinstance(source, types.FunctionType) and scope.get(name) is not source:
            scope[name] = source
            _gather(source.__globals__, scope)


def emulate(declared: dict[str, Any], **instead: Callable[..., Any]) -> dict[str, Kernel]:
    """Return the kernels of a file as ones that run here; ``declared`` are its ``gluon_jit`` objects by a name.

    Device functions of files that it uses come along; their names must not be taken twice. ``instead`` are stand-ins
    for those that are in assembly, or ask for a layout.
    """
    scope: dict[str, Any] = {}
    for kernel in declared.values():
        _gather(kernel.function.__globals__, scope)
    scope |= {"gl": GL, "hopper": HOPPER}
    for name, value in list(scope.items()):
        if isinstance(value, types.FunctionType):
            scope[name] = types.FunctionType(value.__code__, scope, name, value.__defaults__)
    scope |= instead
    return {name: Kernel(scope[kernel.function.__name__]) for name, kernel in declared.items()}
