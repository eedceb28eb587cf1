"""The rows of the MoE benchmark: a model's experts and a number of tokens, their inputs and the right results."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from _gemm_rows import BLOCK, BYTES_PER_S, FLOPS_PER_S, FP4_RMS, MX_BLOCK
from torch import Tensor, nn

from tskernel import moe
from tskernel.library import ops
from tskernel.testing import TOLERANCES, compare

DEVICE = "cuda"
BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
COLD = 150 << 20  # bytes of different experts' weights that a graph walks over: three times the L2 cache of an H200
MOST_SETS = 16
SAMPLE = 4  # tokens at either end that are checked
TOKENS: Final = (1, 2, 4, 8, 16, 64, 512, 4096, 8192)
FEW: Final = 16  # tokens of a decode step, whose time is that of reading weights
DRAWS: Final = 400  # of which the one that sends a rank its even share is kept
Arguments = dict[str, Any]


@dataclass(frozen=True)
class Model:
    """A layer of experts. ``local`` of the ``experts`` that are routed to are on this device: the first ones."""

    name: str
    experts: int
    top_k: int
    hidden: int
    inner: int
    quant: str = "none"
    local: int = 0
    activation: str = "silu"
    biased: bool = False
    score: str = "softmax"
    n_group: int = 1
    topk_group: int = 1
    scaling: float = 1.0

    @property
    def here(self) -> int:
        """How many experts are on this device."""
        return self.local or self.experts

    @property
    def shapes(self) -> dict[str, tuple[int, int]]:
        """Rows and columns of the two weights of an expert."""
        return {"w13": (2 * self.inner, self.hidden), "w2": (self.hidden, self.inner)}

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert: weights, scales, biases."""
        total = 0
        for rows, columns in self.shapes.values():
            total += 2 * rows if self.biased else 0
            if self.quant == "none":
                total += 2 * rows * columns
            elif self.quant == "mxfp4":
                total += rows * columns // 2 + rows * columns // MX_BLOCK
            else:
                total += rows * columns + 4 * math.ceil(rows / BLOCK) * math.ceil(columns / BLOCK)
        return total

    @property
    def router(self) -> dict[str, Any]:
        """The options of ``moe_topk``, but for the bias."""
        return {
            "score_function": self.score, "renormalize": True, "routed_scaling_factor": self.scaling,
            "n_group": self.n_group, "topk_group": self.topk_group,
        }  # fmt: skip


MODELS: Final = (
    Model("gpt-oss mxfp4", 128, 4, 2880, 2880, "mxfp4", activation="swiglu_oai", biased=True),
    Model("gpt-oss bf16", 128, 4, 2880, 2880, activation="swiglu_oai", biased=True),
    Model("qwen3-30b-a3b bf16", 128, 8, 2048, 768),
    Model(
        "deepseek-v3 fp8 block, 32 of 256", 256, 8, 7168, 2048, "fp8_block", local=32, score="sigmoid", n_group=8,
        topk_group=4, scaling=2.5,
    ),
)  # fmt: skip


