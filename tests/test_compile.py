"""torch.compile: few graphs for many sizes, no copies around writes, autocast, and what a second definition does."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from decode_step import PAGE, DecodeStep, step_inputs
from helpers import distinct_options, primary_samples
from processes import run_python
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._inductor.utils import run_and_get_code

import tskernel
from tskernel.dispatch.errors import RegistrationError
from tskernel.library import Op, ops
from tskernel.testing import clone_arguments, compare

COPIES = re.compile(r"\bclone\b|\bcopy_\b|cpp_fused|empty_strided|as_strided")


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def generated_call(function: Callable[..., Any], *args: Any) -> tuple[Any, str]:
    """Compile and run; return the result and the body of the generated ``call``."""
    result, code = run_and_get_code(torch.compile(function, fullgraph=True), *args)
    (source,) = code
    body = source[source.rindex("def call(") :]
    return result, re.sub(r"^\s*#.*$", "", body[: body.index("\n\n")], flags=re.MULTILINE)


WEIGHT = torch.randn(3 * 2 * 16, 32, generator=torch.Generator().manual_seed(0)) / 6
NORM = torch.rand(32, generator=torch.Generator().manual_seed(1))


def prefill_layer(x: Tensor, cu: Tensor) -> Tensor:
    """Use all four ops of the check on a number of tokens."""
    qkv = tskernel.mm(tskernel.rmsnorm(x, NORM), WEIGHT).unflatten(-1, (-1, 16))
    q, k, v = qkv.split(2, 1)
    out = tskernel.mha_prefill(q, k, v, cu, x.shape[0])
    return tskernel.silu_and_mul(out.flatten(1))


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_lib_05_token_counts_share_one_dynamic_graph(backend: str) -> None:
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(prefill_layer, fullgraph=True, dynamic=True, backend=counter)
    graphs = []
    for tokens in (2, 3, 5, 8, 1, 0):
        x = torch.randn(tokens, 32)
        cu = torch.tensor([0, tokens // 2, tokens], dtype=torch.int32)
        compare(compiled(x, cu), prefill_layer(x, cu))
        graphs.append(counter.frame_count)
    assert graphs[:4] == [1, 1, 1, 1] and graphs[-1] <= 3, f"graphs after 2, 3, 5, 8, 1, 0 tokens: {graphs}"


def test_lib_05_lengths_and_batches_share_one_dynamic_graph() -> None:
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(DecodeStep(), fullgraph=True, dynamic=True, backend=counter)
    eager = DecodeStep()
    for batch, step in ((2, 0), (3, 1), (4, 2), (2, 3)):
        inputs = step_inputs(batch, step)
        compare(compiled(*inputs), eager(*inputs))
    assert counter.frame_count == 1


def own_storage(value: Tensor) -> Tensor:
    """Return a copy with the same strides. torch compiles writes to views of one storage if it sees them made."""
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype).copy_(value)


MUTATING = [pytest.param(o, id=o.name) for o in ops.values() if o.mutates]


@pytest.mark.parametrize("op", MUTATING)
@pytest.mark.slow
def test_lib_04_writes_are_compiled_without_copies(op: Op) -> None:
    _, sample = distinct_options(primary_samples(op))[0]
    options = {k: v for k, v in sample.arguments.items() if not isinstance(v, Tensor)}
    want = clone_arguments(sample.arguments)
    op.front(**want)
    got = {k: own_storage(v) for k, v in sample.arguments.items() if isinstance(v, Tensor)}

    def write(tensors: dict[str, Tensor]) -> None:
        op.front(**tensors, **options)

    _, body = generated_call(write, got)
    assert f"torch.ops.tokenspeed.{op.name}.default(" in body
    assert not COPIES.findall(body), body
    for name in got:
        compare(got[name], want[name], exact=True)


@pytest.mark.slow
def test_lib_04_out_form_is_compiled_without_copies() -> None:
    def write(x: Tensor, out: Tensor) -> None:
        tskernel.rmsnorm(x, NORM, out=out)

    x, out = torch.randn(5, 32), torch.full((5, 32), -7.0)
    _, body = generated_call(write, x, out)
    assert "torch.ops.tokenspeed.rmsnorm_out.default(" in body and not COPIES.findall(body), body
    compare(out, tskernel.rmsnorm(x, NORM), exact=True)


def attend_between_writes(
    k1: Tensor, k2: Tensor, kv: Tensor, slots: Tensor, table: Tensor, lens: Tensor
) -> tuple[Tensor, Tensor]:
    """Write slot 0, attend, overwrite it, attend again: the first result must not see the second write."""
    k_cache, v_cache = kv[0], kv[1]
    tskernel.store_kvcache(k1, k1, k_cache, v_cache, slots)
    first = tskernel.mha_decode_with_kvcache(k1, k_cache, v_cache, table, lens, PAGE)
    tskernel.store_kvcache(k2, k2, k_cache, v_cache, slots)
    return first, tskernel.mha_decode_with_kvcache(k1, k_cache, v_cache, table, lens, PAGE)


@pytest.mark.slow
def test_lib_04_write_attend_write_equals_eager_without_copies() -> None:
    k1, k2 = torch.randn(2, 2, 16), torch.randn(2, 2, 16)
    kv = torch.full((2, 3, PAGE, 2, 16), float("nan"))
    slots, table = torch.tensor([0, PAGE]), torch.tensor([[0], [1]], dtype=torch.int32)
    lens = torch.ones(2, dtype=torch.int32)
    eager_kv = kv.clone()
    want = attend_between_writes(k1, k2, eager_kv, slots, table, lens)
    compare(want, (k1, k2))  # a single visible key: attention returns its value
    got, body = generated_call(attend_between_writes, k1, k2, kv, slots, table, lens)
    compare(got, want)
    compare(kv, eager_kv, exact=True)
    assert len(re.findall(r"torch\.ops\.tokenspeed\.\w+\.default\(", body)) == 4 and not COPIES.findall(body), body


def mixed_inputs() -> tuple[Tensor, ...]:
    q, k, v = (torch.randn(5, 2, 16) for _ in range(3))
    return q, k, v.to(torch.bfloat16), torch.tensor([0, 2, 5], dtype=torch.int32)


@pytest.mark.parametrize("route", ["front", "operator", "compiled"])
def test_lib_07_autocast_casts_mixed_inputs(route: str) -> None:
    q, k, v, cu = mixed_inputs()
    call: Callable[..., Any] = torch.ops.tokenspeed.mha_prefill if route == "operator" else tskernel.mha_prefill
    if route == "compiled":
        call = torch.compile(tskernel.mha_prefill, fullgraph=True, backend="aot_eager")
    with torch.autocast("cpu", torch.bfloat16):
        got = call(q, k, v, cu, 3)
    want = tskernel.mha_prefill(q.to(torch.bfloat16), k.to(torch.bfloat16), v, cu, 3)
    assert got.dtype == torch.bfloat16
    compare(got, want, exact=True)


@pytest.mark.parametrize("route", ["front", "operator"])
def test_lib_07_mixed_inputs_outside_autocast_are_named(route: str) -> None:
    q, k, v, cu = mixed_inputs()
    call = torch.ops.tokenspeed.mha_prefill if route == "operator" else tskernel.mha_prefill
    with pytest.raises(ValueError, match=r"tokenspeed::mha_prefill: v\.dtype: expected .*float32.*, got bfloat16"):
        call(q, k, v, cu, 3)


def test_lib_07_autocast_leaves_quantized_and_integer_inputs_alone() -> None:
    a = torch.randint(-8, 8, (3, 16), dtype=torch.int8)
    b = torch.randint(-8, 8, (4, 16), dtype=torch.int8)
    scales = {"a_scale": torch.ones(3, 1), "b_scale": torch.ones(4, 1)}
    want = tskernel.mm(a, b, quant="int8", out_dtype=torch.float32, **scales)
    with torch.autocast("cpu", torch.bfloat16):
        compare(tskernel.mm(a, b, quant="int8", out_dtype=torch.float32, **scales), want, exact=True)


def test_lib_09_a_second_definition_is_refused_and_the_first_keeps_working() -> None:
    x = torch.randn(3, 32)
    want = tskernel.rmsnorm(x, NORM)
    for name in ("tskernel.ops.norm.rmsnorm", "tskernel.backends.portable.rmsnorm.torch"):
        module = importlib.import_module(name)
        with pytest.raises(RegistrationError, match="already"):
            importlib.reload(module)
    with pytest.raises(RuntimeError, match=r"rmsnorm"):
        torch.library.Library("tokenspeed", "FRAGMENT").define("rmsnorm(Tensor x) -> Tensor")
    compare(tskernel.rmsnorm(x, NORM), want, exact=True)
    compare(torch.ops.tokenspeed.rmsnorm(x, NORM), want, exact=True)


REIMPORT = """
import importlib, sys, torch
import tskernel
x, w = torch.randn(3, 8), torch.rand(8)
with torch.no_grad():
    want = tskernel.rmsnorm(x, w)
    assert torch.equal(torch.ops.tokenspeed.rmsnorm(x, w), want)
    import tskernel
    importlib.reload(tskernel)
    importlib.reload(sys.modules["tskernel.api"])
    assert torch.equal(tskernel.rmsnorm(x, w), want)
    first = tskernel
    for name in [n for n in sys.modules if n.partition(".")[0] == "tskernel"]:
        del sys.modules[name]
    try:
        import tskernel
    except Exception as error:
        print(type(error).__name__, error)
    assert torch.equal(first.rmsnorm(x, w), want)
    assert torch.equal(torch.ops.tokenspeed.rmsnorm(x, w), want)
"""


def test_lib_09_importing_and_reloading_again_is_harmless_or_a_clear_error() -> None:
    said = run_python(REIMPORT)
    assert said.startswith("RuntimeError Tried to register an operator (tokenspeed::"), said
