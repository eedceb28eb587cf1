"""What the norms must do beyond the generic contract: ranges, strides, widths, the residual form."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from layouts import LAYOUTS, assert_guards, guarded, laid_out

from tskernel.library import FLOATS
from tskernel.testing import call, compare, kernel_names, oracle

rmsnorm_kernels = pytest.mark.parametrize("kernel", kernel_names("rmsnorm"))
layernorm_kernels = pytest.mark.parametrize("kernel", kernel_names("layernorm"))
gemma_kernels = pytest.mark.parametrize("kernel", kernel_names("gemma_rmsnorm"))
qk_kernels = pytest.mark.parametrize("kernel", kernel_names("qk_rmsnorm"))
add_kernels = pytest.mark.parametrize("kernel", kernel_names("add_rmsnorm"))
fused_kernels = pytest.mark.parametrize("kernel", kernel_names("fused_add_rmsnorm"))
half_or_bf16 = pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16))


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def fused(kernel: str, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, **options: float) -> None:
    assert call("fused_add_rmsnorm", kernel, x, residual, weight, **options) is None


# NRM-01


@pytest.mark.parametrize("hidden", (128, 4096, 16384))
@rmsnorm_kernels
def test_nrm_01_squares_and_sums_in_fp32(kernel: str, hidden: int) -> None:
    x = torch.full((2, hidden), 300.0, dtype=torch.float16)  # 300 * 300 is past fp16
    y = call("rmsnorm", kernel, x, torch.ones(hidden, dtype=torch.float16))
    compare(y, torch.ones_like(y), exact=True)


@pytest.mark.parametrize("hidden", (128, 4096, 16384))
@gemma_kernels
def test_nrm_01_gemma(kernel: str, hidden: int) -> None:
    x = torch.full((2, hidden), 300.0, dtype=torch.float16)
    y = call("gemma_rmsnorm", kernel, x, torch.zeros(hidden, dtype=torch.float16))
    compare(y, torch.ones_like(y), exact=True)


@pytest.mark.parametrize("hidden", (128, 4096, 16384))
@layernorm_kernels
def test_nrm_01_layernorm(kernel: str, hidden: int) -> None:
    x = torch.full((2, hidden), 300.0, dtype=torch.float16)
    x[:, ::2] = -300.0
    y = call("layernorm", kernel, x, torch.ones(hidden, dtype=torch.float16))
    compare(y, x / 300, exact=True)


@add_kernels
def test_nrm_01_add(kernel: str) -> None:
    x = torch.full((2, 4096), 150.0, dtype=torch.float16)
    y, total = call("add_rmsnorm", kernel, x, x.clone(), torch.ones(4096, dtype=torch.float16))
    compare((y, total), (torch.ones_like(x), torch.full_like(x, 300.0)), exact=True)


@qk_kernels
def test_nrm_01_qk(kernel: str) -> None:
    q, k = torch.full((2, 3, 128), 300.0, dtype=torch.float16), torch.full((2, 1, 128), -300.0, dtype=torch.float16)
    one = torch.ones(128, dtype=torch.float16)
    compare(call("qk_rmsnorm", kernel, q, k, one, 2 * one), (torch.ones_like(q), -2 * torch.ones_like(k)), exact=True)


# NRM-02 and LAY-01


def qkv_slices(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return q and the middle-slice k of a qkv ``[5, 768]``, viewed ``[5, 4, 64]``; v is NaN."""
    qkv = torch.randn(5, 768, generator=torch.Generator().manual_seed(0)).to(dtype)
    qkv[:, 512:] = float("nan")
    return qkv[:, :256].view(5, 4, 64), qkv[:, 256:512].view(5, 4, 64)


@half_or_bf16
@rmsnorm_kernels
def test_nrm_02_sliced_inputs(kernel: str, dtype: torch.dtype) -> None:
    weight = torch.rand(64).to(dtype)
    for x in qkv_slices(dtype):
        y = call("rmsnorm", kernel, x, weight)
        compare(y, call("rmsnorm", kernel, x.contiguous(), weight))
        compare(y, oracle("rmsnorm", x, weight))
        assert y.is_contiguous()


