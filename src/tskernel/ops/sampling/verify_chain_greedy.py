"""verify_chain_greedy: accept the drafted tokens that greedy decoding would have produced."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from tskernel.library import Cost, Make, Sample, empty, expect_dim, expect_dtype, expect_shape, nbytes, op


@op(
    roles=("draft_tokens",),
    traits={"num_draft_tokens": 4},
    dtypes=(torch.int32, torch.int64),
    shard={"batch": {"draft_tokens": 0, "target_ids": 0, "return": 0, "return1": 0}},
)
def verify_chain_greedy(draft_tokens: Tensor, target_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Accept the longest prefix of each draft that agrees with the target, and add the target's next token.

    ``target_ids[b, i]`` is the target model's greedy token after the first ``i`` draft tokens (``argmax`` of its
    logits). Draft token ``i`` is accepted while it and all before it equal the target's. Returns ``accepted_len`` (0
    .. n, without the added token) and ``tokens``: the accepted tokens, then the target's token at position
    ``accepted_len`` (the bonus token, or the correction), then -1. A negative draft token is never accepted: pad
    shorter drafts with -1.

    Shapes: ``draft_tokens [B, n]``, ``target_ids [B, n + 1]`` (any strides) -> ``[B]``, ``[B, n + 1]``; n may be 0.
    Dtypes: int32 or int64 ids; both results are int32.
    Raises: ValueError when ``target_ids`` is not one column wider than ``draft_tokens``.
    Source: Leviathan et al. 2023, https://arxiv.org/abs/2211.17192 (greedy case).
    """
    drafted = draft_tokens.shape[1]
    agrees = (draft_tokens == target_ids[:, :drafted]) & (draft_tokens >= 0)
    accepted = agrees.to(torch.int32).cumprod(-1).sum(-1, dtype=torch.int32)
    position = torch.arange(drafted + 1, device=target_ids.device)
    tokens = target_ids.to(torch.int32).masked_fill(position > accepted.unsqueeze(1), -1)
    return accepted, tokens.contiguous()


@verify_chain_greedy.check
def _(draft_tokens: Tensor, target_ids: Tensor) -> None:
    expect_dtype("draft_tokens", draft_tokens, (torch.int32, torch.int64))
    expect_dtype("target_ids", target_ids, (torch.int32, torch.int64))
    expect_dim("draft_tokens", draft_tokens, 2)
    expect_shape("target_ids", target_ids, (draft_tokens.shape[0], draft_tokens.shape[1] + 1))


@verify_chain_greedy.fake
def _(target_ids: Tensor) -> tuple[Tensor, Tensor]:
    return empty((target_ids.shape[0],), target_ids, torch.int32), empty(target_ids.shape, target_ids, torch.int32)


@verify_chain_greedy.trait_values
def _(draft_tokens: Tensor) -> dict[str, object]:
    return {"num_draft_tokens": draft_tokens.shape[1]}


@verify_chain_greedy.samples
def _(make: Make, dtype: torch.dtype) -> Iterator[Sample]:
    for name, (rows, drafted) in {
        "ordinary": (5, 4),
        "one": (1, 1),
        "odd": (3, 7),
        "empty": (0, 4),
        "undrafted": (3, 0),
    }.items():
        draft = make.randint(0, 2, (rows, drafted), dtype)
        yield Sample(name, draft_tokens=draft, target_ids=make.randint(0, 2, (rows, drafted + 1), dtype))
    draft = make.randint(0, 2, (4, 6), dtype).t()
    yield Sample("transposed", draft_tokens=draft, target_ids=make.randint(0, 2, (6, 9), torch.int64)[:, 2:7])


@verify_chain_greedy.cost
def _(draft_tokens: Tensor, target_ids: Tensor) -> Cost:
    return Cost(bytes=nbytes(draft_tokens, target_ids) + 4 * target_ids.numel(), flops=draft_tokens.numel())
