"""What the mixture-of-experts ops must do beyond the generic contract: choice, ties, skipped ids, formats, layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import tskernel
from tskernel.dispatch.errors import KernelRefusedError, NoKernelFoundError
from tskernel.dispatch.registry import KernelRegistry, Priority, register_kernel
from tskernel.moe import moe_apply, moe_plan, moe_process_weights
from tskernel.testing import call, compare, kernel_names, oracle

SCORES = ("softmax", "sigmoid", "sqrt_softplus")
INF, NAN = float("inf"), float("nan")

topk_kernels = pytest.mark.parametrize("kernel", kernel_names("moe_topk"))
dispatch_kernels = pytest.mark.parametrize("kernel", kernel_names("moe_dispatch"))
experts_kernels = pytest.mark.parametrize("kernel", kernel_names("moe_experts"))
combine_kernels = pytest.mark.parametrize("kernel", kernel_names("moe_combine"))
fused_kernels = pytest.mark.parametrize("kernel", kernel_names("moe_fused"))
few = settings(max_examples=20, derandomize=True, deadline=None)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def weights_of(experts: int, hidden: int, inner: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    w13 = torch.randn(experts, 2 * inner, hidden) * hidden**-0.5
    return w13.to(dtype), (torch.randn(experts, hidden, inner) * inner**-0.5).to(dtype)


def act(h: Tensor, activation: str, alpha: float = 1.702, limit: float = 7.0) -> Tensor:
    gate, up = h[: h.shape[0] // 2], h[h.shape[0] // 2 :]
    if activation == "silu":
        return gate / (1 + torch.exp(-gate)) * up
    if activation == "gelu":
        return gate * 0.5 * (1 + torch.erf(gate / 2**0.5)) * up
    if activation == "gelu_tanh":
        return gate * 0.5 * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3))) * up
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate / (1 + torch.exp(-alpha * gate)) * (up + 1)


def dense(
    x: Tensor, w13: Tensor, w2: Tensor, weights: Tensor, ids: Tensor, activation: str = "silu", **options: Any
) -> Tensor:
    """The layer as a loop over tokens and choices in fp64; ``rounds`` rounds the rows that enter each product."""
    b13, b2, expert_map = (options.pop(n, None) for n in ("w13_bias", "w2_bias", "expert_map"))
    first, second = options.pop("rounds", (Tensor.double, Tensor.double))
    result = torch.zeros(x.shape, dtype=torch.float64)
    for t in range(x.shape[0]):
        for k in range(ids.shape[1]):
            e = int(ids[t, k])
            if expert_map is not None:
                e = int(expert_map[e]) if 0 <= e < len(expert_map) else -1
            if not 0 <= e < w13.shape[0]:
                continue
            h = w13[e].double() @ first(x[t]) + (0 if b13 is None else b13[e].double())
            y = w2[e].double() @ second(act(h, activation, **options)) + (0 if b2 is None else b2[e].double())
            result[t] += float(weights[t, k]) * y
    return result


# MOE-01


@pytest.mark.parametrize("renormalize", (True, False))
@pytest.mark.parametrize("bias", (None, 0.0, -20.0))
@pytest.mark.parametrize("groups", ((1, 1), (4, 2)))
@pytest.mark.parametrize("score", SCORES)
@topk_kernels
def test_moe_01_bad_rows_stay_valid_and_alone(
    kernel: str, score: str, groups: tuple[int, int], bias: float | None, renormalize: bool
) -> None:
    options = {
        "score_function": score,
        "renormalize": renormalize,
        "n_group": groups[0],
        "topk_group": groups[1],
        "correction_bias": None if bias is None else torch.full((16,), bias),
    }
    good = torch.randn(3, 16)
    bad = torch.stack(
        [torch.full((16,), NAN), torch.full((16,), -INF), torch.full((16,), INF), torch.randn(16), torch.randn(16)]
    )
    bad[3, ::2], bad[4, 5] = NAN, INF
    rows = torch.cat([good[:1], bad[:3], good[1:2], bad[3:], good[2:]])
    weights, ids = call("moe_topk", kernel, rows, 5, **options)
    assert weights.isfinite().all()
    assert ((ids >= 0) & (ids < 16)).all()
    assert all(len(set(row)) == 5 for row in ids.tolist())
    want = call("moe_topk", kernel, good, 5, **options)
    compare(ids[[0, 4, 7]], want[1], exact=True)
    compare(weights[[0, 4, 7]], want[0])  # vectorised exp may differ in the last bit by a row's place in the tensor
    if score != "sqrt_softplus":  # whose score of -inf is 0 as well, but whose NaN rows were worth a word
        assert (weights[1:3] == 0).all()


@topk_kernels
def test_moe_01_numbers_win_over_nan(kernel: str) -> None:
    logits = torch.tensor([[NAN, -3.0, NAN, -1.0, -INF, -2.0]])
    weights, ids = call("moe_topk", kernel, logits, 3)
    assert ids.tolist() == [[3, 5, 1]]
    compare(weights, torch.tensor([[-1.0, -2.0, -3.0]], dtype=torch.float64).softmax(-1))


# MOE-02


@pytest.mark.parametrize("bias", (-2.0, -20.0))
@pytest.mark.parametrize("score", SCORES)
@topk_kernels
def test_moe_02_dropped_groups_are_minus_infinity(kernel: str, score: str, bias: float) -> None:
    logits = torch.tensor([[0.0] * 4 + [1.0] * 4])
    options = {"score_function": score, "n_group": 2, "topk_group": 1, "correction_bias": torch.full((8,), bias)}
    weights, ids = call("moe_topk", kernel, logits, 2, **options)
    assert ids.tolist() == [[4, 5]]
    assert weights.tolist() == [[0.5, 0.5]]


@topk_kernels
def test_moe_02_group_scores(kernel: str) -> None:
    """With a bias a group counts its two best, without one its best alone."""
    logits = torch.logit(torch.tensor([[0.9, 0.1, 0.1, 0.6, 0.6, 0.1]]))
    options = {"score_function": "sigmoid", "n_group": 2, "topk_group": 1}
    _, ids = call("moe_topk", kernel, logits, 1, correction_bias=torch.zeros(6), **options)
    assert ids.tolist() == [[3]]
    _, ids = call("moe_topk", kernel, logits, 1, **options)
    assert ids.tolist() == [[0]]


@topk_kernels
def test_moe_02_groups_of_one_expert(kernel: str) -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0, 2.0]])
    _, ids = call("moe_topk", kernel, logits, 2, n_group=4, topk_group=2, correction_bias=torch.zeros(4))
    assert ids.tolist() == [[1, 3]]


# MOE-03


@pytest.mark.parametrize("scale", (1.0, 2.5))
@pytest.mark.parametrize("renormalize", (True, False))
@topk_kernels
def test_moe_03_bias_selects_and_scores_weigh(kernel: str, renormalize: bool, scale: float) -> None:
    scores = torch.tensor([[0.8, 0.4, 0.2, 0.1]], dtype=torch.float64)
    bias = torch.tensor([-1.0, 0.0, 0.0, 0.5])
    options = {"score_function": "sigmoid", "renormalize": renormalize, "routed_scaling_factor": scale}
    weights, ids = call("moe_topk", kernel, torch.logit(scores).float(), 2, correction_bias=bias, **options)
    assert ids.tolist() == [[3, 1]]
    want = torch.tensor([[0.2, 0.8]] if renormalize else [[0.1, 0.4]], dtype=torch.float64) * scale
    compare(weights, want)


@pytest.mark.parametrize("bias", (False, True))
@pytest.mark.parametrize("score", SCORES)
@topk_kernels
def test_moe_03_equal_logits_in_bf16_and_fp32_choose_alike(kernel: str, score: str, bias: bool) -> None:
    logits = torch.randn(50, 64).bfloat16()
    options = {"score_function": score, "correction_bias": torch.randn(64) if bias else None}
    weights, ids = call("moe_topk", kernel, logits, 8, **options)
    assert weights.dtype == torch.float32
    assert ids.dtype == torch.int32
    compare((weights, ids), call("moe_topk", kernel, logits.float(), 8, **options), exact=True)


@topk_kernels
def test_moe_03_saturated_scores_still_rank(kernel: str) -> None:
    """Both sigmoids round to 1; the logits tell them apart."""
    _, ids = call("moe_topk", kernel, torch.tensor([[20.0, 30.0, 25.0]]), 3, score_function="sigmoid")
    assert ids.tolist() == [[1, 2, 0]]


# MOE-04


@pytest.mark.parametrize("bias", (None, 0.25))
@pytest.mark.parametrize("groups", ((1, 1), (4, 2), (4, 4)))
@pytest.mark.parametrize("score", SCORES)
@topk_kernels
def test_moe_04_ties_go_to_the_lowest_index(
    kernel: str, score: str, groups: tuple[int, int], bias: float | None
) -> None:
    logits = torch.zeros(3, 64)
    logits[1] = -0.0
    logits[2, ::2] = -0.0
    b = None if bias is None else torch.full((64,), bias)
    weights, ids = call(
        "moe_topk", kernel, logits, 7, score_function=score, n_group=groups[0], topk_group=groups[1], correction_bias=b
    )
    assert ids.tolist() == [list(range(7))] * 3
    compare(weights, torch.full((3, 7), 1 / 7, dtype=torch.float64))


@settings(max_examples=30, derandomize=True, deadline=None)
@given(st.integers(1, 9), st.integers(1, 40), st.data())
def test_moe_04_choice_equals_a_stable_sort(tokens: int, experts: int, data: st.DataObject) -> None:
    top_k = data.draw(st.integers(1, experts))
    levels = data.draw(st.integers(1, 5))
    logits = torch.randint(-levels, levels, (tokens, experts), generator=torch.Generator().manual_seed(experts)).float()
    want = [sorted(range(experts), key=lambda e, row=row: (-row[e], e))[:top_k] for row in logits.tolist()]
    for kernel in kernel_names("moe_topk"):
        weights, ids = call("moe_topk", kernel, logits, top_k)
        assert ids.tolist() == want
        compare(weights, oracle("moe_topk", logits, top_k)[0])


# MOE-05


@pytest.mark.parametrize("experts", (1, 3, 60, 160, 257, 384, 512))
@topk_kernels
def test_moe_05_expert_counts(kernel: str, experts: int) -> None:
    logits = (torch.arange(experts) / experts).expand(2, experts)
    for top_k in sorted({1, min(8, experts), experts}):
        _, ids = call("moe_topk", kernel, logits, top_k)
        assert ids.tolist() == [list(range(experts - 1, experts - 1 - top_k, -1))] * 2


@pytest.mark.parametrize("experts", (1, 3, 60, 160, 257, 384, 512))
@fused_kernels
def test_moe_05_the_last_expert_works(kernel: str, experts: int) -> None:
    w13, w2 = weights_of(experts, 16, 8)
    x, weights = torch.randn(3, 16), torch.rand(3, 2)
    ids = torch.tensor([[experts - 1, 0], [experts - 1, experts - 1], [0, experts // 2]], dtype=torch.int32)
    compare(call("moe_fused", kernel, x, w13, w2, weights, ids), dense(x, w13, w2, weights, ids))


@pytest.mark.parametrize(("top_k", "text"), ((4, "at most the 3 experts"), (0, "at least 1")))
@topk_kernels
def test_moe_05_too_many_experts_asked_for(kernel: str, top_k: int, text: str) -> None:
    with pytest.raises(ValueError, match=rf"tokenspeed::moe_topk: top_k: expected {text}, got {top_k}"):
        call("moe_topk", kernel, torch.zeros(2, 3), top_k)


@pytest.mark.parametrize(
    ("options", "text"),
    (
        ({"n_group": 5}, "n_group: expected a divisor of the 16 experts, got 5"),
        ({"n_group": 4, "topk_group": 5}, "topk_group: expected at most the 4 groups, got 5"),
        ({"n_group": 8, "topk_group": 1}, "top_k: expected at most the experts of 1 of 8 groups, got 3"),
        ({"score_function": "tanh"}, "score_function: expected 'softmax' or 'sigmoid' or 'sqrt_softplus', got 'tanh'"),
    ),
)
def test_moe_topk_refuses(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        tskernel.moe_topk(torch.zeros(2, 16), 3, **options)


# MOE-06


def blocks_of(ids: list[int], experts: int, block: int) -> tuple[list[int], list[int], int]:
    """What moe_dispatch gives, by lists."""
    places: list[int] = []
    owners: list[int] = []
    for e in range(experts):
        mine = [s for s, i in enumerate(ids) if i == e]
        owners += [e] * -(-len(mine) // block)
        places += mine + [len(ids)] * (-len(mine) % block)
    used = len(places)
    bound = min(len(ids) * block, len(ids) + experts * (block - 1))
    size = -(-bound // block) * block
    return places + [len(ids)] * (size - used), owners + [-1] * (size // block - len(owners)), used


@dispatch_kernels
def test_moe_06_blocks_of_four(kernel: str) -> None:
    counts = (1, 5, 0, 4, 7)
    ids = torch.tensor([e for e, n in enumerate(counts) for _ in range(n)], dtype=torch.int32).flip(0).reshape(17, 1)
    order, owners, used = call("moe_dispatch", kernel, ids, 5, block_size=4)
    assert used.tolist() == [4 + 8 + 0 + 4 + 8]
    assert owners.tolist() == [0, 1, 1, 3, 4, 4, -1, -1]
    assert order.tolist()[:12] == [16, 17, 17, 17, 11, 12, 13, 14, 15, 17, 17, 17]
    assert order.shape == (32,)
    assert order.tolist()[24:] == [17] * 8


@few
@given(st.integers(0, 12), st.integers(1, 3), st.integers(1, 9), st.integers(1, 9), st.booleans(), st.integers(0, 99))
def test_moe_06_dispatch_equals_lists(
    tokens: int, top_k: int, experts: int, block: int, mapped: bool, seed: int
) -> None:
    make = torch.Generator().manual_seed(seed)
    known = 2 * experts if mapped else experts
    ids = torch.randint(-2, known + 2, (top_k, tokens), generator=make).t()
    expert_map = torch.randint(-1, experts, (known,), generator=make).to(torch.int32) if mapped else None
    local = [
        -1 if not 0 <= i < known else i if expert_map is None else int(expert_map[i]) for i in ids.reshape(-1).tolist()
    ]
    for kernel in kernel_names("moe_dispatch"):
        order, owners, used = call("moe_dispatch", kernel, ids, experts, block_size=block, expert_map=expert_map)
        assert (order.tolist(), owners.tolist(), used.item()) == blocks_of(local, experts, block)


@pytest.mark.parametrize("block", (1, 4, 16))
@experts_kernels
def test_moe_06_experts_by_block(kernel: str, block: int) -> None:
    """E = 5, counts 1, 5, 0, 4, 7; the expert without tokens holds NaN."""
    ids = torch.tensor([0] + [1] * 5 + [3] * 4 + [4] * 7, dtype=torch.int32)[torch.randperm(17)].reshape(17, 1)
    w13, w2 = weights_of(5, 32, 16)
    w13[2], w2[2] = NAN, NAN
    x = torch.randn(17, 32)
    places = tskernel.moe_dispatch(ids, 5, block_size=block)
    y = call("moe_experts", kernel, x, w13, w2, *places, 1, block_size=block)
    assert y.shape == (17, 1, 32)
    compare(y[:, 0], dense(x, w13, w2, torch.ones(17, 1), ids))


@experts_kernels
def test_moe_06_experts_reads_no_place_past_the_end(kernel: str) -> None:
    """Places from num_tokens_post_padded on may hold anything."""
    ids = torch.tensor([[0, 2], [2, -1], [0, 2]], dtype=torch.int32)
    w13, w2 = weights_of(3, 32, 16)
    x = torch.randn(3, 32)
    order, owners, used = tskernel.moe_dispatch(ids, 3, block_size=4)
    want = call("moe_experts", kernel, x, w13, w2, order, owners, used, 2, block_size=4)
    order[int(used) :], owners[int(used) // 4 :] = 1, 2**31 - 1
    y = call("moe_experts", kernel, x, w13, w2, order, owners, used, 2, block_size=4)
    compare(y, want, exact=True)
    assert (y[1, 1] == 0).all()


@pytest.mark.parametrize("dtype", (torch.int32, torch.int64))
@fused_kernels
def test_moe_06_skipped_ids_add_nothing(kernel: str, dtype: torch.dtype) -> None:
    w13, w2 = weights_of(4, 32, 16)
    w13[3], w2[3] = NAN, NAN
    x = torch.randn(4, 32)
    ids = torch.tensor([[0, -1], [-1, -7], [4, 1], [2**31 - 1, -(2**31)]], dtype=dtype)
    weights = torch.rand(4, 2)
    weights[ids.lt(0) | ids.gt(3)] = NAN
    y = call("moe_fused", kernel, x, w13, w2, weights, ids)
    compare(y, dense(x, w13, w2, weights, ids))
    assert (y[[1, 3]] == 0).all()


@fused_kernels
def test_moe_06_experts_elsewhere_add_nothing(kernel: str) -> None:
    w13, w2 = weights_of(2, 32, 16)
    x, weights = torch.randn(5, 32), torch.rand(5, 2)
    ids = torch.tensor([[0, 1], [2, 3], [5, 1], [1, 3], [6, -1]], dtype=torch.int32)
    expert_map = torch.tensor([1, -1, 0, -1, -1, 9], dtype=torch.int32)  # 9: not a local expert either
    weights[0, 1] = weights[4, 0] = NAN
    y = call("moe_fused", kernel, x, w13, w2, weights, ids, expert_map=expert_map)
    compare(y, dense(x, w13, w2, weights, ids, expert_map=expert_map))
    assert (y[[3, 4]] == 0).all()


@pytest.mark.parametrize("expert", (0, 4))
@fused_kernels
def test_moe_06_all_tokens_to_one_expert(kernel: str, expert: int) -> None:
    w13, w2 = weights_of(5, 32, 16)
    for e in {0, 1, 2, 3, 4} - {expert}:
        w13[e], w2[e] = NAN, NAN
    x, weights = torch.randn(19, 32), torch.rand(19, 2)
    ids = torch.full((19, 2), expert, dtype=torch.int32)
    compare(call("moe_fused", kernel, x, w13, w2, weights, ids), dense(x, w13, w2, weights, ids))


@fused_kernels
def test_moe_06_a_token_does_not_see_others(kernel: str) -> None:
    w13, w2 = weights_of(4, 32, 16)
    x, weights, ids = torch.randn(6, 32), torch.rand(6, 2), torch.randint(0, 4, (6, 2), dtype=torch.int32)
    want = call("moe_fused", kernel, x, w13, w2, weights, ids)
    x[2], weights[4] = NAN, NAN
    y = call("moe_fused", kernel, x, w13, w2, weights, ids)
    keep = [0, 1, 3, 5]
    compare(y[keep], want[keep], exact=True)
    assert y[[2, 4]].isnan().all()


# The expert itself


@pytest.mark.parametrize("biased", (False, True))
@pytest.mark.parametrize("activation", ("silu", "gelu", "gelu_tanh", "swiglu_oai"))
@fused_kernels
def test_activations_and_biases(kernel: str, activation: str, biased: bool) -> None:
    w13, w2 = weights_of(3, 32, 16)
    x, weights, ids = torch.randn(5, 32) * 3, torch.rand(5, 2), torch.randint(0, 3, (5, 2), dtype=torch.int32)
    options: dict[str, Any] = {"w13_bias": torch.randn(3, 32), "w2_bias": torch.randn(3, 32)} if biased else {}
    swiglu = {"swiglu_alpha": 1.5, "swiglu_limit": 2.0} if activation == "swiglu_oai" else {}
    y = call("moe_fused", kernel, x, w13, w2, weights, ids, activation=activation, **options, **swiglu)
    loop = {n.removeprefix("swiglu_"): v for n, v in swiglu.items()}
    compare(y, dense(x, w13, w2, weights, ids, activation, **options, **loop))


@fused_kernels
def test_out_and_strides(kernel: str) -> None:
    w13, w2 = weights_of(3, 32, 16)
    wide = torch.full((5, 48), -7.0)
    x, weights = torch.randn(32, 5).t(), torch.rand(2, 5).t()
    ids = torch.randint(0, 3, (2, 5)).t()
    result = call("moe_fused", kernel, x, w13, w2, weights, ids, out=wide[:, 8:40])
    assert result.data_ptr() == wide[:, 8:].data_ptr()
    compare(wide[:, 8:40], dense(x, w13, w2, weights, ids))
    assert (wide[:, :8] == -7).all()
    assert (wide[:, 40:] == -7).all()


@few
@given(
    st.integers(0, 9),
    st.integers(1, 4),
    st.integers(1, 7),
    st.integers(1, 40),
    st.integers(1, 20),
    st.sampled_from((1, 3, 8)),
)
def test_fused_equals_stages_equals_loop(
    tokens: int, top_k: int, experts: int, hidden: int, inner: int, block: int
) -> None:
    torch.manual_seed(hidden * inner)
    w13, w2 = weights_of(experts, hidden, inner)
    x, weights = torch.randn(tokens, hidden), torch.rand(tokens, top_k)
    ids = torch.randint(-1, experts + 1, (tokens, top_k), dtype=torch.int32)
    want = dense(x, w13, w2, weights, ids)
    compare(tskernel.moe_fused(x, w13, w2, weights, ids), want)
    compare(tskernel.moe_fused(x, w13, w2, weights, ids, override="reference"), want)
    outputs = tskernel.moe_experts(
        x, w13, w2, *tskernel.moe_dispatch(ids, experts, block_size=block), top_k, block_size=block
    )
    compare(tskernel.moe_combine(outputs, weights, ids), want)
    compare(tskernel.moe_combine(outputs, weights), want)


@combine_kernels
def test_combine_leaves_out_negative_ids(kernel: str) -> None:
    outputs, weights = torch.randn(3, 2, 16), torch.rand(3, 2)
    ids = torch.tensor([[0, -1], [-1, -1], [1, 7]], dtype=torch.int32)
    outputs[0, 1], weights[1, 0] = NAN, NAN
    out = torch.full((3, 16), -7.0)
    call("moe_combine", kernel, outputs, weights, ids, out=out)
    compare(out[0], outputs[0, 0].double() * weights[0, 0].double())
    assert (out[1] == 0).all()
    compare(out[2], (outputs[2].double() * weights[2].double()[:, None]).sum(0))


@combine_kernels
def test_combine_sums_in_fp32(kernel: str) -> None:
    outputs = torch.tensor([256.0, 1.0, 1.0, -256.0], dtype=torch.bfloat16).reshape(1, 4, 1)
    y = call("moe_combine", kernel, outputs, torch.ones(1, 4))
    assert y.tolist() == [[2.0]]


# Formats

E4M3, E4M3Z = torch.float8_e4m3fn, torch.float8_e4m3fnuz
# For results whose rows were rounded between the products: a value beside a rounding boundary can fall either way.
ROUNDED = torch.bfloat16
FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def nibbles(data: Tensor) -> Tensor:
    return torch.stack([data & 15, data >> 4], -1).flatten(-2).long()


def stored(quant: str, rows: int, columns: int, dtype: torch.dtype = E4M3) -> tuple[Tensor, Tensor, Tensor]:
    """Return stored weights of 4 experts, their scale and their values in fp64."""
    size = columns**-0.5
    if quant in ("fp8_tensor", "fp8_token", "fp8_block"):
        data = torch.randn(4, rows, columns).to(dtype)
        if quant == "fp8_tensor":
            scale = (torch.rand(4) + 0.5) * size
            return data, scale, data.double() * scale.double()[:, None, None]
        if quant == "fp8_token":
            scale = (torch.rand(4, rows) + 0.5) * size
            return data, scale, data.double() * scale.double()[:, :, None]
        scale = (torch.rand(4, -(-rows // 128), -(-columns // 128)) + 0.5) * size
        wide = scale.double().repeat_interleave(128, 1)[:, :rows].repeat_interleave(128, 2)[:, :, :columns]
        return data, scale, data.double() * wide
    if quant == "int8":
        data = torch.randint(-127, 128, (4, rows, columns)).to(torch.int8)
        scale = (torch.rand(4, rows) + 0.5) * size / 64
        return data, scale, data.double() * scale.double()[:, :, None]
    data = torch.randint(0, 256, (4, rows, columns // 2)).to(torch.uint8)
    if quant == "mxfp4":
        scale = torch.randint(122, 127, (4, rows, columns // 32)).to(torch.uint8)
        return data, scale, FP4.double()[nibbles(data)] * torch.exp2(scale.double() - 127).repeat_interleave(32, 2)
    scale = (torch.rand(4, rows, 2) + 0.5) * size / 4
    return data, scale, (nibbles(data) - 8).double() * scale.double().repeat_interleave(columns // 2, 2)


def quantized_call(
    quant: str, hidden: int = 64, inner: int = 32, dtype: torch.dtype = E4M3
) -> tuple[dict[str, Any], tuple[Tensor, ...]]:
    w13, w13_scale, v13 = stored(quant, 2 * inner, hidden, dtype)
    w2, w2_scale, v2 = stored(quant, hidden, inner, dtype)
    x, weights, ids = torch.randn(6, hidden), torch.rand(6, 2), torch.randint(0, 4, (6, 2), dtype=torch.int32)
    options = {"quant": quant, "w13_scale": w13_scale, "w2_scale": w2_scale}
    return {"x": x, "w13": w13, "w2": w2, "topk_weights": weights, "topk_ids": ids, **options}, (
        x,
        v13,
        v2,
        weights,
        ids,
    )


def rounding(quant: str, dtype: torch.dtype = E4M3, scale: float | None = None) -> Any:
    """Return what a product does to a row that enters it."""
    top = {E4M3: 448.0, E4M3Z: 240.0}[dtype] if quant != "int8" else 127.0

    def group(row: Tensor) -> Tensor:
        s = row.abs().max() / top if scale is None else torch.tensor(scale)
        q = (row / s).clamp(-top, top)
        return (q.round() if quant == "int8" else q.to(dtype)).double() * s.double()

    def rounded(row: Tensor) -> Tensor:
        return torch.cat([group(g) for g in row.float().split(128 if quant == "fp8_block" else row.numel())])

    return rounded


@pytest.mark.parametrize("quant", ("mxfp4", "w4a16"))
@fused_kernels
def test_weight_only_formats(kernel: str, quant: str) -> None:
    arguments, values = quantized_call(quant)
    compare(call("moe_fused", kernel, **arguments), dense(*values))


@pytest.mark.parametrize("shape", ((64, 32), (160, 72)))
@pytest.mark.parametrize("quant", ("fp8_tensor", "fp8_token", "fp8_block", "int8"))
@fused_kernels
def test_formats_that_round_activations(kernel: str, quant: str, shape: tuple[int, int]) -> None:
    arguments, values = quantized_call(quant, *shape)
    y = call("moe_fused", kernel, **arguments)
    compare(y, dense(*values, rounds=[rounding(quant)] * 2), dtype=ROUNDED)
    alone = {n: arguments[n][2:3] for n in ("x", "topk_weights", "topk_ids")}
    compare(call("moe_fused", kernel, **{**arguments, **alone}), y[2:3], dtype=ROUNDED)


@fused_kernels
def test_the_dtype_decides_the_encoding(kernel: str) -> None:
    arguments, values = quantized_call("fp8_token", dtype=E4M3Z)
    y = call("moe_fused", kernel, **arguments)
    compare(y, dense(*values, rounds=[rounding("fp8_token", E4M3Z)] * 2), dtype=ROUNDED)


@pytest.mark.parametrize("quant", ("fp8_tensor", "mxfp4", "int8"))
@fused_kernels
def test_a_static_scale_saturates(kernel: str, quant: str) -> None:
    """x = 1000 with scale 1 is read as the format's maximum."""
    arguments, (x, v13, v2, weights, ids) = quantized_call(quant)
    x.fill_(1000.0)
    top = torch.full_like(x, 127.0 if quant == "int8" else 448.0)
    y = call("moe_fused", kernel, **arguments, a13_scale=torch.ones(1))
    second = Tensor.double if quant == "mxfp4" else rounding(quant)
    compare(y, dense(top, v13, v2, weights, ids, rounds=(Tensor.double, second)), dtype=ROUNDED)


