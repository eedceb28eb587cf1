"""moe_topk: choose the experts of each token and their weights."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from tskernel.library import (
    FLOATS,
    Cost,
    Make,
    Sample,
    empty,
    expect,
    expect_choice,
    expect_dim,
    expect_dtype,
    expect_shape,
    nbytes,
    op,
    wide,
)
from tskernel.ops.moe._router import SCORE_FUNCTIONS, router_choice, router_scores, routing_weights


@op(
    roles=("router_logits",),
    traits={
        "num_experts": 128,
        "top_k": 8,
        "score_function": "softmax",
        "grouped": False,
        "biased": False,
        "renormalize": True,
    },
    shard={"tokens": {"router_logits": 0, "return": 0, "return1": 0}},
)
def moe_topk(
    router_logits: Tensor,
    top_k: int,
    *,
    score_function: str = "softmax",
    renormalize: bool = True,
    routed_scaling_factor: float = 1.0,
    correction_bias: Tensor | None = None,
    n_group: int = 1,
    topk_group: int = 1,
) -> tuple[Tensor, Tensor]:
    """Return the weights and ids of the ``top_k`` best experts of each token, best first, equals by lowest id.

    Scores are ``softmax``, ``sigmoid`` or ``sqrt(softplus)`` (``sqrt_softplus``) of the logits, in fp32. Experts are
    chosen by score + ``correction_bias``; without a bias by the logits themselves, which rank alike and need no
    rounding. The weights are the scores alone: divided by their sum if ``renormalize``, then times
    ``routed_scaling_factor``.

    With ``n_group > 1`` the experts form equal groups of neighbours and only those of the ``topk_group`` best groups
    can be chosen. A group's score is the sum of its two best biased scores, or its best score without a bias; equal
    groups rank by lowest index.

    A NaN logit counts as -inf and +inf as the largest finite value. A row without any logit above -inf still gets
    distinct ids in range; its softmax and sigmoid scores are 0 and so are its weights (0 / 0 renormalises to 0).

    Shapes: ``router_logits [T, E]`` (any strides), ``correction_bias [E]`` -> ``[T, top_k]`` twice.
    Dtypes: ``router_logits`` fp32, fp16 or bf16; ``correction_bias`` likewise; weights fp32, ids int32.
    Raises: ValueError unless 1 <= ``top_k`` <= E, ``n_group`` divides E, 1 <= ``topk_group`` <= ``n_group`` and the
    chosen groups hold ``top_k`` experts.
    Source: Shazeer et al. 2017, https://arxiv.org/abs/1701.06538; groups and bias: DeepSeek-V3,
    https://arxiv.org/abs/2412.19437.
    """
    scores = router_scores(router_logits, score_function, wide(router_logits))
    choice = router_choice(router_logits, scores, correction_bias, n_group, topk_group)
    ids = torch.sort(choice, dim=-1, descending=True, stable=True).indices[:, :top_k]
    weights = routing_weights(scores.gather(1, ids), renormalize, routed_scaling_factor)
    return weights, ids.to(torch.int32).contiguous()


@moe_topk.check
def _(
    router_logits: Tensor,
    top_k: int,
    score_function: str,
    correction_bias: Tensor | None,
    n_group: int,
    topk_group: int,
) -> None:
    expect_dtype("router_logits", router_logits, FLOATS)
    expect_dim("router_logits", router_logits, 2)
    experts = router_logits.shape[1]
    expect(top_k >= 1, "top_k", "at least 1", top_k)
    expect(top_k <= experts, "top_k", f"at most the {experts} experts", top_k)
    expect_choice("score_function", score_function, SCORE_FUNCTIONS)
    expect_shape("correction_bias", correction_bias, (experts,))
    expect_dtype("correction_bias", correction_bias, FLOATS)
    expect(n_group >= 1, "n_group", "at least 1", n_group)
    expect(experts % n_group == 0, "n_group", f"a divisor of the {experts} experts", n_group)
    expect(topk_group >= 1, "topk_group", "at least 1", topk_group)
    expect(topk_group <= n_group, "topk_group", f"at most the {n_group} groups", topk_group)
    expect(
        top_k <= experts // n_group * topk_group,
        "top_k",
        f"at most the experts of {topk_group} of {n_group} groups",
        top_k,
    )


@moe_topk.fake
def _(router_logits: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    shape = (router_logits.shape[0], top_k)
    return empty(shape, router_logits, torch.float32), empty(shape, router_logits, torch.int32)


@moe_topk.trait_values
def _(
    router_logits: Tensor,
    top_k: int,
    score_function: str,
    renormalize: bool,
    correction_bias: Tensor | None,
    n_group: int,
) -> dict[str, object]:
    return {
        "num_experts": router_logits.shape[1],
        "top_k": top_k,
        "score_function": score_function,
        "grouped": n_group > 1,
        "biased": correction_bias is not None,
        "renormalize": renormalize,
    }


@moe_topk.samples
def _(make: Make, dtype: torch.dtype) -> Iterator[Sample]:
    for name, shape in {"ordinary": (7, 64), "one": (1, 1), "odd": (3, 257), "empty": (0, 16)}.items():
        yield Sample(name, router_logits=make.randn(shape, dtype), top_k=min(4, shape[1]))
    logits, bias = make.randn((32, 5), dtype).t(), make.randn((32,), torch.float32)
    yield Sample("transposed", router_logits=logits, top_k=32, renormalize=False, routed_scaling_factor=2.5)
    grouped = {"router_logits": make.randn((5, 40), dtype)[:, 4:36], "n_group": 8, "topk_group": 3}
    for score in SCORE_FUNCTIONS:
        yield Sample(f"grouped {score}", **grouped, top_k=6, score_function=score, correction_bias=bias)
    yield Sample("grouped unbiased", **grouped, top_k=3)
    yield Sample(
        "biased",
        router_logits=logits,
        top_k=2,
        score_function="sigmoid",
        correction_bias=bias,
        routed_scaling_factor=0.5,
    )


@moe_topk.cost
def _(router_logits: Tensor, top_k: int) -> Cost:
    return Cost(bytes=nbytes(router_logits) + 8 * router_logits.shape[0] * top_k, flops=5 * router_logits.numel())
