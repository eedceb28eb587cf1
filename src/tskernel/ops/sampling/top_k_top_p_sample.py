"""top_k_top_p_sample: draw one token per row after temperature, top-k and top-p."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from tskernel.library import Cost, Make, Sample, empty, nbytes, op, wide
from tskernel.ops.sampling._filters import (
    best_first,
    check_per_row,
    check_rows,
    clean_logits,
    effective_top_k,
    shortest_prefix,
    unsorted,
)
from tskernel.ops.sampling._race import race_winner, scaled_logits


@op(
    roles=("logits",),
    traits={"vocab": 128256},
    shard={
        "batch": {"logits": 0, "top_k": 0, "top_p": 0, "temperature": 0, "seed": 0, "offset": 0, "return": 0},
    },
)
def top_k_top_p_sample(
    logits: Tensor, top_k: Tensor, top_p: Tensor, temperature: Tensor, seed: Tensor, offset: Tensor
) -> Tensor:
    """Draw a token per row: temperature, then top-k, then top-p on the renormalised distribution, then one exact draw.

    Per row: logits are divided by ``temperature``; exactly ``top_k`` largest stay (``<= 0`` or ``>= V``: all), equal
    logits by lowest id; of their softmax the shortest best-first prefix with at least ``top_p`` of the mass stays
    (``>= 1``: all, ``<= 0``: the best alone). ``temperature <= 0`` or NaN is greedy, and then equals ``argmax``.

    The draw is the Gumbel race: the kept token with the largest ``logit / temperature + g`` wins (lowest id among
    equals), with ``g = -log(-log1p(-v))``, ``v = min((fp32(w) + 0.5) * 2^-32, 1 - 2^-24)`` in fp32, and ``w`` the
    Philox4x32-10 word of (``seed``, ``offset``, token id): output ``id % 4`` of the call with key ``(seed_low,
    seed_high)`` and counter ``(id // 4, 0, offset_low, offset_high)``, each 32 bits. So the token is a function of the
    row's logits, parameters, seed and offset alone, on every device and in every kernel, wherever the row stands in
    the batch. (Two tokens whose scores differ by less than the rounding of ``log`` may change places between devices.)
    Advance ``offset`` by one per draw.

    NaN logits count as -inf. +inf logits share the row alone. A row without any finite or +inf logit gives id 0.

    Shapes: ``logits [B, V]`` (any strides), all others ``[B]`` -> ``[B]``.
    Dtypes: ``logits`` fp32, fp16 or bf16; ``top_k`` int32; ``top_p`` and ``temperature`` fp32; ``seed`` and ``offset``
    int64; the result is int32. Scores in fp32, prefix sums in fp64.
    Raises: ValueError when V is 0 or a parameter does not have B elements.
    Source: Gumbel 1954 (the race); Salmon et al. 2011, https://doi.org/10.1145/2063384.2063405 (Philox).
    """
    x = clean_logits(logits, wide(logits))
    scaled, greedy = scaled_logits(x, temperature)
    _, ids = best_first(x)
    rank = torch.arange(x.shape[1], device=x.device)
    keep = rank < effective_top_k(top_k, x.shape[1]).masked_fill(greedy, 1)
    weights = scaled.gather(1, ids).exp().masked_fill(~keep, 0.0)
    keep = unsorted(keep & shortest_prefix(weights, top_p), ids)
    return race_winner(scaled, keep & (x > float("-inf")), seed, offset)


@top_k_top_p_sample.check
def _(logits: Tensor, top_k: Tensor, top_p: Tensor, temperature: Tensor, seed: Tensor, offset: Tensor) -> None:
    check_rows("logits", logits)
    check_per_row("top_k", top_k, logits, torch.int32)
    check_per_row("top_p", top_p, logits, torch.float32)
    check_per_row("temperature", temperature, logits, torch.float32)
    check_per_row("seed", seed, logits, torch.int64)
    check_per_row("offset", offset, logits, torch.int64)


@top_k_top_p_sample.fake
def _(logits: Tensor) -> Tensor:
    return empty((logits.shape[0],), logits, torch.int32)


@top_k_top_p_sample.trait_values
def _(logits: Tensor) -> dict[str, object]:
    return {"vocab": logits.shape[1]}


@top_k_top_p_sample.samples
def _(make: Make, dtype: torch.dtype) -> Iterator[Sample]:
    shapes = {"ordinary": (4, 1024), "one": (1, 1), "odd": (3, 769), "empty": (0, 64), "transposed": (5, 128)}
    for name, (rows, vocab) in shapes.items():
        logits = make.randn((vocab, rows), dtype).t() if name == "transposed" else make.randn((rows, vocab), dtype)
        yield Sample(
            name,
            logits=logits * 3,
            top_k=make.randint(-1, 50, (rows,), torch.int32),
            top_p=make.rand((rows,), torch.float32) * 1.2,
            temperature=make.rand((rows,), torch.float32) * 2 - 0.2,
            seed=make.randint(-(2**62), 2**62, (rows,), torch.int64),
            offset=make.randint(0, 2**40, (rows,), torch.int64),
        )


@top_k_top_p_sample.cost
def _(logits: Tensor) -> Cost:
    return Cost(bytes=nbytes(logits) + 40 * logits.shape[0], flops=40 * logits.numel())
