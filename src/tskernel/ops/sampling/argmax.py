"""argmax: the token with the largest logit, for greedy decoding."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from tskernel.library import Cost, Make, Sample, empty, nbytes, op, wide
from tskernel.ops.sampling._filters import check_rows, clean_logits


@op(
    roles=("logits",),
    traits={"vocab": 128256},
    shard={"batch": {"logits": 0, "return": 0}},
)
def argmax(logits: Tensor) -> Tensor:
    """Return the id of the largest logit of each row, the lowest id among equals.

    NaN never wins against a number, not even against -inf; a row without a finite or +inf logit gives id 0.

    Shapes: ``logits [B, V]`` (any strides) -> ``[B]``.
    Dtypes: ``logits`` fp32, fp16 or bf16; the result is int32.
    Raises: ValueError when V is 0.
    """
    return clean_logits(logits, wide(logits)).argmax(-1).to(torch.int32)


@argmax.check
def _(logits: Tensor) -> None:
    check_rows("logits", logits)


@argmax.fake
def _(logits: Tensor) -> Tensor:
    return empty((logits.shape[0],), logits, torch.int32)


@argmax.trait_values
def _(logits: Tensor) -> dict[str, object]:
    return {"vocab": logits.shape[1]}


@argmax.samples
def _(make: Make, dtype: torch.dtype) -> Iterator[Sample]:
    for name, shape in {"ordinary": (4, 1024), "one": (1, 1), "odd": (3, 769), "empty": (0, 64)}.items():
        yield Sample(name, logits=make.randn(shape, dtype))
    yield Sample("transposed", logits=make.randn((128, 5), dtype).t())
    yield Sample("sliced", logits=make.randn((5, 300), dtype)[1:, 7:263])


@argmax.cost
def _(logits: Tensor) -> Cost:
    return Cost(bytes=nbytes(logits) + 4 * logits.shape[0], flops=logits.numel())
