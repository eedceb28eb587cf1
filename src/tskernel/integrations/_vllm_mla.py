# pyright: reportMissingImports=false, reportUntypedBaseClass=false, reportAttributeAccessIssue=false
"""vLLM's latent attention by the ops: decodes, prefills, and the writes to the cache.

What surrounds them stays vLLM's: the products that absorb the up-projections, the parts of a long context and their
sums.
"""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.model_executor.layers.attention.mla_attention import (
    MLACommonBackend,
    MLACommonImpl,
    MLACommonMetadataBuilder,
    QueryLenSupport,
)
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionCGSupport, AttentionType, MultipleOf
from vllm.v1.attention.backends.mla.prefill.base import MLAPrefillBackend
from vllm.v1.attention.backends.mla.prefill.registry import MLAPrefillBackendEnum, register_mla_prefill_backend
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from tskernel import warmup_selection

ops = torch.ops.tokenspeed
NAME = "TSKERNEL_MLA"  # TOKENSPEED_MLA is one of vLLM's own, of another package


def install_mla() -> str:
    """Register the backend as TSKERNEL_MLA, or instead of TRITON_MLA in a vLLM that takes no new names.

    Prefills have a registry of their own; there it is CUSTOM. On CPU vLLM looks at no choice of the user, so both take
    the place of its own. Raises: AttributeError where vLLM has no latent attention for CPUs.
    """
    module = __name__
    decode = f"{module}.{TokenspeedMLABackend.__name__}"
    prefill = f"{module}.{TokenspeedMLAPrefillBackend.__name__}"
    if current_platform.is_cpu():
        backends, prefills = _cpu_members(AttentionBackendEnum), _cpu_members(MLAPrefillBackendEnum)
        for member in backends:
            register_backend(member, decode)
        for member in prefills:
            register_mla_prefill_backend(member, prefill)
        return f"instead of {', '.join(member.name for member in (*backends, *prefills))}"
    try:
        register_backend(NAME, decode)  # pyright: ignore[reportArgumentType]
        name = NAME
    except (AttributeError, KeyError, TypeError):
        register_backend(AttentionBackendEnum.TRITON_MLA, decode)
        name = "TRITON_MLA"
    register_mla_prefill_backend(MLAPrefillBackendEnum.CUSTOM, prefill)
    return f"with --attention-backend {name} --attention-config.mla_prefill_backend CUSTOM"


def _cpu_members(names: Any) -> list[Any]:
    """Return what vLLM may choose on a CPU for latent attention."""
    found = [names[n] for n in ("CPU_MLA", "AMX_MLA", "CPU", "ZEN_CPU") if n in names.__members__]
    if not found:
        raise AttributeError(f"{names.__name__} has no latent attention for CPUs")
    return found


class TokenspeedMLABackend(MLACommonBackend):
    """What vLLM asks before it takes the backend."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", "float16", "bfloat16"]

    @staticmethod
    def get_name() -> str:
        """Return the name under which vLLM finds the backend again."""
        if current_platform.is_cpu():
            return "CPU_MLA"
        return NAME if NAME in AttentionBackendEnum.__members__ else "TRITON_MLA"

    @staticmethod
    def get_impl_cls() -> type:
        """Return the class of a layer."""
        return TokenspeedMLAImpl

    @staticmethod
    def get_builder_cls() -> type:
        """Return the class that sorts a batch."""
        return TokenspeedMLAMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        """Return the page sizes: any, but small ones cost a table entry each."""
        return [MultipleOf(16)]

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        """Return the widths of a latent row: all."""
        return []

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        """Batches are sorted by the host's query lengths: they must be those of the device."""
        return False


class TokenspeedMLAMetadataBuilder(MLACommonMetadataBuilder):
    """vLLM's, for decodes of several tokens each; they may be recorded."""

    _cudagraph_support: ClassVar[Any] = AttentionCGSupport.UNIFORM_BATCH
    query_len_support: ClassVar[Any] = QueryLenSupport.UNIFORM

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device, **more: Any
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device, **more)
        self.layer_names = layer_names  # vLLM's own does not keep them

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> Any:
        """Return the batch that a graph is recorded with, after one run of the decode with it (see attention's)."""
        metadata = super().build_for_cudagraph_capture(common_attn_metadata)
        layers = self.vllm_config.compilation_config.static_forward_context
        kinds = {layers[name].impl.kind: layers[name] for name in self.layer_names if name in layers}
        calls = [partial(_warm_up, layer, metadata, self.model_config.dtype) for layer in kinds.values()]
        warmup_selection((), calls=calls)
        return metadata


def _warm_up(layer: Any, metadata: Any, dtype: torch.dtype) -> None:
    """Run the decode of a layer on zeros."""
    impl, cache = layer.impl, layer.kv_cache
    if cache.numel() == 0 or metadata.decode is None:
        return
    q = torch.zeros((metadata.num_decode_tokens, impl.num_heads, cache.shape[-1]), dtype=dtype, device=cache.device)
    impl.forward_mqa(q, cache, metadata, layer)


