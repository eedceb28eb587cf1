"""The native routing and sampling kernels by emulation: long rows, ties, bad rows, many blocks for a row, layouts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import short
from native_vocab_cases import native_samples, values_of
from test_native_build import emulated, run  # noqa: F401  (a fixture)
from torch import Tensor

from tskernel.backends.cuda import _native as lib
from tskernel.backends.cuda._native_vocab import CHUNKS, workspace
from tskernel.dispatch.registry import KernelRegistry
from tskernel.dispatch.spec import KernelSpec
from tskernel.library import ops
from tskernel.testing import SampleMaker, compare

FAMILIES = ("moe", "sampling")
NATIVE = [s for s in KernelRegistry.get().list_kernels() if s.solution == "native" and s.family in FAMILIES]
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("emulated", "poison")]


@pytest.mark.parametrize("spec", [pytest.param(s, id=s.name) for s in NATIVE])
def test_larger_calls(spec: KernelSpec) -> None:
    """MOE-01, MOE-04, SMP-01, SMP-02, SMP-03, LAY-01, WID-01."""
    for dtype in {ops[spec.mode].dtypes[0], ops[spec.mode].dtypes[-1]}:
        ran = 0
        for sample in native_samples(spec.mode, SampleMaker(), dtype):
            try:
                compare(*run(spec, sample))
            except Exception as error:
                raise AssertionError(f"{spec.name}, {short(dtype)}, {sample.name}: {error}") from error
            ran += 1
        assert ran >= 3


def function_of(op: str) -> Any:
    return KernelRegistry.get().get_by_name(f"cuda/{op}/native").function


def drawn(logits: Tensor, top_k: int, top_p: float) -> Tensor:
    rows = logits.shape[0]
    columns = (torch.full((rows,), top_k, dtype=torch.int32), torch.full((rows,), top_p), torch.ones(rows))
    return function_of("top_k_top_p_sample")(logits, *columns, torch.arange(rows), torch.arange(rows) + 7)


@pytest.mark.parametrize(("top_k", "top_p"), ((0, 1.0), (40, 1.0), (0, 0.9), (3000, 0.99)))
def test_smp_01_a_draw_depends_on_no_other_row(top_k: int, top_p: float) -> None:
    """Alone, a row is cut into other chunks than among 150: the same token."""
    logits = values_of(SampleMaker(), 150, 5000, "spread").to(torch.bfloat16)
    token = drawn(logits, top_k, top_p)
    for i in (0, 1, 149):
        alone = torch.full((1,), i)
        params = (torch.tensor([top_k], dtype=torch.int32), torch.tensor([top_p]), torch.ones(1), alone, alone + 7)
        assert function_of("top_k_top_p_sample")(logits[i : i + 1], *params) == token[i]


@pytest.mark.parametrize("count", (1, 4095, 4096, 4097, 8999))
def test_smp_01_exactly_k_of_equal_values(count: int) -> None:
    """More equals than the list of a row holds: the row is searched itself."""
    probs = torch.full((2, 9000), 0.25)
    probs[:, 17::31] = 0.5
    top_k = torch.full((2,), count, dtype=torch.int32)
    out = torch.empty_like(probs)
    function_of("top_k_renorm")(probs, top_k, out=out)
    assert (out > 0).sum(1).tolist() == [count] * 2
    compare(out, ops["top_k_renorm"].body(probs.double(), top_k))


@pytest.mark.parametrize("op", ("top_k_renorm", "top_p_renorm"))
def test_smp_02_sums_are_exact(op: str) -> None:
    """Values from 1e-30 to 1e30: the smallest are far below the resolution of the largest, and never disturb them."""
    probs = torch.logspace(-30, 30, 5001).flip(0).unsqueeze(0)[:, torch.randperm(5001)].repeat(2, 1)
    per_row = torch.tensor([5, 2000], dtype=torch.int32) if op == "top_k_renorm" else torch.tensor([0.5, 0.999])
    out = torch.empty_like(probs)
    function_of(op)(probs, per_row, out=out)
    compare(out, ops[op].body(probs.double(), per_row))


def test_a_workspace_that_is_too_small_is_refused() -> None:
    probs, out = torch.rand(3, 50), torch.empty(3, 50)
    small = workspace(probs, filters=True)[:-1]
    with pytest.raises(RuntimeError, match="workspace: expected 62080 bytes for each of 3 rows"):
        lib.native("top_k_renorm")(probs, torch.ones(3, dtype=torch.int32), out, small)
    with pytest.raises(RuntimeError, match="partial: expected 128 words for each of 3 rows"):
        lib.native("argmax")(probs, torch.empty(3, dtype=torch.int32), torch.empty(3 * CHUNKS - 1, dtype=torch.int64))


def test_rejections() -> None:
    def reason(op: str, *arguments: Any) -> str | None:
        rejects = KernelRegistry.get().get_by_name(f"cuda/{op}/native").rejects
        assert rejects is not None
        return rejects(*arguments)

    assert reason("moe_topk", torch.empty(1, 513), 8) == "513 experts: expected at most 512"
    assert reason("moe_topk", torch.empty(1, 64), 33) == "top_k is 33: expected at most 32"
    assert reason("moe_dispatch", 513, None) == "513 experts: expected at most 512"
    gaps = torch.ones(4, dtype=torch.int32)[::2]
    assert reason("top_k_renorm", gaps) == "top_k.stride(0) is 2: expected contiguous elements"