class Experts:
    """A model's weights on the device, in the op's order; other orders of them are made once and kept."""

    def __init__(self, model: Model) -> None:
        """Draw weights for which results are of order 1, in place or expert by expert: the largest have 13 GB."""
        self.model, self._kept = model, {}
        self.weights: dict[str, Tensor] = {}
        for name, (rows, columns) in model.shapes.items():
            self.weights |= drawn(name, model.quant, (model.here, rows, columns))
            if model.biased:
                self.weights[f"{name}_bias"] = torch.empty(model.here, rows, dtype=BF16, device=DEVICE).normal_(0, 0.1)
        self.bias, self.map = None, None
        if model.score == "sigmoid":
            self.bias = torch.randn(model.experts, device=DEVICE) * 0.01
        if model.local:
            ids = torch.arange(model.experts, dtype=torch.int32, device=DEVICE)
            self.map = torch.where(ids < model.local, ids, -1)

    def kept(self, key: str, make: Callable[[], Any]) -> Any:
        """Return what ``make`` gave the first time."""
        if key not in self._kept:
            self._kept[key] = make()
        return self._kept[key]

    def plan(self, kernel: str | None) -> moe.MoePlan:
        """Return the plan with a kernel, or with the one that is chosen."""
        m = self.model
        return moe.moe_plan(
            m.quant, BF16, m.activation, num_experts=m.here, top_k=m.top_k, hidden_size=m.hidden,
            intermediate_size=m.inner, with_bias=m.biased, with_expert_map=self.map is not None, **m.router,
            platform=None if DEVICE == "cuda" else DEVICE, override=kernel,
        )  # fmt: skip

    def layer(self, plan: moe.MoePlan) -> nn.Module:
        """Return a layer whose weights are prepared for a plan."""
        return self.kept(f"layout {plan.weight_layout}", lambda: self._layer(plan))

    def _layer(self, plan: moe.MoePlan) -> nn.Module:
        layer = nn.Module()
        for name, weight in self.weights.items():
            setattr(layer, moe.WEIGHTS[name], weight)
        layer.correction_bias, layer.expert_map = self.bias, self.map  # pyright: ignore[reportAttributeAccessIssue]
        moe.moe_process_weights(plan, layer)
        return layer

    def call(self, a: Arguments) -> Arguments:
        """Return the arguments of ``moe_fused`` for tokens and their routing."""
        m, (weights, ids) = self.model, self.route(a["logits"])
        return {
            "x": a["x"], **self.weights, "topk_weights": weights, "topk_ids": ids, "activation": m.activation,
            "quant": m.quant, "expert_map": self.map,
        }  # fmt: skip

    def route(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return weights and ids of the chosen experts, by the reference."""
        return ops["moe_topk"].body(logits, self.model.top_k, correction_bias=self.bias, **self.model.router)


def drawn(name: str, quant: str, shape: tuple[int, int, int]) -> dict[str, Tensor]:
    """Return a weight whose values are of order 1/sqrt(columns), and its scale."""
    experts, rows, columns = shape
    size = columns**-0.5
    if quant == "none":
        return {name: torch.empty(shape, dtype=BF16, device=DEVICE).normal_(0, size)}
    if quant == "mxfp4":
        middle = 127 + round(math.log2(size / FP4_RMS))
        packed = torch.empty(experts, rows, columns // 2, dtype=torch.uint8, device=DEVICE).random_(0, 256)
        scale = torch.empty(experts, rows, columns // MX_BLOCK, dtype=torch.uint8, device=DEVICE)
        return {name: packed, f"{name}_scale": scale.random_(middle - 1, middle + 2)}
    weight = torch.empty(shape, dtype=FP8, device=DEVICE)
    for e in range(experts):
        weight[e] = torch.randn(rows, columns, device=DEVICE).to(FP8)
    blocks = (experts, math.ceil(rows / BLOCK), math.ceil(columns / BLOCK))
    return {name: weight, f"{name}_scale": (torch.rand(blocks, device=DEVICE) + 0.5) * size}


@dataclass(frozen=True)
class Row:
    """A model's experts for a number of tokens, routing included."""

    model: Model
    tokens: int

    @property
    def name(self) -> str:
        """How the row is called in tables and on the command line."""
        return f"{self.model.name}, {self.tokens} tokens"

    def draw(self) -> Arguments:
        """Return tokens and router logits: in each row other numbers of an even grid, so that no two tie.

        Experts are equally likely. Logits are bf16, for sigmoid scores fp32, as the models have them.
        """
        m = self.model
        order = torch.rand(self.tokens, m.experts, device=DEVICE).argsort(1)
        logits = (order - m.experts // 2) * (8 / m.experts)
        x = torch.randn(self.tokens, m.hidden, dtype=BF16, device=DEVICE)
        return {"x": x, "logits": logits.float() if m.score == "sigmoid" else logits.to(BF16)}

    def slots(self, experts: Experts, a: Arguments) -> Tensor:
        """Return the local experts of all choices, those elsewhere left out."""
        ids = experts.route(a["logits"])[1].flatten()
        return ids[ids < self.model.here]

    def make(self, experts: Experts) -> Arguments:
        """Return tokens and logits; few tokens send a rank of several as many choices as its share of the experts."""
        made, m = self.draw(), self.model
        share = round(self.tokens * m.top_k * m.here / m.experts)
        if m.here < m.experts and self.tokens <= FEW:
            for _ in range(DRAWS):
                if self.slots(experts, made).numel() == share:
                    break
                made = self.draw()
        return made

    def sets(self, experts: Experts) -> list[Arguments]:
        """Return at least two sets of tokens, enough that their experts' weights outgrow the L2 cache."""
        made, seen = [], set()
        while len(made) < 2 or (len(made) < MOST_SETS and len(seen) * self.model.expert_bytes < COLD):
            made.append(self.make(experts))
            seen |= set(self.slots(experts, made[-1]).tolist())
            if len(seen) == self.model.here and len(made) >= 2:
                break
        return made

    def work(self, experts: Experts, sets: Sequence[Arguments]) -> dict[str, float]:
        """Return bytes of active weights, all bytes, operations and the floor in us, as means over the sets.

        Tokens are read and results written once.
        """
        m, slots = self.model, [self.slots(experts, a) for a in sets]
        weights = sum(s.unique().numel() for s in slots) / len(sets) * m.expert_bytes
        flops = sum(s.numel() for s in slots) / len(sets) * 2 * 3 * m.hidden * m.inner
        moved = weights + 2 * 2 * self.tokens * m.hidden
        width = 1 if m.quant.startswith("fp8") else 2
        floor = 1e6 * max(moved / BYTES_PER_S, flops / FLOPS_PER_S[width])
        return {"weight_bytes": weights, "bytes": moved, "flops": flops, "floor_us": floor}


def rows(words: Sequence[str] = ()) -> list[Row]:
    """Return all rows, or those whose name holds one of the words."""
    every = [Row(m, t) for m in MODELS for t in TOKENS]
    return [r for r in every if not words or any(w in r.name for w in words)]


# checking


def ends(tokens: int) -> list[int]:
    """Return the numbers of the first and last tokens."""
    return sorted({*range(min(SAMPLE, tokens)), *range(max(0, tokens - SAMPLE), tokens)})


def expected(experts: Experts, a: Arguments) -> Tensor:
    """Return the right results of the first and last tokens, float64 ``[n, H]``.

    One token at a time, so that only its experts are widened; weights stay as stored, which is exact.
    """
    call = experts.call(a)
    found = []
    for t in ends(a["x"].shape[0]):
        mine = {n: call[n][t : t + 1] for n in ("x", "topk_weights", "topk_ids")}
        found.append(ops["moe_fused"].body(**{**call, **mine, "x": mine["x"].double()}))
    return torch.cat(found)


def check(got: Tensor, want: Tensor, quant: str) -> str:
    """Return what is wrong with the results ``got [T, H]``, or nothing.

    Both sides are brought to unit root mean square, token by token, for which the table's absolute bounds are meant.
    Where activations are rounded to fp8 between the products, an element may fall on either side of a step of 1/8, and
    only the root mean square of a token's error is bounded, by the table's row for fp8.
    """
    got = got[ends(got.shape[0])].double()
    unit = want.square().mean(1, keepdim=True).sqrt().clamp_min(1e-30)
    if quant.startswith("fp8"):
        error = ((got - want) / unit).square().mean(1).sqrt()
        bound = TOLERANCES[FP8].rms
        bad = ~(error <= bound)
        return f"RMS error of a token is {float(error[bad].max()):.3g}, over {bound}" if bool(bad.any()) else ""
    try:
        compare(got / unit, want / unit, dtype=BF16)
    except AssertionError as error:
        return str(error)[:200]
    return ""
