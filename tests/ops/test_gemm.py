"""What the GEMM ops must do beyond the generic contract: scale blocks and tails, encodings, one rounding, groups."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from layouts import LAYOUTS, assert_guards, guarded, laid_out
from torch import Tensor

from tskernel._torch.execute import named
from tskernel.dispatch.platform import PlatformInfo
from tskernel.dispatch.ranking import Request, ranking, reject_reason
from tskernel.dispatch.registry import KernelRegistry, KernelSpec
from tskernel.library import ops
from tskernel.testing import SampleMaker, call, compare, kernel_names, oracle, samples_of

E4M3, FNUZ = torch.float8_e4m3fn, torch.float8_e4m3fnuz
GEMMS = ("mm", "bmm", "grouped_mm")
PAIRS = [(op, kernel) for op in GEMMS for kernel in kernel_names(op)]
every_kernel = pytest.mark.parametrize(("op", "kernel"), PAIRS, ids=[k for _, k in PAIRS])
mm_kernels = pytest.mark.parametrize("kernel", kernel_names("mm"))
grouped_kernels = pytest.mark.parametrize("kernel", kernel_names("grouped_mm"))


def gemm(op: str, kernel: str | None, a: Tensor, b: Tensor, **options: Any) -> Tensor:
    """Multiply ``a [M, K]`` by ``b [N, K]`` through any op: as one, a batch of one, or the second of two groups."""
    given = {k: v for k, v in options.items() if v is not None}
    if op == "mm":
        return call(op, kernel, a, b, **given)
    if op == "bmm":
        batched = {k: v[None] if k in ("a_scale", "b_scale") and v.dim() > 1 else v for k, v in given.items()}
        return call(op, kernel, a[None], b[None], **batched)[0]
    twice = {k: torch.stack((v, v)) if k == "b_scale" and v.dim() > 1 else v for k, v in given.items()}
    offsets = torch.tensor([0, a.shape[0]], dtype=torch.int32)
    return call(op, kernel, a, torch.stack((b, b)), offsets, **twice)


def ones(*shape: int, dtype: torch.dtype = E4M3) -> Tensor:
    return torch.ones(shape).to(dtype)


# GEM-01


@pytest.mark.parametrize("m", (1, 17, 130))
@every_kernel
def test_gem_01_the_last_partial_block_counts(op: str, kernel: str, m: int) -> None:
    a_scale = torch.tensor([1.0, 2.0]).repeat(m, 1)
    b_scale = torch.ones(2, 2)
    y = gemm(op, kernel, ones(m, 160), ones(136, 160), a_scale=a_scale, b_scale=b_scale, quant="fp8_block")
    compare(y, torch.full((m, 136), 192.0, dtype=torch.bfloat16), exact=True)
    y = gemm(
        op,
        kernel,
        ones(m, 160),
        ones(136, 160),
        a_scale=torch.ones(m, 2),
        b_scale=a_scale[:1].repeat(2, 1),
        quant="fp8_block",
    )
    compare(y, torch.full((m, 136), 192.0, dtype=torch.bfloat16), exact=True)


@pytest.mark.parametrize("m", (1, 17, 130))
@every_kernel
def test_gem_01_rows_and_column_blocks_have_their_own_scale(op: str, kernel: str, m: int) -> None:
    row = torch.arange(1.0, m + 1).unsqueeze(1)
    b_scale = torch.tensor([[1.0, 1.0], [4.0, 4.0]])  # 128 columns, then the 8 of the last block
    scales = {"a_scale": row * torch.tensor([1.0, 2.0]), "b_scale": b_scale}
    y = gemm(op, kernel, ones(m, 160), ones(136, 160), **scales, quant="fp8_block", out_dtype=torch.float32)
    want = 192 * row * torch.tensor([1.0] * 128 + [4.0] * 8)
    compare(y, want, exact=True)


@pytest.mark.parametrize("k", (1, 16, 100, 128, 129))
@every_kernel
def test_gem_01_k_below_one_block_is_right_or_an_error(op: str, kernel: str, k: int) -> None:
    blocks = -(-k // 128)
    scales = {"a_scale": torch.full((3, blocks), 2.0), "b_scale": torch.full((1, blocks), 0.5)}
    y = gemm(op, kernel, ones(3, k), ones(5, k), **scales, quant="fp8_block", out_dtype=torch.float32)
    compare(y, torch.full((3, 5), float(k)), exact=True)


TAILS = {"mxfp8": (32, 1), "mxfp4": (32, 2), "nvfp4": (16, 2)}


@pytest.mark.parametrize("quant", TAILS)
@every_kernel
def test_gem_01_tails_of_the_small_blocks(op: str, kernel: str, quant: str) -> None:
    block, per_byte = TAILS[quant]
    k = 2 * block + 6
    data = [ones(r, k) if per_byte == 1 else torch.full((r, k // 2), 0x22, dtype=torch.uint8) for r in (3, 5)]
    one_two_four = (
        torch.tensor([1.0, 2.0, 4.0]).to(E4M3) if quant == "nvfp4" else torch.tensor([127, 128, 129], dtype=torch.uint8)
    )
    unit = one_two_four[:1].repeat(3)
    for left, right in ((one_two_four, unit), (unit, one_two_four)):
        scales = {"a_scale": left.repeat(3, 1), "b_scale": right.repeat(5, 1)}
        y = gemm(op, kernel, *data, **scales, quant=quant)
        compare(y, torch.full((3, 5), block + 2.0 * block + 4 * 6).bfloat16(), exact=True)


# Encodings: a product of quantized operands is the product of their numbers.


def quantized(quant: str, x: Tensor, *, weight: bool) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return data, scale, the numbers they stand for, and nvfp4's global scale."""

    def both(name: str, back: str, *extra: Tensor, quantize: dict[str, Any] | None = None, **options: Any) -> Any:
        data, scale = call(name, None, x, *extra, **(quantize or {}), **options)
        return data, scale, call(back, None, data, scale, *extra, torch.float32, **options)

    if quant == "nvfp4":
        global_scale = (2688 / x.float().abs().amax()).reshape(1)
        return *both("quantize_nvfp4", "dequantize_nvfp4", global_scale), global_scale
    if quant in ("mxfp8", "mxfp4"):
        return *both(f"quantize_{quant}", f"dequantize_{quant}"), None
    if quant == "int8":
        return *both("quantize_int8", "dequantize_int8"), None
    granularity = {"fp8_tensor": "tensor", "fp8_token": "token"}.get(quant, "block" if weight else "group")
    return *both("quantize_fp8_dynamic", "dequantize_fp8", granularity=granularity), None


