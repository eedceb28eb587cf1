"""Tiny transformers models with real random weights: greedy tokens on our ops equal those on transformers' own."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from processes import SOURCE, run_python
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import tskernel
from tskernel.testing import compare

transformers = pytest.importorskip("transformers")

from transformers import StaticCache  # noqa: E402
from transformers.masking_utils import (  # noqa: E402
    AttentionMaskInterface,
    causal_mask_function,
    chunked_causal_mask_function,
    sdpa_mask,
    sliding_window_bidirectional_mask_function,
    sliding_window_causal_mask_function,
)

from tskernel.integrations._transformers_mask import tskernel_mask  # noqa: E402
from tskernel.integrations._transformers_plan import decode  # noqa: E402
from tskernel.integrations.transformers import FALLBACK_NAME, NAME, PAGED_NAME, disable, enable, register  # noqa: E402

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,  # large enough that the tokens depend on every layer
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "eos_token_id": None,
    "bos_token_id": None,
}
LAYERS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5}
# Model, more of its config, the attention of transformers that does all it needs.
MODELS: dict[str, tuple[str, dict[str, Any], str]] = {
    "llama": ("Llama", {}, "sdpa"),
    "qwen3": ("Qwen3", {}, "sdpa"),
    "mistral": ("Mistral", {"sliding_window": 5}, "sdpa"),
    "gpt_oss": ("GptOss", {**LAYERS, "num_local_experts": 4, "num_experts_per_tok": 2}, "eager"),
    "qwen3_moe": (
        "Qwen3Moe",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
        "sdpa",
    ),
    "deepseek": (
        "DeepseekV3",
        {
            "head_dim": 8,
            "num_key_value_heads": 4,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 16,
            "v_head_dim": 16,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "n_group": 2,
            "topk_group": 1,
            "moe_intermediate_size": 24,
            "first_k_dense_replace": 1,
        },
        "sdpa",
    ),
    "gemma2": ("Gemma2", {**LAYERS, "attn_logit_softcapping": 3.0, "query_pre_attn_scalar": 16}, "eager"),
}
STEPS = 10
IDS = torch.randint(3, 97, (3, 9), generator=torch.Generator().manual_seed(1))
LEFT = torch.tensor([[0] * 4 + [1] * 5, [0] + [1] * 8, [1] * 9])


def pair(name: str, **options: Any) -> tuple[Any, Any]:
    """Return a model on transformers' attention and its twin on ours."""
    kind, more, attention = MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **more})
    reference = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    for parameter in reference.parameters():  # norms start at ones and biases at zeros: both hide mistakes
        if parameter.dim() == 1:
            parameter.data += 0.2 * torch.randn_like(parameter)
    ours = copy.deepcopy(reference)
    reference.set_attn_implementation(attention)
    enable(ours, **options)
    return reference, ours


@pytest.fixture(scope="module", params=MODELS)
def models(request: pytest.FixtureRequest) -> tuple[Any, Any]:
    return pair(request.param)


@pytest.fixture(scope="module")
def llama() -> tuple[Any, Any]:
    return pair("llama")


def generate(model: Any, mask: Tensor, **options: Any) -> Tensor:
    return model.generate(IDS, attention_mask=mask, max_new_tokens=STEPS, do_sample=False, **options)[:, IDS.shape[1] :]


