"""Generate with a transformers model on tskernel: a small random one, or the one that is named.

python examples/transformers_model/generate.py [MODEL]
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from tskernel.integrations.transformers import enable

PROMPTS = ["The capital of France is", "A kernel is"]

device = "cuda" if torch.cuda.is_available() else "cpu"
if len(sys.argv) > 1:
    tokenizer = AutoTokenizer.from_pretrained(sys.argv[1], padding_side="left")
    model: Any = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.bfloat16, device_map=device)
    batch = tokenizer(PROMPTS, return_tensors="pt", padding=True).to(device)
else:
    tokenizer = None
    config = AutoConfig.for_model(
        "qwen3_moe",
        vocab_size=200,
        hidden_size=64,
        intermediate_size=96,
        moe_intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=8,
        num_experts_per_tok=2,
    )
    model = AutoModelForCausalLM.from_config(config).to(device).eval()
    batch = {"input_ids": torch.randint(200, (2, 6), device=device)}

print(enable(model))
tokens = model.generate(**batch, max_new_tokens=20, do_sample=False)
print(tokens.tolist() if tokenizer is None else "\n".join(tokenizer.batch_decode(tokens)))
