"""FlashAttention-3: which build is there, what it can do, and calls of it that keep the op contracts.

The interface is the op ``fwd`` that each build registers; the Python functions around it offer no ``out``. Read in
flash-attention 0251105 (hopper/flash_api_stable.cpp), vllm-flash-attention 617264c and tokenspeed-fa3 3.0.0. What
differs from the contracts, and is put right here: rows of no sequence are not written, the LSE is ``[heads, rows]``
and contains the sink, sinks must be bf16, values behind the last sequence are multiplied by zero weights, and with
pages as long as a tile so are unused slots. ``leftpad_k``, the first key of a sequence, chooses the path that leaves
those out, and keeps it from pages before a window, which may be freed.

Source: Shah et al. 2024, https://arxiv.org/abs/2407.08608.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from tskernel.backends.cuda import _vendor_rows as rows
from tskernel.dispatch.platform import CapabilityRequirement
from tskernel.dispatch.signature import same_formats

_SM90: Final = {"vendor": "nvidia", "exactly": ("sm90",)}
CAPABILITY: Final = tuple(
    CapabilityRequirement(**_SM90, packages=("triton", package))
    for package in ("flash_attn_interface", "tskernel.backends.cuda._vllm_fa3:library_of_vllm")
)
# Its fp8 kernels round the softmax weights to three mantissa bits: more error than the tolerance table allows.
SIGNATURES: Final = same_formats("q", "kv", dtypes=(torch.float16, torch.bfloat16))
WIDTHS: Final = range(8, 257, 8)
TRAITS: Final = {"head_dim": WIDTHS, "head_dim_v": WIDTHS}


class Library(NamedTuple):
    """A loaded build: its op, the op's arguments in order with their defaults, and the name of its sink argument."""

    call: Any
    defaults: tuple[tuple[str, Any], ...]
    sinks: str | None


@functools.cache
def library() -> Library:
    """Return the build of this process: ``flash_attn_interface``, else vLLM's. Raises: ImportError without one."""
    if importlib.util.find_spec("flash_attn_interface") is not None:
        importlib.import_module("flash_attn_interface")
        call = torch.ops.flash_attn_3.fwd.default
    else:
        from tskernel.backends.cuda import _vllm_fa3

        call = getattr(_vllm_fa3, "library_of_vllm", None)
        if call is None:
            raise ImportError("neither flash_attn_interface nor vLLM's FlashAttention-3 loads")
    arguments = call._schema.arguments
    defaults = tuple((a.name, a.default_value if a.has_default_value() else _NEEDED.get(a.name)) for a in arguments)
    names = {name for name, _ in defaults}
    return Library(call, defaults, next((n for n in ("sinks", "s_aux") if n in names), None))


# vLLM's schema gives no defaults; None stands for an absent optional.
_NEEDED: Final = {
    "is_causal": False,
    "window_size_left": -1,
    "window_size_right": -1,
    "attention_chunk": 0,
    "softcap": 0.0,
    "is_rotary_interleaved": False,
    "num_splits": 0,
    "sm_margin": 0,
    "cp_world_size": 1,
    "cp_rank": 0,
}


@functools.cache
def left_out(feature: str) -> bool:
    """Whether the build was made without a feature, by its own record; a build without a record has all."""
    if importlib.util.find_spec("flash_attn_config") is None:
        return False
    flags = importlib.import_module("flash_attn_config").CONFIG["build_flags"]
    # The two width pairs are spelled FLASH_ATTENTION_ in the record, all else FLASHATTENTION_.
    return any(
        bool(flags.get(f"{prefix}_DISABLE_{feature}", False)) for prefix in ("FLASHATTENTION", "FLASH_ATTENTION")
    )


def forward(**given: Any) -> tuple[Tensor, Tensor]:
    """Call the op with the arguments it is given by name; return out and LSE."""
    found = library()
    out, lse = found.call(*[given.get(name, default) for name, default in found.defaults])[:2]
    return out, lse


def rejects(q: Tensor, v: Tensor, logit_cap: float, softmax_scale: float | None) -> str | None:
    """Return why FlashAttention-3 cannot take widths, cap or scale, or None."""
    width, value_width = q.shape[-1], v.shape[-1]
    if width != value_width and not (128 < width <= 192 and 96 < value_width <= 128):
        return f"widths of q and v are {width} and {value_width}: they must be equal, or 136 to 192 and 104 to 128"
    if logit_cap != 0.0 and left_out("SOFTCAP"):
        return "this build of FlashAttention-3 has no cap"
    if softmax_scale is not None and softmax_scale <= 0.0:
        return f"softmax_scale={softmax_scale}: the kernel takes the maximum before it scales"
    return None


class Scores(NamedTuple):
    """What is done to the scores."""

    scale: float
    causal: bool
    window: int
    cap: float
    sinks: Tensor | None

    def arguments(self, max_k: int) -> dict[str, Any]:
        """Return the op's arguments for them; a window bounds both sides."""
        return {
            "softmax_scale": self.scale,
            "is_causal": self.causal or self.window >= 0,
            "window_size_left": min(self.window, max_k),
            "window_size_right": 0 if self.causal or self.window >= 0 else -1,
            "softcap": self.cap,
        }