class OpCounter(TorchDispatchMode):
    """Counts the operators of ours that run."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "tokenspeed":
            self.counts[func._opname] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("mask", [torch.ones_like(IDS), LEFT], ids=["full", "left_padded"])
def test_greedy_tokens_equal_those_of_transformers(models: tuple[Any, Any], mask: Tensor, cache: str) -> None:
    reference, ours = models
    want = generate(reference, mask, cache_implementation=cache)
    got = generate(ours, mask, cache_implementation=cache)
    assert want.unique().numel() > 8, "the tokens must depend on the layers"
    compare(got, want, exact=True)


def test_greedy_tokens_equal_when_a_row_has_a_hole(llama: tuple[Any, Any]) -> None:
    reference, ours = llama
    hole = torch.tensor([[1, 1, 0, 1, 0, 0, 1, 1, 1]] * 3)
    compare(generate(ours, hole), generate(reference, hole), exact=True)


@pytest.mark.parametrize("mask", [None, LEFT, LEFT.flip(1), torch.tensor([[1, 1, 0, 1, 0, 0, 1, 1, 1]] * 3)])
def test_logits_of_real_tokens_equal_under_any_padding(llama: tuple[Any, Any], mask: Tensor | None) -> None:
    reference, ours = llama
    real = torch.ones_like(IDS) if mask is None else mask
    want, got = (m(IDS, attention_mask=mask).logits[real.bool()] for m in (reference, ours))
    compare(got, want)


def test_chunked_prefill_continues_a_padded_cache(models: tuple[Any, Any]) -> None:
    """Several queries against a cache: the extend form of the ops."""
    logits = []
    for model in models:
        cache = transformers.DynamicCache(config=model.config)
        model(IDS[:, :6], attention_mask=LEFT[:, :6], past_key_values=cache)
        logits.append(model(IDS[:, 6:], attention_mask=LEFT, past_key_values=cache).logits)
    compare(logits[1], logits[0])


def test_our_ops_run(models: tuple[Any, Any]) -> None:
    """The numbers alone do not show who made them."""
    reference, ours = models
    with OpCounter() as mode:
        generate(reference, LEFT)
    assert not mode.counts
    with OpCounter() as mode:
        generate(ours, LEFT, cache_implementation="static")
    layers = ours.config.num_hidden_layers
    windows = set(getattr(ours.config, "layer_types", ())) | {
        ours.config.sliding_window if hasattr(ours.config, "sliding_window") else None
    }
    assert mode.counts["mha_decode_with_kvcache"] == (STEPS - 1) * layers
    assert mode.counts["mha_prefill"] + mode.counts["mha_extend_with_kvcache"] == layers, windows
    assert mode.counts["rmsnorm"] + mode.counts["gemma_rmsnorm"] >= STEPS * (2 * layers + 1)
    routed = {"gpt_oss": layers, "qwen3_moe": layers, "deepseek_v3": layers - 1}.get(ours.config.model_type, 0)
    shared = {"deepseek_v3": layers - 1}.get(ours.config.model_type, 0)
    assert mode.counts["moe_fused"] == STEPS * routed
    assert mode.counts["silu_and_mul"] + mode.counts["gelu_tanh_and_mul"] == STEPS * (layers - routed + shared)


def decode_loop(forward: Callable[..., Any], model: Any, mask: Tensor) -> Tensor:
    """Return greedy tokens from an eager prefill and ``forward`` for each decode step, all shapes static."""
    length = IDS.shape[1] + STEPS
    cache = StaticCache(config=model.config, max_cache_len=length)
    whole = torch.cat((mask, mask.new_ones(3, STEPS)), 1)
    position = (mask.cumsum(1) - 1).clamp(min=0)
    token = model(IDS, attention_mask=mask, position_ids=position, past_key_values=cache).logits[:, -1].argmax(-1)
    tokens = [token]
    for step in range(STEPS - 1):
        at = mask.sum(1, keepdim=True) + step
        token = (
            forward(token[:, None], attention_mask=whole, position_ids=at, past_key_values=cache)
            .logits[:, -1]
            .argmax(-1)
        )
        tokens.append(token)
    return torch.stack(tokens, 1)


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        pytest.param("llama", "inductor", marks=pytest.mark.slow),
        ("qwen3", "eager"),
        ("gpt_oss", "aot_eager"),
        ("qwen3_moe", "aot_eager"),
        ("deepseek", "aot_eager"),
        ("gemma2", "eager"),
    ],
)
def test_compiled_fullgraph_decode_gives_the_same_tokens(name: str, backend: str) -> None:
    torch._dynamo.reset()
    reference, ours = pair(name)
    want = decode_loop(reference, reference, LEFT)
    got = decode_loop(torch.compile(ours, fullgraph=True, backend=backend), ours, LEFT)
    compare(got, want, exact=True)


def test_generate_compiles_the_decode_step_of_a_static_cache(llama: tuple[Any, Any]) -> None:
    """transformers compiles it by itself on accelerators; here it is told to: one graph for all steps."""
    torch._dynamo.reset()
    reference, ours = llama
    config = transformers.CompileConfig(fullgraph=True, backend="aot_eager", mode=None)
    config._compile_all_devices = True
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    got = generate(ours, LEFT, cache_implementation="static", compile_config=config)
    compare(got, generate(reference, LEFT), exact=True)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] - graphs == 1


@pytest.mark.parametrize(
    "options", [{"attention_mask": LEFT}, {"use_cache": False}], ids=["padded", "no_mask_no_cache"]
)
def test_compiled_fullgraph_forward_gives_the_same_logits(llama: tuple[Any, Any], options: dict[str, Any]) -> None:
    torch._dynamo.reset()
    reference, ours = llama
    real = options.get("attention_mask", torch.ones_like(IDS)).bool()
    want = reference(IDS, **options).logits[real]
    got = torch.compile(ours, fullgraph=True, backend="aot_eager")(IDS, **options).logits[real]
    compare(got, want)


@pytest.mark.parametrize("strict", [True, False])
def test_export_holds_our_ops(llama: tuple[Any, Any], strict: bool) -> None:
    reference, ours = llama
    options = {"use_cache": False, "attention_mask": LEFT}
    program = torch.export.export(ours, (IDS,), options, strict=strict)
    names = Counter(
        str(n.target) for n in program.graph.nodes if n.op == "call_function" and "tokenspeed" in str(n.target)
    )
    assert names["tokenspeed.mha_prefill.default"] == 2
    assert names["tokenspeed.rmsnorm.default"] == 5
    compare(program.module()(IDS, **options).logits[LEFT.bool()], reference(IDS, **options).logits[LEFT.bool()])


@settings(derandomize=True, max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_property_a_plan_shows_what_the_boolean_mask_shows(data: st.DataObject) -> None:
    """Any padding, past, free slots, window and layout of the cache, against sdpa under transformers' own mask."""
    batch, queries = data.draw(st.integers(1, 3)), data.draw(st.sampled_from([1, 1, 2, 5]))
    past, free = data.draw(st.sampled_from([0, 0, 3, 6])), data.draw(st.sampled_from([0, 0, 4]))
    window = data.draw(st.sampled_from([0, 0, 1, 4]))
    length = past + queries
    if window:
        left = data.draw(st.lists(st.integers(0, length - 1), min_size=batch, max_size=batch))
        valid = torch.arange(length) >= torch.tensor(left)[:, None]
    else:
        bits = data.draw(
            st.lists(st.lists(st.booleans(), min_size=length, max_size=length), min_size=batch, max_size=batch)
        )
        valid = torch.tensor(bits)
        valid[:, -1] = True
    pattern = sliding_window_causal_mask_function(window) if window else causal_mask_function
    common = {
        "batch_size": batch,
        "q_length": queries,
        "kv_length": length + free,
        "q_offset": torch.tensor(past) if data.draw(st.booleans()) else past,
        "mask_function": pattern,
        "attention_mask": data.draw(st.sampled_from([valid, None])),
        "local_size": window or None,
        "allow_is_causal_skip": data.draw(st.booleans()),
    }
    if common["attention_mask"] is None:
        valid = torch.ones_like(valid)
    if pattern is not causal_mask_function and common["attention_mask"] is None:
        common["allow_is_causal_skip"] = True
    mask = sdpa_mask(**{**common, "allow_is_causal_skip": False})
    shape = (batch, 2, length + free, 8) if data.draw(st.booleans()) else (batch, length + free, 2, 8)
    torch.manual_seed(0)
    q, k, v = torch.randn(batch, 4, queries, 8), torch.randn(shape), torch.randn(shape)
    if shape[2] == 2:
        k, v = k.transpose(1, 2), v.transpose(1, 2)
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True).transpose(1, 2)
    k, v = k.clone(), v.clone()
    k[:, :, length:], v[:, :, length:] = float("nan"), float("nan")
    from tskernel.integrations._transformers_attention import tskernel_attention

    got, weights = tskernel_attention(torch.nn.Module(), q, k, v, tskernel_mask(**common))
    assert weights is None
    real = valid[:, past:]
    compare(got[real], want[real])