QUANTS = ("fp8_tensor", "fp8_token", "fp8_block", "mxfp8", "mxfp4", "nvfp4", "int8")


@pytest.mark.parametrize("weight_only", (False, True))
@pytest.mark.parametrize("quant", QUANTS)
@every_kernel
def test_products_of_quantized_operands(op: str, kernel: str, quant: str, weight_only: bool) -> None:
    make = SampleMaker()
    x, w = make.randn((9, 150), torch.bfloat16), make.randn((140, 150), torch.bfloat16)
    a, a_scale, a_numbers, a_global = quantized(quant, x, weight=False)
    b, b_scale, b_numbers, b_global = quantized(quant, w, weight=True)
    if weight_only:
        a, a_scale, a_numbers, a_global = x, None, x, None
    alpha = torch.ones(1)
    for used in (a_global, b_global):
        alpha = alpha if used is None else alpha / used
    if a_global is None and b_global is None:
        alpha = None
    bias = make.randn((140,), torch.float32)
    y = gemm(op, kernel, a, b, a_scale=a_scale, b_scale=b_scale, alpha=alpha, bias=bias, quant=quant)
    assert y.dtype == torch.bfloat16
    compare(y, a_numbers.double() @ b_numbers.double().t() + bias.double())


@every_kernel
def test_w4a16_is_symmetric_around_8_low_nibble_first(op: str, kernel: str) -> None:
    a = torch.eye(8, dtype=torch.float16)
    b = torch.tensor([[0x80, 0x97, 0x0F, 0x1E]], dtype=torch.uint8)
    for scale in (torch.tensor([[1.0, 2.0]], dtype=torch.float16), torch.tensor([[1.0, 2.0]])):
        y = gemm(op, kernel, a, b, b_scale=scale, quant="w4a16")
        assert y.dtype == torch.float16
        compare(y[:, 0], torch.tensor([-8.0, 0, -1, 1, 14, -16, 12, -14]).half(), exact=True)


