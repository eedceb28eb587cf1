"""Stand-ins for vendor libraries: their recorded signatures in front of torch code that has their manners.

A stand-in refuses what the library refuses, leaves unwritten what the library leaves unwritten, and reads what it reads
too much of. tools/record_vendor_signatures.py records the signatures from the wheels.
"""

from __future__ import annotations

import functools
import importlib.machinery
import json
import math
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

RECORDED: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parent / "data" / "vendor_signatures.json").read_text()
)
NAN, INF = float("nan"), float("inf")
TILE = 32  # keys that a library reads at a time (really 64 to 192; less makes for shorter tests)
GARBAGE = 7.25  # what it writes where its result means nothing


def with_signature(parameters: str, body: Callable[..., Any], **names: Any) -> Callable[..., Any]:
    """Return a function of recorded parameters that hands them to ``body`` by name; defaults may use ``names``."""
    scope: dict[str, Any] = {"body": body, "torch": torch, **names}
    exec(f"def stand_in({parameters}):\n    return body(**locals())", scope)
    return scope["stand_in"]


@contextmanager
def modules(**named: dict[str, Any]) -> Iterator[None]:
    """Install modules with these contents; dots are written as double underscores, parents are made."""
    before = dict(sys.modules)
    try:
        for name, contents in named.items():
            parts = name.split("__")
            for n in range(1, len(parts) + 1):
                full = ".".join(parts[:n])
                module = sys.modules.get(full) or types.ModuleType(full)
                module.__spec__ = importlib.machinery.ModuleSpec(full, None, is_package=True)
                module.__path__ = []
                sys.modules[full] = module
                if n > 1:
                    setattr(sys.modules[".".join(parts[: n - 1])], parts[n - 1], module)
            vars(sys.modules[name.replace("__", ".")]).update(contents)
        yield
    finally:
        for name in set(sys.modules) - set(before):
            del sys.modules[name]
        sys.modules.update(before)


def need(condition: bool, what: str) -> None:
    """Refuse a call as a library would."""
    if not condition:
        raise RuntimeError(f"vendor: {what}")


