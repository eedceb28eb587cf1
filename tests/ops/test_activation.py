"""What the gated activations must do beyond the generic contract: values, widths, layouts, one-rounding fp8."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from layouts import LAYOUTS, assert_guards, guarded, laid_out

from tskernel.library import FLOATS
from tskernel.testing import call, compare, kernel_names, oracle

PLAIN = ("silu_and_mul", "gelu_and_mul", "gelu_tanh_and_mul", "swiglu_oai")
QUANTIZING = tuple(f"{n}_quantize_fp8" for n in PLAIN)
plain_kernels = pytest.mark.parametrize(("name", "kernel"), [(n, k) for n in PLAIN for k in kernel_names(n)])
quantizing_kernels = pytest.mark.parametrize(("name", "kernel"), [(n, k) for n in QUANTIZING for k in kernel_names(n)])


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


# Every activation at gate = up = 3.
AT_THREE = {
    "silu_and_mul": 9 / (1 + math.exp(-3)),
    "gelu_and_mul": 9 * (1 + math.erf(3 / math.sqrt(2))) / 2,
    "gelu_tanh_and_mul": 9 * (1 + math.tanh(math.sqrt(2 / math.pi) * (3 + 0.044715 * 27))) / 2,
    "swiglu_oai": 3 / (1 + math.exp(-1.702 * 3)) * 4,
}


@pytest.mark.parametrize("width", (1, 7, 768, 1234, 3420))
@plain_kernels
def test_wid_01_odd_widths(name: str, kernel: str, width: int) -> None:
    for dtype in FLOATS:
        x = laid_out(torch.full((3, 2 * width), 3.0, dtype=dtype), "offset")
        whole, out = guarded((3, width), dtype)
        call(name, kernel, x, out=out)
        compare(out, torch.full((3, width), AT_THREE[name], dtype=torch.float64))
        assert len(out.unique()) == 1
        assert_guards(whole)


def test_wid_01_value_of_the_catalogue() -> None:
    assert round(AT_THREE["silu_and_mul"], 3) == 8.573


@plain_kernels
def test_gate_comes_first(name: str, kernel: str) -> None:
    x = torch.tensor([[0.0, 0.0, 5.0, 7.0], [5.0, 7.0, 0.0, 0.0]])
    y = call(name, kernel, x)
    assert y[0].tolist() == [0.0, 0.0]  # a zero gate closes every activation
    up_is_zero = [5 / (1 + math.exp(-1.702 * 5)), 7 / (1 + math.exp(-1.702 * 7))] if name == "swiglu_oai" else [0, 0]
    compare(y[1], torch.tensor(up_is_zero, dtype=torch.float64))


@pytest.mark.parametrize("layout", LAYOUTS)
@plain_kernels
def test_nrm_02_strides_of_activations_and_of_out(name: str, kernel: str, layout: str) -> None:
    values = torch.randn(5, 3, 34)
    x, want = laid_out(values, layout), oracle(name, values)
    y = call(name, kernel, x)
    assert y.is_contiguous()
    compare(y, want)
    out = torch.full((17, 3, 5), -7.0).permute(2, 1, 0)
    assert call(name, kernel, x, out=out) is out
    compare(out, want)


@plain_kernels
def test_lay_01_stride_of_a_single_row_is_meaningless(name: str, kernel: str) -> None:
    x = torch.randn(1, 34)
    want = call(name, kernel, x)
    for stride in (1, 4608):
        compare(call(name, kernel, x.as_strided((1, 34), (stride, 1))), want, exact=True)


@plain_kernels
def test_one_rounding_only(name: str, kernel: str) -> None:
    """Nearly all results are the bf16 number next to the exact value; with a gate in bf16 a quarter would not be."""
    x = torch.randn(16, 512, generator=torch.Generator().manual_seed(1)).bfloat16()
    missed = call(name, kernel, x) != oracle(name, x).bfloat16()
    assert missed.float().mean().item() < 0.01


# swiglu_oai

swiglu_kernels = pytest.mark.parametrize("kernel", kernel_names("swiglu_oai"))


@swiglu_kernels
def test_swiglu_oai_clamps(kernel: str) -> None:
    """The gate is clamped above only, up on both sides."""
    gate, up = torch.tensor([9.0, 7.0, -9.0, 1.0, 1.0]), torch.tensor([1.0, 1.0, 1.0, 9.0, -9.0])
    y = call("swiglu_oai", kernel, torch.cat((gate, up))[None])[0]
    g, u = torch.tensor([7.0, 7.0, -9.0, 1.0, 1.0]).double(), torch.tensor([1.0, 1.0, 1.0, 7.0, -7.0]).double()
    compare(y, g * torch.sigmoid(1.702 * g) * (u + 1))
    assert y[0] == y[1]


@swiglu_kernels
def test_swiglu_oai_interleaved(kernel: str) -> None:
    for layout in LAYOUTS:
        x = laid_out(torch.randn(4, 26) * 6, layout)
        halves = torch.cat((x[:, ::2], x[:, 1::2]), dim=-1)
        got = call("swiglu_oai", kernel, x, alpha=1.5, limit=4.0, interleaved=True)
        compare(got, call("swiglu_oai", kernel, halves, alpha=1.5, limit=4.0))
        assert got.is_contiguous()


@swiglu_kernels
def test_swiglu_oai_without_a_limit_is_the_plain_form(kernel: str) -> None:
    x = torch.randn(4, 26) * 20
    gate, up = x.double().chunk(2, -1)
    compare(call("swiglu_oai", kernel, x, 1.0, math.inf), torch.nn.functional.silu(gate) * (up + 1))


# Fused quantization


def activated(name: str, x: torch.Tensor, **options: Any) -> torch.Tensor:
    """Return the unrounded fp32 activation by the fused reference's own formula: another may differ in the last bit."""
    return call(name.removesuffix("_quantize_fp8"), "reference", x.float(), **options)


