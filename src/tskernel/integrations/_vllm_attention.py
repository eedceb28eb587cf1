# pyright: reportMissingImports=false, reportUntypedBaseClass=false
"""vLLM's attention by the ops: decodes, extends and prefills of a batch each go to the op made for them.

vLLM keeps keys and values of a token side by side; the ops take the two as views of one tensor.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.platforms import current_platform
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
    MultipleOf,
)
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.attention.backends.utils import split_decodes_and_prefills

from tskernel import warmup_selection

ops = torch.ops.tokenspeed
NAME = "TOKENSPEED"
ENCODERS = (AttentionType.ENCODER, AttentionType.ENCODER_ONLY)
FP8 = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


def install_attention() -> str:
    """Register the backend under the name TOKENSPEED, or in the slot CUSTOM of a vLLM that takes no new names.

    On CPU vLLM looks at no choice of the user, so the backend takes the place of CPU_ATTN.
    """
    path = f"{__name__}.{TokenspeedAttentionBackend.__name__}"
    if current_platform.is_cpu():
        register_backend(AttentionBackendEnum.CPU_ATTN, path)
        return "instead of CPU_ATTN"
    try:
        register_backend(NAME, path)  # pyright: ignore[reportArgumentType]
    except (AttributeError, KeyError, TypeError):
        register_backend(AttentionBackendEnum.CUSTOM, path)
        return "with --attention-backend CUSTOM"
    return f"with --attention-backend {NAME}"


class TokenspeedAttentionBackend(AttentionBackend):
    """What vLLM asks before it takes the backend."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", "float16", "bfloat16", *FP8]
    forward_includes_kv_cache_update: bool = False

    @staticmethod
    def get_name() -> str:
        """Return the name under which vLLM finds the backend again: a layer looks it up among the registered ones."""
        if current_platform.is_cpu():
            return "CPU_ATTN"
        return NAME if NAME in AttentionBackendEnum.__members__ else "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type:
        """Return the class with ``forward``."""
        return TokenspeedAttentionImpl

    @staticmethod
    def get_builder_cls() -> type:
        """Return the class that sorts a batch."""
        return TokenspeedMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        """Return the page sizes: any, but small ones cost a table entry each."""
        return [MultipleOf(16)]

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        """Return the shape that releases up to 0.26 ask for; later ones always use this one."""
        return (num_blocks, num_kv_heads, block_size, 2 * head_size)

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension: bool = False) -> tuple[int, ...]:
        """Return the order in memory of that shape's dimensions, as the user chose it; releases up to 0.26 ask for it.

        With ``include_num_layers_dimension`` a dimension of layers comes first in the shape. Pages stay outermost in
        memory, so that vLLM may pad them.
        """
        from vllm.v1.attention.backends import utils

        heads_first = utils.get_kv_cache_layout() == "HND"  # pyright: ignore[reportAttributeAccessIssue]
        if include_num_layers_dimension:
            return (1, 2, 0, 3, 4) if heads_first else (1, 0, 3, 2, 4)
        return (0, 1, 2, 3) if heads_first else (0, 2, 1, 3)

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        """Whether layers of this type are served: not those that attend to another sequence."""
        return attn_type in (AttentionType.DECODER, *ENCODERS)

    @classmethod
    def supports_sink(cls) -> bool:
        """Sinks are."""
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        """Windows are."""
        return True

    @classmethod
    def supports_non_causal(cls) -> bool:
        """Attention to later tokens is."""
        return True

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        """Batches are sorted by the host's query lengths: they must be those of the device."""
        return False


@dataclass
class Part:
    """Requests of a batch that go to one op."""

    tokens: slice
    lengths: Tensor
    table: Tensor
    max_query_len: int
    max_seq_len: int
    offsets: Tensor | None = None
    fresh: bool = False


