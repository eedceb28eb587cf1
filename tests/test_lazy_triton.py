"""Kernel files declare Triton code without importing Triton."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

KERNEL = """
from __future__ import annotations
from typing import TYPE_CHECKING
from tskernel.backends.lazy_triton import jit
if TYPE_CHECKING:
    import triton.language as tl

@jit
def square(x):
    return x * x

@jit
def kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + at, square(tl.load(x_ptr + at, mask=at < n)), mask=at < n)
"""


def run(tmp_path: Path, code: str, **env: str) -> str:
    (tmp_path / "declared.py").write_text(KERNEL)
    path = f"{tmp_path}:{Path(__file__).parent.parent / 'src'}"
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, capture_output=True, text=True, env={"PYTHONPATH": path, "PATH": "/usr/bin", **env})
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_declaring_imports_nothing_and_launching_runs(tmp_path: Path) -> None:
    code = """
        import sys, torch, declared
        assert "triton" not in sys.modules
        x, y = torch.arange(10.0), torch.full((10,), -7.0)
        declared.kernel[(3,)](x, y, 10, BLOCK=4)
        assert torch.equal(y, x * x), y
        print(type(declared.kernel).__name__)
    """
    assert run(tmp_path, code, TRITON_INTERPRET="1").strip() == "InterpretedFunction"


def test_without_triton_the_kernel_is_unavailable_with_a_reason(tmp_path: Path) -> None:
    code = """
        import sys, declared
        sys.modules["triton"] = None
        try:
            declared.kernel[(1,)]
        except Exception as error:
            print(type(error).__name__, error)
    """
    assert run(tmp_path, code).startswith("KernelUnavailableError Triton does not load: ")