@every_kernel
def test_scale_shapes_of_rows_and_tensors(op: str, kernel: str) -> None:
    make = SampleMaker()
    a, b = make.randn((4, 32), E4M3), make.randn((6, 32), E4M3)
    s, t = make.rand((4, 1)), make.rand((6, 1))
    want = gemm(op, kernel, a, b, a_scale=s, b_scale=t, quant="fp8_token")
    if op == "mm":
        compare(gemm(op, kernel, a, b, a_scale=s[:, 0], b_scale=t[:, 0], quant="fp8_token"), want, exact=True)
    one = gemm(op, kernel, a, b, a_scale=torch.tensor([0.5]), b_scale=torch.tensor(3.0), quant="fp8_tensor")
    compare(one, (a.double() @ b.double().t()) * 1.5)


# Epilogue and rounding


@every_kernel
def test_bias_is_added_before_the_one_rounding(op: str, kernel: str) -> None:
    a, b = torch.tensor([[256.0, 1.0] + [0.0] * 6]).bfloat16(), torch.ones(8, 8).bfloat16()
    y = gemm(op, kernel, a, b, bias=torch.full((8,), 0.25, dtype=torch.bfloat16))
    compare(y, torch.full((1, 8), 258.0).bfloat16(), exact=True)  # 257 alone would become 256


@every_kernel
def test_alpha_multiplies_the_product_and_not_the_bias(op: str, kernel: str) -> None:
    alpha, bias = torch.tensor([0.5]), torch.arange(8.0)
    y = gemm(op, kernel, torch.ones(3, 8), torch.ones(8, 8), alpha=alpha, bias=bias)
    compare(y, (4 + torch.arange(8.0)).repeat(3, 1), exact=True)
    compare(gemm(op, kernel, torch.ones(3, 8), torch.ones(8, 8), alpha=alpha[0]), torch.full((3, 8), 4.0), exact=True)


@pytest.mark.parametrize("dtype", (torch.float32, torch.float16, torch.bfloat16))
@every_kernel
def test_result_dtype(op: str, kernel: str, dtype: torch.dtype) -> None:
    a, b = torch.ones(3, 8).to(dtype), torch.ones(8, 8).to(dtype)
    assert gemm(op, kernel, a, b).dtype == dtype
    for out_dtype in (torch.float32, torch.float16, torch.bfloat16):
        compare(gemm(op, "reference", a, b, out_dtype=out_dtype), torch.full((3, 8), 8.0).to(out_dtype), exact=True)


@pytest.mark.parametrize("layout", LAYOUTS)
@every_kernel
def test_layouts_and_poisoned_surroundings(op: str, kernel: str, layout: str) -> None:
    make = SampleMaker()
    a, b, bias = (
        make.randn((7, 40), torch.float32),
        make.randn((24, 40), torch.float32),
        make.randn((24,), torch.float32),
    )
    with_bias = bias if op != "grouped_mm" else None
    y = gemm(op, kernel, laid_out(a, layout), laid_out(b, layout), bias=with_bias)
    compare(y, a.double() @ b.double().t() + (0 if with_bias is None else bias.double()))


@mm_kernels
def test_out_may_be_a_view_of_a_wider_buffer(kernel: str) -> None:
    make = SampleMaker()
    a, b = make.randn((6, 40), torch.float32), make.randn((24, 40), torch.float32)
    whole, out = guarded((6, 24), torch.float32)
    for bias in (None, make.randn((24,), torch.float32)):
        assert call("mm", kernel, a, b, bias=bias, out=out) is out
        compare(out, a.double() @ b.double().t() + (0 if bias is None else bias.double()))
        assert_guards(whole)


