"""vLLM's build of FlashAttention-3, without importing vLLM itself: that takes seconds and configures the process."""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path
from typing import Any

import torch

# What a capability names: "tskernel.backends.cuda._vllm_fa3:library_of_vllm" is there when the library loads.
_ATTRIBUTE = "library_of_vllm"


def __getattr__(name: str) -> Any:
    if name == _ATTRIBUTE and (found := _load()) is not None:
        return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@functools.cache
def _load() -> Any:
    spec = importlib.util.find_spec("vllm")
    for place in (spec.submodule_search_locations or ()) if spec is not None else ():
        for file in sorted((Path(place) / "vllm_flash_attn").glob("_vllm_fa3_C*.so")):
            try:
                torch.ops.load_library(str(file))
                return torch.ops._vllm_fa3_C.fwd.default
            except (OSError, RuntimeError, AttributeError):
                continue  # built for another torch or CUDA
    return None
