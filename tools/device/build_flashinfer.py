"""Build the FlashInfer modules that the benchmarks use for sm_90a, on a machine without a GPU.

    CUDA_HOME=/usr/local/cuda python build_flashinfer.py FOLDER [WORD ...]

Leaves ``FOLDER/<module>/<module>.so`` for each module whose name holds a word; pack_peers.sh puts FOLDER where
FlashInfer looks before it compiles. Needs flashinfer-python 0.7.4, ninja, nvcc, and a linkable libcuda and libcudart
(LIBRARY_PATH) with the headers of cuBLAS and cuRAND (CPATH). 5 to 20 minutes a module on two cores.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("FLASHINFER_CUDA_ARCH_LIST", "9.0a")
os.environ.setdefault("FLASHINFER_DISABLE_VERSION_CHECK", "1")

import torch

BF16, INT32 = torch.bfloat16, torch.int32


def modules() -> Iterator[Any]:
    """Yield what builds each module."""
    from flashinfer.jit import attention  # pyright: ignore[reportMissingImports]
    from flashinfer.jit.activation import gen_act_and_mul_module  # pyright: ignore[reportMissingImports]
    from flashinfer.jit.norm import gen_norm_module  # pyright: ignore[reportMissingImports]
    from flashinfer.jit.page import gen_page_module  # pyright: ignore[reportMissingImports]
    from flashinfer.jit.rope import gen_rope_module  # pyright: ignore[reportMissingImports]
    from flashinfer.jit.sampling import gen_sampling_module  # pyright: ignore[reportMissingImports]

    yield from (gen_norm_module(), gen_rope_module(), gen_page_module(), gen_sampling_module())
    yield from (gen_act_and_mul_module(name) for name in ("silu", "gelu_tanh"))
    dtypes = (BF16, BF16, BF16, INT32)
    for width, window in ((128, False), (64, False), (64, True)):
        yield attention.gen_batch_prefill_module("fa2", *dtypes, width, width, 0, window, False, False)
    for backend in ("fa3", "fa2"):
        yield attention.gen_batch_mla_module(backend, *dtypes, 512, 64, False)
    for width in (128, 64):
        yield attention.gen_batch_prefill_module("fa3", *dtypes, width, width, 0, False, False, False)


def main() -> None:
    """Build what is not there yet; a module that fails is named, and the others go on."""
    folder, words = Path(sys.argv[1]), sys.argv[2:]
    for module in modules():
        to = folder / module.name
        if (to / f"{module.name}.so").exists() or (words and not any(w in module.name for w in words)):
            continue
        try:
            module.build(verbose=False)
        except Exception as error:
            print(f"{module.name}: {type(error).__name__}: {str(error)[-1500:]}", flush=True)
            continue
        to.mkdir(parents=True, exist_ok=True)
        for path in module.get_library_paths():
            shutil.copy(path, to / path.name)
        print(f"{module.name}: built", flush=True)


if __name__ == "__main__":
    main()