def bert() -> tuple[Any, Any]:
    torch.manual_seed(0)
    sizes = {
        k: v for k, v in SIZES.items() if k not in ("num_key_value_heads", "head_dim", "bos_token_id", "eos_token_id")
    }
    reference = transformers.BertModel(transformers.BertConfig(**sizes)).eval()
    ours = copy.deepcopy(reference)
    reference.set_attn_implementation("sdpa")
    enable(ours)
    return reference, ours


@pytest.mark.parametrize("mask", [None, LEFT, LEFT.flip(1)], ids=["none", "left", "right"])
def test_encoders_attend_both_ways(mask: Tensor | None) -> None:
    reference, ours = bert()
    with OpCounter() as mode:
        got = ours(IDS, attention_mask=mask).last_hidden_state
    assert mode.counts["mha_prefill"] == 2
    assert mode.counts["layernorm"] == 5
    compare(got, reference(IDS, attention_mask=mask).last_hidden_state)


def test_packed_sentences_need_no_padding() -> None:
    reference, ours = bert()
    rows = [IDS[i][LEFT[i].bool()] for i in range(3)]
    offsets = torch.tensor([0, 5, 13, 22], dtype=torch.int32)
    places = torch.cat([torch.arange(len(r)) for r in rows])
    got = ours(
        torch.cat(rows)[None], position_ids=places[None], cu_seq_lens_q=offsets, cu_seq_lens_k=offsets
    ).last_hidden_state[0]
    want = torch.cat([reference(r[None]).last_hidden_state[0] for r in rows])
    compare(got, want)