@dataclass
class Metadata:
    """A batch: requests with the same number of new tokens, few of them, come first."""

    num_actual_tokens: int
    slot_mapping: Tensor
    causal: bool
    decodes: Part | None
    others: Part | None


class TokenspeedMetadataBuilder(AttentionMetadataBuilder):
    """Sorts a batch into decodes and the rest; reads no tensor of the device."""

    _cudagraph_support: ClassVar[Any] = AttentionCGSupport.UNIFORM_BATCH

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Metadata:
        """Return what the layers need."""
        batch = common_attn_metadata
        if isinstance(batch.causal, Tensor):
            raise NotImplementedError("tskernel attention: causal: expected one answer for the batch, got one each")
        requests, tokens = self._decodes(batch) if batch.causal else (0, 0)
        decodes = others = None
        if requests:
            decodes = Part(
                slice(0, tokens), batch.seq_lens[:requests], batch.block_table_tensor[:requests], tokens // requests,
                batch.max_seq_len,
            )  # fmt: skip
        if tokens < batch.num_actual_tokens:
            offsets = batch.query_start_loc[requests : batch.num_reqs + 1]
            others = Part(
                slice(tokens, batch.num_actual_tokens), batch.seq_lens[requests : batch.num_reqs],
                batch.block_table_tensor[requests : batch.num_reqs], batch.max_query_len, batch.max_seq_len,
                offsets - tokens if tokens else offsets, _fresh(batch, requests),
            )  # fmt: skip
        return Metadata(batch.num_actual_tokens, batch.slot_mapping, batch.causal, decodes, others)

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> Metadata:
        """Return the batch that a graph is recorded with, after one run of the attention with it.

        vLLM runs the model once before it records, but the V1 model runner does so with short sequences, and records
        with the longest ones. What is compiled for these must be compiled before.
        """
        metadata = super().build_for_cudagraph_capture(common_attn_metadata)
        layers = self.vllm_config.compilation_config.static_forward_context
        kinds = {layers[name].impl.kind: layers[name] for name in self.layer_names if name in layers}
        dtype = self.vllm_config.model_config.dtype
        calls = [partial(layer.impl.warm_up, layer, metadata, dtype, self.device) for layer in kinds.values()]
        warmup_selection((), calls=calls)
        return metadata

    def _decodes(self, batch: Any) -> tuple[int, int]:
        """Return how many requests at the front have the same few new tokens, and how many tokens these are."""
        requests, _, tokens, _ = split_decodes_and_prefills(
            batch, decode_threshold=self.reorder_batch_threshold or 1, require_uniform=True
        )
        # Requests that only pad a recorded batch have no tokens; then the rest of the batch is not uniform.
        return (requests, tokens) if requests and tokens % requests == 0 else (0, 0)


def _fresh(batch: Any, start: int) -> bool:
    """Whether no request from ``start`` on has earlier tokens in the cache, so that keys need not be read from it."""
    # An upper bound that equals the number of new tokens is exact. Older releases have the lengths themselves.
    lengths = getattr(batch, "seq_lens_cpu_upper_bound", None)
    if lengths is None:
        lengths = getattr(batch, "_seq_lens_cpu", None)
    if lengths is None:
        return False
    offsets = batch.query_start_loc_cpu[start : batch.num_reqs + 1]
    return bool((offsets[1:] - offsets[:-1] == lengths[start : batch.num_reqs]).all())


