"""quantize_nvfp4: packed e2m1 elements, an e4m3 scale per 16 and one fp32 scale for the tensor."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from tskernel.library import Cost, Make, Sample, empty, nbytes, op
from tskernel.ops.quantization._checks import ceil_div, check_even_rows, check_one_element
from tskernel.ops.quantization._math import (
    FP4_MAX,
    block_amax,
    block_has_nan,
    pack_nibbles,
    quotient,
    round_to_fp4,
    saturate_to_fp8,
    spread,
)


@op(
    roles=("x",),
    traits={"width": 4096, "contiguous": True},
    shard={"tokens": {"x": 0, "return": 0, "return1": 0}},
    vmap=("x",),
)
def quantize_nvfp4(x: Tensor, global_scale: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize ``x`` to NVFP4: two e2m1 codes per byte and an e4m3 scale per 16 columns.

    Shapes: ``x [..., K]`` (any strides, K even), ``global_scale`` one element (rank 0 or 1) -> data ``[..., K/2]``
    (low nibble first), scale ``[..., ceil(K/16)]`` in row-major order (not the 128x4 tiling of tcgen05); the last
    block may be partial. Both contiguous and new.
    Dtypes: ``x`` fp32, fp16 or bf16; ``global_scale`` fp32; data uint8; scale float8_e4m3fn.
    Conventions: as in FlashInfer and vLLM ``global_scale`` multiplies: it is 448 * 6 / amax(x), and value = code *
    scale / global_scale. So a GEMM of two such operands takes alpha = 1 / (global_scale_a * global_scale_b). scale =
    e4m3(global_scale * block amax / 6), saturated; data = e2m1(x * global_scale / scale), ties to the even code,
    saturated. A block whose scale rounds to 0 (an all-zero one too) gives zeros. An infinite ``global_scale`` (amax
    0) counts as the largest fp32 number. e2m1 has no NaN: a block that holds one gets a NaN scale.
    Raises: ValueError when K is 0 or odd, or ``global_scale`` is not one fp32 element.
    Source: NVIDIA 2025, Pretraining Large Language Models with NVFP4, https://arxiv.org/abs/2509.25149.
    """
    most = torch.finfo(torch.float32).max
    y = x.to(torch.float32) * global_scale.to(torch.float32).reshape(()).clamp(max=most)
    scale = saturate_to_fp8(quotient(block_amax(y, 16), FP4_MAX), torch.float8_e4m3fn)
    each = spread(scale.to(torch.float32), x.shape[-1], 16)
    code = round_to_fp4(torch.where(each > 0, y / each, 0.0))
    stored = torch.where(block_has_nan(x, 16), float("nan"), scale.to(torch.float32)).to(torch.float8_e4m3fn)
    return pack_nibbles(code).contiguous(), stored.contiguous()


@quantize_nvfp4.check
def _(x: Tensor, global_scale: Tensor) -> None:
    check_even_rows(x)
    check_one_element("global_scale", global_scale)


@quantize_nvfp4.fake
def _(x: Tensor) -> tuple[Tensor, Tensor]:
    *lead, columns = x.shape
    return empty((*lead, columns // 2), x, torch.uint8), empty((*lead, ceil_div(columns, 16)), x, torch.float8_e4m3fn)


@quantize_nvfp4.trait_values
def _(x: Tensor) -> dict[str, object]:
    return {"width": x.shape[-1], "contiguous": x.is_contiguous()}


@quantize_nvfp4.samples
def _(make: Make, dtype: torch.dtype) -> Iterator[Sample]:
    scale = make.randn((1,), torch.float32).abs() * 100 + 1
    for name, shape in {
        "ordinary": (7, 64),
        "pair": (1, 2),
        "odd": (3, 5, 78),
        "empty": (0, 64),
        "flat": (34,),
    }.items():
        yield Sample(name, x=make.randn(shape, dtype), global_scale=scale)
    yield Sample("transposed", x=make.randn((64, 7), dtype).t(), global_scale=scale[0])
    yield Sample("sliced", x=make.randn((7, 96), dtype)[:, 5:69], global_scale=scale)


@quantize_nvfp4.cost
def _(x: Tensor) -> Cost:
    return Cost(bytes=nbytes(x) + x.numel() // 2 + x.numel() // 16, flops=5 * x.numel())