def test_packed_causal_sequences_need_their_offsets(llama: tuple[Any, Any]) -> None:
    reference, ours = llama
    places, offsets = torch.cat((torch.arange(4), torch.arange(5)))[None], torch.tensor([0, 4, 9], dtype=torch.int32)
    options = {"position_ids": places, "use_cache": False}
    with pytest.raises(
        ValueError, match="position_ids: expected one sequence per row, got several; pass cu_seq_lens_q"
    ):
        ours(IDS[:1], **options)
    compare(ours(IDS[:1], cu_seq_lens_q=offsets, **options).logits, reference(IDS[:1], **options).logits)
    torch._dynamo.reset()
    with pytest.raises(RuntimeError, match="expected one sequence per row"):
        torch.compile(ours, fullgraph=True, backend="aot_eager")(IDS[:1], **options)


def test_a_hole_under_a_window_is_refused() -> None:
    _, ours = pair("mistral")
    hole = torch.tensor([[1, 1, 0, 1, 1, 1, 1, 1, 1]] * 3)
    with pytest.raises(
        ValueError, match="attention_mask: expected each row of a sliding-window layer to be one run of ones"
    ):
        ours(IDS, attention_mask=hole)
    with pytest.raises(RuntimeError, match="sliding-window layer"):  # where values may not be looked at
        tskernel_mask(3, 1, 9, 8, 0, sliding_window_causal_mask_function(5), hole.bool(), 5, allow_is_causal_skip=False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"mask_function": chunked_causal_mask_function(4, torch.zeros(3, dtype=torch.int64)), "local_size": 4},
            "chunked, blockwise",
        ),
        ({"mask_function": sliding_window_bidirectional_mask_function(4), "local_size": 4}, "windowed on both sides"),
        ({"mask_function": sliding_window_causal_mask_function(4), "local_size": 5}, "chunked, blockwise"),
        ({"use_vmap": True}, "custom or_mask_function"),
    ],
)
def test_other_mask_patterns_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f'tskernel attention: mask: .*{message}.*enable\\(model, fallback="sdpa"\\)'):
        tskernel_mask(3, 9, 9, **options)


