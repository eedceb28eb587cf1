"""Hugging Face transformers on ``torch.ops.tokenspeed``: attention, norms and gated activations of a loaded model.

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

__all__ = ["FALLBACK_NAME", "NAME", "Replaced", "disable", "enable", "register"]

NAME = "tskernel"
FALLBACK_NAME = "tskernel_or_sdpa"

_before: weakref.WeakKeyDictionary[nn.Module, str | None] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class Replaced:
    """What ``enable`` did: the model's attention now, numbers of modules replaced, what stayed and why."""

    attention: str | None
    norms: int
    activations: int
    skipped: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [f"tskernel: attention {self.attention}, {self.norms} norms, {self.activations} gated activations"]
        return "\n".join([*lines, *[f"  not replaced: {s}" for s in self.skipped]])


def register() -> None:
    """Make ``attn_implementation="tskernel"`` and ``"tskernel_or_sdpa"`` known to transformers; harmless to repeat.

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

    # Always both: a name without a mask function gets no mask at all, and padding would be attended to.
    AttentionInterface.register(NAME, tskernel_attention)
    AttentionMaskInterface.register(NAME, tskernel_mask)
    AttentionInterface.register(FALLBACK_NAME, tskernel_or_sdpa_attention)
    AttentionMaskInterface.register(FALLBACK_NAME, tskernel_or_sdpa_mask)


def enable(
    model: Any,
    *,
    attention: bool = True,
    norms: bool = True,
    activations: bool = True,
    fallback: str | None = None,
) -> Replaced:
    """Run a transformers model on tskernel's ops. Models built from the same config object are not touched.

    ``attention`` sets the attention implementation, ``norms`` replaces RMS and layer norms, ``activations`` the gated
    activation of MLPs. A module is only replaced when its replacement gives the same numbers. With ``fallback="sdpa"``
    masks that the ops do not have go to transformers' sdpa; without, they raise. The ops are for inference: call the
    model under ``torch.no_grad()`` or ``torch.inference_mode()`` (``generate`` does).

    Raises: ValueError when ``model`` is no transformers model or cannot change its attention, or for another
    ``fallback``.
    """
    if fallback not in (None, "sdpa"):
        raise ValueError(f"tskernel enable: fallback: expected None or 'sdpa', got {fallback!r}")
    if not isinstance(model, nn.Module) or not hasattr(model, "set_attn_implementation"):
        raise ValueError(f"tskernel enable: model: expected a transformers PreTrainedModel, got {type(model).__name__}")
    from tskernel.integrations._transformers_modules import replace_activations, replace_norms

    skipped: list[str] = []
    if attention:
        _set_attention(model, NAME if fallback is None else FALLBACK_NAME)
    counts = []
    for wanted, replace in ((norms, replace_norms), (activations, replace_activations)):
        count, reasons = replace(model) if wanted else (0, [])
        counts.append(count)
        skipped += reasons
    config: Any = model.config
    return Replaced(config._attn_implementation, counts[0], counts[1], tuple(skipped))


def disable(model: Any) -> None:
    """Undo ``enable``: the model's own modules and the attention it had before."""
    from tskernel.integrations._transformers_modules import restore_modules

    restore_modules(model)
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
    model.set_attn_implementation(name)
    _before.setdefault(model, before)


def _own_config(model: nn.Module) -> None:
    """Give the model its own copy of its config: models built from one object would change their attention together."""
    copies: dict[int, Any] = {}
    model.config = copy.deepcopy(model.config, copies)
    for module in model.modules():
        config = module.__dict__.get("config")
        if id(config) in copies:
            module.config = copies[id(config)]
