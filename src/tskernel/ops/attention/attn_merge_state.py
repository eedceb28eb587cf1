"""attn_merge_state: join two attention results over disjoint sets of keys."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from tskernel.checks import FLOATS, empty, expect, expect_dtype, expect_shape, nbytes, wide
from tskernel.library import Cost, Make, Sample, op


@op(
    roles={"out": "out_a"},
    traits={"head_dim_v": 128},
    shard={
        "heads": {"out_a": 1, "lse_a": 1, "out_b": 1, "lse_b": 1, "return": 1, "return1": 1},
        "tokens": {"out_a": 0, "lse_a": 0, "out_b": 0, "lse_b": 0, "return": 0, "return1": 0},
    },
    vmap=("out_a", "lse_a", "out_b", "lse_b"),
    autocast=("out_a", "out_b"),
)
def attn_merge_state(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Merge two partial attention results into the result over all their keys.

    The new LSE is ``log(exp(lse_a) + exp(lse_b))`` and the outputs are weighted by ``exp(lse - new)``. A part with
    LSE -inf saw no key: its output is not used, so (0, -inf) is the exact identity. Neither part may have been
    computed with sinks; a sink enters the merged result as a factor ``1 / (1 + exp(sink - lse))``.

    Shapes: ``out_a, out_b [T, H, D]``, ``lse_a, lse_b [T, H]`` (any strides, more leading dimensions allowed) ->
    ``[..., H, D]`` and ``[..., H]``, contiguous.
    Dtypes: outputs alike in fp32, fp16 or bf16; LSE fp32, natural log.
    Raises: ValueError when shapes or dtypes do not go together.
    Source: Dao et al. 2022, https://arxiv.org/abs/2205.14135; Ye et al. 2024 (FlashInfer's recursive attention).
    """
    dtype = wide(out_a)
    lse_a, lse_b = lse_a.to(dtype), lse_b.to(dtype)
    top = torch.maximum(lse_a, lse_b)
    top = torch.where(top == float("-inf"), 0, top)
    # Relative to the larger one, not to the new LSE: its rounding would show in the weights where it is large.
    weight_a, weight_b = torch.exp(lse_a - top), torch.exp(lse_b - top)
    total = weight_a + weight_b

    def part(out: Tensor, weight: Tensor, lse: Tensor) -> Tensor:
        used = torch.where((lse == float("-inf")).unsqueeze(-1), 0, out.to(dtype))
        return used * (weight / torch.where(total == 0, 1, total)).unsqueeze(-1)

    merged = part(out_a, weight_a, lse_a) + part(out_b, weight_b, lse_b)
    return merged.to(out_a.dtype).contiguous(), (total.log() + top).contiguous()


@attn_merge_state.check
def _(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> None:
    expect(out_a.dim() >= 3, "out_a.shape", "at least 3 dimensions", tuple(out_a.shape))
    expect_dtype("out_a", out_a, FLOATS)
    expect_shape("out_b", out_b, out_a.shape)
    expect_dtype("out_b", out_b, (out_a.dtype,))
    for name, lse in (("lse_a", lse_a), ("lse_b", lse_b)):
        expect_shape(name, lse, out_a.shape[:-1])
        expect_dtype(name, lse, (torch.float32,))


@attn_merge_state.fake
def _(out_a: Tensor) -> tuple[Tensor, Tensor]:
    return empty(out_a.shape, out_a), empty(out_a.shape[:-1], out_a, wide(out_a))


@attn_merge_state.trait_values
def _(out_a: Tensor) -> dict[str, object]:
    return {"head_dim_v": out_a.shape[-1]}


@attn_merge_state.samples
def _(make: Make, dtype: torch.dtype) -> Iterator[Sample]:
    for name, shape in {"ordinary": (5, 4, 32), "one": (1, 1, 1), "odd": (3, 3, 7), "empty": (0, 4, 32)}.items():
        outs = {n: make.randn(shape, dtype) for n in ("out_a", "out_b")}
        yield Sample(name, **outs, **{n: make.randn(shape[:-1], torch.float32) for n in ("lse_a", "lse_b")})
    no_key = make.tensor([[0.5, float("-inf")], [float("-inf"), float("-inf")]], torch.float32)
    wider = make.randn((2, 4, 24), dtype)
    yield Sample("no_key", out_a=wider[:, 1:3, 3:19], out_b=wider[:, ::2, :16], lse_a=no_key, lse_b=no_key.t())


@attn_merge_state.cost
def _(out_a: Tensor, lse_a: Tensor) -> Cost:
    return Cost(bytes=3 * (nbytes(out_a) + nbytes(lse_a)), flops=4 * out_a.numel())
