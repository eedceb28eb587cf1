"""Hugging Face transformers on ``torch.ops.tokenspeed``: a loaded model's attention, norms, gates and experts.

    from tskernel.integrations.transformers import enable

    model = AutoModelForCausalLM.from_pretrained(name)
    print(enable(model))

docs/drop-in.md says what is replaced and what is not.
"""

from __future__ import annotations

import copy
import weakref
from dataclasses import dataclass
from typing import Any

from torch import nn

__all__ = ["FALLBACK_NAME", "NAME", "PAGED_NAME", "Replaced", "disable", "enable", "register"]

NAME = "tskernel"
FALLBACK_NAME = "tskernel_or_sdpa"
# transformers gives packed sequences, not a mask over all of them, to implementations that have "flash" in their name.
PAGED_NAME = "tskernel_flash"

_before: weakref.WeakKeyDictionary[nn.Module, str | None] = weakref.WeakKeyDictionary()
_experts_before: weakref.WeakKeyDictionary[nn.Module, dict[str, str | None]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class Replaced:
    """What ``enable`` did: the model's attention now, numbers of modules replaced, what stayed and why."""

    attention: str | None
    norms: int
    activations: int
    experts: int
    skipped: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [
            f"tskernel: attention {self.attention}, {self.norms} norms, {self.activations} gated activations, "
            f"{self.experts} layers of experts"
        ]
        return "\n".join([*lines, *[f"  not replaced: {s}" for s in self.skipped]])


def register() -> None:
    """Make ``attn_implementation="tskernel"``, ``"tskernel_or_sdpa"`` and ``"tskernel_flash"`` known to transformers.

    Harmless to repeat.

    Raises: ImportError when transformers is missing or has no attention interface.
    """
    try:
        from transformers import AttentionInterface
        from transformers.masking_utils import AttentionMaskInterface
    except ImportError as error:
        raise ImportError(f"tskernel.integrations.transformers needs transformers 5.16 or later: {error}") from error
    from tskernel.integrations._transformers_attention import tskernel_attention
    from tskernel.integrations._transformers_fallback import tskernel_or_sdpa_attention, tskernel_or_sdpa_mask
    from tskernel.integrations._transformers_mask import tskernel_mask
    from tskernel.integrations._transformers_paged import tskernel_paged_attention, tskernel_paged_mask

    # Always both: a name without a mask function gets no mask at all, and padding would be attended to.
    AttentionInterface.register(NAME, tskernel_attention)
    AttentionMaskInterface.register(NAME, tskernel_mask)
    AttentionInterface.register(FALLBACK_NAME, tskernel_or_sdpa_attention)
    AttentionMaskInterface.register(FALLBACK_NAME, tskernel_or_sdpa_mask)
    AttentionInterface.register(PAGED_NAME, tskernel_paged_attention)
    AttentionMaskInterface.register(PAGED_NAME, tskernel_paged_mask)


def enable(
    model: Any,
    *,
    attention: bool = True,
    norms: bool = True,
    activations: bool = True,
    experts: bool = True,
    fallback: str | None = None,
    continuous_batching: bool = False,
) -> Replaced:
    """Run a transformers model on tskernel's ops. Models built from the same config object are not touched.

    ``attention`` sets the attention implementation, ``norms`` replaces RMS and layer norms, ``activations`` the gated
    activation of MLPs, ``experts`` sets the experts implementation and orders their weights for it (what the model
    saves and loads stays as it is). A module is only replaced when its replacement gives the same numbers. With
    ``fallback="sdpa"`` masks that the ops do not have go to transformers' sdpa; without, they raise. With
    ``continuous_batching`` the attention serves ``generate_batch``, and nothing else. The ops are for inference: call
    the model under ``torch.no_grad()`` or ``torch.inference_mode()`` (``generate`` does).

    Raises: ValueError when ``model`` is no transformers model or cannot change its attention, or for another
    ``fallback``.
    """
    if fallback not in (None, "sdpa"):
        raise ValueError(f"tskernel enable: fallback: expected None or 'sdpa', got {fallback!r}")
    if fallback and continuous_batching:
        raise ValueError(
            f"tskernel enable: fallback: expected None with continuous_batching, which makes no masks, got {fallback!r}"
        )
    if not isinstance(model, nn.Module) or not hasattr(model, "set_attn_implementation"):
        raise ValueError(f"tskernel enable: model: expected a transformers PreTrainedModel, got {type(model).__name__}")
    from tskernel.integrations._transformers_modules import replace_activations, replace_norms

    skipped: list[str] = []
    if attention:
        _set_attention(model, PAGED_NAME if continuous_batching else NAME if fallback is None else FALLBACK_NAME)
    counts = []
    for wanted, replace in ((norms, replace_norms), (activations, replace_activations)):
        count, reasons = replace(model) if wanted else (0, [])
        counts.append(count)
        skipped += reasons
    layers, reasons = _set_experts(model) if experts else (0, [])
    config: Any = model.config
    return Replaced(config._attn_implementation, counts[0], counts[1], layers, tuple(skipped + reasons))


def disable(model: Any) -> None:
    """Undo ``enable``: the model's own modules, and the attention and experts implementations it had before."""
    from tskernel.integrations._transformers_experts import restore_experts
    from tskernel.integrations._transformers_modules import restore_modules

    restore_modules(model)
    if model in _experts_before:
        restore_experts(model)
        model.set_experts_implementation(_experts_before.pop(model))
    if model in _before:
        model.set_attn_implementation(_before.pop(model))


def _set_attention(model: Any, name: str) -> None:
    register()
    if not model._can_set_attn_implementation():
        raise ValueError(
            f"tskernel enable: {type(model).__name__}: expected a model whose attention goes through transformers' "
            "AttentionInterface, got one with its own; pass attention=False to replace only norms and activations"
        )
    if getattr(model.config, "output_attentions", False):
        raise ValueError(
            "tskernel enable: config.output_attentions: expected False, got True; "
            "fused attention has no weights to give"
        )
    before = model.config._attn_implementation
    _own_config(model)
    if name == PAGED_NAME:  # set_attn_implementation would look for a package of that name
        model.config._attn_implementation = name
    else:
        model.set_attn_implementation(name)
    _before.setdefault(model, before)


def _set_experts(model: Any) -> tuple[int, list[str]]:
    from tskernel.integrations._transformers_experts import experts_of, prepare_experts, tskernel_experts

    if not experts_of(model):
        return 0, []
    if not model._can_set_experts_implementation():
        return 0, [f"{type(model).__name__}: its experts do not go through transformers' ExpertsInterface"]
    from transformers.integrations.moe import ExpertsInterface

    ExpertsInterface.register(NAME, tskernel_experts)
    count, reasons = prepare_experts(model)
    if count:
        before = model.get_experts_implementation()
        _own_config(model)
        model.set_experts_implementation(NAME)
        _experts_before.setdefault(model, before)
    return count, reasons


def _own_config(model: nn.Module) -> None:
    """Give the model its own copy of its config: models built from one object would change their attention together."""
    copies: dict[int, Any] = {}
    model.config = copy.deepcopy(model.config, copies)
    for module in model.modules():
        config = module.__dict__.get("config")
        if id(config) in copies:
            module.config = copies[id(config)]