def test_masks_and_arguments_without_a_counterpart_are_refused(llama: tuple[Any, Any]) -> None:
    _, ours = llama
    own = torch.ones(3, 1, 9, 9, dtype=torch.bool).tril()
    with pytest.raises(ValueError, match="attention_mask: expected a 2-D padding mask"):
        ours(IDS, attention_mask=own)
    attention = transformers.AttentionInterface()[NAME]
    q = torch.randn(1, 2, 3, 8)
    for options, message in (
        ({"dropout": 0.1}, "dropout: expected 0, got 0.1; .*model.eval"),
        ({"position_bias": q}, 'position_bias: expected None.*"sdpa"'),
        ({"head_mask": q}, 'head_mask: expected None.*"eager"'),
        ({"output_attentions": True}, "output_attentions: expected False"),
        (
            {"cu_seq_lens_q": torch.tensor([0, 3]), "sliding_window": 4, "is_causal": False},
            "sliding_window: expected None",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            attention(torch.nn.Module(), q, q, q, None, **options)
    with pytest.raises(ValueError, match="expected a mask for 2 causal queries over 3 keys, got None"):
        attention(torch.nn.Module(), q[:, :, 1:], q, q, None)
    with pytest.raises(ValueError, match="expected the plan of 3 queries and 3 keys"):
        attention(torch.nn.Module(), q, q, q, tskernel_mask(1, 5, 5, attention_mask=torch.tensor([[0, 1, 1, 1, 1]])))
    with pytest.raises(ValueError, match="fallback: expected None or 'sdpa', got 'eager'"):
        enable(ours, fallback="eager")
    with pytest.raises(ValueError, match="expected a transformers PreTrainedModel, got Linear"):
        enable(torch.nn.Linear(2, 2))


def test_gradients_are_refused(llama: tuple[Any, Any]) -> None:
    with torch.enable_grad(), pytest.raises(Exception, match="grad"):
        llama[1](IDS)


def test_fallback_serves_other_masks_and_only_when_asked_for() -> None:
    reference, ours = pair("llama", fallback="sdpa")
    assert ours.config._attn_implementation == FALLBACK_NAME
    own = (torch.ones(9, 9).tril() * (torch.arange(9) != 3))[None, None].bool().expand(3, 1, -1, -1)
    with OpCounter() as mode:
        compare(ours(IDS, attention_mask=own).logits, reference(IDS, attention_mask=own).logits)
    assert mode.counts["mha_prefill"] == 0
    with OpCounter() as mode:
        compare(generate(ours, LEFT), generate(reference, LEFT), exact=True)
    assert mode.counts["mha_prefill"] == 2
    places = torch.cat((torch.arange(4), torch.arange(5)))[None]
    options = {"position_ids": places, "use_cache": False}
    compare(ours(IDS[:1], **options).logits, reference(IDS[:1], **options).logits)
    with pytest.raises(ValueError, match="softcap: expected None with a mask that goes to sdpa"):
        transformers.AttentionInterface()[FALLBACK_NAME](
            torch.nn.Module(), *[torch.randn(3, 2, 9, 8)] * 3, own, softcap=3.0
        )


def test_enable_is_undone_and_touches_no_other_model() -> None:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES)
    first, second = transformers.LlamaForCausalLM(config).eval(), transformers.LlamaForCausalLM(config).eval()
    want = first(IDS).logits
    report = enable(first)
    assert (report.attention, report.norms, report.activations, report.skipped) == (NAME, 5, 2, ())
    assert str(report) == "tskernel: attention tskernel, 5 norms, 2 gated activations, 0 layers of experts"
    assert second.config._attn_implementation == config._attn_implementation != NAME
    assert enable(first).norms == 0, "a second call finds nothing more to do"
    assert isinstance(first.model.norm, transformers.models.llama.modeling_llama.LlamaRMSNorm)
    compare(first(IDS).logits, want)
    disable(first)
    assert type(first.model.norm) is transformers.models.llama.modeling_llama.LlamaRMSNorm
    with OpCounter() as mode:
        compare(first(IDS).logits, want, exact=True)
    assert not mode.counts
    assert enable(first, attention=False, activations=False).norms == 5
    assert first.config._attn_implementation == config._attn_implementation


@pytest.mark.parametrize("name", ["gpt_oss", "qwen3_moe"])
def test_experts_keep_what_is_saved_and_loaded(name: str) -> None:
    """GPT-OSS keeps columns of gates and ups in turns and matrices transposed; ours are in rows, gates first."""
    reference, ours = pair(name, attention=False, norms=False, activations=False)
    layer = ours.model.layers[0].mlp.experts
    assert layer.config._experts_implementation == NAME
    matrix = layer.gate_up_proj.transpose(1, 2) if layer.is_transposed else layer.gate_up_proj
    assert matrix.is_contiguous()
    want = reference.state_dict()
    for key, value in ours.state_dict().items():
        compare(value, want[key], exact=True)
        assert value.is_contiguous(), "safetensors refuses others"
    logits = reference(IDS).logits
    ours.load_state_dict({k: torch.zeros_like(v) for k, v in want.items()})
    assert not ours(IDS).logits.any()
    ours.load_state_dict(want)
    compare(ours(IDS).logits, logits)
    for other in ("eager", "grouped_mm"):  # the other implementations read the weights as they lie now
        ours.set_experts_implementation(other)
        compare(ours(IDS).logits, logits)
    ours.set_experts_implementation(NAME)
    assert enable(ours).experts == 0, "a second call finds nothing more to do"
    disable(ours)
    assert ours.config._experts_implementation == reference.config._experts_implementation != NAME
    for (_, mine), (_, theirs) in zip(ours.named_parameters(), reference.named_parameters(), strict=True):
        compare(mine, theirs, exact=True)
        assert mine.stride() == theirs.stride()
    with OpCounter() as mode:
        compare(ours(IDS).logits, logits)
    assert not mode.counts


def test_experts_that_compute_something_else_stay() -> None:
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(**{**SIZES, **MODELS["qwen3_moe"][1], "hidden_act": "tanh"})
    model = transformers.Qwen3MoeForCausalLM(config).eval()
    want = model(IDS).logits
    report = enable(model)
    assert report.experts == 0
    assert report.skipped[-1] == "Qwen3MoeExperts: its gate computes something else than the ops"
    compare(model(IDS).logits, want)


def test_experts_ask_to_be_prepared() -> None:
    """The name alone, in a config, finds weights as they were loaded."""
    reference, _ = pair("gpt_oss")
    reference.set_experts_implementation(NAME)
    with pytest.raises(ValueError, match="expected a layer prepared by"):
        reference(IDS)


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt_oss", "qwen3_moe", "gemma2"])
def test_continuous_batching_gives_the_tokens_of_each_request_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three requests share a batch of ten tokens, so that prompts come in parts beside tokens that are decoded."""
    reference, ours = pair(name, continuous_batching=True)
    assert ours.config._attn_implementation == PAGED_NAME
    calls: list[int] = []
    prefill = tskernel.mha_prefill

    def counted(*args: Any, **kwargs: Any) -> Tensor:  # it runs in a thread of transformers, where no mode counts
        calls.append(args[3].shape[0] - 1)
        return prefill(*args, **kwargs)

    monkeypatch.setattr(tskernel, "mha_prefill", counted)
    prompts = [IDS[0].tolist(), IDS[1, :4].tolist(), [*IDS[2].tolist(), *IDS[0, :5].tolist()]]
    results = ours.generate_batch(
        inputs=prompts,
        generation_config=transformers.GenerationConfig(
            max_new_tokens=STEPS, do_sample=False, eos_token_id=-1, pad_token_id=0
        ),
        continuous_batching_config=transformers.ContinuousBatchingConfig(
            page_size=4, num_blocks=32, max_batch_tokens=10, max_requests_per_batch=4
        ),
    )
    got = {tuple(r.prompt_ids): r.generated_tokens for r in results.values()}
    assert len(calls) >= STEPS * ours.config.num_hidden_layers
    assert max(calls) >= 3
    for prompt in prompts:
        want = reference.generate(torch.tensor([prompt]), max_new_tokens=STEPS, do_sample=False)[0, len(prompt) :]
        assert got[tuple(prompt)] == want.tolist()


def test_continuous_batching_serves_nothing_else() -> None:
    _, ours = pair("llama", continuous_batching=True)
    with pytest.raises(ValueError, match="expected what generate_batch passes for packed sequences"):
        ours(IDS)
    with pytest.raises(ValueError, match="fallback: expected None with continuous_batching"):
        enable(ours, fallback="sdpa", continuous_batching=True)
    before = ours.config._attn_implementation
    disable(ours)
    assert before == PAGED_NAME != ours.config._attn_implementation
    assert ours(IDS).logits.isfinite().all()


def test_the_example_runs() -> None:
    example = SOURCE.parent / "examples" / "transformers_model" / "generate.py"
    printed = run_python("import runpy, sys; runpy.run_path(sys.argv.pop())", str(example))
    assert "9 norms, 0 gated activations, 2 layers of experts" in printed


class OddRMSNorm(torch.nn.Module):
    """Looks like an RMS norm by name and parameters, and is none."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(width))
        self.eps = 1e-6

    def forward(self, x: Tensor) -> Tensor:
        return x / (x.square().sum(-1, keepdim=True) + self.eps).sqrt() * self.weight


def test_a_module_is_replaced_for_what_it_computes() -> None:
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).eval()
    model.model.norm = OddRMSNorm(32)
    model.model.layers[0].mlp.act_fn = torch.nn.Tanh()
    report = enable(model)
    assert (report.norms, report.activations) == (4, 1)
    assert report.skipped == ("OddRMSNorm: computes something else than the ops",)
    assert "not replaced: OddRMSNorm" in str(report)


