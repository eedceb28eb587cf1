"""Calls for the native routing and sampling kernels: long and odd rows, ties, rows without a usable value, layouts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from native_cases import LAYOUTS, laid_out
from torch import Tensor

from tskernel.library import Sample
from tskernel.testing import SampleMaker

FP32, I32, I64 = torch.float32, torch.int32, torch.int64
INF, NAN = float("inf"), float("nan")
RENORMS = ("top_k_renorm", "top_p_renorm", "min_p_renorm")
K = (1, 50, 3, 1000, -1, 2**30, 0, 7, 2000)
P = (0.9, 0.5, 1.0, 0.99, 0.0, 1e-6, 0.999999, 1.5, 0.3)
TEMPERATURE = (1.0, 0.7, 1.5, 0.01, 0.0, 30.0, INF, 1e-30, NAN)


def vocab_shapes(large: bool) -> Iterator[tuple[int, int]]:
    """Yield rows and widths: one block or many for a row, whole accesses or single ones, more rows than blocks."""
    yield from ((9, 2048), (2, 8191), (1, 16384))
    if large:
        yield from ((3, 32000), (300, 1030), (1, 151936), (9, 128256), (2, 262144), (1, 50257), (70, 40000))


def values_of(make: SampleMaker, rows: int, width: int, kind: str) -> Tensor:
    """Return logits in fp32: spread out, flat, or of a few values only; the bad rows are NaN, -inf, and two mixed."""
    x = make.randn((rows, width), FP32) * (0.05 if kind == "flat" else 3)
    if kind == "ties":
        x = x.round()
    elif kind == "constant":
        x = torch.zeros_like(x)
    elif kind == "masked":
        x[:, width // 5 :] = -1e9
    elif kind == "bad" and rows >= 4:
        x[0], x[1] = NAN, -INF
        x[2, width // 2], x[2, width // 3] = INF, INF
        x[3, ::2] = NAN
        x[3, 1::4] = -INF
    return x


def parameter(make: SampleMaker, values: tuple[Any, ...], rows: int, dtype: torch.dtype) -> Tensor:
    """Return the values in turn, one for each row."""
    return make.tensor([values[i % len(values)] for i in range(rows)], dtype)


def vocab_call(op: str, make: SampleMaker, x: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the arguments of a sampling op for these logits, with other parameters in every row."""
    rows = x.shape[0]
    if op in RENORMS:
        probs = torch.where(x.isfinite().all(1, keepdim=True), x.softmax(-1), x).to(dtype)
        name = op.removesuffix("_renorm")
        per_row = parameter(make, K, rows, I32) if name == "top_k" else parameter(make, P, rows, FP32)
        return {"probs": probs, name: per_row}
    if op == "argmax":
        return {"logits": x.to(dtype)}
    if op == "apply_penalties_":
        seen = make.randint(0, 9, tuple(x.shape), I32)
        return {
            "logits": torch.nan_to_num(x, nan=0.0, posinf=9.0, neginf=-INF).to(dtype),
            "prompt_mask": make.randint(0, 5, tuple(x.shape), I32) == 1,
            "output_counts": (seen - 5).clamp(min=0).to(I32),
            "presence_penalty": parameter(make, (0.0, 0.5), rows, FP32),
            "frequency_penalty": parameter(make, (0.0, -0.2, 0.1), rows, FP32),
            "repetition_penalty": parameter(make, (1.0, 1.3), rows, FP32),
        }
    return {
        "logits": x.to(dtype),
        "top_k": parameter(make, K, rows, I32),
        "top_p": parameter(make, P[1:], rows, FP32),
        "temperature": parameter(make, TEMPERATURE, rows, FP32),
        "seed": make.randint(-(2**62), 2**62, (rows,), I64),
        "offset": make.randint(0, 2**40, (rows,), I64),
    }