@half_or_bf16
@qk_kernels
def test_nrm_02_sliced_q_and_k(kernel: str, dtype: torch.dtype) -> None:
    q, k = qkv_slices(dtype)
    q_weight, k_weight = torch.rand(64).to(dtype), torch.rand(64).to(dtype)
    got = call("qk_rmsnorm", kernel, q, k, q_weight, k_weight)
    compare(got, call("qk_rmsnorm", kernel, q.contiguous(), k.contiguous(), q_weight, k_weight))
    compare(got, (oracle("rmsnorm", q, q_weight), oracle("rmsnorm", k, k_weight)))
    wide = torch.full((5, 3, 200), float("nan")).to(dtype)
    inner = wide[:, :, 100:164].copy_(torch.randn(5, 3, 64))
    got = call("qk_rmsnorm", kernel, inner, k, q_weight, k_weight)
    compare(got[0], oracle("rmsnorm", inner, q_weight))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ("rmsnorm", "gemma_rmsnorm", "layernorm"))
def test_nrm_02_strides_of_every_norm_and_of_out(name: str, layout: str) -> None:
    x, weight = torch.randn(5, 3, 64), torch.rand(64)
    for kernel in kernel_names(name):
        given_x = laid_out(x, layout)
        want = oracle(name, x, weight)
        compare(call(name, kernel, given_x, weight), want)
        out = torch.full((64, 3, 5), -7.0).permute(2, 1, 0)
        assert call(name, kernel, given_x, weight, out=out) is out
        compare(out, want)


@pytest.mark.parametrize("x_layout", LAYOUTS)
@pytest.mark.parametrize("r_layout", ("transposed", "sliced"))
@fused_kernels
def test_nrm_02_residual_with_other_strides(kernel: str, x_layout: str, r_layout: str) -> None:
    x, r, weight = torch.randn(6, 40).bfloat16(), torch.randn(6, 40).bfloat16(), torch.rand(40).bfloat16()
    y, total = call("add_rmsnorm", "reference/add_rmsnorm", x, r, weight)
    got_x, got_r = laid_out(x, x_layout), laid_out(r, r_layout)
    fused(kernel, got_x, got_r, weight)
    compare((got_x, got_r), (y, total))
    compare(got_r, total, exact=True)
    if got_r._base is not None and r_layout == "sliced":
        beside = torch.cat((got_r._base[:, :5], got_r._base[:, 45:]), 1)
        assert bool(beside.isnan().all()), "written beside the residual"


@rmsnorm_kernels
def test_lay_01_stride_of_a_single_row_is_meaningless(kernel: str) -> None:
    values, weight = torch.randn(1, 48), torch.rand(48)
    want = call("rmsnorm", kernel, values, weight)
    for stride in (1, 48, 4608):
        x = torch.full((4608,), float("nan"))[:48].as_strided((1, 48), (stride, 1)).copy_(values)
        compare(call("rmsnorm", kernel, x, weight), want, exact=True)


@qk_kernels
def test_lay_01_single_token_and_single_kv_head(kernel: str) -> None:
    q, k, weight = torch.randn(1, 4, 48), torch.randn(1, 1, 48), torch.rand(48)
    want = call("qk_rmsnorm", kernel, q, k, weight, weight)
    for stride in (1, 4608):
        got_q = torch.as_strided(q, (1, 4, 48), (stride, 48, 1))
        got_k = torch.as_strided(k, (1, 1, 48), (stride, 1, 1))
        compare(call("qk_rmsnorm", kernel, got_q, got_k, weight, weight), want, exact=True)


@fused_kernels
def test_lay_01_in_place_on_a_single_row(kernel: str) -> None:
    x, r, weight = torch.randn(1, 48), torch.randn(1, 48), torch.rand(48)
    want = oracle("add_rmsnorm", x, r, weight)
    got_x, got_r = x.clone().as_strided((1, 48), (1, 1)), r.clone().as_strided((1, 48), (4608, 1))
    fused(kernel, got_x, got_r, weight)
    compare((got_x, got_r), want)


# NRM-03


@fused_kernels
def test_nrm_03_residual_is_rounded_before_the_norm(kernel: str) -> None:
    x = torch.tensor([[256.0, 0, 0, 0]], dtype=torch.bfloat16)
    residual = torch.ones(1, 4, dtype=torch.bfloat16)
    fused(kernel, x, residual, torch.ones(4, dtype=torch.bfloat16))
    assert residual.tolist() == [[256.0, 1.0, 1.0, 1.0]]
    assert x.tolist() == [[2.0, 0.0078125, 0.0078125, 0.0078125]]


@half_or_bf16
@fused_kernels
def test_nrm_03_equals_add_then_norm(kernel: str, dtype: torch.dtype) -> None:
    x, residual, weight = torch.randn(9, 256).to(dtype), (torch.randn(9, 256) * 30).to(dtype), torch.rand(256).to(dtype)
    total = x + residual
    want = oracle("rmsnorm", total, weight, eps=1e-5)
    fused(kernel, x, residual, weight, eps=1e-5)
    compare(residual, total, exact=True)
    compare(x, want)


