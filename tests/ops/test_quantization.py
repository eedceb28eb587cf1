"""What the quantization ops must do beyond the generic contract: encodings, scales, ties, tails, bad values."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from layouts import LAYOUTS, laid_out
from torch import Tensor

from tskernel.library import FLOATS, ops
from tskernel.ops.quantization._math import FP8_MAX, fp8_scale, from_e8m0, round_to_fp4, saturate_to_fp8, to_e8m0
from tskernel.testing import call, compare, kernel_names

E4M3, FNUZ, E5M2 = torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2
FP4_VALUES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


class Format(NamedTuple):
    """One way to quantize, and its way back."""

    quantize: str
    options: dict[str, Any]
    dequantize: str
    back: dict[str, Any]
    error: tuple[float, float]  # relative to the value and to the largest one of its group


def fp8(granularity: str, ue8m0: bool, group_size: int = 128) -> Format:
    options = {"granularity": granularity, "ue8m0": ue8m0, "group_size": group_size}
    back = {"granularity": granularity, "group_size": group_size}
    return Format("quantize_fp8_dynamic", options, "dequantize_fp8", back, (2**-4, 2**-9 / 448))


FORMATS = {
    "fp8_tensor": fp8("tensor", False),
    "fp8_token": fp8("token", False),
    "fp8_token_ue8m0": fp8("token", True),
    "fp8_group": fp8("group", False),
    "fp8_group_ue8m0": fp8("group", True, 32),
    "fp8_block": fp8("block", False),
    "fp8_block_ue8m0": fp8("block", True, 16),
    "mxfp8": Format("quantize_mxfp8", {}, "dequantize_mxfp8", {}, (2**-4, 2**-9 / 448)),
    "mxfp4": Format("quantize_mxfp4", {}, "dequantize_mxfp4", {}, (0.25, 0.25 / 3)),
    "int8_token": Format("quantize_int8", {"granularity": "token"}, "dequantize_int8", {}, (0.0, 0.5 / 127)),
    "int8_tensor": Format("quantize_int8", {"granularity": "tensor"}, "dequantize_int8", {}, (0.0, 0.5 / 127)),
}
PAIRS = [(f, k) for f in FORMATS for k in kernel_names(FORMATS[f].quantize)]
every_format = pytest.mark.parametrize(("name", "kernel"), PAIRS, ids=[f"{f}-{k}" for f, k in PAIRS])


def kernels(*names: str) -> Any:
    """Parametrise over the kernels of ops with one signature."""
    pairs = [(n, k) for n in names for k in kernel_names(n)]
    return pytest.mark.parametrize(("op", "kernel"), pairs, ids=[k for _, k in pairs])


def quantize(name: str, kernel: str | None, x: Tensor) -> tuple[Tensor, Tensor]:
    return call(FORMATS[name].quantize, kernel, x, **FORMATS[name].options)


def numbers(name: str, data: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    return call(FORMATS[name].dequantize, None, data, scale, dtype, **FORMATS[name].back)


def scale_values(scale: Tensor) -> Tensor:
    return from_e8m0(scale) if scale.dtype == torch.uint8 else scale.float()


# QNT-01

ZERO_CASES = {
    "all_zero": lambda: torch.zeros(3, 160),
    "one_zero_row": lambda: torch.randn(3, 160) * torch.tensor([[1.0], [0.0], [1.0]]),
    "single_1e-30": lambda: torch.zeros(3, 160).index_put_((torch.tensor(1), torch.tensor(150)), torch.tensor(1e-30)),
    "single_1e-44": lambda: torch.zeros(3, 160).index_put_((torch.tensor(1), torch.tensor(150)), torch.tensor(1e-44)),
}


@pytest.mark.parametrize("case", ZERO_CASES)
@every_format
def test_qnt_01_zeros_stay_zeros(name: str, kernel: str, case: str) -> None:
    torch.manual_seed(0)
    x = ZERO_CASES[case]()
    data, scale = quantize(name, kernel, x)
    values = scale_values(scale)
    assert bool(values.isfinite().all()) and bool((values > 0).all())
    back = numbers(name, data, scale)
    assert bool(back.isfinite().all())
    assert bool((back[x == 0] == 0).all())
    assert bool((back.abs() <= 2 * x.abs().amax()).all())


@kernels("quantize_nvfp4")
def test_qnt_01_nvfp4_zeros_stay_zeros(op: str, kernel: str) -> None:
    torch.manual_seed(0)
    for case in ZERO_CASES.values():
        x = case()
        amax = x.abs().amax()
        for global_scale in (2688 / amax, torch.tensor(1.0)):  # infinite for the all-zero tensor
            data, scale = call(op, kernel, x, global_scale.reshape(1))
            back = call("dequantize_nvfp4", None, data, scale, global_scale.reshape(1), torch.float32)
            assert bool(scale.float().isfinite().all()) and bool(back.isfinite().all())
            assert bool((back[x == 0] == 0).all())


@kernels("quantize_fp8")
def test_qnt_01_a_given_zero_scale_gives_no_nan(op: str, kernel: str) -> None:
    data, scale = call(op, kernel, torch.tensor([[0.0, 1.0, -1.0]]), torch.zeros(1))
    compare(data.float(), torch.tensor([[0.0, 448.0, -448.0]]), exact=True)
    compare(scale, torch.zeros(1), exact=True)


# QNT-02


@pytest.mark.parametrize("dtype", FLOATS)
@kernels("quantize_fp8")
def test_qnt_02_finite_input_saturates(op: str, kernel: str, dtype: torch.dtype) -> None:
    x = torch.tensor([[448.0, 464.0, 465.0, 1000.0, -1000.0, float("inf"), -float("inf"), float("nan")]]).to(dtype)
    nan = float("nan")
    for fp8_dtype in (None, E4M3):
        data, _ = call(op, kernel, x, torch.ones(1), dtype=fp8_dtype)
        compare(data.float(), torch.tensor([[448.0, 448, 448, 448, -448, 448, -448, nan]]), exact=True)
    data, _ = call(op, kernel, x, torch.ones(1), dtype=FNUZ)
    compare(data.float(), torch.tensor([[240.0, 240, 240, 240, -240, 240, -240, nan]]), exact=True)
    data, _ = call(op, kernel, x.float() * 1000, torch.ones(1), dtype=E5M2)
    compare(data.float(), torch.tensor([[57344.0] * 4 + [-57344.0, 57344.0, -57344.0, nan]]), exact=True)


@every_format
def test_qnt_02_the_largest_numbers_do_not_overflow(name: str, kernel: str) -> None:
    top = torch.finfo(torch.float32).max
    x = torch.full((2, 64), top)
    x[1] = torch.tensor([-top, 1.0]).repeat(32)
    data, scale = quantize(name, kernel, x)
    assert bool(scale_values(scale).isfinite().all())
    back = numbers(name, data, scale).double()
    assert not bool(back.isnan().any())
    assert torch.equal(back.sign()[0], x.double().sign()[0])


# QNT-03


@pytest.mark.parametrize("granularity", ("tensor", "token", "group", "block"))
@kernels("quantize_fp8_dynamic")
def test_qnt_03_data_are_divided_by_the_stored_power_of_two(op: str, kernel: str, granularity: str) -> None:
    x = torch.linspace(-500, 500, 96).view(1, 96)
    data, scale = call(op, kernel, x, granularity=granularity, ue8m0=True)
    compare(scale.flatten(), torch.tensor([2.0]), exact=True)
    compare(data.float(), (x / 2).to(E4M3).float(), exact=True)


@kernels("quantize_mxfp8")
def test_qnt_03_mxfp8_byte(op: str, kernel: str) -> None:
    x = torch.full((1, 32), 500.0)
    data, scale = call(op, kernel, x)
    compare(scale, torch.tensor([[128]], dtype=torch.uint8), exact=True)
    compare(data.float(), torch.full((1, 32), 256.0), exact=True)  # 250 is nearer to 256 than to 240


@pytest.mark.parametrize("fmax", sorted({*FP8_MAX.values(), 6.0}))
def test_qnt_03_smallest_power_of_two_at_every_exponent(fmax: float) -> None:
    power = 2.0 ** torch.arange(-100, 100, dtype=torch.float64)
    at = (power * fmax).float()
    below, above = (torch.nextafter(at, torch.tensor(limit)) for limit in (0.0, float("inf")))
    compare(fp8_scale(at, fmax, ue8m0=True), power, exact=True)
    compare(fp8_scale(below, fmax, ue8m0=True), power, exact=True)
    compare(fp8_scale(above, fmax, ue8m0=True), 2 * power, exact=True)


# QNT-04


@pytest.mark.parametrize("typed", (torch.uint8, torch.float8_e8m0fnu))
@kernels("dequantize_mxfp4")
def test_qnt_04_low_nibble_first_and_scale_bytes(op: str, kernel: str, typed: torch.dtype) -> None:
    data = torch.tensor([[0x21, 0x72] + [0] * 14], dtype=torch.uint8).repeat(3, 1)
    scale = torch.tensor([[127], [128], [126]], dtype=torch.uint8).view(typed)
    value = call(op, kernel, data, scale, torch.float32)
    want = torch.tensor([[0.5, 1.0, 1.0, 6.0] + [0.0] * 28])
    compare(value, torch.cat((want, want * 2, want / 2)), exact=True)


@kernels("dequantize_mxfp4")
def test_qnt_04_all_codes_and_special_bytes(op: str, kernel: str) -> None:
    data = torch.tensor([[0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE]], dtype=torch.uint8).repeat(4, 1)
    scale = torch.tensor([[127], [255], [0], [254]], dtype=torch.uint8)
    value = call(op, kernel, data, scale, torch.float32)
    codes = torch.tensor([*FP4_VALUES, *[-v for v in FP4_VALUES]])
    assert torch.equal(value[0].signbit(), codes.signbit())
    want = codes.double() * torch.tensor([[1.0], [float("nan")], [2.0**-127], [2.0**127]], dtype=torch.float64)
    compare(value, want.float(), exact=True)


@kernels("quantize_mxfp4")
def test_qnt_04_codes_and_ties(op: str, kernel: str) -> None:
    x = torch.zeros(1, 32)
    x[0, :16] = torch.tensor([6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.25, -0.75, 0.26, 5.1, -6, 0.5, -1.5, 2])
    data, scale = call(op, kernel, x)
    compare(scale, torch.tensor([[127]], dtype=torch.uint8), exact=True)
    want = torch.tensor([6.0, 0.0, 1, 1, 2, 2, 4, 4, 0, -1, 0.5, 6, -6, 0.5, -1.5, 2])
    compare(call("dequantize_mxfp4", None, data, scale, torch.float32)[0, :16], want, exact=True)
    assert data[0, 0] == 0x07  # 6 is code 7, in the low nibble; 0.25 rounds to code 0


def test_qnt_04_scale_bytes_are_torchs() -> None:
    byte = torch.arange(256, dtype=torch.uint8)
    compare(from_e8m0(byte), byte.view(torch.float8_e8m0fnu).float(), exact=True)
    compare(from_e8m0(byte.view(torch.float8_e8m0fnu)), from_e8m0(byte), exact=True)
    compare(to_e8m0(from_e8m0(byte[1:255])), byte[1:255], exact=True)


# KV8-02


@kernels("dequantize_fp8")
def test_kv8_02_the_dtype_decides_the_encoding(op: str, kernel: str) -> None:
    data = torch.tensor([[0x38, 0x80, 0x7F, 0x7E]], dtype=torch.uint8)
    nan = float("nan")
    for dtype, want in ((E4M3, [1.0, -0.0, nan, 448.0]), (FNUZ, [0.5, nan, 240.0, 224.0])):
        value = call(op, kernel, data.view(dtype), torch.ones(1), torch.float32)
        compare(value, torch.tensor([want]), exact=True)
        assert bool(value[0, 1].signbit()) or dtype is FNUZ
    assert call(op, kernel, data.view(E4M3), torch.full((1,), 2.0), torch.float32)[0, 0] == 2.0


@kernels("quantize_fp8")
def test_kv8_02_quantize_writes_the_encoding(op: str, kernel: str) -> None:
    x = torch.tensor([[1.0, -0.0, -1e-9]])
    for dtype, want in ((E4M3, [0x38, 0x80, 0x80]), (FNUZ, [0x40, 0x00, 0x00])):  # fnuz has no -0: its byte is NaN
        data, _ = call(op, kernel, x, torch.ones(1), dtype=dtype)
        assert data.view(torch.uint8).tolist() == [want]


# Scales and shapes


@pytest.mark.parametrize("dtype", FLOATS)
@every_format
def test_round_trip_error_is_bounded(name: str, kernel: str, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    x = (torch.randn(5, 160) * torch.tensor([[1e-3], [1.0], [30.0], [1e3], [0.1]])).to(dtype)
    assert_close_to(name, x, *quantize(name, kernel, x))


def assert_close_to(name: str, x: Tensor, data: Tensor, scale: Tensor) -> None:
    """Bound the round-trip error by half a step at the value, or half the smallest step at the scale of the group."""
    relative, absolute = FORMATS[name].error
    spread = numbers(name, torch.full_like(data, 0x22) if data.dtype == torch.uint8 else torch.ones_like(data), scale)
    span = spread.double() * {"mxfp4": 6.0, "int8_token": 127.0, "int8_tensor": 127.0}.get(name, 448.0)
    error = (numbers(name, data, scale).double() - x.double()).abs()
    bound = (relative * x.double().abs()).maximum(absolute * span) + 1e-6 * x.double().abs()  # the quotient is fp32
    assert bool((error <= bound).all()), float((error - bound).max())
    assert bool((x.double().abs() <= span * (1 + 1e-6)).all())  # nothing was cut off


@pytest.mark.parametrize("layout", LAYOUTS)
@every_format
def test_layouts_give_the_contiguous_result(name: str, kernel: str, layout: str) -> None:
    torch.manual_seed(2)
    x = torch.randn(6, 78, dtype=torch.bfloat16)
    want = quantize(name, "reference", x)
    got = quantize(name, kernel, laid_out(x, layout))
    compare([t.view(torch.uint8) for t in got], [t.view(torch.uint8) for t in want], exact=True)


@every_format
def test_blocks_are_independent_and_the_last_one_may_be_partial(name: str, kernel: str) -> None:
    torch.manual_seed(3)
    x = torch.randn(4, 64)
    x[:, 32:] *= 100
    for columns in (2, 34, 62):
        data, scale = quantize(name, kernel, x[:, :columns])
        if "mx" in name:
            assert scale.shape == (4, -(-columns // 32))
        assert_close_to(name, x[:, :columns], data, scale)


@kernels("quantize_fp8_dynamic")
def test_fp8_scales_of_each_granularity(op: str, kernel: str) -> None:
    x = torch.ones(3, 5)
    x[2, 4] = -896.0
    one = 1 / torch.tensor(448.0)

    def scales(granularity: str) -> Tensor:
        return call(op, kernel, x, granularity=granularity, group_size=2)[1]

    compare(scales("tensor"), torch.tensor([2.0]), exact=True)
    compare(scales("token"), torch.stack((one, one, torch.tensor(2.0))).view(3, 1), exact=True)
    group = one.repeat(3, 3)
    group[2, 2] = 2.0
    compare(scales("group"), group, exact=True)
    compare(scales("block"), group[1:], exact=True)


@every_format
def test_nan_does_not_spread_past_its_block(name: str, kernel: str) -> None:
    torch.manual_seed(4)
    x = torch.randn(4, 96)
    clean = numbers(name, *quantize(name, kernel, x))
    x[2, 40] = float("nan")
    back = numbers(name, *quantize(name, kernel, x))
    if name == "mxfp4":  # e2m1 has no NaN, the scale of the block says it
        assert bool(back[2, 32:64].isnan().all())
        back[2, 32:64] = clean[2, 32:64]
    elif name.startswith("int8"):
        assert back[2, 40] == 0
        back[2, 40] = clean[2, 40]
    else:
        assert bool(back[2, 40].isnan())
        back[2, 40] = clean[2, 40]
    compare(back, clean, exact=True)


@kernels("quantize_int8")
def test_int8_rounds_ties_to_even_and_is_symmetric(op: str, kernel: str) -> None:
    x = torch.tensor([[127.0, 0.5, 1.5, -0.5, -2.5, -127.0, 126.5]])
    data, scale = call(op, kernel, x)
    assert data.tolist() == [[127, 0, 2, 0, -2, -127, 126]] and scale.tolist() == [[1.0]]
    assert call(op, kernel, torch.tensor([[-3.0, 1.0]]))[0].tolist() == [[-127, 42]]


@kernels("quantize_nvfp4")
def test_nvfp4_follows_flashinfer_and_vllm(op: str, kernel: str) -> None:
    torch.manual_seed(5)
    x = torch.randn(5, 70)
    global_scale = (2688 / x.abs().amax()).reshape(1)
    data, scale = call(op, kernel, x, global_scale)
    assert data.shape == (5, 35) and scale.shape == (5, 5) and scale.dtype == E4M3
    assert scale.float().amax() == 448  # the largest block uses the whole range of its scale
    back = call("dequantize_nvfp4", None, data, scale, global_scale, torch.float32)
    amax = torch.nn.functional.pad(x, (0, 10)).view(5, 5, 16).abs().amax(-1).repeat_interleave(16, 1)[:, :70]
    # Half a step of e2m1 (a quarter of the value, or 0.25 of 6) and half a step of the e4m3 scale (2^-4).
    assert bool(((back - x).abs() <= 0.35 * x.abs() + 0.06 * amax).all())
    # Powers of two up and down cancel exactly.
    twice = call(op, kernel, x * 2, global_scale / 2)
    compare((twice[0], twice[1].float()), (data, scale.float()), exact=True)


@kernels("quantize_nvfp4")
def test_nvfp4_codes(op: str, kernel: str) -> None:
    x = torch.zeros(1, 32)
    x[0, :16] = torch.tensor(FP4_VALUES + [-v for v in FP4_VALUES])
    x[0, 16:] = x[0, :16] * 64
    data, scale = call(op, kernel, x, torch.ones(1))
    compare(scale.float(), torch.tensor([[1.0, 64.0]]), exact=True)
    byte = [0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE]
    assert data[0, :8].tolist()[:4] == byte[:4]
    compare(call("dequantize_nvfp4", None, data, scale, torch.ones(1), torch.float32), x, exact=True)
    x[0, 3] = float("nan")
    back = call("dequantize_nvfp4", None, *call(op, kernel, x, torch.ones(1)), torch.ones(1), torch.float32)
    assert bool(back[0, :16].isnan().all())
    compare(back[0, 16:], x[0, 16:], exact=True)


def test_lib_03_the_returned_scale_is_a_copy() -> None:
    scale = torch.ones(1)
    for kernel in kernel_names("quantize_fp8"):
        _, returned = call("quantize_fp8", kernel, torch.ones(2, 4), scale)
        returned.fill_(5)
        assert scale.item() == 1


@pytest.mark.parametrize("shape", ((0, 64), (3, 0, 64)))
@every_format
def test_lib_06_no_rows(name: str, kernel: str, shape: tuple[int, ...]) -> None:
    data, scale = quantize(name, kernel, torch.empty(shape))
    if "tensor" in name:
        assert scale.shape == (1,) and bool((scale > 0).all())
    else:
        assert scale.numel() == 0
    assert numbers(name, data, scale).shape == shape


BAD_CALLS = {
    "quantize_fp8: x.shape: expected at least one column": ("quantize_fp8", (torch.ones(3, 0), torch.ones(1)), {}),
    "quantize_fp8: scale.shape: expected (1,), got (3,)": ("quantize_fp8", (torch.ones(3, 4), torch.ones(3)), {}),
    "quantize_fp8: scale.shape: expected (3, 1), got (3, 4)": (
        "quantize_fp8",
        (torch.ones(3, 4), torch.ones(3, 4)),
        {},
    ),
    "quantize_fp8: dtype: expected float8_e4m3fn": (
        "quantize_fp8",
        (torch.ones(3, 4), torch.ones(1)),
        {"dtype": torch.int8},
    ),
    "quantize_fp8_dynamic: granularity: expected": (
        "quantize_fp8_dynamic",
        (torch.ones(3, 4),),
        {"granularity": "row"},
    ),
    "quantize_fp8_dynamic: group_size: expected at least 1": (
        "quantize_fp8_dynamic",
        (torch.ones(3, 4),),
        {"group_size": 0},
    ),
    "at least two dimensions for blocks": ("quantize_fp8_dynamic", (torch.ones(4),), {"granularity": "block"}),
    "quantize_mxfp4: x.shape[-1]: expected an even number": ("quantize_mxfp4", (torch.ones(3, 5),), {}),
    "quantize_nvfp4: global_scale.shape: expected (1,)": ("quantize_nvfp4", (torch.ones(3, 4), torch.ones(3)), {}),
    "quantize_mxfp8: dtype: expected float8_e4m3fn or float8_e5m2": (
        "quantize_mxfp8",
        (torch.ones(1, 4),),
        {"dtype": FNUZ},
    ),
    "quantize_int8: x.dtype: expected float32": ("quantize_int8", (torch.ones(3, 4, dtype=torch.int32),), {}),
    "dequantize_mxfp4: scale.shape: expected (2, 2), got (2, 1)": (
        "dequantize_mxfp4",
        (torch.ones(2, 17, dtype=torch.uint8), torch.ones(2, 1, dtype=torch.uint8), torch.float32),
        {},
    ),
    "dequantize_int8: out_dtype: expected float32": (
        "dequantize_int8",
        (torch.ones(2, 2, dtype=torch.int8), torch.ones(1), torch.int8),
        {},
    ),
}


@pytest.mark.parametrize("text", BAD_CALLS)
def test_bad_input_names_the_argument(text: str) -> None:
    op, args, kwargs = BAD_CALLS[text]
    with pytest.raises(ValueError) as caught:
        ops[op].front(*args, **kwargs)
    assert text in str(caught.value)


# Properties

few = settings(derandomize=True, deadline=None, max_examples=25)
floats = st.floats(-1e4, 1e4, width=32)


@given(
    rows=st.integers(1, 4),
    columns=st.integers(1, 70).map(lambda k: 2 * k),
    seed=st.integers(0, 99),
    size=st.integers(-60, 60),
)
@few
def test_any_shape_and_magnitude_round_trips(rows: int, columns: int, seed: int, size: int) -> None:
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 2.0**size
    for name in FORMATS:
        for kernel in kernel_names(FORMATS[name].quantize):
            assert_close_to(name, x, *quantize(name, kernel, x))


@given(values=st.lists(floats, min_size=2, max_size=32))
@few
def test_quantizing_keeps_the_order(values: list[float]) -> None:
    x = torch.tensor(sorted(values + values[: len(values) % 2])).view(1, -1)
    for name in FORMATS:
        for kernel in kernel_names(FORMATS[name].quantize):
            back = numbers(name, *quantize(name, kernel, x))
            assert bool((back.diff() >= 0).all()), name


@given(values=st.lists(floats, min_size=16, max_size=16), size=st.integers(-20, 20))
@few
def test_power_of_two_formats_are_idempotent_and_scale_with_their_input(values: list[float], size: int) -> None:
    x = torch.tensor(values).view(1, -1)
    for name in ("fp8_token_ue8m0", "mxfp8", "mxfp4"):
        for kernel in kernel_names(FORMATS[name].quantize):
            once = numbers(name, *quantize(name, kernel, x))
            compare(numbers(name, *quantize(name, kernel, once)), once, exact=True)
            large = x.abs().amax() > 1e-3  # else the scaled input may reach the smallest scale
            if large:
                compare(numbers(name, *quantize(name, kernel, x * 2.0**size)), once * 2.0**size, exact=True)


@given(values=st.lists(st.floats(-8, 8, width=32), min_size=1, max_size=40))
@few
def test_fp4_code_is_the_nearest_value_and_even_on_ties(values: list[float]) -> None:
    x = torch.tensor(values)
    code = round_to_fp4(x)
    distance = (x.abs().clamp(max=6.0).double().unsqueeze(1) - torch.tensor(FP4_VALUES, dtype=torch.float64)).abs()
    assert torch.equal(code.long() & 7, _nearest_even(distance))
    assert torch.equal(code.long() >> 3, torch.signbit(x).long())


def _nearest_even(distance: Tensor) -> Tensor:
    best = distance == distance.amin(1, keepdim=True)
    even_first = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])
    return even_first[best[:, even_first].int().argmax(1)]


@given(x=st.floats(width=32, allow_nan=False), dtype=st.sampled_from(sorted(FP8_MAX, key=str)))
@few
def test_saturation_never_makes_nan_of_a_number(x: float, dtype: torch.dtype) -> None:
    y = saturate_to_fp8(torch.tensor([x, float("nan")]), dtype).float()
    assert abs(y[0].item()) <= FP8_MAX[dtype]
    assert bool(y[1].isnan())
