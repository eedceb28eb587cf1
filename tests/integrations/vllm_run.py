"""Runs a saved toy model in vLLM on this CPU; prints tokens, log-probabilities and which ops ran how often, as JSON.

Usage: vllm_run.py MODEL_FOLDER eager|compiled [DTYPE]; in bfloat16 it prints the prompts' log-probabilities too.
A process of its own: vLLM loads its plugins once.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from typing import Any

ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1", "VLLM_DISABLE_COMPILE_CACHE": "1",
}  # fmt: skip
PROMPTS = [list(range(3, 12)), [40, 7, 19], list(range(60, 95)) * 2, [5]]


def main(folder: str, mode: str, dtype: str = "float32") -> dict[str, Any]:
    os.environ |= ENVIRONMENT
    from torch.profiler import ProfilerActivity, profile
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=folder, skip_tokenizer_init=True, max_model_len=128, dtype=dtype, max_num_seqs=4, block_size=32,
        max_num_batched_tokens=32, gpu_memory_utilization=0.3, enforce_eager=mode == "eager",
    )  # fmt: skip
    params = SamplingParams(
        detokenize=False, ignore_eos=True, temperature=0, max_tokens=12, logprobs=1,
        prompt_logprobs=None if dtype == "float32" else 0,
    )  # fmt: skip
    with profile(activities=[ProfilerActivity.CPU]) as found:
        done = llm.generate([{"prompt_token_ids": p} for p in PROMPTS], params)
    outputs = [r.outputs[0] for r in done]
    ran = Counter({e.key: e.count for e in found.key_averages() if e.key.startswith("tokenspeed::")})
    return {
        "tokens": [list(o.token_ids) for o in outputs],
        "logprobs": [[step[t].logprob for step, t in zip(o.logprobs, o.token_ids, strict=True)] for o in outputs],
        "prompt": [
            [step[t].logprob for step, t in zip(r.prompt_logprobs[1:], r.prompt_token_ids[1:], strict=True)]
            for r in done
            if r.prompt_logprobs
        ],
        "ran": ran,
    }


if __name__ == "__main__":
    sys.stdout.write(f"RESULT {json.dumps(main(*sys.argv[1:]))}\n")