@half_or_bf16
@add_kernels
def test_nrm_03_functional_twin(kernel: str, dtype: torch.dtype) -> None:
    x, residual, weight = torch.randn(9, 256).to(dtype), (torch.randn(9, 256) * 30).to(dtype), torch.rand(256).to(dtype)
    before = x.clone(), residual.clone()
    y, total = call("add_rmsnorm", kernel, x, residual, weight)
    compare((x, residual), before, exact=True)
    compare(total, x + residual, exact=True)
    compare(y, oracle("rmsnorm", x + residual, weight))


# 3 / sqrt(5) * 1.0043 rounds down to 1.34375 in bf16; with the weight rounded to bf16 first (1.0078) it would round up.
FP32_WEIGHT = torch.full((2,), 1.0043)


@rmsnorm_kernels
def test_nrm_03_fp32_weights_are_used_as_fp32(kernel: str) -> None:
    x = torch.tensor([[3.0, 1.0]], dtype=torch.bfloat16)
    assert call("rmsnorm", kernel, x, FP32_WEIGHT, eps=0.0)[0, 0].item() == 1.34375


@fused_kernels
def test_nrm_03_fp32_weights_in_place(kernel: str) -> None:
    x, residual = torch.tensor([[2.0, 1.0]], dtype=torch.bfloat16), torch.tensor([[1.0, 0.0]], dtype=torch.bfloat16)
    fused(kernel, x, residual, FP32_WEIGHT, eps=0.0)
    assert (x[0, 0].item(), residual.tolist()) == (1.34375, [[3.0, 1.0]])


@gemma_kernels
def test_gemma_adds_one_in_fp32(kernel: str) -> None:
    x = torch.tensor([[3.0, 1.0]], dtype=torch.bfloat16)
    weight = torch.full((2,), 0.0043, dtype=torch.bfloat16)  # 1 + weight is not a bf16 number
    assert call("gemma_rmsnorm", kernel, x, weight, eps=0.0)[0, 0].item() == 1.34375


# WID-01


@pytest.mark.parametrize("hidden", (3, 5, 769))
@pytest.mark.parametrize("name", ("rmsnorm", "gemma_rmsnorm"))
def test_wid_01_odd_hidden_sizes(name: str, hidden: int) -> None:
    for kernel in kernel_names(name):
        for dtype in FLOATS:
            x = laid_out(torch.full((4, hidden), 3.0, dtype=dtype), "offset")
            weight = torch.full((hidden,), 0.0 if name.startswith("gemma") else 1.0, dtype=dtype)
            whole, out = guarded((4, hidden), dtype)
            call(name, kernel, x, weight, out=out)
            compare(out, torch.ones_like(out))
            assert len(out.unique()) == 1
            assert_guards(whole)


@pytest.mark.parametrize("hidden", (3, 5, 769))
@layernorm_kernels
def test_wid_01_layernorm(kernel: str, hidden: int) -> None:
    x, bias = laid_out(torch.full((4, hidden), 3.0), "offset"), torch.arange(float(hidden))
    whole, out = guarded((4, hidden), torch.float32)
    call("layernorm", kernel, x, torch.ones(hidden), bias, out=out)
    compare(out, bias.expand(4, hidden))
    assert_guards(whole)


@pytest.mark.parametrize("hidden", (3, 5, 769))
@fused_kernels
def test_wid_01_in_place_leaves_guard_rows(kernel: str, hidden: int) -> None:
    (x_whole, x), (r_whole, r) = guarded((4, hidden), torch.bfloat16), guarded((4, hidden), torch.bfloat16)
    x.fill_(1.0)
    r.fill_(2.0)
    fused(kernel, x, r, torch.ones(hidden, dtype=torch.bfloat16))
    compare((x, r), (torch.ones_like(x), torch.full_like(r, 3.0)))
    assert_guards(x_whole)
    assert_guards(r_whole)


# Layer norm


@layernorm_kernels
def test_layernorm_of_a_large_mean_keeps_its_digits(kernel: str) -> None:
    """E[x^2] - E[x]^2 in fp32 would give noise here."""
    x = 10000.0 + torch.arange(256.0).reshape(2, 128) / 64
    compare(call("layernorm", kernel, x, torch.ones(128)), oracle("layernorm", x, torch.ones(128)))


@layernorm_kernels
def test_layernorm_mixed_parameters(kernel: str) -> None:
    x, weight, bias = torch.randn(3, 40).bfloat16(), torch.rand(40), torch.rand(40).bfloat16()
    compare(call("layernorm", kernel, x, weight, bias), oracle("layernorm", x, weight, bias))