@pytest.mark.parametrize("ue8m0", (False, True))
@pytest.mark.parametrize("granularity", ("token", "group"))
@quantizing_kernels
def test_quantizes_the_unrounded_activation(name: str, kernel: str, granularity: str, ue8m0: bool) -> None:
    x = (torch.randn(5, 2, 308, generator=torch.Generator().manual_seed(2)) * 40).bfloat16()
    for dtype in (None, torch.float8_e4m3fnuz, torch.float8_e5m2):
        options = {"granularity": granularity, "group_size": 64, "ue8m0": ue8m0, "dtype": dtype}
        data, scale = call(name, kernel, x, **options)
        want = call("quantize_fp8_dynamic", None, activated(name, x), **options)
        compare((data, scale), want)
        assert scale.shape == ((5, 2, 1) if granularity == "token" else (5, 2, 3))
        if kernel.startswith("reference/"):
            compare((data, scale), want, exact=True)


@quantizing_kernels
def test_static_scale(name: str, kernel: str) -> None:
    x = (torch.randn(5, 96, generator=torch.Generator().manual_seed(3)) * 40).bfloat16()
    for scale in (torch.tensor([0.25]), torch.tensor(0.25)):
        data, returned = call(name, kernel, x, scale, granularity="tensor")
        compare(data, call("quantize_fp8", None, activated(name, x), scale)[0])
        compare(returned, scale, exact=True)
        assert returned.data_ptr() != scale.data_ptr()


@quantizing_kernels
def test_qnt_01_zero_rows_and_groups(name: str, kernel: str) -> None:
    x = torch.randn(3, 256)
    x[1] = 0.0
    x[2, 64:128] = 0.0
    for options in ({"granularity": "token"}, {"granularity": "group", "group_size": 64}):
        for ue8m0 in (False, True):
            data, scale = call(name, kernel, x, ue8m0=ue8m0, **options)
            assert bool(scale.isfinite().all()) and bool((scale > 0).all())
            assert not data[1].float().any() and not data[2, 64:].float().any()
            assert data[0].float().any()


def half_of(name: str, values: list[float]) -> torch.Tensor:
    """Return an input whose activation is ``values``: with a gate of 5.5, up is what is left over."""
    gate = torch.full((len(values),), 5.5, dtype=torch.float64)
    unit = call(
        name.removesuffix("_quantize_fp8"), None, torch.cat((gate, torch.ones(len(values)))).float()[None]
    ).double()
    up = torch.tensor(values, dtype=torch.float64) / unit[0]
    return torch.cat((gate, up)).float()[None]


@pytest.mark.parametrize("kernel", [k for n in QUANTIZING[:3] for k in kernel_names(n)])
def test_qnt_02_saturates(kernel: str) -> None:
    name = kernel.split("/")[1]
    x = half_of(name, [447.9, 470.0, 1000.0, -1000.0, 1e30])
    data, _ = call(name, kernel, x, torch.ones(1), granularity="tensor")
    assert data.float().tolist() == [[448.0, 448.0, 448.0, -448.0, 448.0]]


