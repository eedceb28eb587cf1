# pyright: reportMissingImports=false, reportUntypedBaseClass=false
"""SGLang's attention by the ops: decode, prefill of prompts with nothing in the cache, extend for all else.

SGLang writes its cache itself (``set_kv_buffer``), since its pools do more than store.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS, register_attention_backend
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.server_args import add_attention_backend_choices
from torch import Tensor

from tskernel.integrations._sglang_refusals import layer_refusal, runner_refusal
from tskernel.integrations._sglang_tables import KVLEN_OF_PADDING, Metadata, Tables

ops = torch.ops.tokenspeed
NAME = "tokenspeed"
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
EXTENDS = (ForwardMode.EXTEND, ForwardMode.MIXED)


def install_attention() -> str:
    """Register the backend under the name tokenspeed."""
    if NAME in ATTENTION_BACKENDS:
        raise TypeError(f"an attention backend named {NAME} exists already: {ATTENTION_BACKENDS[NAME]}")
    add_attention_backend_choices([NAME])
    register_attention_backend(NAME)(TokenspeedAttnBackend)
    return f"with --attention-backend {NAME}"


class TokenspeedAttnBackend(AttentionBackend):
    """All layers of a model; SGLang makes one per model."""

    def __init__(self, model_runner: Any) -> None:
        super().__init__()
        if reason := runner_refusal(model_runner):
            raise NotImplementedError(f"tskernel attention: {reason}; choose another --attention-backend")
        self.pool = model_runner.token_to_kv_pool
        self.page_size, self.device = model_runner.page_size, model_runner.device
        self.apart = isinstance(self.pool, SWAKVPool) and self.pool.swa_layer_nums > 0
        self.fp8 = self.pool.dtype in FP8
        self.chunked = model_runner.attention_chunk_size is not None
        self.tables = Tables(model_runner, self.apart)
        self.forward_metadata: Metadata | None = None
        self.recorded: Metadata | None = None
        self.options: dict[int, dict[str, Any]] = {}

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Prepare a batch that is not recorded."""
        mode = forward_batch.forward_mode
        self.forward_metadata = None
        if mode.is_idle() or forward_batch.batch_size == 0:
            return
        if forward_batch.spec_info is not None or not (mode.is_decode() or mode in EXTENDS):
            raise NotImplementedError(
                f"tskernel attention: forward mode {mode.name}: expected DECODE, EXTEND or MIXED without speculation; "
                "choose another --attention-backend"
            )
        self.forward_metadata = (self.tables.decode if mode.is_decode() else self.tables.extend)(forward_batch)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Make the tensors that recorded decodes read."""
        self.recorded = self.tables.buffers(max_bs, max_num_tokens, self.device)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Fill the tensors of a recorded decode, before it is recorded and before each run."""
        mode = forward_batch.forward_mode
        if not mode.is_decode_or_idle() or forward_batch.spec_info is not None:
            raise NotImplementedError(
                f"tskernel attention: a recorded graph of forward mode {mode.name}: expected DECODE without "
                "speculation; start the server with --cuda-graph-backend-prefill disabled"
            )
        if self.recorded is None:
            raise RuntimeError("tskernel attention: init_cuda_graph_state was not called before a graph was recorded")
        metadata = self.tables.decode(forward_batch)
        if in_capture and metadata.window_slots is not None:
            metadata.window_slots.zero_()  # what is recorded runs once, and must not write to slots in use
        self.forward_metadata = metadata.to(self.recorded, len(forward_batch.out_cache_loc))

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Return the length of requests that only fill up a recorded batch."""
        return KVLEN_OF_PADDING

    def support_triton(self) -> bool:
        """Whether SGLang may use its own Triton kernels around the backend: where there is a GPU."""
        return torch.device(self.device).type != "cpu"

    def forward_decode(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        sinks: Tensor | None = None,
        **more: Any,
    ) -> Tensor:
        """Return the attention of one new token per request, ``[B, Hq * Dv]``."""
        options = self._options(layer, sinks, more)
        if save_kv_cache and k is not None:
            self._store(layer, forward_batch, k, v)
        metadata = self._metadata()
        out = ops.mha_decode_with_kvcache(
            self._heads(q, layer), *self._caches(layer), self._table(layer), metadata.lengths, metadata.max_seq_len,
            **options, **self._scales(layer),
        )  # fmt: skip
        return out.flatten(1)

    def forward_extend(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        sinks: Tensor | None = None,
        **more: Any,
    ) -> Tensor:
        """Return the attention of any number of new tokens per request, ``[T, Hq * Dv]``."""
        options = self._options(layer, sinks, more)
        metadata, fresh = self._metadata(), None
        if save_kv_cache and k is not None and v is not None:
            self._store(layer, forward_batch, k, v)
            # A quantized cache is read back: later tokens will see it so.
            fresh = (k, v) if metadata.fresh and not self.fp8 else None
        rows = self._heads(q, layer)
        if fresh is not None:
            out = ops.mha_prefill(
                rows, fresh[0].view(-1, layer.tp_k_head_num, layer.qk_head_dim),
                fresh[1].view(-1, layer.tp_v_head_num, layer.v_head_dim), metadata.offsets, metadata.max_query_len,
                **options,
            )  # fmt: skip
        else:
            out = ops.mha_extend_with_kvcache(
                rows, metadata.offsets, *self._caches(layer), self._table(layer), metadata.lengths,
                metadata.max_query_len, metadata.max_seq_len, **options, **self._scales(layer),
            )  # fmt: skip
        return out.flatten(1)

    forward_mixed = forward_extend

    def _metadata(self) -> Metadata:
        if self.forward_metadata is None:
            raise RuntimeError("tskernel attention: init_forward_metadata was not called for this batch")
        return self.forward_metadata

    def _options(self, layer: Any, sinks: Tensor | None, more: dict[str, Any]) -> dict[str, Any]:
        """Return the options of the ops for a layer; a layer is checked once, its arguments each time."""
        for name, value in more.items():
            if value is not None and value is not False:
                raise NotImplementedError(
                    f"tskernel attention: {name}: not supported; choose another --attention-backend"
                )
        options = self.options.get(layer.layer_id)
        if options is None:
            if reason := layer_refusal(layer, self.chunked):
                raise NotImplementedError(f"tskernel attention: {reason}; choose another --attention-backend")
            # SGLang's models subtract one themselves: 7 is a window of 8 tokens, the current one included.
            window = layer.sliding_window_size
            options = {
                "softmax_scale": float(layer.scaling),
                "window_left": -1 if window is None else window,
                "logit_cap": float(layer.logit_cap or 0.0),
            }
            self.options[layer.layer_id] = options
        return {**options, "sinks": sinks}

    def _store(self, layer: Any, batch: Any, k: Tensor, v: Tensor | None) -> None:
        where = KVWriteLoc.for_layer(batch, layer, swa_loc=self._metadata().window_slots)
        self.pool.set_kv_buffer(layer, where, k, v, layer.k_scale, layer.v_scale)

    def _heads(self, q: Tensor, layer: Any) -> Tensor:
        return q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)

    def _windowed(self, layer: Any) -> bool:
        return self.pool.layers_mapping[layer.layer_id][1]

    def _table(self, layer: Any) -> Tensor:
        metadata = self._metadata()
        apart = metadata.window_table
        return metadata.table if apart is None or not self._windowed(layer) else apart

    def _caches(self, layer: Any) -> tuple[Tensor, Tensor]:
        """Return keys and values as ``[pages, page_size, Hkv, D]``."""
        k, v = (self._paged(buffer) for buffer in self.pool.get_kv_buffer(layer.layer_id))
        return k, v

    def _paged(self, buffer: Tensor) -> Tensor:
        if buffer.dim() == 4:  # pages of heads of tokens (SGLANG_USE_HND_KVCACHE)
            return buffer.transpose(1, 2)
        pages = buffer.shape[0] // self.page_size
        return buffer[: pages * self.page_size].unflatten(0, (pages, self.page_size))

    def _scales(self, layer: Any) -> dict[str, Tensor]:
        if not self.fp8 or layer.k_scale is None or layer.v_scale is None:
            return {}
        return {"k_scale": layer.k_scale.reshape(-1), "v_scale": layer.v_scale.reshape(-1)}
