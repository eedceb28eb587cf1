"""What the data of a call look like: one ``TensorFormat`` per role."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch


class ScaleFormat(NamedTuple):
    """How a quantized tensor is scaled.

    ``dtype`` is the storage of the scales (uint8 holds ue8m0 bytes); ``granularity`` is "tensor", "channel", "token" or
    "block"; ``block_shape`` is given for blocks.
    """

    dtype: torch.dtype
    granularity: str = "tensor"
    block_shape: tuple[int, ...] = ()

    def __str__(self) -> str:
        block = "x".join(map(str, self.block_shape))
        return f"{self.granularity}{'[' + block + ']' if block else ''}:{_short(self.dtype)}"


class TensorFormat(NamedTuple):
    """The storage dtype of one role, the number format where the dtype does not say it (mxfp4), and the scales."""

    dtype: torch.dtype
    name: str = "dense"
    scale: ScaleFormat | None = None

    def __str__(self) -> str:
        text = _short(self.dtype) if self.name == "dense" else f"{self.name}({_short(self.dtype)})"
        return text if self.scale is None else f"{text}*{self.scale}"


class FormatSignature(NamedTuple):
    """Role -> format, order-free. Two signatures match only when they are equal."""

    roles: frozenset[tuple[str, TensorFormat]] = frozenset()

    @classmethod
    def of(
        cls, roles: Mapping[str, TensorFormat | torch.dtype] | None = None, /, **named: TensorFormat | torch.dtype
    ) -> FormatSignature:
        """Build a signature: ``FormatSignature.of(q=torch.bfloat16, kv=torch.float8_e4m3fn)``."""
        both = {**(roles or {}), **named}
        return cls(frozenset((r, f if isinstance(f, TensorFormat) else TensorFormat(f)) for r, f in both.items()))

    def as_dict(self) -> dict[str, TensorFormat]:
        """Return the roles, sorted by name."""
        return dict(sorted(self.roles))

    def __str__(self) -> str:
        return ", ".join(f"{r}={f}" for r, f in self.as_dict().items()) or "any"


def formats(**roles: TensorFormat | torch.dtype | Iterable[TensorFormat | torch.dtype]) -> frozenset[FormatSignature]:
    """Return every combination of the given formats per role: ``formats(q=HALVES, kv=(torch.bfloat16,))``."""
    choices = [[v] if isinstance(v, (TensorFormat, torch.dtype)) else list(v) for v in roles.values()]
    return frozenset(FormatSignature.of(dict(zip(roles, combo, strict=True))) for combo in itertools.product(*choices))


def same_formats(*roles: str, dtypes: Iterable[torch.dtype]) -> frozenset[FormatSignature]:
    """Return the signatures in which all the roles share one dtype."""
    return frozenset(FormatSignature.of(dict.fromkeys(roles, d)) for d in dtypes)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
