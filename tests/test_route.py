"""What a public function remembers of its calls, and how kernels are called."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor

import tskernel
from tskernel._torch import native_route, route, runners
from tskernel._torch.binding import Constant, calls
from tskernel._torch.gate import GATE
from tskernel.dispatch.registry import KernelRegistry, Priority, register_kernel
from tskernel.library import ops
from tskernel.testing import compare

W = torch.rand(8)


@pytest.fixture
def executed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the ops whose calls were checked and selected, rather than recognised."""
    found: list[str] = []
    real = route.execute

    def noting(op: Any, *args: Any) -> Any:
        found.append(op.name)
        return real(op, *args)

    for name in ("rmsnorm", "mm", "mha_prefill"):
        KernelRegistry.get().kernels_of(name)
    KernelRegistry.get().forget_calls()
    for module in (route, native_route):
        monkeypatch.setattr(module, "execute", noting)
    return found


def test_a_call_is_recognised_by_shapes_options_and_form(executed: list[str]) -> None:
    x, out = torch.randn(3, 8), torch.empty(3, 8)
    calls = [
        lambda: tskernel.rmsnorm(x, W),
        lambda: tskernel.rmsnorm(x, W, 1e-5),
        lambda: tskernel.rmsnorm(x, W, out=out),
        lambda: tskernel.rmsnorm(x[:2], W),
        lambda: tskernel.rmsnorm(x.t().contiguous().t(), W),
        lambda: tskernel.rmsnorm(x.double().float(), W, override="reference"),
        lambda: torch.ops.tokenspeed.rmsnorm(x, W),
    ]
    first = [call().clone() for call in calls]
    assert len(executed) == len(calls)
    for _ in range(2):
        for call, want in zip(calls, first, strict=True):
            compare(call(), want, exact=True)
    assert len(executed) == len(calls)


def test_more_shapes_than_are_tried_first_are_recognised_too(executed: list[str]) -> None:
    weights = [torch.randn(n, 8) for n in range(1, 12)]
    for _ in range(3):
        for b in weights:
            assert tskernel.mm(torch.ones(2, 8), b).shape == (2, b.shape[0])
    assert len(executed) == len(weights)


def test_one_tensor_for_two_arguments_is_recognised_and_differs_from_two(executed: list[str]) -> None:
    q, cu = torch.randn(5, 2, 16), torch.tensor([0, 2, 5], dtype=torch.int32)
    for _ in range(3):
        tskernel.mha_prefill(q, q, q, cu, 3, cu_seqlens_kv=cu, max_seqlen_kv=3)
    assert len(executed) == 1
    for _ in range(3):
        tskernel.mha_prefill(q, q, q, cu, 3, cu_seqlens_kv=cu.clone(), max_seqlen_kv=3)
    assert len(executed) == 2


def test_optional_tensors_come_and_go(executed: list[str]) -> None:
    q, cu = torch.randn(5, 2, 16), torch.tensor([0, 2, 5], dtype=torch.int32)
    sinks, scale = torch.zeros(2), torch.ones(1)
    plain = tskernel.mha_prefill(q, q, q, cu, 3)
    for _ in range(3):
        compare(tskernel.mha_prefill(q, q, q, cu, 3), plain, exact=True)
        compare(tskernel.mha_prefill(q, q, q, cu, 3, k_scale=scale), plain)
        tskernel.mha_prefill(q, q, q, cu, 3, k_scale=scale, v_scale=scale)
        assert tskernel.mha_prefill(q, q, q, cu, 3, sinks=sinks, return_lse=True)[1].shape == (5, 2)
    assert len(executed) == 4


