"""What only an accelerator can show. Run with ``pytest -m gpu`` on a machine that has one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from decode_step import DecodeStep, step_inputs
from helpers import declines, laid_out, prepared, short
from test_conformance import actual, expected

import tskernel
from tskernel.dispatch import autotune
from tskernel.dispatch.registry import KernelRegistry
from tskernel.library import Op, ops
from tskernel.testing import compare, kernel_names, samples_of

EVERY = [(ops[s.mode], s.name) for s in KernelRegistry.get().list_kernels()]
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator")]


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize(("op", "kernel"), [pytest.param(o, k, id=k) for o, k in EVERY])
def test_conformance_on_the_gpu(op: Op, kernel: str) -> None:
    if kernel not in kernel_names(op.name, "cuda"):
        pytest.skip(f"{kernel} does not run on this GPU")
    ran, declined = 0, []
    for form in op.forms:
        for dtype, sample in samples_of(op, "cuda"):
            why = declines(kernel, op, laid_out(kernel, sample), form)
            if why is not None:
                declined.append(f"{sample.name}: {why}")
                continue
            try:
                compare(actual(op, kernel, prepared(kernel, sample), form), expected(op, sample, form))
            except Exception as error:
                where = f"{kernel}, form {form or 'base'!r}, {short(dtype)}, sample {sample.name}"
                raise AssertionError(f"{where}: {error}") from error
            ran += 1
    assert ran, f"{kernel} declined all samples: {declined}"


@pytest.fixture
def no_sync() -> Iterator[None]:
    """Turn every host synchronisation into an error."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("op", [pytest.param(o, id=o.name) for o in ops.values()])
def test_gra_01_no_op_reads_contents_on_the_host(op: Op, no_sync: Any) -> None:
    torch.cuda.set_sync_debug_mode("default")
    for _, sample in samples_of(op, "cuda", dtypes=op.dtypes[-1:]):
        op.front(**sample.arguments)
        torch.cuda.set_sync_debug_mode("error")
        op.front(**sample.arguments)
        torch.cuda.set_sync_debug_mode("default")


def decode_inputs(lens: list[int]) -> dict[str, Any]:
    make = torch.Generator().manual_seed(0)
    cache = [torch.randn(256, 16, 2, 64, generator=make).cuda().bfloat16() for _ in range(2)]
    return {
        "q": torch.randn(4, 8, 64, generator=make).cuda().bfloat16(),
        "k_cache": cache[0],
        "v_cache": cache[1],
        "page_table": torch.randperm(256, generator=make)[: 4 * 64].view(4, 64).int().cuda(),
        "cache_seqlens": torch.tensor(lens, dtype=torch.int32, device="cuda"),
        "max_seqlen_k": 1024,
    }


@pytest.mark.parametrize("kernel", [s.name for s in KernelRegistry.get().list_kernels(mode="mha_decode_with_kvcache")])
def test_gra_02_a_recorded_decode_step_follows_its_inputs(kernel: str) -> None:
    if kernel not in kernel_names("mha_decode_with_kvcache", "cuda"):
        pytest.skip(f"{kernel} does not run on this GPU")
    inputs = decode_inputs([16] * 4)
    call = lambda: tskernel.mha_decode_with_kvcache(**inputs, override=kernel)  # noqa: E731
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    inputs["cache_seqlens"].copy_(torch.tensor([1, 700, 0, 33], dtype=torch.int32))
    inputs["page_table"].copy_(inputs["page_table"].flip(1))
    inputs["k_cache"].neg_()
    larger = decode_inputs([1000] * 4)
    tskernel.mha_decode_with_kvcache(**larger, override=kernel)
    graph.replay()
    compare(out, call(), exact=True)
    assert not out[2].any()


@pytest.mark.parametrize(
    "op", [pytest.param(ops[n], id=n) for n in ("rmsnorm", "mha_decode_with_kvcache", "moe_fused", "mm")]
)
def test_str_01_work_runs_on_the_current_stream(op: Op) -> None:
    _, sample = samples_of(op, "cuda", dtypes=op.dtypes[-1:])[0]
    want = op.front(**sample.arguments)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    for _ in range(20):
        with torch.cuda.stream(side):
            got = op.front(**sample.arguments)
        side.synchronize()
        compare(got, want, exact=True)


@pytest.mark.parametrize("rows", [2**23 - 1, 2**23, 2**23 + 16])
def test_lay_02_offsets_are_64_bit(rows: int) -> None:
    """Rows x 256 columns passes 2^31 elements just between the sizes."""
    x = torch.zeros(rows, 256, dtype=torch.bfloat16, device="cuda")
    x[-1] = 3.0
    y = tskernel.rmsnorm(x, torch.ones(256, dtype=torch.bfloat16, device="cuda"))
    assert float(y[-1].float().mean()) == pytest.approx(1.0, abs=0.01) and not y[:-1].any()


def test_lay_02_a_cache_past_31_bits() -> None:
    pages = 2**31 // (64 * 8 * 128) + 2
    k = torch.zeros(pages, 64, 8, 128, dtype=torch.float8_e4m3fn, device="cuda")
    slots = torch.tensor([(pages - 1) * 64 + 63], device="cuda")
    row = torch.ones(1, 8, 128, dtype=torch.bfloat16, device="cuda")
    one = torch.ones(1, device="cuda")
    tskernel.store_kvcache(row, row, k, k.clone(), slots, k_scale=one, v_scale=one)
    assert float(k[-1, -1].float().sum()) == 8 * 128 and not k[:-1].view(torch.uint8).any()


def test_tun_01_tuning_writes_nothing_on_the_gpu() -> None:
    op = ops["store_kvcache"]
    _, sample = samples_of(op, "cuda", dtypes=op.dtypes[-1:])[0]
    before = {n: sample.arguments[n].clone() for n in op.mutates}
    autotune.tune(op, **sample.arguments)
    for name, value in before.items():
        compare(sample.arguments[name], value, exact=True)
    autotune.database.clear()


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
def test_gra_02_inductor_records_a_decode_step_in_a_cuda_graph(mode: str) -> None:
    """Inductor's own CUDA graphs: buffers are written in place, lengths and tables change between replays."""
    torch._dynamo.reset()
    eager, step = DecodeStep().cuda(), DecodeStep().cuda()
    compiled = torch.compile(step, mode=mode, fullgraph=True)
    with torch.inference_mode():
        for index in range(5):  # warm-up, recording, and replays
            inputs = tuple(t.cuda() for t in step_inputs(2, index))
            want = eager(*(t.clone() for t in inputs))
            torch.compiler.cudagraph_mark_step_begin()
            compare(compiled(*(t.clone() for t in inputs)).clone(), want)
    compare(step.k_cache[:6].nan_to_num(0), eager.k_cache[:6].nan_to_num(0))
    assert torch._dynamo.utils.counters["inductor"]["cudagraph_skips"] == 0
