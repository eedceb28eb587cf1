"""What test_vendor_gemm.py runs in a process of its own, where the CPU counts as an sm90."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import vendors_gemm
from helpers import declines, laid_out, prepared, short
from test_conformance import actual, expected, stored
from torch import Tensor, nn

from tskernel import moe
from tskernel.backends.cuda import _deep_gemm, _vendor_gemm
from tskernel.dispatch.errors import KernelRefusedError
from tskernel.dispatch.registry import KernelRegistry
from tskernel.library import Op, Sample, ops
from tskernel.ops.gemm._samples import whole_blocks
from tskernel.ops.moe._samples import expert_sample
from tskernel.testing import SampleMaker, compare, oracle, samples_of

KERNELS = [
    s.name
    for family in ("gemm", "moe")
    for s in KernelRegistry.get().list_kernels(family=family)
    if s.backend == "cuda" and s.solution in vendors_gemm.LIBRARIES
]
BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
MOE = [k for k in KERNELS if "/moe_fused/" in k]
each = pytest.mark.parametrize("kernel", KERNELS)
each_mm = pytest.mark.parametrize("kernel", [k for k in KERNELS if "/mm/" in k])
each_grouped = pytest.mark.parametrize("kernel", [k for k in KERNELS if "/grouped_mm/" in k])
each_moe = pytest.mark.parametrize("kernel", MOE)


@pytest.fixture(autouse=True)
def fresh() -> None:
    """Forget what the last test called."""
    _vendor_gemm._called.clear()
    torch.manual_seed(0)


def op_and_library(kernel: str) -> tuple[Op, Any]:
    _, op, solution = kernel.split("/")
    return ops[op], vendors_gemm.LIBRARIES[solution]


def check(kernel: str, arguments: dict[str, Any]) -> None:
    """Compare a call through the public function with the oracle; arguments must stay."""
    op, library = op_and_library(kernel)
    before = {n: x.clone() for n, x in arguments.items() if isinstance(x, Tensor)}
    want = oracle(op.name, **arguments)
    with library():
        mine = prepared(kernel, Sample("", **arguments))
        assert declines(kernel, op, mine, "") is None
        compare(op.front(**mine.arguments, override=kernel), want)
    for name, x in before.items():
        assert torch.equal(stored(arguments[name]), stored(x)), f"{name} changed"


def refusal(kernel: str, arguments: dict[str, Any]) -> str | None:
    op, library = op_and_library(kernel)
    with library():
        return declines(kernel, op, laid_out(kernel, Sample("", **arguments)), "")


@each
def test_conformance(kernel: str) -> None:
    op, library = op_and_library(kernel)
    ran = 0
    for form in op.forms:
        for dtype, sample in samples_of(op):
            with library():
                if declines(kernel, op, laid_out(kernel, sample), form) is not None:
                    continue
                try:
                    compare(actual(op, kernel, prepared(kernel, sample), form), expected(op, sample, form))
                except Exception as error:
                    raise AssertionError(f"{form or 'base'!r}, {short(dtype)}, {sample.name}: {error}") from error
            ran += 1
    assert ran > 1


@each
def test_ours_are_chosen_before_what_nobody_measured(kernel: str) -> None:
    op = op_and_library(kernel)[0]
    spec = KernelRegistry.get().get_by_name(kernel)
    for other in KernelRegistry.get().kernels_of(op.name):
        if other.solution not in ("reference", *vendors_gemm.LIBRARIES):
            for traits in ({}, {"quant": "fp8_block"}, {"quant": "mxfp4"}):
                assert spec.priority_of(traits) < other.priority_of({**op.trait_defaults, **traits}), other.name


# mm


def product(m: int, n: int = 192, k: int = 384) -> dict[str, Any]:
    return whole_blocks(SampleMaker(), m, n, k)


@each_mm
@pytest.mark.parametrize("m", (0, 1, 3, 4, 33))
def test_rows_of_all_numbers(kernel: str, m: int) -> None:
    """Scales of ``a`` are laid out in columns of whole fours; a NaN behind them scales no result."""
    check(kernel, product(m))


@each_mm
def test_memory_off_a_border_and_scales_of_any_strides(kernel: str) -> None:
    arguments = product(5)
    for name in ("a", "b"):
        x = arguments[name]
        arguments[name] = torch.empty(x.numel() + 1, dtype=FP8)[1:].view(x.shape).copy_(x)
    for name in ("a_scale", "b_scale"):
        arguments[name] = arguments[name].t().contiguous().t()
    check(kernel, arguments)


@each_mm
def test_results_go_where_they_are_wanted(kernel: str) -> None:
    """An ``out`` whose rows are not on 16-byte borders, inside a buffer that must not be written elsewhere."""
    op, library = op_and_library(kernel)
    arguments, buffer = product(5), torch.full((5, 192 + 5), -7.0, dtype=BF16)
    with library():
        op.front(**arguments, out=buffer[:, 3:-2], override=kernel)
    compare(buffer[:, 3:-2], oracle("mm", **arguments))
    assert bool((buffer[:, :3] == -7).all()) and bool((buffer[:, -2:] == -7).all())


@each_mm
def test_mm_declines_what_the_vendor_cannot_do(kernel: str) -> None:
    arguments = product(5)
    wide = torch.empty(5, 400, dtype=FP8)
    for change, why in (
        ({"a": torch.randn(5, 384, dtype=BF16), "a_scale": None}, "formats"),
        ({"bias": torch.zeros(192)}, "bias"),
        ({"alpha": torch.ones(1)}, "alpha"),
        ({"out_dtype": torch.float16}, "formats"),
        ({"b": arguments["b"][:100]}, "n=100"),
        ({"a": arguments["a"].t().contiguous().t()}, "stride"),
        ({"a": wide[:, 8:392]}, None if "deep" in kernel else "contiguous"),
        ({"a": torch.empty(5, 390, dtype=FP8)[:, :384]}, "strides"),
        ({**product(5, k=320)}, "k=320"),
    ):
        text = refusal(kernel, {**arguments, **change})
        assert text is None if why is None else text is not None and why in text, (why, text)


@each_mm
def test_compiles_nothing_during_capture(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    function, arguments = KernelRegistry.get().get_by_name(kernel).function, product(5)
    out = torch.empty(5, 192, dtype=BF16)
    with op_and_library(kernel)[1]():
        with pytest.raises(KernelRefusedError, match="being captured"):
            function(**arguments, out=out)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        function(**arguments, out=out)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        function(**arguments, out=out)
    compare(out, oracle("mm", **arguments))


# grouped_mm


@pytest.mark.parametrize("ends", ([1], [0], [5, 5, 13], [0, 0, 3], [8, 16, 24], [1, 2, 3, 4], [20, 20, 21, 40]))
@pytest.mark.parametrize("spare", (0, 3))
def test_places_of_rows(ends: list[int], spare: int) -> None:
    total, block = ends[-1] + spare, 8
    found = _deep_gemm.places(torch.tensor(ends, dtype=torch.int32), total, block)
    assert found.group.shape[0] % (2 * block) == 0 and found.group.dtype == torch.int32
    starts, used = [0, *ends[:-1]], [False] * total
    seen = set()
    for e, (begin, end) in enumerate(zip(starts, ends, strict=True)):
        for row in range(begin, end):
            place = int(found.place[row])
            assert int(found.group[place]) == e and place % block == (row - begin) % block
            used[row] = True
            seen.add(place)
    assert found.used.tolist() == used and len(seen) == sum(used)
    assert all(len(set(part)) == 1 for part in found.group.view(-1, block).tolist())
    assert bool((found.place[~found.used] == found.group.shape[0]).all())


@each_grouped
@pytest.mark.parametrize("ends", ([4, 4, 9], [0, 0, 0], [16, 16, 16], [1, 2, 20]))
@pytest.mark.parametrize("rows", (20, 0))
def test_groups_of_all_sizes(kernel: str, ends: list[int], rows: int) -> None:
    """Empty groups, rows of no group that hold NaN, no row at all."""
    arguments = whole_blocks(SampleMaker(), rows, 192, 256, (3,))
    ends = ends if rows else [0, 0, 0]
    arguments["offsets"] = torch.tensor(ends, dtype=torch.int32)
    arguments["a"].view(torch.uint8)[ends[-1] :] = 0x7F  # NaN
    arguments["a_scale"][ends[-1] :] = float("nan")
    check(kernel, arguments)


@each_grouped
def test_grouped_mm_declines_what_the_vendor_cannot_do(kernel: str) -> None:
    arguments = {
        **whole_blocks(SampleMaker(), 9, 192, 256, (3,)), "offsets": torch.tensor([4, 4, 8], dtype=torch.int32)
    }  # fmt: skip
    for change, why in (
        ({}, None),
        ({"b": arguments["b"].transpose(1, 2).contiguous().transpose(1, 2)}, "strides"),
        ({"bias": torch.zeros(3, 192)}, "bias"),
    ):
        text = refusal(kernel, {**arguments, **change})
        assert text is None if why is None else text is not None and why in text, (why, text)


# experts


def experts(quant: str, shape: tuple[int, ...] = (7, 3, 5, 256, 128), **options: Any) -> dict[str, Any]:
    made = expert_sample(SampleMaker(), BF16, shape, quant, **options)
    if options.get("activation") == "swiglu_oai":
        make, (_, _, e, hidden, inner) = SampleMaker(seed=1), shape
        made |= {"w13_bias": make.randn((e, 2 * inner), BF16), "w2_bias": make.randn((e, hidden), BF16)}
    return made


@each_moe
@pytest.mark.parametrize("quant", ("none", "fp8_block", "mxfp4"))
@pytest.mark.parametrize("activation", ("silu", "swiglu_oai"))
def test_experts_of_every_format(kernel: str, quant: str, activation: str) -> None:
    arguments = experts(quant, activation=activation, swiglu_alpha=1.5, swiglu_limit=1.0)
    if quant == "fp8_block" and activation != "silu":
        assert "silu" in str(refusal(kernel, arguments))
        return
    check(kernel, arguments)


@each_moe
@pytest.mark.parametrize(("hidden", "inner"), ((96, 160), (128, 64), (32, 128)))
def test_mxfp4_of_any_width(kernel: str, hidden: int, inner: int) -> None:
    """GPT-OSS has 2880 columns: no whole blocks of 128."""
    check(kernel, experts("mxfp4", (5, 2, 4, hidden, inner), activation="swiglu_oai"))


@each_moe
@pytest.mark.parametrize("few", (True, False))
def test_choices_that_repeat_or_name_no_expert(kernel: str, few: bool) -> None:
    arguments = experts("none")
    arguments["topk_ids"] = torch.tensor(
        [[0, 0, 0], [1, 2, 1], [-1, 5, 2], [-1, -1, -1], [4, -7, 4], [2**31 - 1, 0, 0], [3, 1, 0]], dtype=torch.int64
    )
    arguments["topk_weights"][2, 0] = float("nan")  # of an id that is skipped
    for name in ("x", "topk_ids", "topk_weights") if few else ():
        arguments[name] = arguments[name][: vendors_gemm.FEW]
    check(kernel, arguments)


@each_moe
def test_no_token_is_run_where_there_is_none(kernel: str) -> None:
    check(kernel, experts("none", (0, 2, 4, 64, 32)))


@each_moe
def test_moe_declines_what_the_vendor_cannot_do(kernel: str) -> None:
    arguments = experts("none")
    for change, why in (
        ({}, None),
        ({"activation": "gelu"}, "activation"),
        ({"expert_map": torch.arange(5, dtype=torch.int32)}, "expert_map"),
        ({"w13_bias": torch.zeros(5, 256, dtype=BF16)}, "two biases"),
        ({"w13_bias": torch.zeros(5, 256), "w2_bias": torch.zeros(5, 256, dtype=BF16)}, "dtype of x"),
        ({**experts("none", (3, 2, 3, 33, 19))}, "multiples of 8"),
        ({**experts("mxfp4"), "a13_scale": torch.ones(1)}, "static"),
        ({**experts("w4a16")}, "quant"),
    ):
        text = refusal(kernel, {**arguments, **change})
        assert text is None if why is None else text is not None and why in text, (why, text)


@each_moe
def test_a_planned_layer_is_prepared_once_and_pinned(kernel: str) -> None:
    op, library = op_and_library(kernel)
    arguments = experts("mxfp4", (5, 2, 4, 96, 160), activation="swiglu_oai")
    options = {"num_experts": 4, "top_k": 2, "hidden_size": 96, "intermediate_size": 160, "with_bias": True}
    layer = nn.Module()
    for name, attribute in moe.WEIGHTS.items():
        setattr(layer, attribute, arguments.get(name))
    with library():
        plan = moe.moe_plan("mxfp4", BF16, "swiglu_oai", **options, override=kernel)
        assert plan.pinned and plan.weight_layout == "flashinfer_cutlass"
        moe.moe_process_weights(plan, layer)
        routing = {n: arguments[n] for n in ("topk_weights", "topk_ids")}
        got = moe.moe_apply(plan, arguments["x"], layer, **routing)
        assert moe.moe_plan("mxfp4", BF16, "swiglu_oai", **options).kernel.name != kernel
    compare(got, oracle(op.name, **arguments))