def test_bad_input_is_refused_after_good_calls_too() -> None:
    x = torch.randn(3, 8)
    for _ in range(3):
        tskernel.rmsnorm(x, W)
        tskernel.mha_prefill(
            x.view(3, 1, 8), x.view(3, 1, 8), x.view(3, 1, 8), torch.tensor([0, 3], dtype=torch.int32), 3
        )
    for bad in (None, "text", [1.0]):
        with pytest.raises(ValueError, match=r"tokenspeed::rmsnorm: weight: expected Tensor, got"):
            tskernel.rmsnorm(x, bad)
    with pytest.raises(ValueError, match=r"tokenspeed::rmsnorm: eps: expected float, got"):
        tskernel.rmsnorm(x, W, [1e-6])
    with pytest.raises(ValueError, match=r"tokenspeed::rmsnorm: weight\.shape: expected \(8,\), got \(4,\)"):
        tskernel.rmsnorm(x, W[:4])
    for bad in (-1, 2.0, True):
        with pytest.raises(ValueError, match=r"tokenspeed::mha_prefill: max_seqlen: expected"):
            tskernel.mha_prefill(
                x.view(3, 1, 8), x.view(3, 1, 8), x.view(3, 1, 8), torch.tensor([0, 3], dtype=torch.int32), bad
            )


@pytest.mark.usefixtures("registry")
def test_a_registration_is_seen_by_the_next_call() -> None:
    x = torch.randn(3, 8)
    plain = tskernel.rmsnorm(x, W)
    for _ in range(3):
        tskernel.rmsnorm(x, W)

    @register_kernel("norm", "rmsnorm", name="seven", priority=Priority.PLUGIN)
    def rmsnorm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
        return torch.full_like(x, 7.0)

    assert tskernel.rmsnorm(x, W).unique().tolist() == [7.0]
    assert torch.ops.tokenspeed.rmsnorm(x, W).unique().tolist() == [7.0]
    KernelRegistry.get().unregister("seven")
    compare(tskernel.rmsnorm(x, W), plain, exact=True)


def mm_kernel(function: Any, name: str) -> Any:
    register_kernel("gemm", "mm", name=name, solution=name, priority=0)(function)
    return KernelRegistry.get().get_by_name(name)


@pytest.mark.usefixtures("registry")
def test_keyword_options_are_passed_by_position_and_land_where_they_belong() -> None:
    seen: list[Any] = []

    def last(
        a: Tensor,
        b: Tensor,
        *,
        a_scale: Tensor | None = None,
        b_scale: Tensor | None = None,
        bias: Tensor | None = None,
        alpha: Tensor | None = None,
        quant: str = "none",
        out_dtype: torch.dtype | None = None,
        out: Tensor,
    ) -> None:
        seen.append((a, b, a_scale, b_scale, bias, alpha, quant, out_dtype, out))

    def first(
        a: Tensor,
        b: Tensor,
        *,
        out: Tensor,
        a_scale: Tensor | None = None,
        b_scale: Tensor | None = None,
        bias: Tensor | None = None,
        alpha: Tensor | None = None,
        quant: str = "none",
        out_dtype: torch.dtype | None = None,
    ) -> None:
        last(a, b, a_scale=a_scale, b_scale=b_scale, bias=bias, alpha=alpha, quant=quant, out_dtype=out_dtype, out=out)

    given = tuple(range(8))
    for function in (last, first):  # the second cannot be rebuilt: `out` is not behind the options
        run = runners.make_runner(ops["mm"], mm_kernel(function, f"kernel_{function.__name__}"), "out")
        out = torch.empty(1)
        run(*given, out)
        *rest, into = seen.pop()
        assert tuple(rest) == given and into is out
    assert runners.by_position(ops["mm"], KernelRegistry.get().get_by_name("kernel_last"), ("out",)).__name__ == "last"


def test_signature_shows_the_defaults_of_the_op() -> None:
    from tskernel._torch.front import signature_text

    assert "eps: 'float' = 1e-06" in signature_text(ops["rmsnorm"])
    assert "logit_cap: 'float' = 0.0" in signature_text(ops["mha_prefill"])


