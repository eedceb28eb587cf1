"""cuDNN's fused attention on packed sequences, through FlashInfer, which plans it by shape and keeps the plans.

torch's own ``_cudnn_attention_forward`` is not used: it plans anew at every call with offsets, passes the LSE offsets
of one head, and overflows them past 2^31 elements (aten/src/ATen/native/cudnn/MHA.cpp, read in 02a4a0f). Read in
flashinfer-python 0.7.4 (flashinfer/cudnn/prefill.py): offsets in tokens are read on the device, the LSE is natural and
``[rows, heads]``, windows are as in the op contracts, ``out`` must be contiguous, rows of no sequence are not written.

Source: https://docs.nvidia.com/deeplearning/cudnn (scaled dot product attention).
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from tskernel.backends.cuda import _vendor_rows as rows
from tskernel.dispatch.errors import KernelRefusedError
from tskernel.dispatch.platform import CapabilityRequirement
from tskernel.dispatch.signature import same_formats

CAPABILITY: Final = CapabilityRequirement(
    vendor="nvidia",
    at_least="sm90",
    packages=("triton", "cudnn", "flashinfer.cudnn:cudnn_batch_prefill_with_kv_cache"),
)
SIGNATURES: Final = same_formats("q", "kv", dtypes=(torch.float16, torch.bfloat16))
TRAITS: Final = {"head_dim": {128, 192}, "head_dim_v": {128}, "logit_cap": {False}}
_WORKSPACE: Final = 128 << 20  # bytes; what FlashInfer asks for

_planned: set[Any] = set()


def rejects(q: Tensor, k: Tensor, v: Tensor, softmax_scale: float | None) -> str | None:
    """Return why cuDNN cannot take layouts or scale, or None."""
    if softmax_scale is not None and softmax_scale <= 0.0:
        return f"softmax_scale={softmax_scale}: the kernel takes the maximum before it scales"
    return rows.crooked(q=q, k=k, v=v)


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
    whole = out.is_contiguous() and out.data_ptr() % 16 == 0
    target = out if whole else torch.empty(out.shape, dtype=out.dtype, device=out.device)
    given = None if lse is None else torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    shielded = rows.shield(v, cu_k)
    bounded = causal or window >= 0
    # A bound of one token selects a path that stores the LSE of grouped heads wrongly (cuDNN before 9.27).
    _forward(
        q=q,
        k_cache=k,
        v_cache=v,
        scale=scale,
        max_token_per_sequence=max(2, min(max_q, q.shape[0])),
        max_sequence_kv=max(2, min(max_k, k.shape[0])),
        causal=bounded,
        return_lse=given is not None,
        batch_offsets_q=cu_q.contiguous(),
        batch_offsets_k=cu_k.contiguous(),
        batch_offsets_units="tokens",
        out=target,
        lse=given,
        is_cuda_graph_compatible=True,
        lse_base="ln",
        window_left=min(window, k.shape[0]) if window >= 0 else None,
        sinks=sinks.float().contiguous() if sinks is not None and given is None else None,
    )
    if sinks is not None and given is not None:
        rows.discount(target, given, sinks)
    rows.settle(target, lse, given, cu_q, v, cu_k, shielded)
    if cu_k is not cu_q:
        rows.clear_blind(target, lse, cu_q, cu_k, causal=bounded)
    if target is not out:
        out.copy_(target)
    return None


def _forward(**given: Any) -> None:
    """Call the library. Raises: KernelRefusedError where it would have to plan during capture."""
    from flashinfer.cudnn import cudnn_batch_prefill_with_kv_cache as attend  # pyright: ignore[reportMissingImports]

    kind = tuple(_kind(name, value) for name, value in sorted(given.items()))
    if kind not in _planned and torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise KernelRefusedError("cuDNN has no plan yet for this kind of call and a graph is being captured")
    attend(workspace_buffer=torch.empty(_WORKSPACE, dtype=torch.uint8, device=given["q"].device), **given)
    _planned.add(kind)


def _kind(name: str, value: Any) -> Any:
    return (name, tuple(value.shape), value.stride(), value.dtype) if isinstance(value, Tensor) else (name, value)
