"""Replaces norm and gated MLP modules of a model, one class at a time, by changing the class of its instances.

A subclass with another ``forward`` keeps parameters, hooks, names and ``isinstance`` as they are, is seen by
``torch.compile``, and is undone by putting the old class back. What a class computes is not taken from its name: the
replacement is run beside the original on random numbers first.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import tskernel
from tskernel.testing import TOLERANCES

_MARK = "_tskernel_replaces"
_GATED = {"silu": "silu_and_mul", "gelu": "gelu_and_mul", "gelu_tanh": "gelu_tanh_and_mul"}


def replace_norms(model: nn.Module) -> tuple[int, list[str]]:
    """Replace RMS and layer norms; return how many, and why not for each class that looks like one and stays."""
    return _replace(model, _norm_candidates)


def replace_activations(model: nn.Module) -> tuple[int, list[str]]:
    """Replace the gated activation of MLPs; return how many, and why not for each class that stays."""
    return _replace(model, _mlp_candidates)


def restore_modules(model: nn.Module) -> int:
    """Undo all replacements in a model; return how many."""
    count = 0
    for module in model.modules():
        original = getattr(type(module), _MARK, None)
        if original is not None:
            module.__class__ = original
            count += 1
    return count


def _replace(model: nn.Module, candidates: Callable[[nn.Module], list[type]]) -> tuple[int, list[str]]:
    chosen: dict[tuple[type, ...], type | str | None] = {}
    count, skipped = 0, []
    for module in model.modules():
        if hasattr(type(module), _MARK):
            continue
        offers = candidates(module)
        key = (type(module), *offers)
        if key not in chosen:
            chosen[key] = _choose(module, offers)
            if isinstance(chosen[key], str):
                skipped.append(f"{type(module).__name__}: {chosen[key]}")
        replacement = chosen[key]
        if isinstance(replacement, type):
            module.__class__ = replacement
            count += 1
    return count, skipped


def _choose(module: nn.Module, candidates: list[type]) -> type | str | None:
    """Return the candidate that computes what the module does, why there is none, or None if none was offered."""
    if not candidates:
        return None
    if "forward" in module.__dict__:
        return "its forward is patched (by a device map, for example), which would hide the replacement"
    for candidate in candidates:
        try:
            if _agrees(module, candidate):
                return candidate
        except (NotImplementedError, RuntimeError, TypeError, ValueError) as error:
            return f"could not be tried: {error}"
    return "computes something else than the ops"


def _agrees(module: nn.Module, candidate: type) -> bool:
    """Run a module and its replacement on the same random input."""
    trial, x = candidate.trial(module)
    with torch.inference_mode():
        want = type(module).forward(trial, x)
        trial.__class__ = candidate
        got = trial(x)
    if not isinstance(want, Tensor) or want.shape != got.shape or want.dtype != got.dtype:
        return False
    bound = TOLERANCES[want.dtype].rms * want.float().square().mean().sqrt()
    return bool((got.float() - want.float()).square().mean().sqrt() <= bound)


def _subclass(original: type, forward: Callable[..., Tensor], trial: Callable[..., Any]) -> type:
    names = {
        "forward": forward,
        "trial": staticmethod(trial),
        _MARK: original,
        "__module__": original.__module__,
        "__doc__": original.__doc__,
    }
    return type(f"Tskernel{original.__name__}", (original,), names)


# Norms.


def _norm_candidates(module: nn.Module) -> list[type]:
    kind = type(module)
    if isinstance(module, nn.LayerNorm) and kind is nn.LayerNorm:
        return [_layernorm(kind)] if module.weight is not None and module.weight.dim() == 1 else []
    if not kind.__name__.endswith(("RMSNorm", "T5LayerNorm", "RmsNorm")) or set(module._parameters) != {"weight"}:
        return []
    weight = module._parameters["weight"]
    if weight is None or weight.dim() != 1 or not isinstance(_eps(module), float):
        return []
    return [_rmsnorm(kind, op, mixed) for op in (tskernel.rmsnorm, tskernel.gemma_rmsnorm) for mixed in (True, False)]


def _eps(module: nn.Module) -> Any:
    return getattr(module, "variance_epsilon", getattr(module, "eps", getattr(module, "epsilon", None)))


@functools.cache
def _rmsnorm(original: type, op: Callable[..., Tensor], mixed: bool) -> type:
    """Return the replacement of an RMS norm. ``mixed``: an fp32 weight leaves the result in the dtype of the input.

    Where dtypes are mixed in another way, the original decides what they promote to.
    """

    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        weight = self.weight
        if weight.dtype == hidden_states.dtype or (mixed and weight.dtype == torch.float32):
            return op(hidden_states, weight, _eps(self))
        return original.forward(self, hidden_states)  # pyright: ignore[reportFunctionMemberAccess]

    return _subclass(original, forward, lambda module: _norm_trial(module, torch.bfloat16 if mixed else torch.float32))


@functools.cache
def _layernorm(original: type) -> type:
    def forward(self: Any, input: Tensor) -> Tensor:
        if self.weight.dtype == input.dtype:
            return tskernel.layernorm(input, self.weight, self.bias, self.eps)
        return original.forward(self, input)  # pyright: ignore[reportFunctionMemberAccess]

    return _subclass(original, forward, lambda module: _norm_trial(module, torch.float32))


def _norm_trial(module: nn.Module, dtype: torch.dtype) -> tuple[nn.Module, Tensor]:
    """Return a copy of a norm with a random fp32 weight (ones would hide a difference), and an input."""
    trial = copy.copy(module)
    make = torch.Generator().manual_seed(0)
    parameters = {
        n: nn.Parameter(torch.randn(p.shape, generator=make), requires_grad=False)
        for n, p in module._parameters.items()
        if p is not None
    }
    trial.__dict__["_parameters"] = {**module._parameters, **parameters}
    trial.__dict__["_forward_pre_hooks"], trial.__dict__["_forward_hooks"] = {}, {}
    width = next(iter(parameters.values())).shape[-1]
    return trial, torch.randn(3, width, generator=make).to(dtype)


# MLPs.


def _mlp_candidates(module: nn.Module) -> list[type]:
    children = module._modules
    activation = activation_name(children.get("act_fn", children.get("activation_fn")))
    if activation is None or "down_proj" not in children:
        return []
    op = getattr(tskernel, _GATED[activation])
    if "gate_proj" in children and "up_proj" in children:
        return [_split_mlp(type(module), op)]
    return [_merged_mlp(type(module), op)] if "gate_up_proj" in children else []


def activation_name(module: nn.Module | None) -> str | None:
    """Return which gated op an activation module belongs to."""
    name = type(module).__name__
    if name in ("SiLU", "SiLUActivation"):
        return "silu"
    if name == "GELUTanh" or (isinstance(module, nn.GELU) and module.approximate == "tanh"):
        return "gelu_tanh"
    return "gelu" if name in ("GELU", "GELUActivation") else None


@functools.cache
def _split_mlp(original: type, op: Callable[..., Tensor]) -> type:
    def forward(self: Any, x: Tensor) -> Tensor:
        return self.down_proj(op(torch.cat((self.gate_proj(x), self.up_proj(x)), -1)))

    return _subclass(original, forward, lambda module: _mlp_trial(module, module.gate_proj))


@functools.cache
def _merged_mlp(original: type, op: Callable[..., Tensor]) -> type:
    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        return self.down_proj(op(self.gate_up_proj(hidden_states)))

    return _subclass(original, forward, lambda module: _mlp_trial(module, module.gate_up_proj))


def _mlp_trial(module: nn.Module, first: Any) -> tuple[nn.Module, Tensor]:
    """Return a copy that shares the MLP's own weights, which are too large to copy, and an input."""
    weight = first.weight
    if weight.is_meta:
        raise ValueError("its weights are on the meta device; load the model first")
    dtype = weight.dtype if weight.dtype.is_floating_point else torch.float32
    x = torch.randn(2, first.in_features, generator=torch.Generator().manual_seed(0))
    return copy.copy(module), x.to(weight.device, dtype)