LIBRARY = torch.library.Library("tskernel_test_gate", "FRAGMENT")
LIBRARY.define("scale(Tensor x, Tensor w, float eps, int twice, str? word, Tensor(a!) out) -> ()")
operator_calls: list[tuple[float, int, str | None]] = []


@torch.library.impl(LIBRARY, "scale", "CPU")
def scale(x: Tensor, w: Tensor, eps: float, twice: int, word: str | None, out: Tensor) -> None:
    operator_calls.append((eps, twice, word))
    torch.mul(x, w, out=out)


@pytest.mark.usefixtures("registry")
@pytest.mark.parametrize("writes", [True, False], ids=["writes into out", "returns"])
def test_a_bound_operator_is_called_for_the_kernel(writes: bool) -> None:
    """From the second call of a kind on, where the C++ gate is built; the results are the same."""
    python_calls: list[str] = []

    @calls(
        "tskernel_test_gate::scale", "x", "weight", "eps", Constant(2), Constant(None), "out" if writes else "return0"
    )
    def rmsnorm_(x: Tensor, weight: Tensor, eps: float = 1e-6, *, out: Tensor) -> None:
        python_calls.append("kernel")
        torch.ops.tskernel_test_gate.scale(x, weight, eps, 2, None, out)

    def rmsnorm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
        out = torch.empty_like(x)
        rmsnorm_(x, weight, eps, out=out)
        return out

    vars(rmsnorm)["binding"] = vars(rmsnorm_)["binding"]
    register_kernel("norm", "rmsnorm", name="bound", priority=Priority.PLUGIN)(rmsnorm_ if writes else rmsnorm)
    x = torch.randn(3, 8)
    operator_calls.clear()
    for _ in range(3):
        got = tskernel.rmsnorm(x, W)
        compare(got, x * W, exact=True)
    assert operator_calls == [(1e-6, 2, None)] * 3
    assert len(python_calls) == (1 if GATE is not None else 3)
    assert tskernel.rmsnorm(x, W).data_ptr() != got.data_ptr()
    if writes:
        out = torch.empty(3, 8)
        for _ in range(3):
            assert tskernel.rmsnorm(x, W, 1e-5, out=out) is out
            compare(out, x * W, exact=True)
            compare(torch.ops.tokenspeed.rmsnorm(x, W), x * W, exact=True)
        assert operator_calls[-2:] == [(1e-5, 2, None), (1e-6, 2, None)]


@pytest.mark.usefixtures("registry")
def test_results_that_are_allocated_beforehand_look_like_the_kernels_own(monkeypatch: pytest.MonkeyPatch) -> None:
    @register_kernel("norm", "rmsnorm", name="fills", priority=Priority.PLUGIN)
    def rmsnorm(x: Tensor, weight: Tensor, eps: float = 1e-6, *, out: Tensor) -> None:
        out.copy_(x * eps)

    for x in (torch.randn(3, 8), torch.randn(8, 3).t(), torch.randn(2, 3, 8, dtype=torch.bfloat16), torch.randn(8)):
        results = [tskernel.rmsnorm(x, W.to(x.dtype), eps) for eps in (1.0, 1.0, 2.0, 2.0)]
        assert len({r.data_ptr() for r in results}) == 4
        for r, eps in zip(results, (1.0, 1.0, 2.0, 2.0), strict=True):
            assert (r.shape, r.stride(), r.dtype) == (results[0].shape, results[0].stride(), x.dtype)
            compare(r, x * eps, exact=True)


@pytest.mark.usefixtures("registry")
def test_a_kernel_may_forget_its_own_call() -> None:
    @register_kernel("norm", "rmsnorm", name="forgets", priority=Priority.PLUGIN)
    def rmsnorm(x: Tensor, weight: Tensor, eps: float = 1e-6, *, out: Tensor) -> None:
        KernelRegistry.get().forget_calls()
        gc.collect()
        out.fill_(eps)

    for _ in range(4):
        assert tskernel.rmsnorm(torch.ones(2, 8), W).unique().numel() == 1
