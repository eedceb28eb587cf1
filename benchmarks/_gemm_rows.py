"""The rows of the GEMM benchmark: a format, M, N and K, and what each must at least move and multiply."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

DEVICE = "cuda"
BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
BYTES_PER_S: Final = 4.3e12  # what a copy reaches on an H200
FLOPS_PER_S: Final = {1: 1979e12, 2: 989e12}  # dense matrix instructions of an H200, by bytes of what they multiply
BLOCK, MX_BLOCK, NV_BLOCK, W4_GROUP = 128, 32, 16, 128
FP4_RMS: Final = 2.93  # of all e2m1 codes alike
W4_RMS: Final = 4.6  # of -8 .. 7 alike
INT8_RMS: Final = 73.6  # of -127 .. 127 alike
Arguments = dict[str, Any]


class Format(NamedTuple):
    """How operands are stored: the op's ``quant``, bits of each, and how many bytes wide what is multiplied is."""

    quant: str
    a_bits: int
    b_bits: int
    width: int


FORMATS: Final = {
    "bf16": Format("none", 16, 16, 2),
    "fp8 tensor": Format("fp8_tensor", 8, 8, 1),
    "fp8 token": Format("fp8_token", 8, 8, 1),
    "fp8 block": Format("fp8_block", 8, 8, 1),
    "int8": Format("int8", 8, 8, 1),
    "mxfp8": Format("mxfp8", 8, 8, 1),
    "mxfp4": Format("mxfp4", 4, 4, 1),
    "nvfp4": Format("nvfp4", 4, 4, 1),
    "mxfp4 weights": Format("mxfp4", 16, 4, 2),
    "nvfp4 weights": Format("nvfp4", 16, 4, 2),
    "w4a16": Format("w4a16", 16, 4, 2),
}


