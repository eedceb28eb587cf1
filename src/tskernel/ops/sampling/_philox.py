"""Philox4x32-10, the counter-based generator of the sampling ops, in int64 tensors that hold unsigned 32-bit words.

A word is a pure function of (seed, stream, index), so a draw depends neither on the device, nor on the kernel, nor on
the row's place in the batch. Word ``i`` of (seed, stream) is output ``i % 4`` of the Philox call with key ``(seed &
0xffffffff, seed >> 32)`` and counter ``(i // 4, 0, stream & 0xffffffff, stream >> 32)``: the word that cuRAND gives
after ``curand_init(seed, stream, i)`` and that ``at::Philox4_32(seed, stream)`` gives at position ``i``.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_BELOW_ONE = 1.0 - 2.0**-24  # the largest fp32 below one


def _multiply(word: Tensor, multiplier: int) -> tuple[Tensor, Tensor]:
    """Return the high and low words of the 64-bit product, by halves: the whole product would overflow int64."""
    low = (word & 0xFFFF) * multiplier
    high = (word >> 16) * multiplier + (low >> 16)
    return high >> 16, ((high & 0xFFFF) << 16) | (low & 0xFFFF)


def philox4x32(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Return the four output words for four counter words and two key words, which broadcast against each other.

    Source: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3", https://doi.org/10.1145/2063384.2063405.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        high0, low0 = _multiply(c0, _MULTIPLIERS[0])
        high1, low1 = _multiply(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _KEY_STEPS[0]) & _MASK, (k1 + _KEY_STEPS[1]) & _MASK
    return c0, c1, c2, c3


def random_words(seed: Tensor, stream: Tensor, count: int) -> Tensor:
    """Return words 0 .. count-1 of each (seed, stream) pair: two int64 ``[B]`` to int64 ``[B, count]`` in [0, 2^32)."""
    block = torch.arange((count + 3) // 4, device=seed.device, dtype=torch.int64).unsqueeze(0)
    seed, stream = seed.unsqueeze(1), stream.unsqueeze(1)
    counter = (block, torch.zeros_like(seed), stream & _MASK, (stream >> 32) & _MASK)
    words = philox4x32(counter, (seed & _MASK, (seed >> 32) & _MASK))
    return torch.stack(words, dim=-1).flatten(1)[:, :count]


def gumbel_noise(seed: Tensor, stream: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    """Return Gumbel noise ``-log(-log1p(-v))`` with ``v = min((fp32(word) + 0.5) * 2^-32, 1 - 2^-24)`` in fp32.

    ``v`` is finest near 0, where the winners of a race over a large vocabulary lie, so that ties are rare.
    """
    words = random_words(seed, stream, count).to(torch.float32)
    uniform = ((words + 0.5) * 2.0**-32).clamp(max=_BELOW_ONE).to(dtype)
    return -torch.log(-torch.log1p(-uniform))
