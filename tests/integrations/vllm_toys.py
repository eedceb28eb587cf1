"""Toy models with random weights, saved as vLLM loads them; quantized ones beside a plain copy with the same values."""

from __future__ import annotations

import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

ops = torch.ops.tokenspeed
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
GPT_OSS = {
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 8,
    "rope_parameters": {**YARN, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
}
BLOCKS = {"hidden_size": 256, "head_dim": 128, "initializer_range": 0.1}  # blocks of 128 in every matrix
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "qwen3_moe": ("Qwen3Moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}),
    "gpt_oss": ("GptOss", GPT_OSS),
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
ROUTERS = [f"model.layers.{n}.mlp.gate" for n in range(SIZES["num_hidden_layers"])]
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "modules_to_not_convert": ROUTERS}
FP8_BLOCK = {**FP8, "weight_block_size": [128, 128]}
QUANTIZED: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "qwen3_moe_fp8_block": (
        "Qwen3Moe", {**BLOCKS, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128}, FP8_BLOCK,
    ),
    "qwen3_moe_fp8_static": ("Qwen3Moe", MODELS["qwen3_moe"][1], {**FP8, "activation_scheme": "static"}),
    "gpt_oss_mxfp4": ("GptOss", GPT_OSS, {"quant_method": "mxfp4"}),
}  # fmt: skip


def make(kind: str, sizes: dict[str, Any], folder: Path) -> Path:
    """Save a model of random weights."""
    config = getattr(transformers, f"{kind}Config")(**(SIZES | sizes), architectures=[f"{kind}ForCausalLM"])
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    for p in model.parameters():
        if p.dim() == 1:
            p.data.normal_(1.0, 0.2)  # norms' weights, biases and sinks that are all alike would hide mistakes
    model.save_pretrained(folder)
    return folder


@cache
def saved(name: str, folder: Path) -> Path:
    """Return the folder of a plain model."""
    return make(*MODELS[name], folder / name)


def prompt_logprobs(folder: Path, prompts: list[list[int]]) -> list[float]:
    """Return the log-probability of every token of the prompts but the first, by transformers in fp32."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    found = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        with torch.no_grad():
            each = model(ids).logits[0, :-1].log_softmax(-1)
        found += each.gather(1, ids[0, 1:, None]).flatten().tolist()
    return found


@cache
def quantized(name: str, folder: Path) -> tuple[Path, Path]:
    """Return the folders of a quantized model and of the plain one with the values that it stands for."""
    kind, sizes, config = QUANTIZED[name]
    plain = make(kind, sizes, folder / f"{name}_plain")
    small = Path(shutil.copytree(plain, folder / name))
    weights, stored = load_file(plain / "model.safetensors"), {}
    for key, weight in list(weights.items()):
        if config["quant_method"] == "mxfp4" and ".experts." in key and not key.endswith("bias"):
            stored |= mxfp4(key, weight, weights)
        elif config["quant_method"] == "fp8" and key.endswith("_proj.weight"):
            stored |= fp8(key, weight, weights, config)
        else:
            stored[key] = weight
    metadata = {"format": "pt"}
    save_file({k: w.contiguous() for k, w in stored.items()}, small / "model.safetensors", metadata)
    save_file({k: w.contiguous() for k, w in weights.items()}, plain / "model.safetensors", metadata)
    settings = json.loads((small / "config.json").read_text()) | {"quantization_config": config}
    (small / "config.json").write_text(json.dumps(settings))
    return small, plain


def fp8(key: str, weight: Tensor, weights: dict[str, Tensor], config: dict[str, Any]) -> dict[str, Tensor]:
    """Return what a checkpoint holds of a matrix ``[N, K]``, and put the values that this stands for in its place."""
    block = "weight_block_size" in config
    data, scale = ops.quantize_fp8_dynamic(weight, granularity="block" if block else "tensor")
    each = scale.repeat_interleave(128, 0).repeat_interleave(128, 1) if block else scale
    weights[key] = data.float() * each
    stored = {key: data, f"{key}_scale_inv" if block else f"{key}_scale": scale if block else scale[0]}
    if config["activation_scheme"] == "static":
        stored[key.replace("weight", "input_scale")] = torch.tensor(0.5)
    return stored


def mxfp4(key: str, weight: Tensor, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return what a GPT-OSS checkpoint holds of experts ``[E, K, N]``, and put the values in their place."""
    data, scale = ops.quantize_mxfp4(weight.transpose(1, 2).contiguous())
    weights[key] = ops.dequantize_mxfp4(data, scale, torch.float32).transpose(1, 2)
    return {f"{key}_blocks": data.unflatten(-1, (-1, 16)), f"{key}_scales": scale}
