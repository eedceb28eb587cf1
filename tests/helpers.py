"""What the generic tests share: every op with every sample, by a readable id."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tskernel.dispatch.ranking import reject_reason, unfit
from tskernel.dispatch.registry import KernelRegistry
from tskernel.library import Op, Sample, ops
from tskernel.testing import samples_of


def short(dtype: torch.dtype) -> str:
    """Return a dtype's name."""
    return str(dtype).removeprefix("torch.")


def each_op() -> Any:
    """Parametrise over all ops."""
    return pytest.mark.parametrize("op", [pytest.param(o, id=o.name) for o in ops.values()])


def primary_samples(op: Op) -> list[tuple[torch.dtype, Sample]]:
    """Return an op's samples in its last dtype (bf16 for most): the one that servers run."""
    return samples_of(op, dtypes=op.dtypes[-1:])


def form_samples(op: Op, samples: list[tuple[torch.dtype, Sample]]) -> Iterator[tuple[str, torch.dtype, Sample]]:
    """Yield every sample for every form of the op."""
    for form in op.forms:
        for dtype, sample in samples:
            yield form, dtype, sample


def distinct_options(samples: list[tuple[torch.dtype, Sample]]) -> list[tuple[torch.dtype, Sample]]:
    """Return, for each set of given options, the non-empty sample with the fewest sizes of 1.

    What differs to a tracer.
    """
    found: dict[str, tuple[int, torch.dtype, Sample]] = {}
    for dtype, sample in samples:
        sizes = [s for v in sample.arguments.values() if isinstance(v, torch.Tensor) for s in v.shape]
        if 0 not in sizes:
            key = str([(k, isinstance(v, torch.Tensor) or v) for k, v in sample.arguments.items() if v is not None])
            if key not in found or sizes.count(1) < found[key][0]:
                found[key] = (sizes.count(1), dtype, sample)
    return [(dtype, sample) for _, dtype, sample in found.values()]


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Return the tensors of a result."""
    if isinstance(value, torch.Tensor):
        return [value]
    return [t for v in value for t in tensors_in(v)] if isinstance(value, (tuple, list)) else []


def laid_out(kernel: str, sample: Sample) -> Sample:
    """Return a sample that says its weights are in the order that a kernel reads, where it has one of its own."""
    spec = KernelRegistry.get().get_by_name(kernel)
    if spec.weight_preprocessor is None:
        return sample
    return Sample(sample.name, **{**sample.arguments, "weight_layout": next(iter(spec.traits["weight_layout"]))})


def prepared(kernel: str, sample: Sample) -> Sample:
    """Return a sample whose weights are in the order that a kernel reads, where it has one of its own."""
    from tskernel.moe import WEIGHTS

    spec = KernelRegistry.get().get_by_name(kernel)
    if spec.weight_preprocessor is None:
        return sample
    made = spec.weight_preprocessor({name: sample.arguments.get(name) for name in WEIGHTS})
    return laid_out(kernel, Sample(sample.name, **{**sample.arguments, **made}))


def declines(kernel: str, op: Op, sample: Sample, form: str) -> str | None:
    """Return why a kernel does not take a sample, or None: formats, traits, its own rejects."""
    from tskernel._torch.execute import call_request, named

    spec = KernelRegistry.get().get_by_name(kernel)
    arguments = op.fill(sample.arguments)
    why = unfit(spec, call_request(op, arguments, form, None))
    return why if why is not None else reject_reason(spec, named(op, arguments, None))
