"""gelu_tanh_and_mul: the GEGLU activation with the tanh form of GELU."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from tskernel.library import Cost, Make, Sample, op, wide
from tskernel.ops.activation._gated import check_gated, empty_half, gate_and_up, gated_cost, gated_samples, gated_traits


@op(
    out=True,
    roles=("x",),
    traits={"width": 14336, "contiguous": True},
    shard={"tokens": {"x": 0, "return": 0}},
    vmap=("x",),
)
def gelu_tanh_and_mul(x: Tensor) -> Tensor:
    """Return ``gelu_tanh(gate) * up``, the gate being the first half of the columns of ``x`` and up the second.

    gelu_tanh(g) = g * (1 + tanh(sqrt(2 / pi) * (g + 0.044715 * g^3))) / 2.

    Shapes: ``x [..., 2D]`` (any strides) -> ``[..., D]``, contiguous.
    Dtypes: ``x`` fp32, fp16 or bf16, the result alike; computed in fp32, one rounding.
    Raises: ValueError when the number of columns is odd or 0.
    Source: Shazeer 2020, https://arxiv.org/abs/2002.05202 (GEGLU);
    Hendrycks & Gimpel 2016, https://arxiv.org/abs/1606.08415, section 2.
    """
    gate, up = gate_and_up(x, wide(x))
    return (F.gelu(gate, approximate="tanh") * up).to(x.dtype).contiguous()


@gelu_tanh_and_mul.check
def _(x: Tensor) -> None:
    check_gated(x)


@gelu_tanh_and_mul.fake
def _(x: Tensor) -> Tensor:
    return empty_half(x)


@gelu_tanh_and_mul.trait_values
def _(x: Tensor) -> dict[str, object]:
    return gated_traits(x)


@gelu_tanh_and_mul.samples
def _(make: Make, dtype: torch.dtype) -> Iterator[Sample]:
    yield from gated_samples(make, dtype)


@gelu_tanh_and_mul.cost
def _(x: Tensor) -> Cost:
    return gated_cost(x)
