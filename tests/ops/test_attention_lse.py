"""The log-sum-exp that attention returns, and the merge it makes possible: LSE of the edge-case catalogue."""

from __future__ import annotations

import math

import pytest
import torch
from attention_cases import (
    INF,
    LATENT,
    MHA,
    NAN,
    Sequences,
    arguments_for,
    dense,
    kernels_of,
    latent_call,
    normal,
    op_of,
    run,
    uniform,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tskernel.dispatch.registry import KernelRegistry
from tskernel.library import FLOATS
from tskernel.testing import call, compare, kernel_names, oracle


def with_lse(*names: str) -> list[str]:
    """Return the kernels that can return the LSE."""
    return [k for k in kernels_of(*names) if KernelRegistry.get().get_by_name(k).lse]


each_lse = pytest.mark.parametrize("kernel", with_lse(*MHA))
each_merge = pytest.mark.parametrize("kernel", kernel_names("attn_merge_state"))


def lse_of(kernel: str, s: Sequences, **options: object) -> tuple[Tensor, Tensor]:
    """Run a kernel that returns the LSE."""
    out, lse = run(kernel, arguments_for(kernel, s, **options))
    assert lse is not None
    return out, lse


# LSE-01


@pytest.mark.parametrize("dtype", FLOATS)
@each_lse
def test_lse_01_natural_log_in_fp32(kernel: str, dtype: torch.dtype) -> None:
    for n in (1, 2, 7, 100):
        _, lse = lse_of(kernel, uniform([1], [n], dtype=dtype))
        assert lse.dtype == torch.float32 and lse.shape == (1, 2)
        compare(lse, torch.full((1, 2), math.log(n)))


@each_lse
def test_lse_01_of_scaled_and_capped_scores(kernel: str) -> None:
    s = normal([2, 2], [5, 4])
    for options in ({}, {"softmax_scale": 0.5}, {"softmax_scale": 2.0, "logit_cap": 1.5}, {"softmax_scale": -1.0}):
        _, lse = lse_of(kernel, s, **options)
        compare(lse, dense(s, scale=options.get("softmax_scale"), logit_cap=options.get("logit_cap", 0.0))[1])


@each_lse
def test_lse_01_survives_large_scores(kernel: str) -> None:
    """Scores of 1000 and more: exp must see differences only."""
    s = uniform([1], [4])
    s.q, s.k = [torch.full((1, 2, 16), 500.0)], [torch.full((4, 1, 16), 1.0)]
    s.k[0][0] = -1.0
    out, lse = lse_of(kernel, s)
    compare(out, torch.full_like(out, 2.0))
    compare(lse, torch.full_like(lse, 2000 + math.log(3)))


@pytest.mark.parametrize("kernel", with_lse(*LATENT))
def test_lse_01_mla(kernel: str) -> None:
    for n in (1, 7, 100):
        _, lse = run(kernel, latent_call(op_of(kernel), [torch.zeros(1, 3, 24)], [torch.randn(n, 24)], 16))
        assert lse is not None and lse.dtype == torch.float32
        compare(lse, torch.full_like(lse, math.log(n)))


# LSE-02


@pytest.mark.parametrize("dtype", FLOATS)
@each_merge
def test_lse_02_merge_weighs_by_keys(kernel: str, dtype: torch.dtype) -> None:
    a, b = torch.full((2, 3, 8), 1.0, dtype=dtype), torch.full((2, 3, 8), 4.0, dtype=dtype)
    out, lse = call("attn_merge_state", kernel, a, torch.full((2, 3), math.log(2)), b, torch.zeros(2, 3))
    assert out.dtype == dtype and lse.dtype == torch.float32
    compare(out, torch.full_like(out, 2.0))
    compare(lse, torch.full_like(lse, math.log(3)))


@pytest.mark.parametrize("second", with_lse(*MHA))
@pytest.mark.parametrize("first", with_lse(*MHA))
def test_lse_02_parts_of_different_kernels(first: str, second: str) -> None:
    """The last query over 8 keys is the merge of 3 keys and 5, however each part was computed."""
    s = normal([1], [8])
    want, want_lse = dense(s)
    a = lse_of(first, Sequences(s.q, [s.k[0][:3]], [s.v[0][:3]]))
    b = lse_of(second, Sequences(s.q, [s.k[0][3:]], [s.v[0][3:]]))
    for kernel in kernel_names("attn_merge_state"):
        out, lse = call("attn_merge_state", kernel, *a, *b)
        compare(out, want)
        compare(lse, want_lse)


# LSE-03


@pytest.mark.parametrize("dtype", FLOATS)
@each_merge
def test_lse_03_identity(kernel: str, dtype: torch.dtype) -> None:
    none = torch.zeros(1, 2, 8, dtype=dtype), torch.full((1, 2), -INF)
    some = torch.full((1, 2, 8), 7.0, dtype=dtype), torch.full((1, 2), 1.5)
    for a, b, want in ((none, none, none), (none, some, some), (some, none, some)):
        compare(call("attn_merge_state", kernel, *a, *b), want, exact=True)


@each_merge
def test_lse_03_the_output_of_a_part_without_keys_is_not_used(kernel: str) -> None:
    lse = torch.tensor([[-INF, 0.5]])
    poisoned, plain = torch.full((1, 2, 8), 3.0), torch.full((1, 2, 8), 5.0)
    poisoned[0, 0] = NAN
    for a, b in (((poisoned, lse), (plain, torch.zeros(1, 2))), ((plain, torch.zeros(1, 2)), (poisoned, lse))):
        out, _ = call("attn_merge_state", kernel, *a, *b)
        compare(out[0, 0], plain[0, 0], exact=True)
    both = call("attn_merge_state", kernel, poisoned, torch.full((1, 2), -INF), poisoned, torch.full((1, 2), -INF))
    compare(both, (torch.zeros(1, 2, 8), torch.full((1, 2), -INF)), exact=True)


@each_merge
def test_lse_03_extreme_states(kernel: str) -> None:
    """Weights are differences of logarithms: neither 1e30 keys nor 1e-30 may overflow."""
    a, b = torch.full((1, 1, 8), 1.0), torch.full((1, 1, 8), 3.0)
    for x in (-300.0, 300.0, 3e4):
        out, lse = call("attn_merge_state", kernel, a, torch.full((1, 1), x), b, torch.full((1, 1), x))
        compare(out, torch.full_like(out, 2.0))
        compare(lse, torch.full_like(lse, x + math.log(2)))
        compare(call("attn_merge_state", kernel, a, torch.full((1, 1), x), b, torch.full((1, 1), x - 500))[0], a)


# LSE-04


@pytest.mark.parametrize("sink", (-INF, 0.0, 50.0, 200.0))
@each_lse
def test_lse_04_leaves_the_sink_out(kernel: str, sink: float) -> None:
    s = normal([2, 2], [5, 0])
    _, without = lse_of(kernel, s)
    out, lse = lse_of(kernel, s, sinks=torch.full((4,), sink))
    compare(lse, without, exact=True)
    assert bool(out.isfinite().all())


@each_lse
def test_lse_04_a_sink_is_a_factor_on_a_merged_result(kernel: str) -> None:
    """As attn_merge_state's docstring says: parts are computed without the sink, which then scales the whole."""
    s, sinks = normal([1], [8]), torch.tensor([0.5, -1.0, 2.0, 0.0])
    a = lse_of(kernel, Sequences(s.q, [s.k[0][:3]], [s.v[0][:3]]))
    b = lse_of(kernel, Sequences(s.q, [s.k[0][3:]], [s.v[0][3:]]))
    out, lse = call("attn_merge_state", "reference", *a, *b)
    compare(out * (1 / (1 + torch.exp(sinks - lse))).unsqueeze(-1), dense(s, sinks=sinks)[0])


# Properties of the merge


def states(seed: int, shape: tuple[int, int, int]) -> list[tuple[Tensor, Tensor]]:
    """Return three partial results, some of which saw no key."""
    torch.manual_seed(seed)
    made = [(torch.randn(shape), torch.randn(shape[:2]) * 5) for _ in range(3)]
    for out, lse in made:
        empty = torch.rand(shape[:2]) < 0.2
        lse.masked_fill_(empty, -INF)
        out.masked_fill_(empty.unsqueeze(-1), 0.0)
    return made


@settings(max_examples=20, deadline=None, derandomize=True)
@given(seed=st.integers(0, 999), tokens=st.integers(0, 4), heads=st.integers(1, 3), width=st.integers(1, 9))
@each_merge
def test_merge_is_associative_and_commutative(kernel: str, seed: int, tokens: int, heads: int, width: int) -> None:
    a, b, c = states(seed, (tokens, heads, width))
    left = call("attn_merge_state", kernel, *call("attn_merge_state", kernel, *a, *b), *c)
    right = call("attn_merge_state", kernel, *a, *call("attn_merge_state", kernel, *b, *c))
    compare(left, tuple(x.double() for x in right))
    compare(call("attn_merge_state", kernel, *b, *a), oracle("attn_merge_state", *a, *b))
