"""The experts function of transformers' interface, by ``moe_fused``, and what a layer's weights need before it.

transformers keeps the weights of a layer's experts in two tensors, in one of four layouts. ``moe_fused`` reads gate
rows and then up rows, columns next to each other. A layer in another layout is brought to it once, in place of the old
weights: names, shapes, what is saved and what may be loaded stay as they were.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import tskernel
from tskernel.integrations._transformers_modules import activation_name
from tskernel.testing import TOLERANCES

_FORM = "_tskernel_experts"
_HANDLES = "_tskernel_handles"
_EXPERTS, _HIDDEN, _INNER, _TOP_K, _TOKENS = 3, 16, 12, 2, 5  # of the trial


class Form(NamedTuple):
    """How ``moe_fused`` is to be called for a layer."""

    activation: str
    alpha: float
    limit: float


def tskernel_experts(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Run routed experts; the signature is that of transformers' ``ExpertsInterface``.

    Shapes: ``hidden_states [T, H]``, ``top_k_index`` and ``top_k_weights`` ``[T, K]`` -> ``[T, H]``. An index that is
    not below the number of experts adds 0.
    Raises: ValueError for a module that ``enable`` has not prepared.
    """
    form = getattr(module, _FORM, None)
    if form is None:
        raise ValueError(
            f"tskernel experts: {type(module).__name__}: expected a layer prepared by "
            "tskernel.integrations.transformers.enable(model), got one as it was loaded; call enable on the model"
        )
    return _call(module, form, hidden_states, top_k_index, top_k_weights)


