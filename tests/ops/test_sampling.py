"""What the sampling ops must do beyond the generic contract: filters, bad rows, the generator, penalties, drafts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import tskernel
from tskernel.library import FLOATS
from tskernel.ops.sampling._philox import philox4x32, random_words
from tskernel.testing import call, compare, kernel_names

INF, NAN = float("inf"), float("nan")
OFF_K, OFF_P = 0, 1.0

argmax_kernels = pytest.mark.parametrize("kernel", kernel_names("argmax"))
top_k_kernels = pytest.mark.parametrize("kernel", kernel_names("top_k_renorm"))
top_p_kernels = pytest.mark.parametrize("kernel", kernel_names("top_p_renorm"))
min_p_kernels = pytest.mark.parametrize("kernel", kernel_names("min_p_renorm"))
sample_kernels = pytest.mark.parametrize("kernel", kernel_names("top_k_top_p_sample"))
penalty_kernels = pytest.mark.parametrize("kernel", kernel_names("apply_penalties_"))
verify_kernels = pytest.mark.parametrize("kernel", kernel_names("verify_chain_greedy"))
few = settings(max_examples=20, derandomize=True, deadline=None)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def column(value: Any, rows: int, dtype: torch.dtype) -> Tensor:
    return torch.tensor(value if isinstance(value, list) else [value] * rows, dtype=dtype)


def parameters(
    rows: int, top_k: Any = OFF_K, top_p: Any = OFF_P, temperature: Any = 1.0, seed: Any = 0, offset: Any = 0
) -> list[Tensor]:
    return [
        column(top_k, rows, torch.int32),
        column(top_p, rows, torch.float32),
        column(temperature, rows, torch.float32),
        column(seed, rows, torch.int64),
        column(offset, rows, torch.int64),
    ]


def sample(kernel: str, logits: Tensor, **options: Any) -> Tensor:
    return call("top_k_top_p_sample", kernel, logits, *parameters(logits.shape[0], **options))


# SMP-01


@sample_kernels
def test_smp_01_one_hot_rows_always_give_their_token(kernel: str) -> None:
    logits = torch.full((5, 1000), -INF)
    logits[:, 7] = 0.0
    top_k = [2**30, 1000, 1, 0, -1]
    for top_p in (-1.0, 0.0, 0.5, 1.0, 2.0):
        for draw in range(3):
            token = sample(kernel, logits, top_k=top_k, top_p=top_p, offset=draw)
            assert token.dtype == torch.int32
            assert token.tolist() == [7] * 5


@top_k_kernels
def test_smp_01_top_k_off_keeps_the_row(kernel: str) -> None:
    probs = torch.tensor([0.5, 0.25, 0.125, 0.125]).repeat(5, 1)
    kept = call("top_k_renorm", kernel, probs, column([2**30, 4, 0, -1, 5], 5, torch.int32))
    compare(kept, probs, exact=True)
    one_hot = torch.zeros(5, 1000)
    one_hot[:, 7] = 1.0
    compare(call("top_k_renorm", kernel, one_hot, column([2**30, 1000, 1, 0, -1], 5, torch.int32)), one_hot, exact=True)


@top_p_kernels
def test_smp_01_top_p_ends(kernel: str) -> None:
    probs = torch.tensor([0.25, 0.5, 0.125, 0.125]).repeat(5, 1)
    kept = call("top_p_renorm", kernel, probs, column([1.0, 1.5, INF, 0.0, -1.0], 5, torch.float32))
    compare(kept[:3], probs[:3], exact=True)
    assert kept[3:].tolist() == [[0.0, 1.0, 0.0, 0.0]] * 2


@sample_kernels
def test_smp_01_ids_are_in_range(kernel: str) -> None:
    logits = torch.randn(64, 333)
    token = sample(kernel, logits, seed=list(range(64)), top_k=5, top_p=0.9)
    assert ((token >= 0) & (token < 333)).all()
    best = logits.topk(5).indices
    assert (best == token.unsqueeze(1)).any(1).all()


@pytest.mark.parametrize("top_k", (1, 3, 6))
@top_k_kernels
def test_smp_01_exactly_k_on_ties(kernel: str, top_k: int) -> None:
    probs = torch.tensor([[0.05, 0.3, 0.05, 0.3, 0.05, 0.05, 0.2]])
    kept = call("top_k_renorm", kernel, probs, column(top_k, 1, torch.int32))
    order = [1, 3, 6, 0, 2, 4, 5]
    assert sorted(kept[0].nonzero().flatten().tolist()) == sorted(order[:top_k])
    compare(kept.sum(), torch.tensor(1.0))


@sample_kernels
def test_smp_01_exactly_k_equal_logits(kernel: str) -> None:
    logits = torch.zeros(400, 50)
    logits[:, ::2] = -0.0
    token = sample(kernel, logits, top_k=3, seed=list(range(400)))
    assert set(token.tolist()) == {0, 1, 2}


# SMP-02


def with_bad_rows(good: Tensor) -> Tensor:
    """Put four bad rows between two good ones: NaN, -inf, one +inf, half NaN."""
    bad = torch.stack([torch.full_like(good[0], NAN), torch.full_like(good[0], -INF), good[0], good[1]])
    bad[2, 11], bad[3, ::2] = INF, NAN
    return torch.cat([good[:1], bad, good[1:]])


@pytest.mark.parametrize("options", ({}, {"top_k": 5}, {"top_p": 0.5}, {"temperature": 0.0}, {"temperature": 1e-30}))
@sample_kernels
def test_smp_02_bad_rows_stay_valid_and_alone(kernel: str, options: dict[str, Any]) -> None:
    good = torch.randn(2, 64)
    token = sample(kernel, with_bad_rows(good), seed=[3, 0, 0, 0, 0, 4], **options)
    compare(token[[0, 5]], sample(kernel, good, seed=[3, 4], **options), exact=True)
    assert token[1:4].tolist() == [0, 0, 11]
    assert token[4] % 2 == 1


@argmax_kernels
def test_smp_02_argmax_of_bad_rows(kernel: str) -> None:
    good = torch.randn(2, 64)
    token = call("argmax", kernel, with_bad_rows(good))
    assert token.dtype == torch.int32
    half = good[1].clone()
    half[::2] = -INF
    assert token.tolist() == [good[0].argmax(), 0, 0, 11, half.argmax(), good[1].argmax()]


@argmax_kernels
def test_smp_02_argmax_ties_and_nan(kernel: str) -> None:
    logits = torch.full((5, 128), -INF)
    logits[0, [70, 90]] = 3.0
    logits[1, [5, 100]] = torch.tensor([NAN, -2.0])
    logits[2, [3, 64]] = torch.tensor([0.0, -0.0])
    logits[3, [64, 127]] = INF
    logits[4, 1:] = NAN
    assert call("argmax", kernel, logits).tolist() == [70, 100, 3, 64, 0]


@pytest.mark.parametrize("op", ("top_k_renorm", "top_p_renorm", "min_p_renorm"))
def test_smp_02_renorm_of_bad_rows(op: str) -> None:
    good = torch.rand(2, 64)
    probs = with_bad_rows(good)
    value = torch.tensor([5] * 6, dtype=torch.int32) if op == "top_k_renorm" else torch.full((6,), 0.4)
    for kernel in kernel_names(op):
        kept = call(op, kernel, probs, value)
        compare(kept[[0, 5]], call(op, kernel, good, value[:2]), exact=True)
        assert (kept[1:3] == 0).all()
        assert kept[3].tolist() == [float(i == 11) for i in range(64)]
        assert kept[4, ::2].eq(0).all()
        compare(kept[4].sum(), torch.tensor(1.0))


# SMP-03


@pytest.mark.parametrize(("top_p", "kept"), ((0.5, 1), (0.7, 2), (0.75, 2), (0.76, 3), (0.875, 3), (0.9, 4)))
@top_p_kernels
def test_smp_03_top_p_keeps_the_shortest_prefix(kernel: str, top_p: float, kept: int) -> None:
    values = torch.tensor([0.5, 0.25, 0.125, 0.125])
    for order in ([0, 1, 2, 3], [3, 1, 0, 2], [2, 3, 1, 0]):
        probs = values[order].unsqueeze(0)
        result = call("top_p_renorm", kernel, probs, column(top_p, 1, torch.float32))
        best = sorted(range(4), key=lambda i, p=probs: (-float(p[0, i]), i))[:kept]
        want = torch.zeros(4, dtype=torch.float64)
        want[best] = values.double()[:kept] / values[:kept].sum()
        compare(result[0], want)


@pytest.mark.parametrize(
    ("top_p", "kept"), ((0.0, {0}), (0.7, {0, 1}), (0.75, {0, 1}), (0.76, {0, 1, 2}), (1.0, {0, 1, 2, 3}))
)
@sample_kernels
def test_smp_03_the_sampler_draws_from_that_prefix(kernel: str, top_p: float, kept: set[int]) -> None:
    logits = torch.tensor([0.5, 0.25, 0.125, 0.125]).log2().mul(np.log(2)).expand(300, 4)
    assert set(sample(kernel, logits, top_p=top_p, seed=list(range(300))).tolist()) == kept


@sample_kernels
def test_smp_03_top_p_is_a_share_of_what_top_k_left(kernel: str) -> None:
    """Of .4 .3 .2 .1, k = 3 leaves shares 4/9, 3/9, 2/9: p = .75 keeps two of them, though .4 + .3 < .75."""
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log().expand(300, 4)
    draw = {"seed": list(range(300)), "top_p": 0.75}
    assert set(sample(kernel, logits, top_k=3, **draw).tolist()) == {0, 1}
    assert set(sample(kernel, logits, **draw).tolist()) == {0, 1, 2}


@sample_kernels
def test_smp_03_temperature_comes_first(kernel: str) -> None:
    """At temperature 1/2 the shares .5 .3 .2 become 25/38, 9/38, 4/38."""
    logits = torch.tensor([0.5, 0.3, 0.2]).log().expand(300, 3)
    draw = {"seed": list(range(300)), "top_p": 0.85}
    assert set(sample(kernel, logits, temperature=0.5, **draw).tolist()) == {0, 1}
    assert set(sample(kernel, logits, **draw).tolist()) == {0, 1, 2}


@few
@given(
    st.integers(1, 4),
    st.integers(1, 300),
    st.integers(1, 6),
    st.floats(-0.1, 1.1),
    st.integers(-1, 310),
    st.integers(0, 99),
)
def test_smp_03_sets_equal_numpy(rows: int, vocab: int, levels: int, top_p: float, top_k: int, seed: int) -> None:
    """Small integers over their sum: many ties, and prefix sums that fp64 holds exactly."""
    weights = np.random.default_rng(seed).integers(0, levels + 1, (rows, vocab)).astype(np.float32)
    weights[:, 0] = levels
    order = np.argsort(-weights, axis=1, kind="stable")
    place = np.argsort(order, axis=1, kind="stable")
    sums = np.take_along_axis(weights, order, 1).astype(np.float64).cumsum(1)
    p, k = np.float64(np.float32(top_p)), vocab if not 0 < top_k < vocab else top_k
    count = vocab if p >= 1 else np.maximum((sums < p * sums[:, -1:]).sum(1, keepdims=True) + 1, 1)
    for op, kept, value in (
        ("top_p_renorm", place < count, torch.full((rows,), top_p)),
        ("top_k_renorm", place < k, torch.full((rows,), top_k, dtype=torch.int32)),
    ):
        want = np.where(kept, weights, 0).astype(np.float64)
        for kernel in kernel_names(op):
            compare(
                call(op, kernel, torch.from_numpy(weights), value), torch.from_numpy(want / want.sum(1, keepdims=True))
            )


# SMP-04


@pytest.mark.parametrize("scale", (1.0, 0.25, 8.0))
@min_p_kernels
def test_smp_04_min_p_is_relative_to_the_best(kernel: str, scale: float) -> None:
    probs = torch.tensor([0.5, 0.25, 0.125, 0.125]).repeat(7, 1)
    min_p = column([-1.0, 0.0, 0.25, 0.26, 0.5, 1.0, 9.0], 7, torch.float32)
    kept = call("min_p_renorm", kernel, probs * scale, min_p)
    counts = [4, 4, 4, 2, 2, 1, 1]
    want = torch.stack([torch.where(torch.arange(4) < n, probs[0], 0.0) for n in counts]).double()
    compare(kept, want / want.sum(1, keepdim=True))


@min_p_kernels
def test_smp_04_min_p_does_not_see_earlier_filters(kernel: str) -> None:
    probs = torch.randn(6, 200).mul(2).softmax(-1)
    min_p = torch.rand(6) * 0.2
    whole = call("min_p_renorm", kernel, probs, min_p)
    cut = call("min_p_renorm", kernel, tskernel.top_k_renorm(probs, column(50, 6, torch.int32)), min_p)
    compare(whole.gt(0) & cut.gt(0), cut.gt(0), exact=True)
    inside = cut > 0
    best = probs.amax(1, keepdim=True)
    assert (probs[inside] >= (min_p.unsqueeze(1) * best * 0.999).expand_as(probs)[inside]).all()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("op", ("top_k_renorm", "top_p_renorm", "min_p_renorm", "top_k_top_p_sample", "argmax"))
def test_smp_04_filters_leave_their_input_alone(op: str, dtype: torch.dtype) -> None:
    x = torch.randn(4, 64).softmax(-1).to(dtype)
    x[1, 3] = NAN
    extra = {
        "top_k_renorm": [column(5, 4, torch.int32)],
        "top_k_top_p_sample": parameters(4, top_k=5, top_p=0.5),
        "argmax": [],
    }.get(op, [torch.full((4,), 0.3)])
    before = x.clone()
    for kernel in kernel_names(op):
        result = call(op, kernel, x, *extra)
        assert torch.equal(x.view(torch.uint8), before.view(torch.uint8))
        assert result.data_ptr() != x.data_ptr()


# The generator


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    (
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ),
)
def test_philox_known_answers(counter: tuple[int, ...], key: tuple[int, ...], words: tuple[int, ...]) -> None:
    """The vectors that the authors of Philox publish with Random123."""
    c0, c1, c2, c3 = (torch.tensor([c]) for c in counter)
    k0, k1 = (torch.tensor([k]) for k in key)
    assert [int(w) for w in philox4x32((c0, c1, c2, c3), (k0, k1))] == list(words)


def numpy_words(seed: int, stream: int, count: int) -> np.ndarray:
    """Philox4x32-10 by Python integers, one word at a time."""
    words = []
    for block in range(-(-count // 4)):
        c = [block, 0, stream & 0xFFFFFFFF, (stream >> 32) & 0xFFFFFFFF]
        k = [seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF]
        for _ in range(10):
            a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
            c = [b >> 32 ^ c[1] ^ k[0], b & 0xFFFFFFFF, a >> 32 ^ c[3] ^ k[1], a & 0xFFFFFFFF]
            k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
        words += c
    return np.array(words[:count], dtype=np.uint64)


@pytest.mark.parametrize("count", (1, 4, 7, 64))
def test_words_of_a_stream(count: int) -> None:
    pairs = [(0, 0), (-1, 2**63 - 1), (2**40 + 5, -3), (12345, 2**33)]
    seed, stream = (torch.tensor(v) for v in zip(*pairs, strict=True))
    words = random_words(seed, stream, count)
    assert words.tolist() == [numpy_words(s, o, count).tolist() for s, o in pairs]


@pytest.mark.parametrize(
    "options",
    ({}, {"temperature": 0.7}, {"top_k": 20}, {"top_p": 0.8}, {"top_k": 40, "top_p": 0.9, "temperature": 1.5}),
)
@sample_kernels
def test_tokens_follow_from_seed_and_offset_alone(kernel: str, options: dict[str, Any]) -> None:
    """The race of the docstring in numpy, in fp64: the same tokens."""
    rows, vocab = 12, 101
    logits = torch.randn(rows, vocab) * 2
    seeds, offsets = [int(s) for s in torch.randint(-(2**62), 2**62, (rows,))], list(range(rows))
    z = logits.double().numpy() / options.get("temperature", 1.0)
    order = np.argsort(-logits.numpy(), axis=1, kind="stable")
    place = np.argsort(order, axis=1)
    keep = place < options.get("top_k", vocab)
    share = np.where(keep, np.exp(z), 0)
    share /= share.sum(1, keepdims=True)
    before = np.take_along_axis(share, order, 1).cumsum(1) - np.take_along_axis(share, order, 1)
    keep &= np.take_along_axis(before, place, 1) < options.get("top_p", 2.0)
    words = np.stack([numpy_words(s, o, vocab) for s, o in zip(seeds, offsets, strict=True)])
    v = np.minimum((words.astype(np.float32) + np.float32(0.5)) * np.float32(2**-32), np.float32(1 - 2**-24))
    score = np.where(keep, z - np.log(-np.log1p(-v.astype(np.float64))), -np.inf)
    token = sample(kernel, logits, seed=seeds, offset=offsets, **options)
    assert token.tolist() == score.argmax(1).tolist()


@sample_kernels
def test_the_place_in_the_batch_does_not_matter(kernel: str) -> None:
    logits = torch.randn(9, 300)
    options = parameters(
        9, [0, 5, 50] * 3, [0.9, 1.0, 0.5] * 3, [1.0, 0.0, 2.0] * 3, list(range(9)), list(range(9, 18))
    )
    token = call("top_k_top_p_sample", kernel, logits, *options)
    order = torch.randperm(9)
    compare(call("top_k_top_p_sample", kernel, logits[order], *[o[order] for o in options]), token[order], exact=True)
    for i in range(9):
        compare(
            call("top_k_top_p_sample", kernel, logits[i : i + 1], *[o[i : i + 1] for o in options]),
            token[i : i + 1],
            exact=True,
        )


@sample_kernels
def test_draws_follow_the_distribution(kernel: str) -> None:
    """20000 draws: each count within five standard deviations of its expectation."""
    probs = torch.tensor([0.4, 0.3, 0.15, 0.1, 0.04, 0.01], dtype=torch.float64)
    n = 20000
    logits = probs.log().float().expand(n, 6)
    for draw in ({"seed": 1, "offset": list(range(n))}, {"seed": list(range(n)), "offset": 1}):
        counts = torch.bincount(sample(kernel, logits, **draw), minlength=6)
        assert ((counts - n * probs).abs() < 5 * (n * probs * (1 - probs)).sqrt()).all(), counts


@pytest.mark.parametrize("temperature", (0.0, -1.0, NAN, 1e-38))
@sample_kernels
def test_temperature_zero_is_greedy(kernel: str, temperature: float) -> None:
    logits = torch.randn(20, 77)
    token = sample(kernel, logits, temperature=temperature, seed=list(range(20)))
    compare(token, tskernel.argmax(logits), exact=True)
    tied = torch.tensor([[1.0, 5.0, 5.0, 5.0]]).expand(30, 4)
    if temperature != 1e-38:
        assert sample(kernel, tied, temperature=temperature, seed=list(range(30))).tolist() == [1] * 30


@sample_kernels
def test_infinite_temperature_is_uniform_over_what_is_possible(kernel: str) -> None:
    logits = torch.tensor([[3.0, -INF, -900.0, NAN, 0.0]]).expand(200, 5)
    assert set(sample(kernel, logits, temperature=INF, seed=list(range(200))).tolist()) == {0, 2, 4}


@pytest.mark.parametrize("dtype", FLOATS)
def test_kernels_agree_on_real_vocabularies(dtype: torch.dtype) -> None:
    logits = (torch.randn(4, 32000) * 3).to(dtype)
    options = parameters(4, [0, 50, 0, 1000], [1.0, 0.9, 0.95, 0.5], [1.0, 0.7, 1.2, 0.1], [1, 2, 3, 4], [5, 6, 7, 8])
    tokens = [call("top_k_top_p_sample", k, logits, *options) for k in kernel_names("top_k_top_p_sample")]
    for token in tokens[1:]:
        compare(token, tokens[0], exact=True)


@pytest.mark.parametrize(
    ("change", "text"),
    (
        ({"logits": torch.zeros(2, 0)}, r"logits.shape: expected at least one column, got \(2, 0\)"),
        ({"logits": torch.zeros(8)}, r"logits: expected 2 dimensions, got shape \(8,\)"),
        ({"top_k": torch.zeros(2)}, "top_k.dtype: expected int32, got float32"),
        ({"top_p": torch.zeros(3)}, r"top_p.shape: expected \(2,\), got \(3,\)"),
        ({"seed": torch.zeros(2, dtype=torch.int32)}, "seed.dtype: expected int64, got int32"),
    ),
)
def test_the_sampler_refuses(change: dict[str, Tensor], text: str) -> None:
    names = ("top_k", "top_p", "temperature", "seed", "offset")
    arguments = {"logits": torch.zeros(2, 8), **dict(zip(names, parameters(2), strict=True)), **change}
    with pytest.raises(ValueError, match=f"tokenspeed::top_k_top_p_sample: {text}"):
        tskernel.top_k_top_p_sample(**arguments)


# Penalties


@pytest.mark.parametrize("dtype", FLOATS)
@penalty_kernels
def test_penalties_lower_what_was_seen(kernel: str, dtype: torch.dtype) -> None:
    wide = torch.full((3, 8), -7.0, dtype=dtype)
    logits = wide[:, 2:7]
    logits[:] = torch.tensor([2.0, -2.0, 2.0, -INF, 0.5])
    prompt = torch.tensor([[True, True, False, False, False]]).expand(3, 5)
    counts = torch.tensor([[0, 1, 3, 2, 0]], dtype=torch.int32).expand(3, 5)
    presence, frequency, repetition = (
        torch.tensor([0.0, 0.5, 0.0]),
        torch.tensor([0.0, 0.25, 0.0]),
        torch.tensor([1.0, 1.0, 2.0]),
    )
    assert call("apply_penalties_", kernel, logits, prompt, counts, presence, frequency, repetition) is None
    want = [[2.0, -2.0, 2.0, -INF, 0.5], [2.0, -2.75, 0.75, -INF, 0.5], [1.0, -4.0, 1.0, -INF, 0.5]]
    assert logits.tolist() == want
    assert (wide[:, [0, 1, 7]] == -7).all()


@penalty_kernels
def test_neutral_penalties_change_no_bit(kernel: str) -> None:
    logits = torch.randn(4, 33)
    logits[0, :3] = torch.tensor([NAN, INF, -0.0])
    before = logits.clone()
    ones, zeros = torch.ones(4), torch.zeros(4)
    counts = torch.randint(0, 3, (4, 33), dtype=torch.int32)
    call("apply_penalties_", kernel, logits, torch.rand(4, 33) > 0.5, counts, zeros, zeros, ones)
    assert torch.equal(logits.view(torch.int32), before.view(torch.int32))


# Verification


@verify_kernels
def test_verify_accepts_the_agreeing_prefix(kernel: str) -> None:
    target = torch.tensor([[5, 6, 7, 8]] * 6, dtype=torch.int32)
    draft = torch.tensor([[5, 6, 7], [5, 6, 9], [5, 9, 7], [9, 6, 7], [5, -1, -1], [-1, -1, -1]], dtype=torch.int32)
    accepted, tokens = call("verify_chain_greedy", kernel, draft, target)
    assert accepted.tolist() == [3, 2, 1, 0, 1, 0]
    assert tokens.tolist() == [
        [5, 6, 7, 8],
        [5, 6, 7, -1],
        [5, 6, -1, -1],
        [5, -1, -1, -1],
        [5, 6, -1, -1],
        [5, -1, -1, -1],
    ]
    assert accepted.dtype == tokens.dtype == torch.int32


@verify_kernels
def test_verify_never_accepts_padding(kernel: str) -> None:
    accepted, tokens = call("verify_chain_greedy", kernel, torch.tensor([[-1, 3]]), torch.tensor([[-1, 3, 4]]))
    assert (accepted.tolist(), tokens.tolist()) == ([0], [[-1, -1, -1]])


@few
@given(st.integers(0, 6), st.integers(0, 6), st.integers(0, 99))
def test_verify_equals_greedy_decoding(rows: int, drafted: int, seed: int) -> None:
    make = torch.Generator().manual_seed(seed)
    draft = torch.randint(-1, 2, (rows, drafted), generator=make)
    target = torch.randint(0, 2, (rows, drafted + 1), generator=make)
    want: list[list[int]] = []
    for d, t in zip(draft.tolist(), target.tolist(), strict=True):
        n = next((i for i in range(drafted) if d[i] != t[i]), drafted)
        want.append([*t[: n + 1], *[-1] * (drafted - n)])
    for kernel in kernel_names("verify_chain_greedy"):
        accepted, tokens = call("verify_chain_greedy", kernel, draft, target)
        assert tokens.tolist() == want
        assert accepted.tolist() == [sum(i >= 0 for i in row) - 1 for row in want]