class TokenspeedAttentionImpl(AttentionImpl):
    """One layer."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        encoder = attn_type in ENCODERS
        if alibi_slopes is not None:
            raise NotImplementedError("tskernel attention: ALiBi: not supported; choose another attention backend")
        if not encoder and attn_type != AttentionType.DECODER:
            raise NotImplementedError(f"tskernel attention: attention type: expected a decoder's, got {attn_type}")
        if encoder and sliding_window is not None:
            raise NotImplementedError("tskernel attention: sliding_window: not supported in encoders")
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        self.kv_cache_dtype, self.attn_type = kv_cache_dtype, attn_type
        self.fp8 = FP8.get(kv_cache_dtype)
        self.encoder, self.shares = encoder, kv_sharing_target_layer_name is not None
        self.sliding_window, self.sinks = sliding_window, sinks
        self.options: dict[str, Any] = {
            "softmax_scale": self.scale,
            "window_left": -1 if sliding_window is None else sliding_window - 1,
            "logit_cap": float(logits_soft_cap or 0.0),
            "sinks": sinks,
        }

    @property
    def kind(self) -> tuple[Any, ...]:
        """What may make kernels differ between layers of a cache."""
        window, cap = self.options["window_left"], self.options["logit_cap"]
        return (self.num_heads, self.num_kv_heads, self.head_size, window, cap, self.sinks is None, self.fp8)

    def warm_up(self, layer: Any, metadata: Metadata, dtype: torch.dtype, device: torch.device) -> None:
        """Run the attention, with queries by themselves and with ones that are part of a row with keys and values."""
        if layer.kv_cache.numel() == 0:
            return
        tokens, heads = metadata.num_actual_tokens, self.num_heads + 2 * self.num_kv_heads
        rows = torch.zeros((tokens, heads, self.head_size), dtype=dtype, device=device)
        q, k, v = rows.split([self.num_heads, self.num_kv_heads, self.num_kv_heads], dim=1)
        for query in (q, q.contiguous()):
            self.forward(layer, query, k, v, layer.kv_cache, metadata, torch.empty_like(query.contiguous()))

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Write the new tokens' keys and values to their slots."""
        if self.encoder:
            return
        scales = self._scales(layer)
        ops.store_kvcache(key[: len(slot_mapping)], value[: len(slot_mapping)], *self._caches(kv_cache), slot_mapping,
                          **scales)  # fmt: skip

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Metadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Write the attention of ``query [T, Hq, D]`` to ``output``; rows that only pad are left alone."""
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("tskernel attention: quantized outputs: not supported")
        if attn_metadata is None:  # vLLM measures memory
            return output.fill_(0)
        out = output.view(-1, self.num_heads, self.head_size)
        for part in (attn_metadata.decodes, attn_metadata.others):
            if part is None:
                continue
            q, to = query[part.tokens], out[part.tokens]
            if part.offsets is None:
                ops.mha_decode_with_kvcache_out(
                    q, *self._caches(kv_cache), part.table, part.lengths, part.max_seq_len, part.max_query_len,
                    **self.options, **self._scales(layer), out=to,
                )  # fmt: skip
            elif self.encoder or (part.fresh and not self.shares):
                ops.mha_prefill_out(
                    q, key[part.tokens], value[part.tokens], part.offsets, part.max_query_len,
                    is_causal=attn_metadata.causal and not self.encoder, **self.options, out=to,
                )  # fmt: skip
            else:
                ops.mha_extend_with_kvcache_out(
                    q, part.offsets, *self._caches(kv_cache), part.table, part.lengths, part.max_query_len,
                    part.max_seq_len, is_causal=attn_metadata.causal, **self.options, **self._scales(layer), out=to,
                )  # fmt: skip
        return output

    def _caches(self, kv_cache: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values as ``[pages, page_size, Hkv, D]``: views, whatever order vLLM keeps them in."""
        if kv_cache.dim() == 5:  # keys and values apart, up to about 0.23
            k, v = kv_cache.unbind(0 if kv_cache.shape[0] == 2 else 1)
        else:
            k, v = kv_cache.transpose(1, 2).split(self.head_size, dim=-1)
        return (k, v) if self.fp8 is None else (k.view(self.fp8), v.view(self.fp8))

    def _scales(self, layer: Any) -> dict[str, Tensor]:
        if self.fp8 is None:
            return {}
        return {"k_scale": layer._k_scale.reshape(1), "v_scale": layer._v_scale.reshape(1)}
