"""Mixture of experts for a whole layer: plan once, prepare the layer's weights once, then call.

``moe_plan`` chooses the kernel of ``moe_fused`` for a layer, ``moe_process_weights`` brings the layer's weights into
the order that this kernel reads fastest, and ``moe_apply`` routes and runs. They are plain functions over
``torch.ops.tokenspeed`` operators, so a compiled or exported model sees only those.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

from tskernel.dispatch.platform import PlatformInfo
from tskernel.dispatch.ranking import Request, not_found, ranking, reject_reason
from tskernel.dispatch.registry import KernelSpec
from tskernel.dispatch.selection import make_request
from tskernel.dispatch.signature import FormatSignature
from tskernel.library import validate
from tskernel.ops.moe._weights import FP8_BLOCK, MXFP4_BLOCK, PACKED, QUANTS
from tskernel.ops.moe.moe_fused import moe_fused
from tskernel.ops.moe.moe_topk import moe_topk

__all__ = ["MoePlan", "moe_apply", "moe_plan", "moe_process_weights"]

# Argument of moe_fused -> attribute of the layer.
WEIGHTS: Final[Mapping[str, str]] = {
    "w13": "w13_weight",
    "w2": "w2_weight",
    "w13_scale": "w13_weight_scale",
    "w2_scale": "w2_weight_scale",
    "w13_bias": "w13_weight_bias",
    "w2_bias": "w2_weight_bias",
    "a13_scale": "w13_input_scale",
    "a2_scale": "w2_input_scale",
}
_INPUT_SCALES: Final = ("a13_scale", "a2_scale")
_LAYOUT: Final = "moe_weight_layout"
_PLANNED_TOKENS: Final = 16  # a kernel may reject calls by their size; a plan asks it about this one


@dataclass(frozen=True)
class MoePlan:
    """What ``moe_plan`` decided for a layer.

    ``kernel`` is the chosen one; ``pinned`` tells whether calls insist on it.
    """

    kernel: KernelSpec
    pinned: bool
    weight_layout: str
    quant: str
    activation: str
    top_k: int
    score_function: str
    renormalize: bool
    routed_scaling_factor: float
    n_group: int
    topk_group: int
    swiglu_alpha: float
    swiglu_limit: float


def moe_plan(
    quant: str = "none",
    input_dtype: torch.dtype = torch.bfloat16,
    activation: str = "silu",
    *,
    num_experts: int,
    top_k: int,
    hidden_size: int,
    intermediate_size: int,
    weight_dtype: torch.dtype | None = None,
    group_size: int = 128,
    with_bias: bool = False,
    with_expert_map: bool = False,
    score_function: str = "softmax",
    renormalize: bool = True,
    routed_scaling_factor: float = 1.0,
    n_group: int = 1,
    topk_group: int = 1,
    swiglu_alpha: float = 1.702,
    swiglu_limit: float = 7.0,
    platform: PlatformInfo | str | None = None,
    solution: str | None = None,
    override: str | None = None,
) -> MoePlan:
    """Choose the kernel that will run a layer's experts.

    ``num_experts`` counts the experts of this device and ``intermediate_size`` is per device. ``weight_dtype`` picks
    between the dtypes that ``quant`` allows (by default ``input_dtype``, float8_e4m3fn, int8 or uint8), ``group_size``
    is that of w4a16 scales. The platform is the current one unless given. A kernel with its own weight layout, or one
    that is asked for by name or solution, is pinned: each call insists on it. Any other layer is selected at the call,
    which finds the planned kernel, or a better one for that size.

    Raises: ValueError for an unknown ``quant``; NoKernelFoundError with every candidate's reason; OverrideError for an
    override that cannot be met.
    """
    if quant not in QUANTS:
        raise ValueError(f"tskernel.moe_plan: quant: expected {' or '.join(map(repr, QUANTS))}, got {quant!r}")
    weight_dtype = weight_dtype or _weight_dtype(quant, input_dtype)
    shape = (num_experts, hidden_size, intermediate_size)
    arguments = {
        **_weights_like(quant, input_dtype, weight_dtype, shape, group_size=group_size, with_bias=with_bias),
        **_tokens_like(input_dtype, hidden_size, top_k, num_experts if with_expert_map else None),
        "activation": activation,
        "quant": quant,
        "swiglu_alpha": swiglu_alpha,
        "swiglu_limit": swiglu_limit,
    }
    spec = _choose(arguments, weight_dtype, platform=platform, solution=solution, override=override)
    return MoePlan(
        kernel=spec,
        pinned=spec.weight_preprocessor is not None or solution is not None or override is not None,
        weight_layout=_layout_of(spec),
        quant=quant,
        activation=activation,
        top_k=top_k,
        score_function=score_function,
        renormalize=renormalize,
        routed_scaling_factor=routed_scaling_factor,
        n_group=n_group,
        topk_group=topk_group,
        swiglu_alpha=swiglu_alpha,
        swiglu_limit=swiglu_limit,
    )


def _weight_dtype(quant: str, input_dtype: torch.dtype) -> torch.dtype:
    if quant == "none":
        return input_dtype
    return torch.float8_e4m3fn if quant.startswith("fp8") else torch.int8 if quant == "int8" else torch.uint8


def _layout_of(spec: KernelSpec) -> str:
    """Return the name of the weight layout that a kernel reads."""
    accepted = spec.traits.get("weight_layout", ("plain",))
    return "plain" if "plain" in accepted else next(iter(accepted))


def _weights_like(
    quant: str,
    x_dtype: torch.dtype,
    dtype: torch.dtype,
    shape: tuple[int, int, int],
    *,
    group_size: int,
    with_bias: bool,
) -> dict[str, Tensor]:
    """Return meta tensors that look like a layer's weights, scales and biases."""
    experts, hidden, inner = shape
    found: dict[str, Tensor] = {}
    for name, rows, columns in (("w13", 2 * inner, hidden), ("w2", hidden, inner)):
        width = columns // 2 if quant in PACKED else columns
        found[name] = torch.empty((experts, rows, width), dtype=dtype, device="meta")
        scales = {
            "fp8_tensor": (experts,),
            "fp8_token": (experts, rows),
            "int8": (experts, rows),
            "fp8_block": (experts, -(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK)),
            "mxfp4": (experts, rows, columns // MXFP4_BLOCK),
            "w4a16": (experts, rows, columns // group_size),
        }
        if quant in scales:
            scale_dtype = torch.uint8 if quant == "mxfp4" else torch.float32
            found[f"{name}_scale"] = torch.empty(scales[quant], dtype=scale_dtype, device="meta")
        if with_bias:
            found[f"{name}_bias"] = torch.empty((experts, rows), dtype=x_dtype, device="meta")
    return found


def _tokens_like(dtype: torch.dtype, hidden: int, top_k: int, mapped_experts: int | None) -> dict[str, Tensor]:
    """Return meta tensors that look like tokens and their routing."""
    tokens = {
        "x": torch.empty((_PLANNED_TOKENS, hidden), dtype=dtype, device="meta"),
        "topk_weights": torch.empty((_PLANNED_TOKENS, top_k), dtype=torch.float32, device="meta"),
        "topk_ids": torch.empty((_PLANNED_TOKENS, top_k), dtype=torch.int32, device="meta"),
    }
    if mapped_experts is not None:
        tokens["expert_map"] = torch.empty((mapped_experts,), dtype=torch.int32, device="meta")
    return tokens


def _choose(
    arguments: dict[str, Any],
    weight_dtype: torch.dtype,
    *,
    platform: PlatformInfo | str | None,
    solution: str | None,
    override: str | None,
) -> KernelSpec:
    """Return the best kernel that takes such a call, each kernel being offered weights in its own layout."""
    filled = moe_fused.fill(arguments)
    validate(moe_fused, filled)
    reasons: dict[str, str] = {}
    fits: list[KernelSpec] = []
    requests: list[Request] = []
    formats = FormatSignature.of(x=arguments["x"].dtype, w=weight_dtype)
    for layout in _layouts():
        traits = {**moe_fused.traits_of(filled), "weight_layout": layout}
        request = make_request(
            "moe", "moe_fused", formats, traits=traits, platform=platform, solution=solution, override=override
        )
        requests.append(request)
        found = ranking(request)
        for spec in found.fits:
            if _layout_of(spec) == layout:
                why = reject_reason(
                    spec, {**dict(zip(moe_fused.arguments, filled, strict=True)), "weight_layout": layout}
                )
                fits += [spec] if why is None else []
                reasons |= {} if why is None else {spec.name: why}
        reasons = {**found.reasons, **reasons}
    if not fits:
        raise not_found(requests[-1], reasons)
    return min(fits, key=lambda s: (-s.priority_of(requests[-1].traits), s.name))


def _layouts() -> list[str]:
    """Return every weight layout that some kernel reads."""
    from tskernel.dispatch.registry import KernelRegistry

    return sorted({"plain", *(_layout_of(s) for s in KernelRegistry.get().kernels_of("moe_fused"))})


def moe_process_weights(plan: MoePlan, layer: nn.Module) -> None:
    """Check a layer's expert weights and replace them by what the planned kernel reads. Call it once, after loading.

    The layer has ``w13_weight`` and ``w2_weight`` and, as ``plan.quant`` asks, ``w13_weight_scale``,
    ``w13_weight_bias``, ``w13_input_scale`` and the same for ``w2``. Input scales with one element per expert are
    replaced by their maximum. A kernel's ``weight_preprocessor`` gets a dict of these by argument name of
    ``moe_fused`` and returns such a dict.

    Raises: ValueError for weights that do not fit each other or the plan, or that were prepared for another layout.
    """
    layout = getattr(layer, _LAYOUT, None)
    if layout is not None:
        if layout != plan.weight_layout:
            raise ValueError(
                f"tskernel.moe_process_weights: weights: expected plain ones, got ones prepared as {layout!r}"
            )
        return
    weights = _weights_of(layer)
    for name in _INPUT_SCALES:
        scale = weights[name]
        if scale is not None and scale.numel() > 1:
            weights[name] = scale.max().reshape(1)
    _validate_weights(plan, weights)
    if plan.kernel.weight_preprocessor is not None:
        weights = dict(plan.kernel.weight_preprocessor(weights))
    for name, attribute in WEIGHTS.items():
        _replace(layer, attribute, weights.get(name))
    setattr(layer, _LAYOUT, plan.weight_layout)


def _weights_of(layer: nn.Module) -> dict[str, Tensor | None]:
    return {name: getattr(layer, attribute, None) for name, attribute in WEIGHTS.items()}


def _validate_weights(plan: MoePlan, weights: dict[str, Tensor | None]) -> None:
    w2 = weights["w2"]
    if w2 is None:
        raise ValueError("tskernel.moe_process_weights: w2_weight: expected a Tensor, got None")
    w2_bias = weights["w2_bias"]
    dtype = w2.dtype if plan.quant == "none" else torch.bfloat16 if w2_bias is None else w2_bias.dtype
    tokens = {
        "x": torch.empty((0, w2.shape[1]), dtype=dtype, device=w2.device),
        "topk_weights": torch.empty((0, plan.top_k), dtype=torch.float32, device=w2.device),
        "topk_ids": torch.empty((0, plan.top_k), dtype=torch.int32, device=w2.device),
    }
    validate(moe_fused, moe_fused.fill({**weights, **tokens, "activation": plan.activation, "quant": plan.quant}))


def _replace(layer: nn.Module, attribute: str, value: Tensor | None) -> None:
    old = getattr(layer, attribute, None)
    if value is old:
        return
    if isinstance(old, nn.Parameter) and value is not None:
        value = nn.Parameter(value, requires_grad=False)
    setattr(layer, attribute, value)


def moe_apply(
    plan: MoePlan,
    x: Tensor,
    layer: nn.Module,
    router_logits: Tensor | None = None,
    topk_weights: Tensor | None = None,
    topk_ids: Tensor | None = None,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Route tokens and run their experts: ``x [T, H]`` to ``[T, H]``.

    Either ``router_logits [T, E]``, routed as the plan says with the layer's ``correction_bias`` if it has one, or the
    finished ``topk_weights`` and ``topk_ids``. The layer's ``expert_map``, if it has one, maps global to local ids.

    Raises: ValueError when neither or both are given, or when the weights were not prepared for the plan.
    """
    layout = getattr(layer, _LAYOUT, "plain")
    if layout != plan.weight_layout:
        raise ValueError(
            f"tskernel.moe_apply: weights: expected ones prepared as {plan.weight_layout!r}, got {layout!r}; "
            "call moe_process_weights(plan, layer) first"
        )
    if (topk_weights is None) != (topk_ids is None) or (topk_ids is None) == (router_logits is None):
        raise ValueError(
            "tskernel.moe_apply: routing: expected router_logits, or topk_weights and topk_ids, got another mix"
        )
    if topk_weights is None or topk_ids is None:
        topk_weights, topk_ids = moe_topk(
            router_logits,
            plan.top_k,
            score_function=plan.score_function,
            renormalize=plan.renormalize,
            routed_scaling_factor=plan.routed_scaling_factor,
            correction_bias=getattr(layer, "correction_bias", None),
            n_group=plan.n_group,
            topk_group=plan.topk_group,
        )
    weights = _weights_of(layer)
    return moe_fused(
        x,
        weights.pop("w13"),
        weights.pop("w2"),
        topk_weights,
        topk_ids,
        **weights,
        activation=plan.activation,
        quant=plan.quant,
        swiglu_alpha=plan.swiglu_alpha,
        swiglu_limit=plan.swiglu_limit,
        expert_map=getattr(layer, "expert_map", None),
        weight_layout=plan.weight_layout,
        out=out,
        override=plan.kernel.name if plan.pinned else None,
    )
