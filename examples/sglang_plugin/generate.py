"""Generate with SGLang on tskernel's ops: python examples/sglang_plugin/generate.py MODEL."""

from __future__ import annotations

import os
import sys

os.environ.setdefault("TSKERNEL_SGLANG", "1")  # before SGLang loads its plugins

import sglang  # pyright: ignore[reportMissingImports]

if __name__ == "__main__":  # SGLang starts processes, which import this file
    engine = sglang.Engine(model_path=sys.argv[1], attention_backend="tokenspeed")
    done = engine.generate(["Hello, my name is"], {"temperature": 0, "max_new_tokens": 20})
    print(done[0]["text"])
    engine.shutdown()
