"""The one place for tolerances, oracles and sample inputs: used by the tests, the benchmarks and authors of plugins."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from tskernel.dispatch.errors import NoKernelFoundError, OverrideError
from tskernel.dispatch.platform import platform_of
from tskernel.dispatch.registry import KernelRegistry
from tskernel.library import Op, Sample, ops

__all__ = [
    "TOLERANCES",
    "SampleMaker",
    "Tolerance",
    "call",
    "clone_arguments",
    "compare",
    "kernel_names",
    "oracle",
    "samples_of",
]


class Tolerance(NamedTuple):
    """Bounds for one output dtype.

    ``rtol`` and ``atol`` per element, ``rms`` for the root-mean-square error over that of the reference.
    """

    rtol: float
    atol: float
    rms: float
    reason: str


# By the dtype of the result. Kernels accumulate in fp32, so half-precision results differ from the oracle by their own
# rounding, plus, where a kernel rounds an intermediate (the softmax weights before the second product), one or two
# roundings more.
TOLERANCES: Final[Mapping[torch.dtype, Tolerance]] = {
    torch.float64: Tolerance(1e-9, 1e-9, 1e-9, "same arithmetic in another order"),
    torch.float32: Tolerance(2e-4, 2e-4, 2e-5, "fp32 sums of up to 1e4 terms in another order, fast exp and tanh"),
    torch.float16: Tolerance(
        4e-3, 4e-3, 2e-3, "10 mantissa bits: half a step is 2^-11; weights rounded once more inside attention"
    ),
    torch.bfloat16: Tolerance(
        3e-2, 3e-2, 1e-2, "7 mantissa bits: half a step is 2^-8; weights rounded once more inside attention"
    ),
    torch.float8_e4m3fn: Tolerance(
        0.13, 2**-9, 5e-2, "3 mantissa bits: one step is 2^-3 where a tie falls the other way; smallest step 2^-9"
    ),
    torch.float8_e4m3fnuz: Tolerance(0.13, 2**-10, 5e-2, "as e4m3fn, one exponent lower"),
    torch.float8_e5m2: Tolerance(0.26, 2**-16, 1e-1, "2 mantissa bits: one step is 2^-2; smallest step 2^-16"),
    torch.float8_e5m2fnuz: Tolerance(0.26, 2**-17, 1e-1, "as e5m2, one exponent lower"),
}
_EXACT: Final = Tolerance(0.0, 0.0, 0.0, "integers, indices, bytes and copies have one right value")


def compare(got: Any, want: Any, *, dtype: torch.dtype | None = None, exact: bool = False) -> None:
    """Raise AssertionError unless ``got`` equals ``want`` within the table's row for its dtype.

    Tuples are compared item by item. ``want`` may be wider (the float64 oracle). Infinities and NaN must stand in the
    same places. ``dtype`` picks another row than got's own, for a value that went through that dtype; ``exact`` asks
    for equality.
    """
    if isinstance(got, (tuple, list)):
        if len(got) != len(want):
            raise AssertionError(f"expected {len(want)} results, got {len(got)}")
        for i, (g, w) in enumerate(zip(got, want, strict=True)):
            try:
                compare(g, w, dtype=dtype, exact=exact)
            except AssertionError as error:
                raise AssertionError(f"result {i}: {error}") from None
        return
    if got.shape != want.shape:
        raise AssertionError(f"shape: expected {tuple(want.shape)}, got {tuple(got.shape)}")
    row = _EXACT if exact else TOLERANCES.get(dtype or got.dtype, _EXACT)
    g, w = got.detach().to("cpu", torch.float64), want.detach().to("cpu", torch.float64)
    finite = w.isfinite()
    same = (g == w) | (g.isnan() & w.isnan())
    if not bool(same[~finite].all()) or not bool(g[finite].isfinite().all()):
        where = (~torch.where(finite, g.isfinite(), same)).nonzero()[0].tolist()
        raise AssertionError(
            f"non-finite values differ first at {where}: got {g[tuple(where)].item()}, want {w[tuple(where)].item()}"
        )
    g, w = g[finite], w[finite]
    bad = (g - w).abs() > row.atol + row.rtol * w.abs()
    if bool(bad.any()):
        i = int((g - w).abs().argmax())
        raise AssertionError(
            f"{int(bad.sum())} of {g.numel()} elements differ: got {g[i].item():.8g}, want {w[i].item():.8g} "
            f"(rtol {row.rtol}, atol {row.atol})"
        )
    scale = math.sqrt(float(w.square().mean())) if w.numel() else 0.0
    rms = math.sqrt(float((g - w).square().mean())) if w.numel() else 0.0
    if rms > row.rms * scale + row.atol:
        raise AssertionError(f"RMS error {rms:.3g} is over {row.rms} of the reference's {scale:.3g}")


class SampleMaker:
    """Makes sample tensors on one device from one seed; the values do not depend on the device."""

    def __init__(self, device: torch.device | str = "cpu", seed: int = 0) -> None:
        """Fix the device and the seed."""
        self.device = torch.device(device)
        self._generator = torch.Generator().manual_seed(seed)

    def randn(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return standard normal values, rounded to ``dtype`` (saturated for fp8)."""
        values = torch.randn(tuple(shape), generator=self._generator)
        if dtype.itemsize == 1 and dtype.is_floating_point:
            top = torch.finfo(dtype).max
            values = values.clamp(-top, top)
        return values.to(dtype).to(self.device)

    def rand(self, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
        """Return uniform values in [0, 1)."""
        return torch.rand(tuple(shape), generator=self._generator).to(dtype).to(self.device)

    def randint(self, low: int, high: int, shape: Sequence[int], dtype: torch.dtype = torch.int32) -> Tensor:
        """Return integers in [low, high)."""
        return torch.randint(low, high, tuple(shape), generator=self._generator).to(dtype).to(self.device)

    def tensor(self, values: Any, dtype: torch.dtype) -> Tensor:
        """Return a tensor of given values."""
        return torch.tensor(values, dtype=dtype, device=self.device)

    def permutation(self, n: int, dtype: torch.dtype = torch.int32) -> Tensor:
        """Return 0..n-1 in random order."""
        return torch.randperm(n, generator=self._generator).to(dtype).to(self.device)

    def full(self, shape: Sequence[int], value: float, dtype: torch.dtype) -> Tensor:
        """Return a constant tensor."""
        return torch.full(tuple(shape), value, dtype=torch.float32).to(dtype).to(self.device)


def samples_of(
    op: Op, device: torch.device | str = "cpu", dtypes: Sequence[torch.dtype] | None = None
) -> list[tuple[torch.dtype, Sample]]:
    """Return all samples of an op, for each of its dtypes."""
    return [(d, s) for d in (dtypes or op.dtypes) for s in op.sample_calls(SampleMaker(device), d)]


def kernel_names(op: str, device: torch.device | str = "cpu") -> list[str]:
    """Return the kernels of an op that the device's platform can run, the reference included."""
    platform = platform_of(torch.device(device))
    return [s.name for s in KernelRegistry.get().list_kernels(mode=op) if s.unfit(platform) is None]


def call(op: str, kernel: str | None, *args: Any, **kwargs: Any) -> Any:
    """Call the public function with one kernel forced.

    Skip the running pytest test, with the reason, if the kernel declines the call.
    """
    try:
        return ops[op].front(*args, **kwargs, override=kernel)
    except (OverrideError, NoKernelFoundError) as error:
        import pytest

        return pytest.skip(str(error))


def oracle(op: str, *args: Any, **kwargs: Any) -> Any:
    """Run the reference body on float64 copies of the fp32, fp16 and bf16 arguments.

    Quantized data and fp32 scales stay what they are.
    """
    declared = ops[op]

    def widen(value: Any) -> Any:
        if isinstance(value, Tensor) and value.dtype in (torch.float32, torch.float16, torch.bfloat16):
            return value.to(torch.float64)
        return value

    return declared.body(*map(widen, args), **{k: widen(v) for k, v in kwargs.items()})


def clone_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments with their own storage and the same strides; views that share a storage keep sharing one."""
    wholes: dict[int, Tensor] = {}
    bases: dict[
        tuple[int, torch.dtype], Tensor
    ] = {}  # one per dtype: torch.compile wants views of one storage to share it

    def base_of(value: Tensor) -> Tensor:
        storage = value.untyped_storage()
        if storage._cdata not in wholes:
            whole = torch.empty(0, dtype=torch.uint8, device=value.device)
            wholes[storage._cdata] = whole.set_(storage.clone())  # pyright: ignore[reportArgumentType]
        key = (storage._cdata, value.dtype)
        if key not in bases:
            bases[key] = wholes[storage._cdata].view(value.dtype)
        return bases[key]

    def copy(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return torch.as_strided(base_of(value), value.shape, value.stride(), value.storage_offset())

    return {k: copy(v) for k, v in arguments.items()}
