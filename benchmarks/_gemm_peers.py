"""What is timed on a GEMM row: each registered kernel by override, and the peers' own interfaces.

A peer that wants scales in another order gets them so before it is timed. Packages are imported when a contender is
prepared.
"""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import torch
from _gemm_rows import BF16, DEVICE, Row
from _side_by_side import Arguments, Call, Contender, keeping
from torch import Tensor

from tskernel.library import ops
from tskernel.ops.gemm._operands import plain_operands
from tskernel.testing import kernel_names

os.environ.setdefault("FLASHINFER_DISABLE_VERSION_CHECK", "1")


def result(a: Arguments) -> Tensor:
    """Return an empty result."""
    return torch.empty(a["a"].shape[0], a["b"].shape[0], dtype=BF16, device=a["a"].device)


def ours(kernel: str | None, a: Arguments) -> Call:
    """Return the public function with a kernel forced, or as selected."""
    return keeping(ops["mm"].front, **a, out=result(a), override=kernel)


# torch: cuBLAS and CUTLASS


def torch_mm(a: Arguments) -> Call:
    """Return the product of bf16 matrices."""
    return keeping(torch.mm, a["a"], a["b"].t(), out=result(a))


def unpacked(a: Arguments) -> Call:
    """Return the product of what the operands mean, in bf16, unpacked ahead."""
    x, w = plain_operands(a["a"], a["b"], a.get("a_scale"), a["b_scale"], a["quant"])
    return torch_mm({"a": x.to(BF16), "b": w.to(BF16)})


def scaled_mm(a: Arguments, *, fast: bool = False) -> Call:
    """Return torch's fp8 product with one scale each or with scales by row and column."""
    x, w = a["a_scale"], a["b_scale"]
    left, right = (x.reshape(()), w.reshape(())) if x.numel() == 1 == w.numel() else (x, w.reshape(1, -1))
    return keeping(
        torch._scaled_mm, a["a"], a["b"].t(), left, right, out_dtype=BF16, use_fast_accum=fast, out=result(a)
    )


def rowwise(a: Arguments) -> Call:
    """Return torch's product of the same fp8 numbers with scales by row and column: other numbers, the same work."""
    m, n = a["a"].shape[0], a["b"].shape[0]
    one = partial(torch.ones, device=DEVICE)
    return scaled_mm({**a, "a_scale": one(m, 1), "b_scale": one(n, 1)})


def scaled_blocks(a: Arguments) -> Call:
    """Return torch's fp8 product of blocks: scales of ``a`` column by column, those of ``b`` padded to four by K."""
    from torch.nn.functional import ScalingType, scaled_mm

    x, w = a["a_scale"].t().contiguous().t(), a["b_scale"]
    padded = torch.nn.functional.pad(w, (0, -w.shape[1] % 4))[:, : w.shape[1]]
    return keeping(
        scaled_mm, a["a"], a["b"].t(), x, ScalingType.BlockWise1x128, padded.t(), ScalingType.BlockWise128x128,
        output_dtype=BF16,
    )  # fmt: skip


def int_mm(a: Arguments) -> Call:
    """Return torch's int8 product, whose int32 sums are left unscaled."""
    return keeping(torch._int_mm, a["a"], a["b"].t())


# DeepGEMM, FlashInfer, quack, vLLM


def deep_gemm() -> Any:
    """Return DeepGEMM, on its own or inside vLLM."""
    try:
        import deep_gemm as found
    except ImportError:
        from vllm.third_party import deep_gemm as found
    return found


def deep_blocks(a: Arguments) -> Call:
    """Return DeepGEMM's product, with the scales of ``a`` in the order that its kernel loads."""
    library = deep_gemm()
    order = getattr(library, "get_mn_major_tma_aligned_tensor", None) or library.get_col_major_tma_aligned_tensor
    x, out = order(a["a_scale"]), result(a)

    def product() -> Tensor:
        library.fp8_gemm_nt((a["a"], x), (a["b"], a["b_scale"]), out, disable_ue8m0_cast=True)
        return out

    return keeping(product)


def flashinfer_blocks(a: Arguments) -> Call:
    """Return FlashInfer's product of fp8 blocks: the scales of ``a`` column by column, columns padded to four rows."""
    from flashinfer.gemm import fp8_blockscale_gemm_sm90

    x = torch.nn.functional.pad(a["a_scale"].t(), (0, -a["a"].shape[0] % 4)).contiguous()
    return keeping(fp8_blockscale_gemm_sm90, a["a"], a["b"], x, a["b_scale"], out=result(a))


def flashinfer_mm(backend: str, a: Arguments) -> Call:
    """Return FlashInfer's bf16 product."""
    from flashinfer.gemm import mm_bf16

    return keeping(mm_bf16, a["a"], a["b"].t(), out=result(a), backend=backend)


def quack_mm(a: Arguments) -> Call:
    """Return quack's bf16 product in CuTe DSL; tuning compiles dozens of kernels per shape, so it is asked for."""
    from quack.gemm_interface import gemm

    return keeping(gemm, a["a"], a["b"].t(), out=result(a), tuned=os.environ.get("QUACK_TUNED", "") == "1")


def vllm_scaled(a: Arguments) -> Call:
    """Return vLLM's scaled product of fp8 or int8 numbers."""
    from vllm import _custom_ops as vllm

    return keeping(vllm.cutlass_scaled_mm, a["a"], a["b"].t(), a["a_scale"], a["b_scale"].reshape(1, -1), BF16)


def vllm_blocks(a: Arguments) -> Call:
    """Return vLLM's product of fp8 blocks: the scales of ``a`` column by column."""
    from vllm import _custom_ops as vllm

    return keeping(
        vllm.cutlass_scaled_mm, a["a"], a["b"].t(), a["a_scale"].t().contiguous().t(), a["b_scale"].t(), BF16
    )


SCALED = {"torch._scaled_mm": Contender(scaled_mm), "vllm": Contender(vllm_scaled)}
UNPACKED = {"torch.mm, unpacked": Contender(unpacked, "other")}
PEERS: dict[str, dict[str, Contender]] = {
    "bf16": {
        "torch.mm": Contender(torch_mm),
        **{f"flashinfer {b}": Contender(partial(flashinfer_mm, b)) for b in ("cudnn", "cublaslt", "tinygemm")},
        "quack": Contender(quack_mm),
    },
    "fp8 tensor": {**SCALED, "torch._scaled_mm, fast sums": Contender(partial(scaled_mm, fast=True), "other")},
    "fp8 token": {**SCALED, "torch._scaled_mm, fast sums": Contender(partial(scaled_mm, fast=True), "other")},
    "fp8 block": {
        "torch.scaled_mm": Contender(scaled_blocks),
        "deep_gemm": Contender(deep_blocks),
        "flashinfer": Contender(flashinfer_blocks),
        "vllm": Contender(vllm_blocks),
        "torch._scaled_mm, by rows": Contender(rowwise, "rate"),
    },
    "int8": {"vllm": Contender(vllm_scaled), "torch._int_mm, unscaled": Contender(int_mm, "rate")},
}
NO_WARM_UP: tuple[str, ...] = ("torch", "flashinfer", "quack")  # nothing to compile, or what others would disturb


def contenders(row: Row, device: str | None = None) -> dict[str, Contender]:
    """Return everything that may be timed on a row: our kernels (with a slash in the name) and peers."""
    names = [n for n in kernel_names("mm", device or DEVICE) if not n.startswith("reference/")]
    return {**{n: Contender(partial(ours, n), "kernel") for n in names}, **PEERS.get(row.format, UNPACKED)}