@fused_kernels
def test_a_static_second_scale(kernel: str) -> None:
    arguments, values = quantized_call("mxfp4")
    y = call("moe_fused", kernel, **arguments, a2_scale=torch.tensor(0.01))
    compare(y, dense(*values, rounds=(Tensor.double, rounding("fp8_tensor", scale=0.01))), dtype=ROUNDED)


@pytest.mark.parametrize("quant", ("fp8_tensor", "fp8_token", "fp8_block", "int8", "mxfp4", "w4a16"))
@fused_kernels
def test_unused_quantized_experts_are_not_read(kernel: str, quant: str) -> None:
    arguments, _ = quantized_call(quant)
    arguments["topk_ids"] = arguments["topk_ids"].remainder(2) * 3
    want = call("moe_fused", kernel, **arguments)
    for name in ("w13_scale", "w2_scale"):
        arguments[name][1:3] = 255 if quant == "mxfp4" else NAN
    compare(call("moe_fused", kernel, **arguments), want, exact=True)


@fused_kernels
def test_zero_tokens_of_zero(kernel: str) -> None:
    """An all-zero row has a finite dynamic scale."""
    arguments, _ = quantized_call("fp8_block")
    arguments["x"].zero_()
    assert (call("moe_fused", kernel, **arguments) == 0).all()