@dataclass(frozen=True)
class Row:
    """One product ``a [M, K] @ b [N, K]^T`` with a bf16 result. ``group`` is the table it is shown in."""

    group: str
    format: str
    m: int
    n: int
    k: int

    @property
    def name(self) -> str:
        """How the row is called in tables and on the command line."""
        return f"{self.format} {self.m} x {self.n} x {self.k}"

    @property
    def what(self) -> Format:
        """The row's format."""
        return FORMATS[self.format]

    @property
    def weight_only(self) -> bool:
        """Whether ``a`` is bf16 beside a quantized ``b``."""
        return self.what.a_bits == 16 and self.what.b_bits < 16

    @property
    def flops(self) -> int:
        """Operations of the product."""
        return 2 * self.m * self.n * self.k

    @property
    def bytes(self) -> int:
        """Bytes that are read or written at least: operands, their scales, the result."""
        a = self.m * self.k * self.what.a_bits // 8 + (0 if self.weight_only else self._scale_bytes(self.m, 1))
        b = self.n * self.k * self.what.b_bits // 8 + self._scale_bytes(self.n, BLOCK)
        return a + b + 2 * self.m * self.n

    def _scale_bytes(self, rows: int, tall: int) -> int:
        quant, k = self.what.quant, self.k
        if quant == "none":
            return 0
        return {
            "fp8_tensor": 4,
            "fp8_block": 4 * math.ceil(rows / tall) * math.ceil(k / BLOCK),
            "mxfp8": rows * math.ceil(k / MX_BLOCK),
            "mxfp4": rows * math.ceil(k / MX_BLOCK),
            "nvfp4": rows * math.ceil(k / NV_BLOCK),
            "w4a16": 2 * rows * (k // W4_GROUP),
        }.get(quant, 4 * rows)

    @property
    def floor_us(self) -> float:
        """The longer of the bytes at 4.3 TB/s and the operations at the part's matrix rate."""
        return 1e6 * max(self.bytes / BYTES_PER_S, self.flops / FLOPS_PER_S[self.what.width])

    def make(self) -> Arguments:
        """Return the arguments of ``mm``: random numbers, scaled so that results are about 1."""
        quant = self.what.quant
        a, a_scale = (normal(self.m, self.k), None) if self.what.a_bits == 16 else stored(quant, self.m, self.k, 1)
        size = self.k**-0.5
        if quant == "none":
            return {"a": a, "b": normal(self.n, self.k).mul_(size)}
        b, b_scale = stored(quant, self.n, self.k, BLOCK, size)
        given = {"a": a, "b": b, "b_scale": b_scale, "quant": quant}
        return given if self.weight_only else {**given, "a_scale": a_scale}


def normal(*shape: int) -> Tensor:
    """Return standard normal bf16 values on the GPU."""
    return torch.randn(shape, dtype=BF16, device=DEVICE)


def codes(*shape: int, low: int = 0, high: int = 256, dtype: torch.dtype = torch.uint8) -> Tensor:
    """Return integers in [low, high)."""
    return torch.empty(shape, dtype=dtype, device=DEVICE).random_(low, high)


def near(size: float, *shape: int) -> Tensor:
    """Return fp32 scales of about ``size``."""
    return (torch.rand(shape, device=DEVICE) + 0.5) * size


def powers(size: float, *shape: int) -> Tensor:
    """Return ue8m0 bytes of the powers of two next to ``size``."""
    middle = 127 + round(math.log2(size))
    return codes(*shape, low=middle - 1, high=middle + 2)


def stored(quant: str, rows: int, k: int, tall: int, size: float = 1.0) -> tuple[Tensor, Tensor]:
    """Return a matrix whose values are about ``size``, and its scale; fp8_block has scales per ``tall`` rows."""
    if quant.startswith("fp8"):
        shape = {
            "fp8_tensor": (1,),
            "fp8_block": (math.ceil(rows / tall), math.ceil(k / BLOCK)),
        }.get(quant, (rows, 1))
        return normal(rows, k).to(FP8), near(size, *shape)
    if quant == "int8":
        return codes(rows, k, low=-127, high=128, dtype=torch.int8), near(size / INT8_RMS, rows, 1)
    if quant == "mxfp8":
        return normal(rows, k).to(FP8), powers(size, rows, math.ceil(k / MX_BLOCK))
    if quant == "w4a16":
        return codes(rows, k // 2), near(size / W4_RMS, rows, k // W4_GROUP).to(BF16)
    if quant == "mxfp4":
        return codes(rows, k // 2), powers(size / FP4_RMS, rows, math.ceil(k / MX_BLOCK))
    # e4m3 scales reach down to 2^-9 only, so nvfp4's results come out larger
    return codes(rows, k // 2), near(max(size / FP4_RMS, 2**-5), rows, math.ceil(k / NV_BLOCK)).to(FP8)


ANCHORS: Final = (
    (1, 8192, 8192), (16, 8192, 8192), (64, 7168, 2048), (128, 4096, 7168), (512, 8192, 8192), (4096, 8192, 8192)
)  # fmt: skip
DEEPSEEK: Final = ((7168, 2048), (4096, 7168), (24576, 1536), (2112, 7168), (7168, 16384))
FEW: Final = (1, 2, 4, 8, 16)
LLAMA: Final = (28672, 8192)  # half of a 70B's gate and up


def _rows() -> Iterator[Row]:
    for format in ("bf16", "fp8 tensor", "fp8 token"):
        for shape in ANCHORS:
            yield Row("dense", format, *shape)
    for m in (64, 512, 4096):
        for shape in DEEPSEEK:
            yield Row("blocks", "fp8 block", m, *shape)
    for shape in ((8192, 8192), LLAMA):
        for m in FEW:
            yield Row("few", "mxfp4 weights", m, *shape)
    for m in FEW:  # what the rows before are compared with, beside those of the first group
        yield from (Row("few", "bf16", m, *s) for s in ((8192, 8192), LLAMA) if (m, *s) not in ANCHORS)
    for format in ("w4a16", "nvfp4 weights"):
        yield from (Row("others", format, m, 8192, 8192) for m in (1, 16, 64))
    for format in ("int8", "mxfp8", "mxfp4", "nvfp4"):
        yield from (Row("others", format, m, 8192, 8192) for m in (16, 512, 4096))


def rows(words: Sequence[str] = ()) -> list[Row]:
    """Return all rows, or those of a group that is one of ``words`` or with a name that holds one."""
    return [r for r in _rows() if not words or any(w == r.group or w in r.name for w in words)]