# Properties


@pytest.mark.parametrize("name", ("rmsnorm", "gemma_rmsnorm", "layernorm"))
@settings(max_examples=25, derandomize=True, deadline=None, database=None)
@given(data=st.data())
def test_every_shape_and_layout_equals_the_oracle(name: str, data: st.DataObject) -> None:
    kernel = data.draw(st.sampled_from(kernel_names(name)))
    lead = data.draw(st.lists(st.integers(0, 4), min_size=0, max_size=3))
    hidden = data.draw(st.integers(1, 70))
    dtype = data.draw(st.sampled_from(FLOATS))
    layout = data.draw(st.sampled_from(LAYOUTS))
    eps = data.draw(st.sampled_from((1e-6, 1e-3, 1.0)))
    generator = torch.Generator().manual_seed(hidden)
    x = laid_out(torch.randn(*lead, hidden, generator=generator).to(dtype), layout)
    weight = torch.randn(hidden, generator=generator).to(dtype)
    compare(call(name, kernel, x, weight, eps=eps), oracle(name, x, weight, eps=eps))


@settings(max_examples=20, derandomize=True, deadline=None, database=None)
@given(st.integers(1, 40), st.floats(2.0**-6, 2.0**6))
def test_rmsnorm_does_not_depend_on_the_scale_of_a_row(hidden: int, factor: float) -> None:
    x = torch.randn(3, hidden, generator=torch.Generator().manual_seed(hidden)).double() + 3
    for kernel in kernel_names("rmsnorm"):
        args = (torch.ones(hidden), 0.0)
        compare(call("rmsnorm", kernel, (x * factor).float(), *args), call("rmsnorm", kernel, x.float(), *args))


def test_vmap_takes_the_leading_dimension() -> None:
    import tskernel

    x, residual, weight = torch.randn(4, 3, 16), torch.randn(4, 3, 16), torch.rand(16)
    compare(torch.vmap(tskernel.rmsnorm, in_dims=(0, None))(x, weight), tskernel.rmsnorm(x, weight))
    got = torch.vmap(tskernel.add_rmsnorm, in_dims=(1, 0, None))(x.transpose(0, 1), residual, weight)
    compare(got, tskernel.add_rmsnorm(x, residual, weight))
    q, k = torch.randn(4, 3, 2, 16), torch.randn(4, 3, 1, 16)
    got = torch.vmap(tskernel.qk_rmsnorm, in_dims=(0, 0, None, None))(q, k, weight, weight)
    compare(got, tskernel.qk_rmsnorm(q, k, weight, weight))


# Refusals


@pytest.mark.parametrize(
    ("name", "shapes", "text"),
    [
        ("rmsnorm", ((3, 8), (7,)), r"weight.shape: expected \(8,\), got \(7,\)"),
        ("rmsnorm", ((3, 0), (0,)), r"x.shape: expected at least one column, got \(3, 0\)"),
        ("rmsnorm", ((), (1,)), r"x.shape: expected at least one dimension, got \(\)"),
        ("layernorm", ((3, 8), (8,), (1,)), r"bias.shape: expected \(8,\), got \(1,\)"),
        ("add_rmsnorm", ((3, 8), (1, 8), (8,)), r"residual.shape: expected \(3, 8\), got \(1, 8\)"),
        ("fused_add_rmsnorm", ((3, 8), (3, 7), (8,)), r"residual.shape: expected \(3, 8\), got \(3, 7\)"),
        ("qk_rmsnorm", ((3, 2, 8), (3, 2, 4), (8,), (8,)), r"k.shape: expected \(3, \*, 8\), got \(3, 2, 4\)"),
        ("qk_rmsnorm", ((3, 2, 8), (3, 2, 8), (8,), (4,)), r"k_weight.shape: expected \(8,\), got \(4,\)"),
    ],
)
def test_refusals_name_the_argument(name: str, shapes: tuple[tuple[int, ...], ...], text: str) -> None:
    with pytest.raises(ValueError, match=f"tokenspeed::{name}: {text}"):
        call(name, None, *[torch.zeros(s) for s in shapes])


def test_dtypes_must_agree() -> None:
    x, half = torch.zeros(2, 4), torch.zeros(2, 4, dtype=torch.float16)
    with pytest.raises(ValueError, match=r"residual.dtype: expected float32, got float16"):
        call("add_rmsnorm", None, x, half, torch.zeros(4))
    with pytest.raises(ValueError, match=r"weight.dtype: expected float16 or float32, got bfloat16"):
        call("rmsnorm", None, half, torch.zeros(4, dtype=torch.bfloat16))