@pytest.mark.parametrize(
    ("change", "text"),
    (
        ({"activation": "relu"}, "activation: expected 'silu' or 'gelu' or 'gelu_tanh' or 'swiglu_oai', got 'relu'"),
        ({"quant": "fp6"}, "quant: expected 'none' or .*, got 'fp6'"),
        ({"quant": "int8"}, "w13.dtype: expected int8, got float32"),
        ({"w2_scale": torch.ones(4)}, "w2_scale: expected None for quant='none', got Tensor"),
        ({"w2": torch.zeros(4, 32, 15)}, r"w13.shape: expected \(4, 30, 32\), got \(4, 32, 32\)"),
        ({"w2": torch.zeros(3, 32, 16)}, r"w2.shape: expected \(4, 32, 16\), got \(3, 32, 16\)"),
        ({"w13_bias": torch.zeros(4, 16)}, r"w13_bias.shape: expected \(4, 32\), got \(4, 16\)"),
        ({"topk_weights": torch.zeros(5, 3)}, r"topk_weights.shape: expected \(5, 2\), got \(5, 3\)"),
        ({"topk_ids": torch.zeros(4, 2, dtype=torch.int32)}, r"topk_ids.shape: expected \(5, \*\), got \(4, 2\)"),
        ({"a13_scale": torch.ones(1)}, "a13_scale: expected None for quant='none', got a Tensor"),
        ({"x": torch.zeros(5, 32, dtype=torch.int32)}, "x.dtype: expected float32 or float16 or bfloat16, got int32"),
        ({"expert_map": torch.zeros(0, dtype=torch.int32)}, "expert_map.shape: expected at least one expert"),
    ),
)
def test_moe_fused_refuses(change: dict[str, Any], text: str) -> None:
    w13, w2 = weights_of(4, 32, 16)
    arguments = {"x": torch.zeros(5, 32), "w13": w13, "w2": w2, "topk_weights": torch.zeros(5, 2)}
    arguments["topk_ids"] = torch.zeros(5, 2, dtype=torch.int32)
    with pytest.raises(ValueError, match=f"tokenspeed::moe_fused: {text}"):
        tskernel.moe_fused(**{**arguments, **change})