def own_sinks(scores: Scores, lse: Tensor | None) -> dict[str, Tensor]:
    """Return the sinks as the op's argument, or nothing where ``discount`` must apply them.

    The op wants them in bf16, to which fp32 ones cannot be rounded for free, and puts them into the LSE.
    """
    name, sinks = library().sinks, scores.sinks
    if sinks is None or name is None or lse is not None or sinks.dtype != torch.bfloat16:
        return {}
    return {name: sinks.contiguous()}


def ragged(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    max_q: int,
    max_k: int,
    scores: Scores,
    out: Tensor,
    lse: Tensor | None,
) -> None:
    """Attend packed queries to packed keys, into ``out`` and, where given, ``lse [Tq, Hq]``."""
    if out.numel() == 0:
        return
    if k.shape[0] == 0 or cu_q.shape[0] == 1:
        return rows.without_keys(out, lse)
    q, k, v = map(rows.aligned, (q, k, v))
    cu_q, cu_k = cu_q.contiguous(), cu_k.contiguous()
    max_q, max_k = _bound(max_q, q.shape[0]), _bound(max_k, k.shape[0])
    target, sinks = rows.staged(out), own_sinks(scores, lse)
    shielded = rows.shield(v, cu_k)
    _, given = forward(
        q=q,
        k=k,
        v=v,
        out=target,
        cu_seqlens_q=cu_q,
        cu_seqlens_k=cu_k,
        max_seqlen_q=max_q,
        max_seqlen_k=max_k,
        num_splits=1,
        **scores.arguments(max_k),
        **sinks,
    )
    if scores.sinks is not None and not sinks:
        rows.discount(target, given.t(), scores.sinks)
    rows.settle(target, lse, given.t(), cu_q, v, cu_k, shielded)
    if target is not out:
        out.copy_(target)
    return None


class Pages(NamedTuple):
    """A paged cache, and how long its sequences may be."""

    k: Tensor
    v: Tensor
    table: Tensor
    lengths: Tensor
    longest: int


def paged(
    q: Tensor, pages: Pages, cu_q: Tensor | None, max_q: int, scores: Scores, out: Tensor, lse: Tensor | None
) -> None:
    """Attend to a paged cache: packed queries with ``cu_q``, else ``max_q`` queries per sequence."""
    if out.numel() == 0:
        return
    batch, page_size = pages.table.shape[0], pages.k.shape[1]
    columns = min(pages.table.shape[1], -(-pages.longest // page_size))
    if columns <= 0 or batch == 0:
        return rows.without_keys(out, lse)
    q, k, v = map(rows.aligned, (q, pages.k, pages.v))
    max_q = _bound(max_q, q.shape[0])
    target, sinks = rows.staged(out), own_sinks(scores, lse)
    given = _attend_pages(q, pages._replace(k=k, v=v), columns, cu_q, max_q, scores, target, sinks)
    if scores.sinks is not None and not sinks:
        rows.discount(target, given, scores.sinks)
    if cu_q is not None:
        rows.settle(target, lse, given, cu_q, target, cu_q, None)
    elif lse is not None:
        lse.copy_(given)
    if target is not out:
        out.copy_(target)
    return None


def _attend_pages(
    q: Tensor,
    pages: Pages,
    columns: int,
    cu_q: Tensor | None,
    max_q: int,
    scores: Scores,
    out: Tensor,
    sinks: dict[str, Tensor],
) -> Tensor:
    """Call the op; return the LSE as ``[Tq, Hq]``."""
    batch, page_size = pages.table.shape[0], pages.k.shape[1]
    cu_q = None if cu_q is None else cu_q.contiguous()
    table = pages.table.narrow(1, 0, columns)
    lengths = pages.lengths.contiguous()
    options: dict[str, Any] = {}
    if scores.window >= 0:
        window = min(scores.window, columns * page_size)
        options["leftpad_k"] = rows.first_keys(lengths, cu_q, max_q, window)
    elif _whole_tiles(page_size, max_q * q.shape[1] // pages.k.shape[2]):
        options["leftpad_k"] = torch.zeros(batch, dtype=torch.int32, device=q.device)
    if cu_q is not None:
        options |= {"cu_seqlens_q": cu_q, "max_seqlen_q": max_q}
    else:
        q, out = q.unflatten(0, (batch, max_q)), out.unflatten(0, (batch, max_q))
    _, lse = forward(
        q=q,
        k=pages.k,
        v=pages.v,
        out=out,
        seqused_k=lengths,
        page_table=table if table.stride(-1) == 1 else table.contiguous(),
        **scores.arguments(columns * page_size),
        **options,
        **sinks,
    )
    return lse.t() if cu_q is not None else lse.transpose(1, 2).flatten(0, 1)


def _whole_tiles(page_size: int, queries: int) -> bool:
    """Whether the library might copy whole tiles of a page, unused slots and all: tiles have 64 to 192 keys."""
    return page_size >= 64 and page_size % 16 == 0 and queries > 64


def _bound(bound: int, limit: int) -> int:
    return max(1, min(bound, limit))