def test_mixed_dtypes_promote_as_before() -> None:
    """GPT-OSS keeps norm weights in fp32 and returns bf16; Llama's formula promotes, so there the original decides."""
    for name in ("llama", "gpt_oss"):
        reference, ours = pair(name)
        for model in (reference, ours):
            model.model.norm.weight.data = model.model.norm.weight.data.float()
        x = torch.randn(4, 32).bfloat16()
        with OpCounter() as mode:
            got = ours.model.norm(x)
        want = reference.model.norm(x)
        assert got.dtype == want.dtype
        assert mode.counts["rmsnorm"] == (name == "gpt_oss")
        compare(got, want)


def test_register_is_idempotent_and_brings_both_parts() -> None:
    register()
    register()
    for name in (NAME, FALLBACK_NAME):
        assert name in transformers.AttentionInterface()
        assert name in AttentionMaskInterface()


def test_a_plan_says_where_the_tokens_are() -> None:
    """The tables by hand: two rows, the first with a hole and left padding, one query more than the cache held."""
    valid = torch.tensor([[0, 1, 0, 1, 1], [1, 1, 1, 1, 1]], dtype=torch.bool)
    plan = decode(tskernel_mask(2, 2, 6, 3, attention_mask=valid), 2, 6)
    assert plan.causal
    assert plan.window == 0
    assert plan.k_len.tolist() == [3, 5]
    assert plan.q_end.tolist() == [2, 4]
    assert plan.k_table is not None
    assert plan.k_table[0, :3].tolist() == [1, 3, 4]
    assert plan.k_table[1, :5].tolist() == [0, 1, 2, 3, 4]
    assert plan.order is not None
    assert plan.order.flatten().tolist() == [0, 1, 2, 3]