@pytest.mark.parametrize("kernel", [k for n in QUANTIZING[:3] for k in kernel_names(n)])
def test_qnt_03_power_of_two_scale(kernel: str) -> None:
    name = kernel.split("/")[1]
    for amax, scale in ((500.0, 2.0), (440.0, 1.0), (900.0, 4.0)):
        data, got = call(name, kernel, half_of(name, [amax, 1.0]), ue8m0=True)
        assert got.item() == scale
        assert data[0, 0].item() == torch.tensor(amax / scale).to(torch.float8_e4m3fn).item()


@quantizing_kernels
def test_nan_stays_in_its_element(name: str, kernel: str) -> None:
    x = torch.randn(2, 64)
    x[0, 3] = float("nan")
    data, scale = call(name, kernel, x)
    assert data.float().isnan().nonzero().tolist() == [[0, 3]]
    assert bool(scale.isfinite().all())


# Properties


@pytest.mark.parametrize("name", PLAIN)
@settings(max_examples=20, derandomize=True, deadline=None, database=None)
@given(data=st.data())
def test_every_shape_and_layout_equals_the_oracle(name: str, data: st.DataObject) -> None:
    kernel = data.draw(st.sampled_from(kernel_names(name)))
    lead = data.draw(st.lists(st.integers(0, 4), min_size=0, max_size=3))
    width = data.draw(st.integers(1, 40))
    x = torch.randn(*lead, 2 * width, generator=torch.Generator().manual_seed(width)) * 8
    x = laid_out(x.to(data.draw(st.sampled_from(FLOATS))), data.draw(st.sampled_from(LAYOUTS)))
    compare(call(name, kernel, x), oracle(name, x))


@settings(max_examples=25, derandomize=True, deadline=None, database=None)
@given(data=st.data())
def test_dequantizing_gives_the_activation_back(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(QUANTIZING))
    kernel = data.draw(st.sampled_from(kernel_names(name)))
    width, group = data.draw(st.integers(1, 70)), data.draw(st.integers(1, 80))
    options = {"granularity": data.draw(st.sampled_from(("token", "group"))), "ue8m0": data.draw(st.booleans())}
    x = torch.randn(3, 2 * width, generator=torch.Generator().manual_seed(width)) * 10.0 ** data.draw(
        st.integers(-8, 8)
    )
    quantized, scale = call(name, kernel, x, group_size=group, **options)
    each = scale if options["granularity"] == "token" else scale.repeat_interleave(group, -1)[:, :width]
    want = activated(name, x)
    error = (quantized.float() * each - want).abs()
    # Half a step of e4m3: 2^-4 of a normal number, 2^-10 of the scale below that.
    assert bool((error <= want.abs() * 2.0**-4 * 1.001 + each * 2.0**-10 * 1.001).all())


def test_vmap_takes_the_leading_dimension() -> None:
    import tskernel

    x = torch.randn(4, 3, 16)
    for name in PLAIN:
        function = getattr(tskernel, name)
        compare(torch.vmap(function, in_dims=1)(x), function(x.transpose(0, 1)))


# Refusals


@pytest.mark.parametrize("name", (*PLAIN, *QUANTIZING))
def test_refuses_odd_widths(name: str) -> None:
    with pytest.raises(ValueError, match=rf"tokenspeed::{name}: x.shape: expected an even number .*got \(3, 7\)"):
        call(name, None, torch.zeros(3, 7))
    with pytest.raises(ValueError, match=rf"tokenspeed::{name}: x.shape: expected at least two columns, got \(3, 0\)"):
        call(name, None, torch.zeros(3, 0))


@pytest.mark.parametrize("name", QUANTIZING)
def test_refuses_options_that_contradict(name: str) -> None:
    x, one = torch.zeros(3, 8), torch.ones(1)
    cases: list[tuple[str, dict[str, Any]]] = [
        ("granularity: expected 'tensor' or 'token' or 'group', got 'block'", {"granularity": "block"}),
        ('scale: expected a tensor with granularity "tensor", got None', {"granularity": "tensor"}),
        ("scale: expected None with granularity 'token', which measures it, got a tensor", {"scale": one}),
        ("ue8m0: expected False with a given scale", {"scale": one, "granularity": "tensor", "ue8m0": True}),
        (r"scale.shape: expected \(1,\), got \(3,\)", {"scale": torch.ones(3), "granularity": "tensor"}),
        ("group_size: expected at least 1, got 0", {"granularity": "group", "group_size": 0}),
        ("dtype: expected float8_e4m3fn or ", {"dtype": torch.float16}),
    ]
    for text, options in cases:
        with pytest.raises(ValueError, match=f"tokenspeed::{name}: {text}"):
            call(name, None, x, **options)
