"""Generate with vLLM on tskernel's ops: python examples/vllm_plugin/generate.py MODEL."""

from __future__ import annotations

import os
import sys

os.environ.setdefault("TSKERNEL_VLLM", "1")  # before vLLM loads its plugins

from vllm import LLM, SamplingParams  # pyright: ignore[reportMissingImports]

llm = LLM(model=sys.argv[1], attention_backend="TOKENSPEED")
for request in llm.generate(["Hello, my name is"], SamplingParams(temperature=0, max_tokens=20)):
    print(request.outputs[0].text)
