# pyright: reportMissingImports=false
"""What the attention backend for SGLang does not do: found before the first token, each with its own sentence."""

from __future__ import annotations

from typing import Any

from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache import memory_pool as pools
from sglang.srt.runtime_context import get_parallel

OTHER_POOLS = tuple(
    getattr(pools, name)
    for name in (
        "NoOpMHATokenToKVPool",
        "MHATokenToKVPoolFP4",
        "MHATokenToKVPoolMXFP8",
        "PageMajorMHATokenToKVPool",
    )
    if hasattr(pools, name)
)


def runner_refusal(runner: Any) -> str | None:
    """Return why a model is not served, or None."""
    if runner.use_mla_backend:
        return "latent attention (MLA): not supported"
    if runner.model_config.is_encoder_decoder:
        return "an encoder-decoder model, which has cross-attention: not supported"
    if runner.is_draft_worker or not runner.spec_algorithm.is_none():
        return "speculative decoding: not supported"
    parallel = get_parallel()
    if parallel.attn_cp_size > 1 or parallel.dcp_enabled:
        return "context parallelism: not supported"
    if runner.kv_index_translator is not None and runner.kv_index_translator.is_translating:
        return "--enable-unified-memory: not supported"
    if getattr(runner, "prefill_aware_swa", False):
        return "a window that spares the prompt (prefill-aware): not supported"
    return next(filter(None, map(_pool_refusal, _leaves(runner.token_to_kv_pool))), None)


def _leaves(pool: Any) -> list[Any]:
    """Return the pools that hold tensors: a pool may keep the layers with a window, or without a state, apart."""
    parts = [getattr(pool, name, None) for name in ("full_kv_pool", "swa_kv_pool")]
    return [part for part in parts if part is not None] or [pool]


def _pool_refusal(pool: Any) -> str | None:
    kind = type(pool).__name__
    if not isinstance(pool, pools.MHATokenToKVPool) or isinstance(pool, OTHER_POOLS):
        return f"a cache of kind {kind}: expected MHATokenToKVPool"
    if pool.is_quantized_kv_cache:
        return f"a cache quantized by {type(pool.quant_method).__name__}: expected fp8_e4m3, fp8_e5m2 or none"
    if pool.kv_cache_layout not in ("nhd", "hnd"):
        return f"the cache layout {pool.kv_cache_layout}: expected nhd or hnd"
    return None


def layer_refusal(layer: Any, chunked: bool) -> str | None:
    """Return why a layer is not served, or None; ``chunked``: the model has layers that see chunks only."""
    name = f"layer {layer.layer_id}"
    if layer.is_cross_attention:
        return f"{name}: cross-attention: not supported"
    if layer.attn_type != AttentionType.DECODER:
        return f"{name}: attention type {layer.attn_type}: expected {AttentionType.DECODER}"
    if layer.use_irope and chunked:
        return f"{name}: attention within chunks: not supported"
    if layer.pos_encoding_mode != "NONE":
        return f"{name}: pos_encoding_mode {layer.pos_encoding_mode}: expected NONE"
    if layer.logit_cap and layer.logit_capping_method != "tanh":
        return f"{name}: logit_capping_method {layer.logit_capping_method}: expected tanh"
    if layer.xai_temperature_len > 0:
        return f"{name}: a temperature by position (xai_temperature_len): not supported"
    return None
