"""FlashAttention-4 (CuTe DSL): calls of ``flash_attn.cute`` that keep the op contracts.

Read in flash-attn-4 4.0.0b36 (flash_attn/cute/interface.py). ``_flash_attn_fwd`` is what its public functions call;
they offer no ``out``. It compiles a program per kind of call at first use, by itself and on the host. What differs
from the contracts, and is put right here: rows of no sequence are not written, the LSE is ``[heads, rows]`` and
contains the sink, values behind the last sequence are multiplied by zero weights, and rows without keys are given
what tiles before the first key hold.

Source: https://github.com/Dao-AILab/flash-attention; Shah et al. 2024, https://arxiv.org/abs/2407.08608.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from tskernel.backends.cuda import _vendor_rows as rows
from tskernel.dispatch.errors import KernelRefusedError
from tskernel.dispatch.platform import Arch, CapabilityRequirement, platform_of
from tskernel.dispatch.signature import same_formats

_PACKAGES: Final = ("triton", "flash_attn.cute.interface:_flash_attn_fwd")
CAPABILITY: Final = (
    CapabilityRequirement(vendor="nvidia", exactly=("sm90",), packages=_PACKAGES),
    CapabilityRequirement(vendor="nvidia", family="sm100", packages=_PACKAGES),
)
SIGNATURES: Final = same_formats("q", "kv", dtypes=(torch.float16, torch.bfloat16))
WIDTHS: Final = range(8, 257, 8)
TRAITS: Final = {"head_dim": WIDTHS, "head_dim_v": WIDTHS}

_compiled: set[Any] = set()


def rejects(q: Tensor, v: Tensor, softmax_scale: float | None) -> str | None:
    """Return why FlashAttention-4 cannot take widths or scale, or None."""
    widths = (q.shape[-1], v.shape[-1])
    arch = platform_of(q.device).arch
    if arch is not None and arch >= Arch((10, 0)) and max(widths) > 128 and widths not in ((192, 128), (256, 256)):
        return f"widths of q and v are {widths}: on this part they are at most 128, or 192 and 128, or both 256"
    if softmax_scale is not None and softmax_scale <= 0.0:
        return f"softmax_scale={softmax_scale}: the kernel takes the maximum before it scales"
    return None


def ragged(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float,
    causal: bool,
    window: int = -1,
    cap: float = 0.0,
    sinks: Tensor | None = None,
    out: Tensor,
    lse: Tensor | None,
) -> None:
    """Attend packed queries to packed keys, into ``out`` and, where given, ``lse [Tq, Hq]``."""
    if out.numel() == 0:
        return
    if k.shape[0] == 0 or cu_q.shape[0] == 1:
        return rows.without_keys(out, lse)
    q, k, v = map(rows.aligned, (q, k, v))
    target = rows.staged(out)
    given = None if lse is None else torch.empty((q.shape[1], q.shape[0]), dtype=torch.float32, device=q.device)
    shielded = rows.shield(v, cu_k)
    bounded = causal or window >= 0
    _forward(
        q=q,
        k=k,
        v=v,
        cu_seqlens_q=cu_q.contiguous(),
        cu_seqlens_k=cu_k.contiguous(),
        max_seqlen_q=max(1, min(max_q, q.shape[0])),
        max_seqlen_k=max(1, min(max_k, k.shape[0])),
        softmax_scale=scale,
        causal=bounded and window < 0,
        softcap=cap if cap != 0.0 else None,
        window_size_left=min(window, k.shape[0]) if window >= 0 else None,
        window_size_right=0 if window >= 0 else None,
        learnable_sink=sinks if given is None else None,
        out=target,
        lse=given,
    )
    rearranged = None if given is None else given.t()
    if sinks is not None and rearranged is not None:
        rows.discount(target, rearranged, sinks)
    rows.settle(target, lse, rearranged, cu_q, v, cu_k, shielded)
    if cu_k is not cu_q:
        rows.clear_blind(target, lse, cu_q, cu_k, causal=bounded)
    if target is not out:
        out.copy_(target)
    return None


def _forward(**given: Any) -> None:
    """Call the library. Raises: KernelRefusedError where it would have to compile during capture."""
    from flash_attn.cute import interface  # pyright: ignore[reportMissingImports]

    kind = _kind(given)
    if kind not in _compiled:
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise KernelRefusedError(
                "FlashAttention-4 has not compiled this kind of call and a graph is being captured"
            )
        interface._flash_attn_fwd(**given)
        _compiled.add(kind)
    else:
        interface._flash_attn_fwd(**given)


def _kind(given: dict[str, Any]) -> Any:
    """Return what the library compiles for: at least as fine as its own key, lengths in powers of two."""
    q, k, v, sinks = given["q"], given["k"], given["v"], given["learnable_sink"]
    bounds = tuple(given[n].bit_length() for n in ("max_seqlen_q", "max_seqlen_k"))
    absent = tuple(given[n] is None for n in ("lse", "window_size_left"))
    layouts = tuple((x.shape[1:], tuple(s == 0 for s in x.stride())) for x in (q, k, v))
    many = given["cu_seqlens_q"].shape[0]
    return (
        (q.device, q.dtype, layouts, bounds, many, absent, given["causal"], given["softcap"]),
        None if sinks is None else sinks.dtype,
    )