def need_rows(**tensors: Tensor | None) -> None:
    """Refuse tensors whose rows do not start on 16 bytes."""
    for name, x in tensors.items():
        if x is not None:
            need(x.stride(-1) == 1, f"{name} must be contiguous in its last dimension")
            steps = [s * x.element_size() for s in x.stride()[:-1]]
            need(x.data_ptr() % 16 == 0 and not any(s % 16 for s in steps), f"{name} is not aligned to 16 bytes")


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    causal: bool,
    left: int = -1,
    right: int = -1,
    cap: float = 0.0,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend ``q [Lq, Hq, D]`` to ``k, v [Lk, Hkv, ...]`` in fp32; the LSE ``[Lq, Hq]`` contains the sink.

    The scale is applied after the maximum is taken, so it must be positive.
    """
    need(scale > 0, "the scale must be positive")
    group = q.shape[1] // k.shape[1]
    k, v = (x.float().repeat_interleave(group, 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.float(), k) * scale
    if cap:
        scores = cap * torch.tanh(scores / cap)
    own = torch.arange(q.shape[0])[:, None] + k.shape[0] - q.shape[0]
    key = torch.arange(k.shape[0])[None]
    hidden = torch.zeros(q.shape[0], k.shape[0], dtype=torch.bool)
    if causal or right >= 0:
        hidden |= key > own + max(right, 0)
    if left >= 0:
        hidden |= key < own - left
    scores = scores.masked_fill(hidden, -INF)
    if sinks is not None:
        scores = torch.cat([scores, sinks.float()[:, None, None].expand(-1, q.shape[0], 1)], -1)
        v = torch.cat([v, torch.zeros(1, *v.shape[1:])])
    lse = torch.logsumexp(scores, -1) if scores.shape[-1] else torch.full(scores.shape[:2], -INF)
    weights = torch.exp(scores - torch.where(lse == -INF, 0.0, lse)[..., None])
    return torch.einsum("hqk,khd->qhd", weights, v), lse.T


def stray(v: Tensor, first: int, length: int) -> Tensor:
    """Return what the last tile of a sequence's values adds beyond the sequence: 0, or NaN where those are not finite.

    ``v [Tk, Hkv, Dv]``; the sequence has ``length`` rows from ``first`` on.
    """
    end = min(first + -(-length // TILE) * TILE, v.shape[0])
    return (v[first + length : end].float() * 0).sum(0)


def attend_packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    out: Tensor,
    *,
    blind: float = 0.0,
    **options: Any,
) -> Tensor:
    """Attend packed sequences; return the LSE ``[Hq, Tq]``. Rows of no sequence stay unwritten.

    ``blind`` is what rows without keys are given.
    """
    lse = torch.full((q.shape[1], q.shape[0]), NAN)
    for b in range(cu_q.shape[0] - 1):
        (q0, q1), (k0, k1) = cu_q[b : b + 2].tolist(), cu_k[b : b + 2].tolist()
        result, found = attend(q[q0:q1], k[k0:k1], v[k0:k1], **options)
        if k1 > k0:
            result = result + stray(v, k0, k1 - k0).repeat_interleave(q.shape[1] // k.shape[1], 0)
        if blind:
            unseen = found == -INF
            result, found = torch.where(unseen[..., None], blind, result), torch.where(unseen, blind, found)
        out[q0:q1] = result.to(out.dtype)
        lse[:, q0:q1] = found.T
    return lse


# FlashAttention-3


def _fa3_forward(q: Tensor, k: Tensor, v: Tensor, **a: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    for x in (k, v):
        need(x.dtype == q.dtype and q.dtype in (torch.float16, torch.bfloat16), "dtypes of q, k and v")
    need_rows(q=q, k=k, v=v, out=a["out"])
    need(a["softcap"] == 0.0, "This flash attention build does not support tanh softcapping.")
    need(q.shape[-1] % 8 == 0 and q.shape[-1] <= 256, "head_size")
    same = v.shape[-1] == q.shape[-1] or (128 < q.shape[-1] <= 192 and 96 < v.shape[-1] <= 128)
    need(same, "If V headdim is different from Q/K dim")
    sinks = a["sinks"]
    need(sinks is None or (sinks.dtype == torch.bfloat16 and sinks.is_contiguous()), "sinks must have dtype bfloat16")
    causal, left, right = a["is_causal"], a["window_size_left"], a["window_size_right"]
    options = {"scale": a["softmax_scale"], "causal": causal, "left": left, "right": 0 if causal else right}
    out, empty = a["out"], torch.empty(0)
    if a["page_table"] is None:
        need(a["max_seqlen_q"] is not None and a["max_seqlen_k"] is not None, "max_seqlen must be provided")
        for name in ("cu_seqlens_q", "cu_seqlens_k"):
            need(a[name].is_contiguous() and a[name].dtype == torch.int32, name)
        cu_q, cu_k = a["cu_seqlens_q"], a["cu_seqlens_k"]
        if k.shape[0] == 0:
            return out.zero_(), torch.full((q.shape[1], q.shape[0]), INF), empty, empty
        return out, attend_packed(q, k, v, cu_q, cu_k, out, sinks=sinks, **options), empty, empty
    return out, _fa3_pages(q, k, v, out, a, sinks=sinks, **options), empty, empty


def _fa3_pages(q: Tensor, k: Tensor, v: Tensor, out: Tensor, a: dict[str, Any], **options: Any) -> Tensor:
    cu_q, table, lengths = a["cu_seqlens_q"], a["page_table"], a["seqused_k"]
    need(table.dtype == torch.int32 and table.stride(-1) == 1, "page_table")
    need(lengths.is_contiguous() and lengths.dtype == torch.int32, "seqused_k")
    need((cu_q is None) == (q.dim() == 4) and (cu_q is None or a["max_seqlen_q"] is not None), "cu_seqlens_q")
    most = q.shape[1] if cu_q is None else a["max_seqlen_q"]
    pads = torch.zeros_like(lengths) if a["leftpad_k"] is None else a["leftpad_k"]
    tiled = k.shape[1] % TILE == 0 and most * q.shape[-2] // k.shape[2] > 64 and a["leftpad_k"] is None
    lse = torch.full((q.shape[0], q.shape[2], q.shape[1]) if cu_q is None else (q.shape[1], q.shape[0]), NAN)
    for b, (length, pad) in enumerate(zip(lengths.tolist(), pads.tolist(), strict=True)):
        start = max(0, length - pad - most - options["left"]) // TILE * TILE if options["left"] >= 0 else 0
        keys, values = (torch.zeros(length, *x.shape[2:], dtype=x.dtype) for x in (k, v))
        for t in range(pad + start, length):  # reads, and would fault on, every entry of its tiles
            page, slot = int(table[b, t // k.shape[1]]), t % k.shape[1]
            need(0 <= page < k.shape[0], f"illegal memory access at page {page}")
            keys[t], values[t] = k[page, slot], v[page, slot]
        rows = slice(b, b + 1) if cu_q is None else slice(*cu_q[b : b + 2].tolist())
        result, found = attend(q[b] if cu_q is None else q[rows], keys[pad:], values[pad:], **options)
        if tiled and length % TILE:
            result = result + (v[int(table[b, (length - 1) // k.shape[1]]), length % k.shape[1] :].float() * 0).sum()
        out[rows] = (result[None] if cu_q is None else result).to(out.dtype)
        if cu_q is None:
            lse[b] = found.T
        else:
            lse[:, rows] = found.T
    return lse


@contextmanager
def flash_attention_3() -> Iterator[None]:
    """Install ``flash_attn_interface`` and its op."""
    _fa3_op()
    config = {"CONFIG": RECORDED["tokenspeed_fa3"]["flash_attn_config.py:CONFIG"]}
    with modules(flash_attn_interface={}, flash_attn_config=config):
        yield


@functools.cache
def _fa3_op() -> torch.library.Library:
    """Register the op under its recorded schema; once, since torch keeps handles to it."""
    library = torch.library.Library("flash_attn_3", "DEF")
    library.define(RECORDED["tokenspeed_fa3"]["flash_attn_3/_C.abi3.so:fwd"])
    names = [a.name for a in torch.ops.flash_attn_3.fwd.default._schema.arguments]
    library.impl("fwd", lambda *a, **k: _fa3_forward(**dict(zip(names, a, strict=False)), **_rest(names, a, k)), "CPU")
    return library


def _rest(names: list[str], given: tuple[Any, ...], keywords: dict[str, Any]) -> dict[str, Any]:
    """Return what the dispatcher left out: trailing arguments that equal their defaults."""
    defaults = {a.name: a.default_value for a in torch.ops.flash_attn_3.fwd.default._schema.arguments}
    return {n: keywords.get(n, defaults[n]) for n in names[len(given) :]}


# FlashAttention-4


def _fa4_forward(**a: Any) -> tuple[Any, ...]:
    q, k, v, out, sinks = a["q"], a["k"], a["v"], a["out"], a["learnable_sink"]
    need_rows(q=q, k=k, v=v, out=out)
    need(a["page_table"] is None and a["num_splits"] == 1, "no pages and no splits on sm90")
    need(8 <= q.shape[-1] <= 256 and q.shape[-1] % 8 == 0 == v.shape[-1] % 8, "head dims")
    need(sinks is None or (sinks.shape == (q.shape[1],) and sinks.dtype in (torch.bfloat16, torch.float32)), "sinks")
    left, right, causal = a["window_size_left"], a["window_size_right"], a["causal"]
    need(left is None or left >= 0, "window")
    if a["lse"] is not None:
        need(a["lse"].shape == (q.shape[1], q.shape[0]) and a["lse"].is_contiguous(), "lse")
    right = 0 if causal else -1 if right is None else right
    options = {"scale": a["softmax_scale"], "causal": causal, "left": -1 if left is None else left, "right": right}
    options |= {"cap": a["softcap"] or 0.0, "sinks": sinks, "blind": 0.0 if sinks is not None else GARBAGE}
    lse = attend_packed(q, k, v, a["cu_seqlens_q"], a["cu_seqlens_k"], out, **options)
    if a["lse"] is not None:
        a["lse"].copy_(lse)
    return out, a["lse"], None, None, None


@contextmanager
def flash_attention_4() -> Iterator[None]:
    """Install ``flash_attn.cute.interface``."""
    parameters = RECORDED["flash_attn_4"]["flash_attn/cute/interface.py:_flash_attn_fwd"]
    with modules(flash_attn__cute__interface={"_flash_attn_fwd": with_signature(parameters, _fa4_forward)}):
        yield


# FlashMLA


class SchedMeta:
    """What the newer interface calls a plan: made empty, filled by the first call, of no use for other lengths."""

    lengths: Any = None


def _flash_mla_plan(**a: Any) -> tuple[Any, Any]:
    if "args" in a:
        return SchedMeta(), None
    need(a["cache_seqlens"].dtype == torch.int32 and a["num_heads_k"] == 1, "get_mla_metadata")
    return (a["cache_seqlens"].tolist(), a["num_heads_per_head_k"]), torch.zeros(a["cache_seqlens"].shape[0] + 1)


def _flash_mla_forward(**a: Any) -> tuple[Tensor, Tensor]:
    q, cache, table, lengths, plan = (
        a[n] for n in ("q", "k_cache", "block_table", "cache_seqlens", "tile_scheduler_metadata")
    )
    need_rows(q=q, k_cache=cache)
    need(cache.shape[1] == 64 and q.shape[3] == 576 and a["head_dim_v"] == 512, "page_block_size must be 64")
    need(table.stride(-1) == 1 and lengths.is_contiguous(), "layout")
    if isinstance(plan, SchedMeta):
        need(a["num_splits"] is None and plan.lengths in (None, lengths.tolist()), "sched_meta")
        plan.lengths = lengths.tolist()
    else:
        need(plan == (lengths.tolist(), q.shape[1] * q.shape[2]), "tile_scheduler_metadata of other lengths")
    out, lse = torch.empty(*q.shape[:3], 512, dtype=q.dtype), torch.empty(q.shape[0], q.shape[2], q.shape[1])
    for b, length in enumerate(lengths.tolist()):
        keys = torch.stack([cache[int(table[b, t // 64]), t % 64] for t in range(length)] or [cache[0, 0]])[:length]
        result, found = attend(q[b], keys, keys[..., :512], scale=a["softmax_scale"], causal=a["causal"])
        out[b], lse[b] = result.to(q.dtype), torch.where(found == -INF, INF, found).T
    return out, lse


@contextmanager
def flash_mla(version: str = "9241ae3") -> Iterator[None]:
    """Install ``flash_mla`` with the interface of a version."""
    recorded = RECORDED[f"flash_mla {version}"]
    bodies = {"get_mla_metadata": _flash_mla_plan, "flash_mla_with_kvcache": _flash_mla_forward}
    with modules(flash_mla={n: with_signature(recorded[n], body) for n, body in bodies.items()}):
        yield


# cuDNN, through FlashInfer


def _cudnn_forward(**a: Any) -> tuple[Any, ...]:
    q, k, v, out, lse = a["q"], a["k_cache"], a["v_cache"], a["out"], a["lse"]
    need_rows(q=q, k=k, v=v)
    need(q.shape[2] in (128, 192) and v.shape[2] == 128, "head_dim_qk must be 128 or 192, and head_dim_vo 128")
    need(out.is_contiguous() and out.data_ptr() % 16 == 0, "out must be contiguous")
    need(a["batch_offsets_units"] == "tokens" and a["lse_base"] == "ln" and a["block_tables"] is None, "offsets")
    need(a["return_lse"] == (lse is not None) and (lse is None or lse.shape == q.shape[:2]), "lse")
    need(a["max_token_per_sequence"] > 1 and a["workspace_buffer"].numel() >= 128 << 20, "workspace and bounds")
    sinks, left = a["sinks"], a["window_left"]
    need(sinks is None or (sinks.dtype == torch.float32 and sinks.is_contiguous()), "sinks must be contiguous fp32")
    options = {"scale": a["scale"], "causal": a["causal"], "left": -1 if left is None else left, "sinks": sinks}
    options["blind"] = 0.0 if sinks is not None else GARBAGE
    found = attend_packed(q, k, v, a["batch_offsets_q"], a["batch_offsets_k"], out, **options)
    if lse is not None:
        lse.copy_(found.T)
    return out, lse


@contextmanager
def cudnn() -> Iterator[None]:
    """Install ``flashinfer.cudnn`` and ``cudnn``."""
    name = "cudnn_batch_prefill_with_kv_cache"
    parameters = RECORDED["flashinfer_python"][f"flashinfer/cudnn/prefill.py:{name}"]
    with modules(cudnn={}, flashinfer__cudnn={name: with_signature(parameters, _cudnn_forward)}):
        yield


# FlashInfer


class _Decode:
    """The decode wrapper: a plan without cutting, and page ranges that may be put in place of the planned ones."""

    def _init(self, **a: Any) -> None:
        need(a["use_tensor_cores"] and a["kv_layout"] == "NHD", "tensor cores and NHD")
        need(a["float_workspace_buffer"].data_ptr() % 16 == 0, "workspace")

    def _plan(self, **a: Any) -> None:
        need(a["indptr"].device.type == "cpu", "plan: indptr on the host")
        need(a["disable_split_kv"], "this stand-in plans without cutting only")
        need(a["is_causal"] is None and a["window_right"] == 0, "mask")
        self.planned = a

    def _run(self, **a: Any) -> Any:
        plan, q, (k, v) = self.planned, a["q"], a["paged_kv_cache"]
        starts, tails = self._paged_kv_indptr_buf.tolist(), self._paged_kv_last_page_len_buf.tolist()
        indices, n, size = self._paged_kv_indices_buf, plan["q_len_per_req"], plan["page_size"]
        need_rows(q=q, k=k, v=v)
        need(q.is_contiguous() and a["out"].is_contiguous() and k.stride() == v.stride(), "layouts")
        need(q.shape[0] == (len(starts) - 1) * n and q.dtype == plan["q_data_type"], "q")
        need(q.shape[1:] == (plan["num_qo_heads"], plan["head_dim"]), "heads")
        need(k.shape[1:] == (size, plan["num_kv_heads"], plan["head_dim"]), "cache")
        need(a["return_lse"] == (a["lse"] is not None), "lse")
        for b in range(len(starts) - 1):
            count = starts[b + 1] - starts[b]
            length = (((count - 1) * size + tails[b]) & 0xFFFFFFFF) if count else 0
            need(length <= count * size, f"length {length} is past the pages of request {b}")
            pages = [int(indices[starts[b] + t // size]) for t in range(length)]
            need(all(0 <= p < k.shape[0] for p in pages), "illegal memory access")
            keys, values = (
                torch.stack([x[p, t % size] for t, p in enumerate(pages)]) if pages else x[0, :0] for x in (k, v)
            )
            options = {"scale": plan["sm_scale"], "left": plan["window_left"], "cap": plan["logits_soft_cap"]}
            result, found = attend(q[b * n : b * n + n], keys, values, causal=True, **options)
            unseen = found == -INF
            a["out"][b * n : b * n + n] = torch.where(unseen[..., None], GARBAGE if length else 0.0, result)
            if a["lse"] is not None:
                a["lse"][b * n : b * n + n] = torch.where(unseen, -5e4, found) / math.log(2)
        return a["out"]


@contextmanager
def flashinfer() -> Iterator[None]:
    """Install ``flashinfer`` with its decode wrapper."""
    recorded, name = RECORDED["flashinfer_python"], "BatchDecodeWithPagedKVCacheWrapper"
    bodies = {"__init__": _Decode._init, "plan": _Decode._plan, "run": _Decode._run}
    file = "flashinfer/decode.py"
    members = {
        n: with_signature(recorded[f"{file}:{name}.{'_plan_impl' if n == 'plan' else n}"], body)
        for n, body in bodies.items()
    }
    with modules(flashinfer={name: type(name, (), members)}):
        yield


LIBRARIES = {
    "cudnn": cudnn,
    "flashinfer": flashinfer,
    "fa3": flash_attention_3,
    "fa4": flash_attention_4,
    "flashmla": flash_mla,
}