def _call(module: Any, form: Form, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    w13, w2 = module.gate_up_proj, module.down_proj
    if module.is_transposed:
        w13, w2 = w13.transpose(1, 2), w2.transpose(1, 2)
    return tskernel.moe_fused(
        x,
        w13,
        w2,
        weights,
        ids,
        activation=form.activation,
        w13_bias=module.gate_up_proj_bias if module.has_bias else None,
        w2_bias=module.down_proj_bias if module.has_bias else None,
        swiglu_alpha=form.alpha,
        swiglu_limit=form.limit,
    )


def experts_of(model: nn.Module) -> list[Any]:
    """Return the modules of a model whose experts go through transformers' interface."""
    return [m for m in model.modules() if {"has_gate", "is_transposed", "is_concatenated"} <= set(vars(m))]


def prepare_experts(model: nn.Module) -> tuple[int, list[str]]:
    """Prepare all layers of experts that are not, or none; return how many, and what stands against it.

    The implementation is one setting of a model, so one layer that computes something else keeps all as they are.
    """
    modules = [m for m in experts_of(model) if not hasattr(m, _FORM)]
    forms: dict[type, Form | str] = {}
    for module in modules:
        if type(module) not in forms:
            forms[type(module)] = _choose(module)
    reasons = [f"{kind.__name__}: {form}" for kind, form in forms.items() if isinstance(form, str)]
    if reasons:
        return 0, reasons
    for module in modules:
        setattr(module, _FORM, forms[type(module)])
        _relay(module)
    return len(modules), []


def restore_experts(model: nn.Module) -> None:
    """Undo ``prepare_experts``: the weights lie as transformers keeps them."""
    for module in experts_of(model):
        if hasattr(module, _FORM):
            _relay_back(module)
            delattr(module, _FORM)


# Which call computes what the module computes.


def _choose(module: Any) -> Form | str:
    """Return the call that gives what a layer's own code gives, or why there is none."""
    if not module.has_gate:
        return "experts without a gate are no form of moe_fused"
    wanted = {"gate_up_proj", "down_proj"} | ({"gate_up_proj_bias", "down_proj_bias"} if module.has_bias else set())
    if set(module._parameters) != wanted:
        return f"expected the weights {', '.join(sorted(wanted))}, got {', '.join(sorted(module._parameters))}"
    if any(p is None or not p.dtype.is_floating_point or p.element_size() < 2 for p in module._parameters.values()):
        return "its weights are quantized, and in no layout of transformers that is known here"
    for form in _forms(module):
        try:
            if _agrees(module, form):
                return form
        except (NotImplementedError, RuntimeError, TypeError, ValueError, AttributeError) as error:
            return f"could not be tried: {error}"
    return "its gate computes something else than the ops"


def _forms(module: Any) -> Iterator[Form]:
    name = activation_name(getattr(module, "act_fn", None))
    if name is not None:
        yield Form(name, 1.702, 7.0)
    alpha, limit = getattr(module, "alpha", None), getattr(module, "limit", None)
    if isinstance(alpha, float) and isinstance(limit, float):
        yield Form("swiglu_oai", alpha, limit)


def _agrees(module: Any, form: Form) -> bool:
    """Run a small layer of random weights of the module's class by its own code and by the op."""
    make = torch.Generator().manual_seed(0)
    trial = copy.copy(module)
    shapes = {
        "gate_up_proj": (_EXPERTS, 2 * _INNER, _HIDDEN),
        "down_proj": (_EXPERTS, _HIDDEN, _INNER),
        "gate_up_proj_bias": (_EXPERTS, 2 * _INNER),
        "down_proj_bias": (_EXPERTS, _HIDDEN),
    }
    random = {n: torch.randn(shapes[n], generator=make) for n in module._parameters}
    if module.is_transposed:
        random |= {n: w.transpose(1, 2) for n, w in random.items() if w.dim() == 3}
    trial.__dict__["_parameters"] = {n: nn.Parameter(w, requires_grad=False) for n, w in random.items()}
    trial.num_experts = _EXPERTS
    x = 3 * torch.randn(_TOKENS, _HIDDEN, generator=make)
    ids = torch.rand(_TOKENS, _EXPERTS, generator=make).topk(_TOP_K).indices
    weights = torch.rand(_TOKENS, _TOP_K, generator=make)
    with torch.inference_mode():
        want = type(module).forward.__wrapped__(trial, x, ids, weights)
        if not module.is_concatenated:
            for name in _interleaved(trial):
                trial._parameters[name] = nn.Parameter(_split(trial._parameters[name]), requires_grad=False)
        got = _call(trial, form, x, ids, weights)
    bound = TOLERANCES[want.dtype].rms * want.square().mean().sqrt()
    return want.shape == got.shape and bool((got - want).square().mean().sqrt() <= bound)


# Layouts. In ``gate_up_proj`` and its bias the last dimension is the one of gates and ups wherever they alternate.


def _interleaved(module: Any) -> tuple[str, ...]:
    return ("gate_up_proj", "gate_up_proj_bias") if module.has_bias else ("gate_up_proj",)


def _split(x: Tensor) -> Tensor:
    """Return gates and then ups of a last dimension in which they alternate, and the rows of a matrix as its columns.

    The memory of the result is that of ``[E, 2I, H]``.
    """
    parts = (x[..., ::2], x[..., 1::2])
    if x.dim() == 2:
        return torch.cat(parts, -1)
    return torch.cat([p.transpose(1, 2) for p in parts], 1).transpose(1, 2)


def _join(x: Tensor) -> Tensor:
    """Undo ``_split``."""
    return torch.stack(x.chunk(2, -1), -1).flatten(-2)


def _relay(module: Any) -> None:
    """Bring a layer's weights to the layout of ``moe_fused``, and what it saves and loads to that of transformers."""
    if module.is_transposed:
        w2 = module.down_proj
        w2.data = w2.data.transpose(1, 2).contiguous().transpose(1, 2)
        if module.is_concatenated:
            w13 = module.gate_up_proj
            w13.data = w13.data.transpose(1, 2).contiguous().transpose(1, 2)
    handles = [module.register_state_dict_post_hook(_save)]
    if not module.is_concatenated:
        for name in _interleaved(module):
            parameter = module._parameters[name]
            parameter.data = _split(parameter.data)
        handles.append(module.register_load_state_dict_pre_hook(_load))
        module.__class__ = _concatenated(type(module))
    setattr(module, _HANDLES, handles)


def _relay_back(module: Any) -> None:
    for handle in getattr(module, _HANDLES, ()):
        handle.remove()
    if not module.is_concatenated:
        module.__class__ = type(module).__mro__[1]
        for name in _interleaved(module):
            parameter = module._parameters[name]
            parameter.data = _join(parameter.data)
    for parameter in module._parameters.values():
        parameter.data = parameter.data.contiguous()
    if hasattr(module, _HANDLES):
        delattr(module, _HANDLES)


@functools.cache
def _concatenated(original: Any) -> type:
    """Return a subclass whose other implementations (``eager``, ``grouped_mm``) read gates and then ups."""

    def apply_gate(self: Any, gate_up: Tensor) -> Tensor:
        return original._apply_gate(self, _join(gate_up))

    names = {"_apply_gate": apply_gate, "__module__": original.__module__, "__doc__": original.__doc__}
    return type(f"Tskernel{original.__name__}", (original,), names)


def _save(module: Any, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any]) -> None:
    """Give what is saved the layout in which it was loaded."""
    for name in module._parameters:
        value = state_dict[prefix + name]
        if not module.is_concatenated and name in _interleaved(module):
            value = _join(value)
        state_dict[prefix + name] = value.contiguous()


def _load(module: Any, state_dict: dict[str, Any], prefix: str, *others: Any) -> None:
    for name in _interleaved(module):
        if prefix + name in state_dict:
            state_dict[prefix + name] = _split(state_dict[prefix + name])