# The layer


class Layer(nn.Module):
    def __init__(self, **tensors: Tensor) -> None:
        super().__init__()
        for name, value in tensors.items():
            setattr(self, name, nn.Parameter(value, requires_grad=False))


def plan_of(quant: str = "none", dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    return moe_plan(quant, dtype, num_experts=4, top_k=2, hidden_size=64, intermediate_size=32, **options)


def test_layer_routes_and_runs() -> None:
    w13, w2 = weights_of(4, 64, 32)
    layer = Layer(w13_weight=w13, w2_weight=w2, w13_weight_bias=torch.randn(4, 64), correction_bias=torch.randn(4))
    plan = plan_of(
        with_bias=True, activation="swiglu_oai", score_function="sigmoid", routed_scaling_factor=2.5, swiglu_limit=1.0
    )
    assert not plan.pinned
    moe_process_weights(plan, layer)
    moe_process_weights(plan, layer)
    x, logits = torch.randn(5, 64), torch.randn(5, 4)
    weights, ids = oracle(
        "moe_topk",
        logits,
        2,
        score_function="sigmoid",
        correction_bias=layer.correction_bias,
        routed_scaling_factor=2.5,
    )
    want = dense(x, w13, w2, weights, ids, "swiglu_oai", w13_bias=layer.w13_weight_bias, limit=1.0)
    out = torch.full((5, 64), -7.0)
    assert moe_apply(plan, x, layer, logits, out=out) is out
    compare(out, want)
    compare(moe_apply(plan, x, layer, topk_weights=weights.float(), topk_ids=ids), want)


def test_layer_compiles_to_ops() -> None:
    w13, w2 = weights_of(4, 64, 32)
    layer = Layer(w13_weight=w13, w2_weight=w2)
    plan = plan_of()
    moe_process_weights(plan, layer)
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(lambda x, r: moe_apply(plan, x, layer, r), backend=keep, fullgraph=True, dynamic=True)
    x, logits = torch.randn(5, 64), torch.randn(5, 4)
    compare(compiled(x, logits), moe_apply(plan, x, layer, logits), exact=True)
    called = [str(n.target) for n in graphs[0].graph.nodes if n.op == "call_function" and "tokenspeed" in str(n.target)]
    assert called == ["tokenspeed.moe_topk.default", "tokenspeed.moe_fused.default"]


@pytest.mark.parametrize("quant", ("fp8_tensor", "fp8_token", "fp8_block", "int8", "mxfp4", "w4a16"))
def test_layer_formats(quant: str) -> None:
    arguments, _ = quantized_call(quant)
    names = {"w13": "w13_weight", "w2": "w2_weight", "w13_scale": "w13_weight_scale", "w2_scale": "w2_weight_scale"}
    layer = Layer(**{attribute: arguments[name] for name, attribute in names.items()})
    scales = {}
    if quant == "fp8_tensor":
        layer.w13_input_scale = nn.Parameter(torch.tensor([0.01, 0.03, 0.02, 0.01]), requires_grad=False)
        scales["a13_scale"] = torch.tensor([0.03])
    plan = plan_of(quant, group_size=32 if quant == "w4a16" else 128)
    moe_process_weights(plan, layer)
    y = moe_apply(plan, arguments["x"], layer, topk_weights=arguments["topk_weights"], topk_ids=arguments["topk_ids"])
    compare(y, oracle("moe_fused", **arguments, **scales), dtype=ROUNDED)


@pytest.fixture
def reordering(registry: KernelRegistry) -> str:
    """A kernel that reads w2 transposed, and says so."""
    spec = registry.get_by_name("reference/moe_fused")

    def transposed(
        x: Tensor,
        w13: Tensor,
        w2: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        *,
        activation: str = "silu",
        quant: str = "none",
        w13_scale: Tensor | None = None,
        w2_scale: Tensor | None = None,
        w13_bias: Tensor | None = None,
        w2_bias: Tensor | None = None,
        a13_scale: Tensor | None = None,
        a2_scale: Tensor | None = None,
        swiglu_alpha: float = 1.702,
        swiglu_limit: float = 7.0,
        expert_map: Tensor | None = None,
        weight_layout: str = "plain",
    ) -> Tensor:
        return spec.function(x, w13, w2.transpose(1, 2), topk_weights, topk_ids)

    register_kernel(
        "moe",
        "moe_fused",
        name="test/transposed",
        priority=Priority.PLUGIN,
        traits={"weight_layout": {"transposed"}, "quant": {"none"}},
        weight_preprocessor=lambda weights: {**weights, "w2": weights["w2"].transpose(1, 2).contiguous()},
    )(transposed)
    return "test/transposed"


def test_reordered_weights_reach_their_kernel_alone(reordering: str) -> None:
    w13, w2 = weights_of(4, 64, 32)
    layer = Layer(w13_weight=w13, w2_weight=w2.clone())
    x, weights, ids = torch.randn(5, 64), torch.rand(5, 2), torch.randint(0, 4, (5, 2), dtype=torch.int32)
    want = dense(x, w13, w2, weights, ids)
    compare(tskernel.moe_fused(x, w13, w2, weights, ids), want)  # plain weights: not its business

    plan = plan_of()
    assert (plan.kernel.name, plan.weight_layout, plan.pinned) == (reordering, "transposed", True)
    with pytest.raises(
        ValueError, match="expected ones prepared as 'transposed', got 'plain'; call moe_process_weights"
    ):
        moe_apply(plan, x, layer, topk_weights=weights, topk_ids=ids)
    moe_process_weights(plan, layer)
    moe_process_weights(plan, layer)
    assert layer.w2_weight.shape == (4, 32, 64)
    compare(moe_apply(plan, x, layer, topk_weights=weights, topk_ids=ids), want)

    plain = plan_of(override="reference")
    assert plain.pinned
    with pytest.raises(ValueError, match="expected plain ones, got ones prepared as 'transposed'"):
        moe_process_weights(plain, layer)
    with pytest.raises(ValueError, match="expected ones prepared as 'plain', got 'transposed'"):
        moe_apply(plain, x, layer, topk_weights=weights, topk_ids=ids)


def test_reordered_weights_find_no_other_kernel() -> None:
    w13, w2 = weights_of(4, 64, 32)
    call_ = (torch.randn(5, 64), w13, w2, torch.rand(5, 2), torch.zeros(5, 2, dtype=torch.int32))
    with pytest.raises(
        NoKernelFoundError, match="the reference reads plain weights, these are laid out for 'swizzled'"
    ):
        tskernel.moe_fused(*call_, weight_layout="swizzled")
    with pytest.raises(KernelRefusedError):
        tskernel.moe_fused(*call_, weight_layout="swizzled", override="reference")


def test_plans_for_other_platforms() -> None:
    assert plan_of(platform="sm90").kernel.name.startswith(("cuda/", "portable/", "reference/"))
    assert plan_of("mxfp4", platform="gfx950").kernel.name.startswith(("rocm/", "portable/", "reference/"))


@pytest.mark.parametrize(
    ("make", "error", "text"),
    (
        (lambda: plan_of("fp3"), ValueError, "tskernel.moe_plan: quant: expected 'none' or .*, got 'fp3'"),
        (lambda: plan_of(activation="relu"), ValueError, "activation: expected 'silu'"),
        (lambda: plan_of(solution="none such"), NoKernelFoundError, "solution is reference, asked for none such"),
    ),
)
def test_moe_plan_refuses(make: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        make()


def test_layer_refuses() -> None:
    w13, w2 = weights_of(4, 64, 32)
    plan = plan_of()
    with pytest.raises(ValueError, match=r"w13.shape: expected \(4, 64, 64\), got \(4, 60, 64\)"):
        moe_process_weights(plan, Layer(w13_weight=w13[:, :60], w2_weight=w2))
    with pytest.raises(ValueError, match="w2_weight: expected a Tensor, got None"):
        moe_process_weights(plan, Layer(w13_weight=w13))
    layer, x = Layer(w13_weight=w13, w2_weight=w2), torch.randn(2, 64)
    moe_process_weights(plan, layer)
    for routing in ({}, {"topk_ids": torch.zeros(2, 2, dtype=torch.int32)}):
        with pytest.raises(ValueError, match="expected router_logits, or topk_weights and topk_ids"):
            moe_apply(plan, x, layer, **routing)
