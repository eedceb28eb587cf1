"""apply_penalties_ in C++: logits of tokens that were not seen are neither read nor written."""

from __future__ import annotations

from torch import Tensor

from tskernel._torch.binding import calls
from tskernel.backends.cuda import _native as lib
from tskernel.dispatch.registry import Priority, register_kernel
from tskernel.dispatch.signature import formats


def rejects(presence_penalty: Tensor, frequency_penalty: Tensor, repetition_penalty: Tensor) -> str | None:
    """Return why this call does not fit, or None."""
    return lib.crooked(
        presence_penalty=presence_penalty, frequency_penalty=frequency_penalty, repetition_penalty=repetition_penalty
    )


@register_kernel(
    "sampling",
    "apply_penalties_",
    capability=lib.CAPABILITY,
    signatures=formats(logits=lib.FLOATS),
    priority=Priority.PERFORMANT,
    rejects=rejects,
)
@calls(
    "tskernel_native::apply_penalties_",
    "logits",
    "prompt_mask",
    "output_counts",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)
def apply_penalties_(
    logits: Tensor,
    prompt_mask: Tensor,
    output_counts: Tensor,
    presence_penalty: Tensor,
    frequency_penalty: Tensor,
    repetition_penalty: Tensor,
) -> None:
    """Launch the kernel of csrc/apply_penalties.cu."""
    lib.native("apply_penalties_")(
        logits, prompt_mask, output_counts, presence_penalty, frequency_penalty, repetition_penalty
    )
