"""apply_penalties_: repetition, frequency and presence penalties on logits, in place."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from tskernel.library import Cost, Make, Sample, expect_dtype, expect_shape, nbytes, op, wide
from tskernel.ops.sampling._filters import check_per_row, check_rows


@op(
    mutates=("logits",),
    roles=("logits",),
    traits={"vocab": 128256},
    shard={
        "batch": {
            "logits": 0,
            "prompt_mask": 0,
            "output_counts": 0,
            "presence_penalty": 0,
            "frequency_penalty": 0,
            "repetition_penalty": 0,
        },
    },
)
def apply_penalties_(
    logits: Tensor,
    prompt_mask: Tensor,
    output_counts: Tensor,
    presence_penalty: Tensor,
    frequency_penalty: Tensor,
    repetition_penalty: Tensor,
) -> None:
    """Lower the logits of tokens that were seen before.

    First, tokens that stand in the prompt or in the output have a positive logit divided, any other multiplied, by
    ``repetition_penalty``. Then ``frequency_penalty * count + presence_penalty * (count > 0)`` is subtracted, where
    ``count`` is how often the token was output; prompt tokens do not count. Penalties 1, 0 and 0 leave a row
    bit-equal.

    Shapes: ``logits [B, V]`` (any strides, written), ``prompt_mask`` and ``output_counts`` ``[B, V]``, each penalty
    ``[B]``.
    Dtypes: ``logits`` fp32, fp16 or bf16; ``prompt_mask`` bool; ``output_counts`` int32; penalties fp32; fp32
    arithmetic, one rounding.
    Raises: ValueError when V is 0 or a shape differs.
    Source: Keskar et al. 2019, https://arxiv.org/abs/1909.05858 (repetition); the OpenAI API reference (frequency,
    presence).
    """
    w = wide(logits)
    x = logits.to(w)
    repetition = repetition_penalty.to(w).unsqueeze(1)
    seen = prompt_mask | (output_counts > 0)
    x = torch.where(seen, torch.where(x > 0, x / repetition, x * repetition), x)
    x = x - frequency_penalty.to(w).unsqueeze(1) * output_counts
    x = x - presence_penalty.to(w).unsqueeze(1) * (output_counts > 0)
    logits.copy_(x)


@apply_penalties_.check
def _(
    logits: Tensor,
    prompt_mask: Tensor,
    output_counts: Tensor,
    presence_penalty: Tensor,
    frequency_penalty: Tensor,
    repetition_penalty: Tensor,
) -> None:
    check_rows("logits", logits)
    expect_shape("prompt_mask", prompt_mask, logits.shape)
    expect_dtype("prompt_mask", prompt_mask, (torch.bool,))
    expect_shape("output_counts", output_counts, logits.shape)
    expect_dtype("output_counts", output_counts, (torch.int32,))
    check_per_row("presence_penalty", presence_penalty, logits, torch.float32)
    check_per_row("frequency_penalty", frequency_penalty, logits, torch.float32)
    check_per_row("repetition_penalty", repetition_penalty, logits, torch.float32)


@apply_penalties_.trait_values
def _(logits: Tensor) -> dict[str, object]:
    return {"vocab": logits.shape[1]}


@apply_penalties_.samples
def _(make: Make, dtype: torch.dtype) -> Iterator[Sample]:
    shapes = {"ordinary": (4, 256), "one": (1, 1), "odd": (3, 769), "empty": (0, 64), "sliced": (4, 65)}
    for name, (rows, vocab) in shapes.items():
        logits = make.randn((rows, vocab + 6), dtype)[:, 3:-3] if name == "sliced" else make.randn((rows, vocab), dtype)
        yield Sample(
            name,
            logits=logits,
            prompt_mask=make.randint(0, 2, (rows, vocab), torch.int32).bool(),
            output_counts=make.randint(-2, 4, (rows, vocab), torch.int32).clamp(min=0),
            presence_penalty=make.rand((rows,), torch.float32),
            frequency_penalty=make.rand((rows,), torch.float32) - 0.5,
            repetition_penalty=make.rand((rows,), torch.float32) + 0.5,
        )


@apply_penalties_.cost
def _(logits: Tensor, prompt_mask: Tensor, output_counts: Tensor) -> Cost:
    return Cost(bytes=2 * nbytes(logits) + nbytes(prompt_mask, output_counts), flops=5 * logits.numel())
