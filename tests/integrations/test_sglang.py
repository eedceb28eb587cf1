"""Real SGLang on this CPU: its own classes, pools and model runner give with the plugin what they give without.

Needs an environment with sglang (tools/sglang_environment.sh makes one); skipped elsewhere.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

transformers = pytest.importorskip("transformers")

if importlib.util.find_spec("sglang") is None:
    pytest.skip("could not find sglang", allow_module_level=True)

HERE = Path(__file__).parent
STAND_IN = [] if importlib.util.find_spec("sgl_kernel") else [str(HERE / "sglang_cpu")]
os.environ |= {"SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1"}
sys.path += STAND_IN

import torch  # noqa: E402
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend  # noqa: E402
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention  # noqa: E402
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool  # noqa: E402
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool  # noqa: E402
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode  # noqa: E402
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm  # noqa: E402

from tskernel.integrations import _sglang_refusals  # noqa: E402
from tskernel.integrations import sglang as plugin  # noqa: E402
from tskernel.integrations._sglang_attention import TokenspeedAttnBackend  # noqa: E402
from tskernel.testing import compare  # noqa: E402

HQ, HKV, D, SLOTS, CONTEXT = 4, 2, 16, 256, 64
SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,  # large enough that the tokens depend on every layer
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "eos_token_id": None,
    "bos_token_id": None,
}
KINDS = ["sliding_attention", "full_attention"]
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("Llama", "LlamaConfig", {}),
    "gemma3": (
        "Gemma3",
        "Gemma3TextConfig",
        {"layer_types": KINDS, "sliding_window": 8, "query_pre_attn_scalar": 32},
    ),
}
COMMON = {"mha_prefill", "mha_extend_with_kvcache", "mha_decode_with_kvcache", "add_rmsnorm"}
OPS = {
    "llama": COMMON | {"rmsnorm", "silu_and_mul", "apply_rope"},
    "gemma3": COMMON | {"gemma_rmsnorm", "gelu_tanh_and_mul"},  # has rotations of its own
}


# --- the whole of SGLang's model runner, and its engine ---------------------------------------------------------------


@cache
def saved(name: str, folder: Path) -> str:
    kind, config, more = MODELS[name]
    made = getattr(transformers, config)(**SIZES, **more, architectures=[f"{kind}ForCausalLM"])
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForCausalLM")(made)
    for p in model.parameters():
        if p.dim() == 1:
            p.data.normal_(1.0 if name == "llama" else 0.0, 0.2)  # alike weights would hide mistakes
    model.save_pretrained(folder / name)
    return str(folder / name)


def start(folder: str, attention: str, way: str, switch: str, **more: Any) -> subprocess.CompletedProcess[str]:
    command = (sys.executable, str(HERE / "sglang_run.py"), folder, attention, way, json.dumps(more))
    path = os.pathsep.join([*STAND_IN, *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"TSKERNEL_SGLANG": switch, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=900)


@cache
def ran(folder: str, attention: str, way: str, switch: str) -> dict[str, Any]:
    done = start(folder, attention, way, switch)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert done.returncode == 0 and lines, done.stdout[-3000:] + done.stderr[-3000:]
    return {**json.loads(lines[0].removeprefix("RESULT ")), "log": done.stdout + done.stderr}


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("toys")


def same(ours: dict[str, Any], stock: dict[str, Any]) -> None:
    assert ours["tokens"] == stock["tokens"]
    for mine, theirs in zip(ours["logprobs"], stock["logprobs"], strict=True):
        assert mine == pytest.approx(theirs, abs=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_tokens_and_logprobs_are_those_of_stock_sglang(name: str, folder: Path) -> None:
    model = saved(name, folder)
    stock, ours = ran(model, "torch_native", "runner", ""), ran(model, "tokenspeed", "runner", "1")
    assert stock["ran"] == {} and "tskernel in SGLang" not in stock["log"]  # untouched with the switch off
    assert {key.removeprefix("tokenspeed::") for key in ours["ran"]} == OPS[name]
    assert len({tuple(t) for t in ours["tokens"]}) == len(ours["tokens"])
    same(ours, stock)
    assert ours["log"].count("tskernel in SGLang") == 1


def test_the_engine_finds_the_plugin_in_each_of_its_processes(folder: Path) -> None:
    model = saved("llama", folder)
    ours, stock = ran(model, "tokenspeed", "engine", "1"), ran(model, "torch_native", "runner", "")
    steps, prompts = len(stock["tokens"][0]), len(stock["tokens"])
    assert [t[:steps] for t in ours["tokens"][:prompts]] == stock["tokens"]
    assert ours["log"].count("tskernel in SGLang") >= 2  # SGLang's server and its scheduler are processes


def test_a_word_that_is_no_part_stops_the_server(folder: Path) -> None:
    done = start(saved("llama", folder), "tokenspeed", "runner", "attention,nrom")
    assert done.returncode != 0
    assert "tskernel: TSKERNEL_SGLANG: expected 1, 0 or some of attention, norm, activation, rope, got" in done.stderr


# --- the backend against SGLang's own, on real pools and layers -------------------------------------------------------


def runner(page_size: int, dtype: torch.dtype, apart: bool = False, **more: Any) -> Any:
    requests = ReqToTokenPool(8, CONTEXT, "cpu", enable_memory_saver=False)
    common = {"page_size": page_size, "dtype": dtype, "device": "cpu", "enable_memory_saver": False}
    if apart:
        pool = SWAKVPool(
            size=SLOTS, size_swa=SLOTS // 2, head_num=HKV, head_dim=D, swa_attention_layer_ids=[0],
            full_attention_layer_ids=[1], **common,
        )  # fmt: skip
        mapping = torch.zeros(SLOTS + page_size + 1, dtype=torch.int64)
        mapping[-1] = -1
        pool.register_mapping(mapping)
    else:
        pool = MHATokenToKVPool(SLOTS, head_num=HKV, head_dim=D, layer_num=2, **common)
    known = {
        "use_mla_backend": False,
        "model_config": SimpleNamespace(is_encoder_decoder=False),
        "is_draft_worker": False,
        "spec_algorithm": SpeculativeAlgorithm.NONE,
        "kv_index_translator": None,
        "attention_chunk_size": None,
        "device": "cpu",
        "page_size": page_size,
        "req_to_token_pool": requests,
        "token_to_kv_pool": pool,
    }
    return SimpleNamespace(**{**known, **more})


@pytest.fixture(autouse=True)
def parallel(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What a server would publish of its ranks: one."""
    ranks = SimpleNamespace(attn_cp_size=1, dcp_enabled=False)
    monkeypatch.setattr(_sglang_refusals, "get_parallel", lambda: ranks)
    return ranks