def vocab_samples(op: str, make: SampleMaker, dtype: torch.dtype, large: bool) -> Iterator[Sample]:
    """Yield calls of one sampling op."""
    for rows, width in vocab_shapes(large):
        yield Sample(f"{rows}x{width}", **vocab_call(op, make, values_of(make, rows, width, "spread"), dtype))
    rows, width = (300, 9000) if large else (9, 5000)
    for kind in ("flat", "ties", "constant", "masked", "bad"):
        yield Sample(kind, **vocab_call(op, make, values_of(make, rows, width, kind), dtype))
    for width in (64, 67):
        for layout in LAYOUTS:
            arguments = vocab_call(op, make, values_of(make, 9, width, "spread"), dtype)
            name = "probs" if "probs" in arguments else "logits"
            yield Sample(f"{width} {layout}", **{**arguments, name: laid_out(arguments[name], layout)})


def topk_samples(make: SampleMaker, dtype: torch.dtype, large: bool) -> Iterator[Sample]:
    """Yield calls of moe_topk: every number of registers, every score, groups of all sizes, ties."""
    cases = (
        (8, 2, 1, 1), (40, 4, 4, 2), (128, 8, 1, 1), (256, 8, 8, 4), (384, 6, 1, 1), (512, 16, 64, 9), (96, 3, 32, 5),
    )  # fmt: skip
    for experts, top_k, groups, kept in cases:
        for i, score in enumerate(("softmax", "sigmoid", "sqrt_softplus")):
            for biased in (False, True):
                logits = make.randn((1100 if large else 5, experts), dtype)
                logits[1] = logits[1].round()
                logits[2] = 0.0
                bias = make.randn((experts,), FP32 if i else dtype) if biased else None
                yield Sample(
                    f"{experts} {score} {groups} {biased}",
                    router_logits=logits, top_k=top_k, score_function=score, correction_bias=bias, n_group=groups,
                    topk_group=kept, renormalize=i != 1 or biased, routed_scaling_factor=1.0 + i,
                )  # fmt: skip
    bad = make.randn((5, 60), dtype)
    bad[1], bad[2], bad[3, ::2], bad[4, 7] = NAN, -INF, NAN, INF
    for groups, kept in ((1, 1), (5, 2)):
        yield Sample("bad", router_logits=bad, top_k=4, n_group=groups, topk_group=kept, renormalize=groups == 1)


def dispatch_samples(make: SampleMaker, dtype: torch.dtype, large: bool) -> Iterator[Sample]:
    """Yield calls of moe_dispatch: one segment and several, skewed and skipped experts, maps."""
    sizes = ((1, 8, 128, 16), (700, 6, 60, 64), (1500, 3, 512, 8), (600, 8, 3, 128), (1024, 4, 7, 1))
    for tokens, top_k, experts, block in (*sizes, *(((16384, 8, 256, 64), (9000, 16, 512, 128)) if large else ())):
        ids = make.randint(-1, experts + 1, (tokens, top_k), dtype)
        ids[: tokens // 3] = experts - 1
        yield Sample(f"{tokens}x{top_k} of {experts}", topk_ids=ids, num_experts=experts, block_size=block)
    expert_map = make.permutation(64, I32) - 30
    ids = make.randint(-2, 70, (900, 5), dtype)
    yield Sample("mapped", topk_ids=ids, num_experts=33, block_size=32, expert_map=expert_map)


def verify_samples(make: SampleMaker, dtype: torch.dtype) -> Iterator[Sample]:
    """Yield calls of verify_chain_greedy: more tokens than lanes, more rows than blocks."""
    for rows, drafted in ((300, 3), (5, 70), (2, 32)):
        draft = (make.randint(0, 40, (rows, drafted), dtype) == 0).to(dtype)
        yield Sample(f"{rows}x{drafted}", draft_tokens=draft, target_ids=make.full((rows, drafted + 1), 0, dtype))


def native_samples(op: str, make: SampleMaker, dtype: torch.dtype, *, large: bool = False) -> Iterator[Sample]:
    """Yield calls of one routing or sampling op; ``dtype`` is of the ids where an op takes only those."""
    if op == "moe_topk":
        yield from topk_samples(make, dtype, large)
    elif op == "moe_dispatch":
        yield from dispatch_samples(make, dtype, large)
    elif op == "verify_chain_greedy":
        yield from verify_samples(make, dtype)
    else:
        yield from vocab_samples(op, make, dtype, large)
