"""Kernel files declare Triton code without importing Triton."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from tskernel.backends.compile_case import CompileCase, descriptor
from tskernel.backends.lazy_triton import JitOptions, LazyGluonKernel, LazyKernel, gluon_jit, jit

KERNEL = """
from __future__ import annotations
from typing import TYPE_CHECKING
from tskernel.backends.lazy_triton import gluon_jit, jit
if TYPE_CHECKING:
    import triton.language as tl

@jit(noinline=True)
def square(x):
    return x * x

@jit(do_not_specialize=("n",))
def kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + at, square(tl.load(x_ptr + at, mask=at < n)), mask=at < n)

@gluon_jit
def gluon_kernel(x_ptr, n):
    at = gl.arange(0, 128, gl.BlockedLayout([1], [32], [4], [0]))
    gl.store(x_ptr + at, at, mask=at < n)
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


def test_a_prepared_launch_runs_in_the_interpreter(tmp_path: Path) -> None:
    code = """
        import torch, declared
        from tskernel.backends.triton_launch import prepare
        x, y = torch.arange(10.0), torch.full((10,), -7.0)
        launch = prepare(declared.kernel, (3,), x, y, 10, BLOCK=4)
        launch(x, y)
        assert torch.equal(y, x * x), y
        launch(2 * x, y)
        assert torch.equal(y, 4 * x * x), y
    """
    run(tmp_path, code, TRITON_INTERPRET="1")


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


def test_without_gluon_only_gluon_kernels_are_unavailable(tmp_path: Path) -> None:
    code = """
        import sys, declared
        sys.modules["triton.experimental.gluon"] = None
        declared.kernel.resolve()
        try:
            declared.gluon_kernel[(1,)]
        except Exception as error:
            print(type(error).__name__, error)
    """
    text = run(tmp_path, code)
    assert text.startswith("KernelUnavailableError Gluon does not load from Triton 3.") and "needs 3.6" in text


def test_the_interpreter_refuses_gluon(tmp_path: Path) -> None:
    code = """
        import declared
        try:
            declared.gluon_kernel[(1,)]
        except Exception as error:
            print(type(error).__name__, error)
    """
    assert run(tmp_path, code, TRITON_INTERPRET="1").startswith("KernelUnavailableError Triton's interpreter")


def test_options_reach_triton() -> None:
    @jit(do_not_specialize=("n",), do_not_specialize_on_alignment=("x",), noinline=True)
    def kernel(x, n, m):
        pass

    found = kernel.resolve()
    assert found.noinline is True
    assert [p.do_not_specialize for p in found.params] == [False, True, False]
    assert [p.do_not_specialize_on_alignment for p in found.params] == [True, False, False]


def test_options_for_an_unknown_argument_are_refused() -> None:
    with pytest.raises(ValueError, match="do_not_specialize: expected arguments among x, n; got 'm'"):

        @jit(do_not_specialize=("m",))
        def kernel(x, n):
            pass


def test_gluon_is_a_kind_of_triton_kernel_with_options() -> None:
    @gluon_jit(do_not_specialize=("n",))
    def kernel(x, n):
        pass

    assert isinstance(kernel, LazyGluonKernel) and isinstance(kernel, LazyKernel)
    assert kernel.options == JitOptions(do_not_specialize=("n",))
    assert kernel.resolve().is_gluon() and kernel.resolve().params[1].do_not_specialize


@gluon_jit
def copy_tile(source, to, barrier_count):
    tile = gl.allocate_shared_memory(source.dtype, source.block_shape, source.layout)  # noqa: F821
    bar = gl.allocate_shared_memory(gl.int64, [1], hopper.mbarrier.MBarrierLayout())  # noqa: F821
    hopper.mbarrier.init(bar, count=barrier_count)  # noqa: F821
    hopper.mbarrier.expect(bar, source.block_type.nbytes)  # noqa: F821
    hopper.tma.async_copy_global_to_shared(source, [0, 0], bar, tile)  # noqa: F821
    hopper.mbarrier.wait(bar, 0)  # noqa: F821
    hopper.tma.async_copy_shared_to_global(to, [0, 0], tile)  # noqa: F821
    hopper.tma.store_wait(0)  # noqa: F821


def test_gluon_compiles_for_sm90_with_descriptors() -> None:
    from test_cross_compile import PARTS, build
    from triton._C.libtriton import native_specialize_impl
    from triton.backends.nvidia.compiler import CUDABackend
    from triton.experimental.gluon import language
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    layout = language.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    tile = descriptor("bf16", [64, 64], layout)
    given = TensorDescriptor.from_tensor(torch.empty(128, 256, dtype=torch.bfloat16), [64, 64], layout)
    assert native_specialize_impl(CUDABackend, given, False, True, True)[0] == tile
    signature = {"source": tile, "to": tile, "barrier_count": "constexpr"}
    case = CompileCase("copy", copy_tile, signature, {"barrier_count": 1}, {"num_warps": 4})
    assert "cp.async.bulk.tensor.2d" in build(PARTS["sm90"], case).asm["ptx"]