@pytest.mark.parametrize("sizes", ((0, 5, 8), (4, 0, 8), (4, 5, 0), (0, 0, 0)))
@every_kernel
def test_lib_06_empty_sizes(op: str, kernel: str, sizes: tuple[int, int, int]) -> None:
    m, n, k = sizes
    bias = torch.arange(float(n))
    y = gemm(op, kernel, torch.ones(m, k), torch.ones(n, k), bias=None if op == "grouped_mm" else bias)
    compare(y, (torch.zeros(m, n) if op == "grouped_mm" else bias.repeat(m, 1)), exact=True)
    scales = {"a_scale": torch.ones(m, 1), "b_scale": torch.ones(n, 1)}
    y = gemm(op, kernel, ones(m, k), ones(n, k), **scales, quant="fp8_token")
    compare(y, torch.zeros(m, n).bfloat16(), exact=True)


@every_kernel
def test_a_bad_row_disturbs_no_other(op: str, kernel: str) -> None:
    make = SampleMaker()
    a, b = make.randn((5, 16), torch.float32), make.randn((8, 16), torch.float32)
    want = gemm(op, kernel, a, b)
    a[2] = float("nan")
    y = gemm(op, kernel, a, b)
    assert bool(y[2].isnan().all())
    y[2] = want[2]
    compare(y, want)


# Groups


def looped(a: Tensor, b: Tensor, ends: list[int], alpha: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    """Return the grouped product, one group after the other, in float64."""
    y = torch.zeros(a.shape[0], b.shape[1], dtype=torch.float64)
    start = 0
    for e, end in enumerate(ends):
        y[start:end] = a[start:end].double() @ b[e].double().t()
        y[start:end] *= 1 if alpha is None else alpha[e].double()
        y[start:end] += 0 if bias is None else bias[e].double()
        start = end
    return y


@pytest.mark.parametrize("ends", ([1, 6, 6, 10, 17], [0, 0, 0, 0, 17], [17] * 5, [2, 3, 5, 7, 11], [0] * 5))
@grouped_kernels
def test_groups_of_any_size_and_unused_rows(kernel: str, ends: list[int]) -> None:
    make = SampleMaker()
    a, b = make.randn((17, 32), torch.float32), make.randn((5, 24, 32), torch.float32)
    want = looped(a, b, ends)
    a[ends[-1] :] = float("nan")
    for e in range(5):
        if ends[e] == (ends[e - 1] if e else 0):
            b[e] = float("nan")  # the matrix of an empty group does not matter
    compare(call("grouped_mm", kernel, a, b, torch.tensor(ends, dtype=torch.int32)), want)


@grouped_kernels
def test_groups_have_their_own_alpha_and_bias(kernel: str) -> None:
    make = SampleMaker()
    a, b, ends = make.randn((9, 32), torch.float32), make.randn((3, 8, 32), torch.float32), [4, 4, 7]
    alpha, bias = make.rand((3,)), make.randn((3, 8), torch.float32)
    y = call("grouped_mm", kernel, a, b, torch.tensor(ends, dtype=torch.int32), alpha=alpha, bias=bias)
    compare(y, looped(a, b, ends, alpha, bias))
    scales = {"a_scale": torch.ones(1), "b_scale": alpha}
    data = (a.to(E4M3), b.to(E4M3))
    y = call("grouped_mm", kernel, *data, torch.tensor(ends, dtype=torch.int32), **scales, quant="fp8_tensor")
    compare(y, looped(*data, ends, alpha))


# Kernels of other devices that are plain torch: their arithmetic is checked here, their speed there.


def accepted(name: str) -> list[tuple[KernelSpec, dict[str, Any]]]:
    """Return the kernel with each sample that it would take on a device that it is made for."""
    spec = KernelRegistry.get().get_by_name(name)
    op = ops[spec.mode]
    platform = PlatformInfo.named("gfx942" if spec.backend == "rocm" else "sm90")
    found = []
    for _, sample in samples_of(op):
        values = dict(sample.arguments)
        if spec.backend == "rocm":
            values = {
                k: v.float().to(FNUZ) if isinstance(v, Tensor) and v.dtype == E4M3 else v for k, v in values.items()
            }
        arguments = op.fill(values)
        request = Request(op, platform, op.formats_of(arguments), op.traits_of(arguments))
        if spec in ranking(request).fits and reject_reason(spec, named(op, arguments, None)) is None:
            found.append((spec, dict(zip(op.arguments, arguments, strict=True))))
    return found


@pytest.mark.parametrize(
    "name",
    ("portable/mm/torch_scaled", "portable/mm/torch_int8", "portable/mm/torch_unpack", "rocm/mm/torch_scaled_fnuz"),
)
def test_plain_torch_kernels_of_other_devices(name: str) -> None:
    if "scaled" in name and tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13):
        pytest.skip("the CPU has torch._scaled_mm with row scales from torch 2.13 on")
    calls = accepted(name)
    assert len(calls) >= 6
    for spec, values in calls:
        out = ops[spec.mode].allocate(list(values.values())).fill_(-7)
        extra = {"out": out} if spec.writes_out else {}
        result = spec.function(**values, **extra)
        compare(out if spec.writes_out else result, oracle(spec.mode, **values))


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16))
@pytest.mark.parametrize("op", ("mm", "bmm"))
def test_plain_torch_16_bit_products_where_this_cpu_declines_them(op: str, dtype: torch.dtype) -> None:
    spec = KernelRegistry.get().get_by_name(f"portable/{op}/torch")
    make = SampleMaker()
    lead = () if op == "mm" else (3,)
    a, b = make.randn((*lead, 7, 64), dtype), make.randn((*lead, 24, 64), dtype)
    for bias in (None, make.randn((24,), dtype)):
        out = torch.full((*lead, 7, 24), -7.0).to(dtype)
        spec.function(a, b, bias=bias, out=out)
        compare(out, oracle(op, a, b, bias=bias))


