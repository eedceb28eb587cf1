"""Build tskernel: a pure wheel, plus csrc/*.cu where a CUDA or ROCm compiler is at hand.

Everything else is declared in pyproject.toml. Sources are found by glob, so that adding a kernel edits nothing here.
TSKERNEL_CSRC=0 forces the pure wheel.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from setuptools import setup


def native_options() -> tuple[str, dict[str, Any]]:
    """Return a sentence that says what is built, and the matching arguments of setup()."""
    sources = sorted(str(path) for path in Path("csrc").glob("*.cu"))
    if not sources:
        return "a pure Python wheel (no csrc/*.cu)", {}
    if os.environ.get("TSKERNEL_CSRC") == "0":
        return "a pure Python wheel (TSKERNEL_CSRC=0)", {}
    try:
        from torch.utils import cpp_extension
    except ImportError:
        return "a pure Python wheel (torch is not importable here; try --no-build-isolation)", {}
    if cpp_extension.CUDA_HOME is None and cpp_extension.ROCM_HOME is None:
        return "a pure Python wheel (no nvcc or hipcc found)", {}
    # CUDAExtension turns the sources into HIP on a ROCm build of torch.
    extension = cpp_extension.CUDAExtension("tskernel._C", sources, include_dirs=["csrc"], py_limited_api=True)
    return f"{len(sources)} native sources from csrc/", {
        "ext_modules": [extension],
        "cmdclass": {"build_ext": cpp_extension.BuildExtension},
        "options": {"bdist_wheel": {"py_limited_api": "cp310"}},
    }


SENTENCE, OPTIONS = native_options()
print(f"tskernel: building {SENTENCE}", file=sys.stderr)
setup(**OPTIONS)
