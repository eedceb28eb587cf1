"""Runs a saved toy model in SGLang on this CPU; prints tokens, log-probabilities and which ops ran how often, as JSON.

Usage: sglang_run.py MODEL_FOLDER ATTENTION_BACKEND runner|engine [SERVER_ARGUMENTS_AS_JSON]. ``runner`` is SGLang's
model runner and batches in this process, as its one_batch benchmark drives them; ``engine`` the whole engine.
A process of its own: SGLang loads its plugins once.
"""

from __future__ import annotations

import json
import sys
from array import array
from collections import Counter
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PROMPTS = [list(range(3, 12)), [40, 7, 19], list(range(60, 95)) * 2, [5, 6]]
FIRST = 2  # tokens of each prompt that go in before the rest: the rest then finds a prefix in the cache
STEPS = 10


def arguments(folder: str, attention: str, more: dict[str, Any]) -> dict[str, Any]:
    fixed = {"device": "cpu", "dtype": "float32", "max_total_tokens": 1024, "mem_fraction_static": 0.3}
    return {
        "model_path": folder, "attention_backend": attention, "skip_tokenizer_init": True, "log_level": "warning",
        "disable_overlap_schedule": True, "random_seed": 0, "chunked_prefill_size": 32, **fixed, **more,
    }  # fmt: skip


def engine(options: dict[str, Any]) -> dict[str, Any]:
    import sglang

    server = sglang.Engine(**options)
    greedy = {"temperature": 0, "max_new_tokens": STEPS, "ignore_eos": True}
    done = server.generate(input_ids=PROMPTS, sampling_params=greedy, return_logprob=True)
    logprobs = [[step[0] for step in r["meta_info"]["output_token_logprobs"]] for r in done]
    server.shutdown()
    return {"tokens": [r["output_ids"] for r in done], "logprobs": logprobs, "ran": {}}


def loaded(options: dict[str, Any]) -> Any:
    """Make SGLang's model runner, without a tokenizer and without a scheduler."""
    from sglang.benchmark import one_batch
    from sglang.srt.runtime_context import SpawnRanks, publish
    from sglang.srt.server_args import PortArgs, ServerArgs

    server = ServerArgs(**options)
    server.resolve_once()
    publish(server, role="scheduler", ranks=SpawnRanks(world_rank=0, gpu_id=0))
    one_batch._init_process_global_configs()
    one_batch.get_tokenizer = lambda *_, **__: None
    return one_batch.load_model(server, PortArgs.init_new(server), 0, 0)[0]


def requests() -> list[Any]:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.sampling.sampling_params import SamplingParams

    made = []
    for i, prompt in enumerate(PROMPTS):
        start = array("q", prompt[:FIRST])
        req = Req(i, "", start, SamplingParams(temperature=0, max_new_tokens=STEPS))
        req.full_untruncated_fill_ids, req.logprob_start_len, req.extend_end = start, -1, FIRST
        made.append(req)
    return made


def runner(options: dict[str, Any]) -> dict[str, Any]:
    from sglang.srt.plugins import load_plugins
    from torch.profiler import ProfilerActivity, profile

    load_plugins()
    model, reqs = loaded(options), requests()
    with profile(activities=[ProfilerActivity.CPU]) as found:
        model.extend(reqs)
        reqs = [req for req, prompt in zip(reqs, PROMPTS, strict=True) if len(prompt) > FIRST]
        for req, prompt in zip(reqs, [p for p in PROMPTS if len(p) > FIRST], strict=True):
            req.full_untruncated_fill_ids.extend(prompt[FIRST:])
            req.prefix_len, req.extend_end = FIRST, len(prompt)
        step = model.extend(reqs)
        ids, logits, batch = step
        tokens, logprobs = [ids], [logits.float().log_softmax(-1).gather(1, ids[:, None].long())]
        for _ in range(STEPS - 1):
            ids, logits = model.decode(ids, batch)
            tokens.append(ids)
            logprobs.append(logits.float().log_softmax(-1).gather(1, ids[:, None].long()))
    ran = Counter({e.key: e.count for e in found.key_averages() if e.key.startswith("tokenspeed::")})
    columns = list(zip(*[t.tolist() for t in tokens], strict=True))
    return {"tokens": columns, "logprobs": list(zip(*[p[:, 0].tolist() for p in logprobs], strict=True)), "ran": ran}


def main(folder: str, attention: str, way: str, more: str = "{}") -> dict[str, Any]:
    options = arguments(folder, attention, json.loads(more))
    return engine(options) if way == "engine" else runner(options)


if __name__ == "__main__":
    sys.stdout.write(f"RESULT {json.dumps(main(*sys.argv[1:]))}\n")