@pytest.mark.parametrize(
    ("platform", "dtype", "name", "fits"),
    (
        ("sm80", E4M3, "portable/mm/torch_scaled", False),
        ("sm89", E4M3, "portable/mm/torch_scaled", True),
        ("sm120", E4M3, "portable/mm/torch_scaled", True),
        ("sm90", FNUZ, "portable/mm/torch_scaled", False),
        ("gfx950", E4M3, "portable/mm/torch_scaled", True),
        ("gfx942", E4M3, "portable/mm/torch_scaled", False),
        ("gfx942", FNUZ, "rocm/mm/torch_scaled_fnuz", True),
        ("gfx950", FNUZ, "rocm/mm/torch_scaled_fnuz", False),
        ("cpu", E4M3, "portable/mm/torch_scaled", False),
    ),
)
def test_kv8_02_a_kernel_of_one_encoding_declines_the_other(
    platform: str, dtype: torch.dtype, name: str, fits: bool
) -> None:
    a, b = ones(4, 32, dtype=dtype), ones(16, 32, dtype=dtype)
    arguments = ops["mm"].fill(
        {"a": a, "b": b, "a_scale": torch.ones(1), "b_scale": torch.ones(1), "quant": "fp8_tensor"}
    )
    op = ops["mm"]
    request = Request(op, PlatformInfo.named(platform), op.formats_of(arguments), op.traits_of(arguments))
    assert (name in [s.name for s in ranking(request).fits]) is fits


# Refusals