class TokenspeedMLAImpl(MLACommonImpl):
    """One layer."""

    can_return_lse_for_decode: bool = False
    supports_dcp: bool = False
    supports_pcp: bool = False

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None,
        attn_type: str,
        kv_sharing_target_layer_name: str | None,
        **mla: Any,
    ) -> None:
        super().__init__(
            num_heads, head_size, scale, num_kv_heads, alibi_slopes, sliding_window, kv_cache_dtype, logits_soft_cap,
            attn_type, kv_sharing_target_layer_name, **mla,
        )  # fmt: skip
        for what, value in (("alibi_slopes", alibi_slopes), ("sliding_window", sliding_window)):
            if value is not None:
                raise NotImplementedError(f"tskernel MLA: {what}: not supported; choose another attention backend")
        if attn_type != AttentionType.DECODER:
            raise NotImplementedError(f"tskernel MLA: attention type: expected a decoder's, got {attn_type}")
        self.supports_quant_query_input = False
        self.options: dict[str, Any] = {
            "kv_lora_rank": self.kv_lora_rank,
            "qk_nope_head_dim": self.qk_nope_head_dim,
            "softmax_scale": float(scale),
            "logit_cap": float(logits_soft_cap or 0.0),
        }

    @property
    def kind(self) -> tuple[Any, ...]:
        """What may make kernels differ between layers of a cache."""
        return (self.num_heads, *self.options.values())

    def do_kv_cache_update(
        self, kv_c_normed: Tensor, k_pe: Tensor, kv_cache: Tensor, slot_mapping: Tensor, kv_cache_dtype: str,
        k_scale: Tensor,
    ) -> None:  # fmt: skip
        """Write the new tokens' latent vectors and rotary keys to their slots."""
        if kv_cache.numel() == 0:
            return
        slots = slot_mapping.flatten()
        rows = slice(0, len(slots))
        ops.store_mla_kvcache(kv_c_normed[rows], k_pe.flatten(1)[rows], kv_cache.unsqueeze(2), slots)

    def forward_mqa(
        self, q: Tensor | tuple[Tensor, Tensor], kv_c_and_k_pe_cache: Tensor, attn_metadata: Any, layer: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Return the latent attention ``[T, H, R]`` of the decodes, and no LSE."""
        query = torch.cat(q, dim=-1) if isinstance(q, tuple) else q
        cache, decode, requests = kv_c_and_k_pe_cache.unsqueeze(2), attn_metadata.decode, attn_metadata.num_decodes
        table, lengths, longest = decode.block_table[:requests], decode.seq_lens[:requests], attn_metadata.max_seq_len
        tokens = query.shape[0]
        if tokens % requests == 0:
            out = ops.mla_decode_with_kvcache(
                query.unflatten(0, (requests, tokens // requests)), cache, table, lengths, longest, **self.options
            )
            return out.flatten(0, 1), None
        # Requests that only pad a recorded batch have no tokens: the others say where theirs begin.
        out = ops.mla_extend_with_kvcache(
            query, cache, table, lengths, attn_metadata.query_start_loc[: requests + 1], attn_metadata.max_query_len,
            longest, **self.options,
        )  # fmt: skip
        return out, None


class TokenspeedMLAPrefillBackend(MLAPrefillBackend):
    """Attention of new tokens to each other and to one part of their context, keys and values expanded per head."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]

    @staticmethod
    def get_name() -> str:
        """Return the name that logs show."""
        return "tskernel"

    def run_prefill_new_tokens(
        self, q: Tensor, k: Tensor, v: Tensor, return_softmax_lse: bool, out: Tensor | None = None,
        output_scale: Tensor | None = None,
    ) -> Any:  # fmt: skip
        """Return ``[T, H, Dv]``, with ``return_softmax_lse`` also the LSE ``[H, T]``."""
        if output_scale is not None:
            raise NotImplementedError("tskernel MLA: quantized outputs: not supported")
        batch = self._prefill_metadata
        offsets, longest = batch.query_start_loc, batch.max_query_len
        return self._run(q, k, v, (offsets, offsets, longest, longest), True, return_softmax_lse, out)

    def run_prefill_context_chunk(
        self, chunk: Any = None, q: Any = None, k: Any = None, v: Any = None, out: Tensor | None = None, *,
        chunk_idx: int | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Return ``[T, H, Dv]`` and the LSE ``[H, T]`` of one part of the context.

        Releases up to 0.26 give its number, ``chunk_idx``; later ones the part itself, ``chunk``.
        """
        if chunk_idx is not None:
            batch = self._prefill_metadata
            sums, longest = batch.chunked_context.cu_seq_lens[chunk_idx], batch.chunked_context.max_seq_lens[chunk_idx]
            lengths = (batch.query_start_loc, sums, batch.max_query_len, longest)
        else:
            lengths = (chunk.query_start_loc, chunk.cu_seq_lens, chunk.max_query_len, chunk.max_seq_len)
        return self._run(q, k, v, lengths, False, True, out)

    def _run(
        self, q: Tensor, k: Tensor, v: Tensor, lengths: tuple[Any, ...], causal: bool, lse: bool, out: Tensor | None
    ) -> Any:
        options = {"softmax_scale": self.scale, "is_causal": causal}
        if not lse and out is None:
            return ops.mla_prefill(q, k, v, *lengths, **options)
        if not lse:
            ops.mla_prefill_out(q, k, v, *lengths, **options, out=out)
            return out
        result, sums = ops.mla_prefill_lse(q, k, v, *lengths, **options)
        return (result if out is None else out.copy_(result)), sums.t().contiguous()
