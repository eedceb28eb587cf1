"""Every kernel of every op on every sample, in every form, against the float64 oracle."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import declines, form_samples, short, tensors_in

from tskernel._torch.runners import call_with
from tskernel.library import Op, Sample, ops
from tskernel.testing import clone_arguments, compare, kernel_names, oracle, samples_of

PAIRS = [(o, k) for o in ops.values() for k in kernel_names(o.name)]


def expected(op: Op, sample: Sample, form: str) -> Any:
    """Return the oracle's results: what is returned, or the written arguments of a mutating op."""
    arguments = clone_arguments(sample.arguments)
    if op.mutates:
        # Write through float64 twins, so that the comparison sees one rounding of the kernel and none of the oracle.
        wide = {
            k: v.double() if isinstance(v, torch.Tensor) and v.dtype in _WIDENED else v for k, v in arguments.items()
        }
        op.body(**wide)
        return tuple(wide[n] for n in op.mutates)
    return oracle(op.name, **arguments, **({"return_lse": True} if form == "lse" else {}))


_WIDENED = (torch.float32, torch.float16, torch.bfloat16)


def actual(op: Op, kernel: str, sample: Sample, form: str) -> Any:
    """Return a kernel's results, through the public function; ``out`` starts as -7."""
    arguments = clone_arguments(sample.arguments)
    if op.mutates:
        op.front(**arguments, override=kernel)
        return tuple(arguments[n] for n in op.mutates)
    if form == "lse":
        return op.front(**arguments, return_lse=True, override=kernel)
    if form == "out":
        out = op.allocate(op.fill(arguments)).fill_(-7)
        assert op.front(**arguments, out=out, override=kernel) is out
        return out
    return op.front(**arguments, override=kernel)


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize(("op", "kernel"), [pytest.param(o, k, id=k) for o, k in PAIRS])
def test_conformance(op: Op, kernel: str, record_property: Any) -> None:
    ran, declined = 0, []
    for form, dtype, sample in form_samples(op, samples_of(op)):
        why = declines(kernel, op, sample, form)
        if why is not None:
            declined.append(f"{sample.name}: {why}")
            continue
        try:
            compare(actual(op, kernel, sample, form), expected(op, sample, form))
        except Exception as error:
            raise AssertionError(
                f"{kernel}, form {form or 'base'!r}, {short(dtype)}, sample {sample.name}: {error}"
            ) from error
        ran += 1
    assert ran, f"{kernel} declined all samples: {declined}"
    record_property("kernel x sample x form compared with the oracle", ran)


def stored(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of the elements: NaN equals itself, and any strides do."""
    return tensor.clone(memory_format=torch.contiguous_format).flatten().view(torch.uint8)


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("op", [pytest.param(o, id=o.name) for o in ops.values()])
def test_read_only_arguments_stay_untouched(op: Op) -> None:
    for _, sample in samples_of(op, dtypes=op.dtypes[-1:]):
        arguments = clone_arguments(sample.arguments)
        before = clone_arguments(arguments)
        result = op.front(**arguments)
        for name, value in arguments.items():
            if isinstance(value, torch.Tensor) and name not in op.mutates and value.numel():
                assert torch.equal(stored(value), stored(before[name])), f"{sample.name}: {name} changed"
        assert len(tensors_in(result)) == op.signature.num_returns


def test_every_op_has_samples_for_every_option() -> None:
    """An option that no sample sets is an option that no test sees."""
    unseen = []
    for op in ops.values():
        given = {k for _, s in samples_of(op, dtypes=op.dtypes[-1:]) for k, v in s.arguments.items() if v is not None}
        unseen += [f"{op.name}.{p.name}" for p in op.signature.params if p.name not in given]
    assert not unseen, unseen


def test_call_with_passes_keywords_by_name() -> None:
    op = ops["mha_prefill"]
    seen = call_with(op, lambda *a, **k: (a, k), list(range(len(op.arguments))))
    assert len(seen[0]) == op.signature.positional
    assert list(seen[1]) == list(op.arguments[op.signature.positional :])