A, B, A8, B8 = torch.ones(4, 32), torch.ones(6, 32), ones(4, 32), ones(6, 32)
ONE, U8 = torch.ones(1), torch.ones(6, 16, dtype=torch.uint8)
BAD_CALLS: dict[str, tuple[str, tuple[Tensor, ...], dict[str, Any]]] = {
    "mm: b.shape: expected 32 elements of K like a, got (6, 31)": ("mm", (A, B[:, :31]), {}),
    "mm: b.dtype: expected float32, got bfloat16": ("mm", (A, B.bfloat16()), {}),
    "mm: quant: expected 'none' or": ("mm", (A, B), {"quant": "fp8"}),
    "mm: a_scale: expected None without quantization": ("mm", (A, B), {"a_scale": ONE}),
    "mm: b_scale: expected a Tensor for quant 'fp8_tensor'": ("mm", (A8, B8), {"a_scale": ONE, "quant": "fp8_tensor"}),
    "mm: a.dtype: expected float32 or": ("mm", (A8, B8), {"b_scale": ONE, "quant": "fp8_tensor"}),
    "mm: a_scale.shape: expected (4, 1), got (6, 1)": (
        "mm",
        (A8, B8),
        {"a_scale": torch.ones(6, 1), "b_scale": torch.ones(6), "quant": "fp8_token"},
    ),
    "mm: b_scale.shape: expected (1, 1), got (6, 1)": (
        "mm",
        (A8, B8),
        {"a_scale": torch.ones(4, 1), "b_scale": torch.ones(6, 1), "quant": "fp8_block"},
    ),
    "mm: b_scale.dtype: expected uint8 or float8_e8m0fnu": (
        "mm",
        (A, U8),
        {"b_scale": torch.ones(6, 1), "quant": "mxfp4"},
    ),
    "mm: b_scale.shape: expected groups that divide K = 32": (
        "mm",
        (A, U8),
        {"b_scale": torch.ones(6, 3), "quant": "w4a16"},
    ),
    "mm: bias.shape: expected (6,), got (4,)": ("mm", (A, B), {"bias": torch.ones(4)}),
    "mm: alpha.dtype: expected float32": ("mm", (A, B), {"alpha": ONE.half()}),
    "mm: alpha.shape: expected (1,), got (2,)": ("mm", (A, B), {"alpha": torch.ones(2)}),
    "mm: out_dtype: expected float32": ("mm", (A, B), {"out_dtype": torch.int8}),
    "bmm: b.shape: expected (1, *, *), got (2, 6, 32)": ("bmm", (A[None], torch.stack((B, B))), {}),
    "grouped_mm: offsets.dtype: expected int32": ("grouped_mm", (A, B[None], torch.tensor([4])), {}),
    "grouped_mm: offsets.shape: expected (1,), got (2,)": ("grouped_mm", (A, B[None], torch.tensor([0, 4]).int()), {}),
    "grouped_mm: b.shape: expected at least one group": ("grouped_mm", (A, B[None][:0], torch.tensor([]).int()), {}),
}


@pytest.mark.parametrize("text", BAD_CALLS)
def test_bad_input_names_the_argument(text: str) -> None:
    op, args, kwargs = BAD_CALLS[text]
    with pytest.raises(ValueError) as caught:
        ops[op].front(*args, **kwargs)
    assert text in str(caught.value)


def test_lib_07_autocast_casts_the_operands_of_a_dense_product() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        y = ops["mm"].front(A, B.half())
        assert y.dtype == torch.bfloat16
        q = ops["mm"].front(A8, B8, a_scale=ONE, b_scale=ONE, quant="fp8_tensor", out_dtype=torch.float32)
    compare(y, torch.full((4, 6), 32.0).bfloat16(), exact=True)
    compare(q, torch.full((4, 6), 32.0), exact=True)


# Properties

few = settings(derandomize=True, deadline=None, max_examples=20)


@given(m=st.integers(1, 9), n=st.integers(1, 260), k=st.integers(1, 300), seed=st.integers(0, 99))
@few
def test_fp8_blocks_of_any_size_equal_the_scaled_product(m: int, n: int, k: int, seed: int) -> None:
    make = SampleMaker(seed=seed)
    a, b = make.randn((m, k), E4M3), make.randn((n, k), E4M3)
    a_scale, b_scale = make.rand((m, -(-k // 128))), make.rand((-(-n // 128), -(-k // 128)))
    x = a.double() * a_scale.double().repeat_interleave(128, 1)[:, :k]
    w = b.double() * b_scale.double().repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)[:, :k]
    for op, kernel in PAIRS:
        if kernel.startswith("reference"):  # the others decline quantized operands
            y = gemm(op, kernel, a, b, a_scale=a_scale, b_scale=b_scale, quant="fp8_block", out_dtype=torch.float32)
            compare(y, x @ w.t())


@given(counts=st.lists(st.integers(0, 6), min_size=1, max_size=6), spare=st.integers(0, 3), seed=st.integers(0, 99))
@few
def test_grouped_equals_one_product_after_the_other(counts: list[int], spare: int, seed: int) -> None:
    make = SampleMaker(seed=seed)
    ends = torch.tensor(counts).cumsum(0).tolist()
    a, b = make.randn((ends[-1] + spare, 16), torch.float32), make.randn((len(counts), 8, 16), torch.float32)
    for kernel in kernel_names("grouped_mm"):
        compare(call("grouped_mm", kernel, a, b, torch.tensor(ends, dtype=torch.int32)), looped(a, b, ends))