class Requests:
    """Requests whose pages lie anywhere; makes the batches that SGLang would make of them."""

    def __init__(self, made: Any, rows: list[int]) -> None:
        self.runner, self.rows, self.lengths = made, rows, [0] * len(rows)
        self.table = made.req_to_token_pool.req_to_token
        pages = torch.randperm(SLOTS // made.page_size - 1) + 1
        self.pages = iter(pages.tolist())
        self.window_pages = iter((torch.randperm(SLOTS // 2 // made.page_size - 1) + 1).tolist())

    def batch(self, new: list[int], decode: bool = False) -> ForwardBatch:
        prefixes = list(self.lengths)
        for i, count in enumerate(new):
            for position in range(prefixes[i], prefixes[i] + count):
                self.table[self.rows[i], position] = self.slot(i, position)
            self.lengths[i] += count
        where = [self.table[r, p : p + n] for r, p, n in zip(self.rows, prefixes, new, strict=True)]
        lengths = torch.tensor(self.lengths)
        batch = ForwardBatch(
            forward_mode=ForwardMode.DECODE if decode else ForwardMode.EXTEND,
            batch_size=len(new),
            input_ids=torch.zeros(sum(new), dtype=torch.int64),
            req_pool_indices=torch.tensor(self.rows),
            seq_lens=lengths,
            out_cache_loc=torch.cat(where).long(),
            seq_lens_sum=sum(self.lengths),
        )
        batch.seq_lens_cpu = lengths.clone()
        if not decode:
            batch.extend_seq_lens, batch.extend_prefix_lens = torch.tensor(new), torch.tensor(prefixes)
            batch.extend_seq_lens_cpu, batch.extend_prefix_lens_cpu = list(new), prefixes
        return batch

    def slot(self, i: int, position: int) -> int:
        size = self.runner.page_size
        if position % size:
            return int(self.table[self.rows[i], position - 1]) + 1
        page = next(self.pages) * size
        mapping = getattr(self.runner.token_to_kv_pool, "full_to_swa_index_mapping", None)
        if mapping is not None:
            mapping[page : page + size] = torch.arange(size) + next(self.window_pages) * size
        return page


def qkv(tokens: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    heads = (HQ, HKV, HKV)
    return tuple(torch.randn(tokens, h * D).to(dtype) for h in heads)  # pyright: ignore[reportReturnType]


def layer(index: int, **more: Any) -> RadixAttention:
    return RadixAttention(HQ, D, 0.3, HKV, index, **more)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("page_size", (1, 4))
def test_attention_is_that_of_sglangs_own_backend(page_size: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    made = runner(page_size, dtype)
    mine, theirs = TokenspeedAttnBackend(made), TorchNativeAttnBackend(made)
    layers = [layer(0, sliding_window_size=5), layer(1)]
    requests = Requests(made, [3, 1, 6])
    for new, decode in (([7, 2, 11], False), ([3, 9, 1], False), ([1, 1, 1], True), ([1, 1, 1], True)):
        batch = requests.batch(new, decode)
        for backend in (mine, theirs):
            backend.init_forward_metadata(batch)
        for each in layers:
            q, k, v = qkv(sum(new), dtype)
            heads = (q, k.view(-1, HKV, D), v.view(-1, HKV, D))
            got, want = (b.forward(*(t.clone() for t in heads), each, batch) for b in (mine, theirs))
            compare(got, want)


def attended(
    made: Any, requests: Requests, q: torch.Tensor, new: list[int], index: int, cap: float, sinks: torch.Tensor | None,
    window: int, scales: tuple[float, float] = (1.0, 1.0),
) -> torch.Tensor:  # fmt: skip
    """Attention by its definition, one request and one query at a time, in fp64."""
    rows, at = [], 0
    caches = [c.double() * s for c, s in zip(made.token_to_kv_pool.get_kv_buffer(index), scales, strict=True)]
    for row, length, count in zip(requests.rows, requests.lengths, new, strict=True):
        places = requests.table[row, :length].long()
        if getattr(made.token_to_kv_pool, "layers_mapping", {}).get(index, (0, False))[1]:
            places = made.token_to_kv_pool.translate_loc_from_full_to_swa(places)
        k, v = (c[places].repeat_interleave(HQ // HKV, 1) for c in caches)
        for i in range(count):
            last = length - count + i
            first = 0 if window < 0 else max(0, last - window)
            scores = torch.einsum("hd,khd->hk", q[at].view(HQ, D).double(), k[first : last + 1]) * 0.3
            scores = cap * torch.tanh(scores / cap) if cap else scores
            if sinks is not None:
                scores = torch.cat([scores, sinks.double()[:, None]], 1)
            weights = scores.softmax(-1)[:, : last + 1 - first]
            rows.append(torch.einsum("hk,khd->hd", weights, v[first : last + 1]).flatten())
            at += 1
    return torch.stack(rows)


STEPS = (([7, 2], False), ([3, 9], False), ([1, 1], True))


@pytest.mark.parametrize("window", (-1, 5))
@pytest.mark.parametrize("cap", (0.0, 1.5))
@pytest.mark.parametrize("sunk", (False, True))
def test_sinks_caps_and_windows(sunk: bool, cap: float, window: int) -> None:
    torch.manual_seed(1)
    made = runner(4, torch.float32)
    backend, requests = TokenspeedAttnBackend(made), Requests(made, [2, 5])
    each, sinks = layer(0, sliding_window_size=window, logit_cap=cap), torch.randn(HQ) if sunk else None
    for new, decode in STEPS:
        batch = requests.batch(new, decode)
        backend.init_forward_metadata(batch)
        q, k, v = qkv(sum(new), torch.float32)
        got = backend.forward(q, k.view(-1, HKV, D), v.view(-1, HKV, D), each, batch, sinks=sinks)
        compare(got, attended(made, requests, q, new, 0, cap, sinks, window))


@pytest.mark.parametrize("gone", (0, -1))
@pytest.mark.parametrize("page_size", (1, 4))
def test_a_pool_that_keeps_layers_with_a_window_apart(page_size: int, gone: int) -> None:
    # SGLang's torch_native backend reads such a pool at the wrong places, so the definition is what is compared with.
    torch.manual_seed(6)
    window, made = 5, runner(page_size, torch.float32, apart=True)
    backend, requests = TokenspeedAttnBackend(made), Requests(made, [2, 5])
    mapping = made.token_to_kv_pool.full_to_swa_index_mapping
    for new, decode in (([12, 2], False), ([3, 9], False), ([1, 1], True)):
        for row, length in zip(requests.rows, requests.lengths, strict=True):  # what SGLang does with old pages
            left = max(0, length - window) // page_size * page_size
            mapping[requests.table[row, :left].long()] = gone
        batch = requests.batch(new, decode)
        backend.init_forward_metadata(batch)
        for each, w in ((layer(0, sliding_window_size=window), window), (layer(1), -1)):
            q, k, v = qkv(sum(new), torch.float32)
            got = backend.forward(q, k.view(-1, HKV, D), v.view(-1, HKV, D), each, batch)
            compare(got, attended(made, requests, q, new, each.layer_id, 0.0, None, w))


@pytest.mark.parametrize("scaled", (False, True))
@pytest.mark.parametrize("dtype", (torch.float8_e4m3fn, torch.float8_e5m2))
def test_quantized_caches(dtype: torch.dtype, scaled: bool) -> None:
    torch.manual_seed(2)
    made = runner(4, dtype)
    backend, requests, each = TokenspeedAttnBackend(made), Requests(made, [2, 5]), layer(0)
    scales = (0.5, 2.0) if scaled else (1.0, 1.0)
    if scaled:
        each.k_scale, each.v_scale = (torch.nn.Parameter(torch.tensor(s), requires_grad=False) for s in scales)
    for new, decode in STEPS:
        batch = requests.batch(new, decode)
        backend.init_forward_metadata(batch)
        q, k, v = (t.bfloat16() for t in qkv(sum(new), torch.float32))
        # SGLang divides the keys and values that it is given in place.
        got = backend.forward(q, k.view(-1, HKV, D), v.view(-1, HKV, D), each, batch)
        compare(got, attended(made, requests, q, new, 0, 0.0, None, -1, scales))


def test_the_layout_with_heads_before_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_USE_HND_KVCACHE", "1")
    torch.manual_seed(3)
    made = runner(4, torch.float32)
    assert made.token_to_kv_pool.kv_cache_layout == "hnd"
    backend, requests, each = TokenspeedAttnBackend(made), Requests(made, [2, 5]), layer(0)
    for new, decode in STEPS:
        batch = requests.batch(new, decode)
        backend.init_forward_metadata(batch)
        q, k, v = qkv(sum(new), torch.float32)
        got = backend.forward(q, k.view(-1, HKV, D), v.view(-1, HKV, D), each, batch)
        tokens = [b.transpose(1, 2).flatten(0, 1) for b in made.token_to_kv_pool.get_kv_buffer(0)]
        seen = SimpleNamespace(token_to_kv_pool=SimpleNamespace(get_kv_buffer=lambda _, tokens=tokens: tokens))
        compare(got, attended(seen, requests, q, new, 0, 0.0, None, -1))


@pytest.mark.parametrize("apart", (False, True))
def test_recorded_decodes_read_buffers_that_keep_their_addresses(apart: bool) -> None:
    torch.manual_seed(4)
    made = runner(4, torch.float32, apart)
    backend, requests = TokenspeedAttnBackend(made), Requests(made, [2, 5])
    backend.init_cuda_graph_state(4, 4)
    each = layer(0, sliding_window_size=5)
    first = requests.batch([9, 2])
    backend.init_forward_metadata(first)
    q, k, v = qkv(11, torch.float32)
    backend.forward(q, k.view(-1, HKV, D), v.view(-1, HKV, D), each, first)
    addresses = set()
    for step in range(3):
        batch = requests.batch([1, 1], decode=True)
        backend.init_forward_metadata_out_graph(batch, in_capture=step == 0)
        backend.init_forward_metadata_in_graph(batch)
        metadata = backend.forward_metadata
        assert metadata is not None and metadata.max_seq_len == CONTEXT  # a recorded launch serves every length
        tensors = (metadata.lengths, metadata.table, metadata.window_table, metadata.window_slots)
        addresses.add(tuple(t if t is None else t.data_ptr() for t in tensors))
        if step == 0 and apart:  # SGLang records with its first slot as the place to write to
            assert not metadata.window_slots.any()
            backend.init_forward_metadata_out_graph(batch)
        q, k, v = qkv(2, torch.float32)
        got = backend.forward(q, k.view(-1, HKV, D), v.view(-1, HKV, D), each, batch)
        compare(got, attended(made, requests, q, [1, 1], 0, 0.0, None, 5))
    assert len(addresses) == 1


def test_rows_that_pad_a_recorded_batch_give_finite_numbers() -> None:
    torch.manual_seed(5)
    made = runner(1, torch.float32)
    backend, requests, each = TokenspeedAttnBackend(made), Requests(made, [2]), layer(0)
    backend.init_cuda_graph_state(4, 4)
    batch = requests.batch([1], decode=True)
    batch.batch_size, batch.req_pool_indices = 3, torch.tensor([2, 0, 0])
    fill = backend.get_cuda_graph_seq_len_fill_value()
    batch.seq_lens = batch.seq_lens_cpu = torch.tensor([1, fill, fill])
    batch.out_cache_loc = torch.cat([batch.out_cache_loc, torch.zeros(2, dtype=torch.int64)])
    backend.init_forward_metadata_out_graph(batch)
    q, k, v = qkv(3, torch.float32)
    got = backend.forward(q, k.view(-1, HKV, D), v.view(-1, HKV, D), each, batch)
    assert got.isfinite().all()
    compare(got[0], v[0].view(HKV, D).repeat_interleave(HQ // HKV, 0).flatten())


def test_nothing_is_written_where_sglang_says_so() -> None:
    made = runner(1, torch.float32)
    backend, requests = TokenspeedAttnBackend(made), Requests(made, [2])
    batch = requests.batch([3])
    backend.init_forward_metadata(batch)
    q, k, v = qkv(3, torch.float32)
    backend.forward(q, k.view(-1, HKV, D), v.view(-1, HKV, D), layer(0), batch, save_kv_cache=False)
    assert not any(b.any() for b in made.token_to_kv_pool.get_kv_buffer(0))


@pytest.mark.parametrize(
    ("more", "sentence"),
    (
        ({"use_mla_backend": True}, "latent attention"),
        ({"model_config": SimpleNamespace(is_encoder_decoder=True)}, "cross-attention"),
        ({"spec_algorithm": SpeculativeAlgorithm.EAGLE}, "speculative decoding"),
        ({"is_draft_worker": True}, "speculative decoding"),
        ({"kv_index_translator": SimpleNamespace(is_translating=True)}, "--enable-unified-memory"),
        ({"token_to_kv_pool": SimpleNamespace()}, "expected MHATokenToKVPool"),
    ),
)
def test_models_that_are_refused(more: dict[str, Any], sentence: str) -> None:
    with pytest.raises(NotImplementedError, match=f"{sentence}.*choose another --attention-backend"):
        TokenspeedAttnBackend(runner(1, torch.float32, **more))


def test_context_parallelism_is_refused(parallel: SimpleNamespace) -> None:
    parallel.attn_cp_size = 2
    with pytest.raises(NotImplementedError, match="context parallelism"):
        TokenspeedAttnBackend(runner(1, torch.float32))


@pytest.mark.parametrize(
    ("more", "sentence"),
    (
        ({"is_cross_attention": True}, "cross-attention"),
        ({"attn_type": AttentionType.ENCODER_ONLY}, "attention type"),
        ({"attn_type": AttentionType.DECODER_BIDIRECTIONAL}, "attention type"),
        ({"pos_encoding_mode": "ALIBI"}, "pos_encoding_mode"),
        ({"logit_cap": 3.0, "logit_capping_method": "clip"}, "logit_capping_method"),
    ),
)
def test_layers_and_arguments_that_are_refused(more: dict[str, Any], sentence: str) -> None:
    made = runner(1, torch.float32)
    backend, batch = TokenspeedAttnBackend(made), Requests(made, [2]).batch([3])
    backend.init_forward_metadata(batch)
    q, k, v = qkv(3, torch.float32)
    heads = (q, k.view(-1, HKV, D), v.view(-1, HKV, D))
    with pytest.raises(NotImplementedError, match=sentence):
        backend.forward(*heads, layer(0, **more), batch)
    with pytest.raises(NotImplementedError, match="score_mod: not supported"):
        backend.forward(*heads, layer(1), batch, score_mod=lambda s: s)


@pytest.mark.parametrize("mode", (ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND_V2, ForwardMode.DLLM_EXTEND))
def test_modes_that_are_refused(mode: ForwardMode) -> None:
    made = runner(1, torch.float32)
    backend, batch = TokenspeedAttnBackend(made), Requests(made, [2]).batch([3])
    batch.forward_mode = mode
    with pytest.raises(NotImplementedError, match=f"forward mode {mode.name}: expected DECODE"):
        backend.init_forward_metadata(batch)
    backend.init_cuda_graph_state(2, 2)
    with pytest.raises(NotImplementedError, match=f"recorded graph of forward mode {mode.name}"):
        backend.init_forward_metadata_out_graph(batch)


# --- hooks, each in a process of its own: SGLang cannot take one back -------------------------------------------------


def test_layers_give_what_sglangs_own_give() -> None:
    environment = os.environ | {"TSKERNEL_SGLANG": "norm,activation,rope", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([*STAND_IN, *filter(None, [os.environ.get("PYTHONPATH")])])
    command = (sys.executable, str(HERE / "sglang_layers.py"))
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=900)
    assert done.returncode == 0 and "ALL ALIKE" in done.stdout, done.stdout[-3000:] + done.stderr[-3000:]


def test_what_has_no_place_is_said(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    def missing(part: str) -> Any:
        def install() -> str:
            raise AttributeError(f"no {part} in this release")

        return install

    monkeypatch.setattr(plugin, "_installer", missing)
    monkeypatch.setattr(plugin, "_installed", {})
    monkeypatch.setenv("TSKERNEL_SGLANG", "1")
    plugin.register()
    said = capfd.readouterr()
    assert "NOT norm, it stays SGLang's: AttributeError: no norm in this release" in said.err + said.out
    monkeypatch.setenv("TSKERNEL_SGLANG", "norm")
    with pytest.raises(RuntimeError, match="cannot replace what TSKERNEL_SGLANG names"):
        plugin.register()
    with pytest.raises(SystemExit, match=r"tskernel: .*cannot replace what TSKERNEL_SGLANG names"):
        plugin.load()
