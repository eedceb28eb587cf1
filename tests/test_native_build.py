"""The native library without a GPU: the same kernels run by the host compiler, and compiled for CUDA and HIP.

``common/emulate.h`` runs every thread of a block as a fiber: numbers, addresses and barriers are those of a GPU. What
it cannot show is races, timing and the device's own instructions (tests/test_gpu.py, compute-sanitizer).
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import short
from native_cases import extra_samples, layout_samples
from test_conformance import expected

import tskernel
from tskernel._torch.execute import named
from tskernel._torch.runners import call_with
from tskernel.backends.cuda import _native as lib
from tskernel.dispatch.platform import ANY
from tskernel.dispatch.ranking import reject_reason
from tskernel.dispatch.registry import KernelRegistry
from tskernel.dispatch.spec import KernelSpec
from tskernel.library import Sample, ops
from tskernel.ops.quantization._math import FP8_MAX, saturate_to_fp8
from tskernel.testing import SampleMaker, clone_arguments, compare, samples_of

ROOT = Path(__file__).resolve().parent.parent
CSRC = ROOT / "csrc"
NATIVE = [s for s in KernelRegistry.get().list_kernels() if s.solution == "native"]
ROWS = [s for s in NATIVE if s.family not in ("moe", "sampling")]  # those have tests/test_native_vocab.py
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
FP32, BF16 = torch.float32, torch.bfloat16
# Rotations are of pairs and mx blocks of 32.
WIDTHS = dict.fromkeys(("apply_rope", "apply_rope_", "apply_rope_store_kvcache_"), (6, 64))
WIDTHS |= {"quantize_mxfp8": (33, 64), "quantize_mxfp4": (34, 64)}
pytestmark = pytest.mark.slow


def load_builder() -> Any:
    spec = importlib.util.spec_from_file_location("csrc_build", CSRC / "build.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["csrc_build"] = module
    spec.loader.exec_module(module)
    return module


builder = load_builder()


@pytest.fixture(scope="session")
def emulated(built_once: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the library for the CPU and load it."""
    if shutil.which(os.environ.get("CXX", "c++")) is None:
        pytest.skip("no host compiler")

    def build(path: Path) -> None:
        # Two files that include all others: torch's headers are most of the work.
        folder, sources = tmp_path_factory.mktemp("emulated"), builder.sources()
        halves = [folder / "first.cu", folder / "second.cu"]
        for half, files in zip(halves, (sources[::2], sources[1::2]), strict=True):
            half.write_text("".join(f'#include "{f}"\n' for f in files))
        builder.build_library(builder.emulated_toolchain(builder.torch_root()), folder, path, halves)

    library = built_once("libtskernel_emulated.so", build)
    torch.ops.load_library(str(library))
    return library


def run(spec: KernelSpec, sample: Sample) -> tuple[Any, Any]:
    """Return what the kernel's function gives on CPU tensors, and the oracle; skip a call that it declines."""
    op = ops[spec.mode]
    arguments = clone_arguments(sample.arguments)
    full = op.fill(arguments)
    if (why := reject_reason(spec, named(op, full, None))) is not None:
        pytest.skip(why)
    if op.mutates:
        call_with(op, spec.function, full)
        return tuple(arguments[n] for n in op.mutates), expected(op, sample, "")
    if spec.writes_out:
        out = op.allocate(full).fill_(-7)
        call_with(op, lambda *a, **k: spec.function(*a, **k, out=out), full)
        return out, expected(op, sample, "")
    return call_with(op, spec.function, full), expected(op, sample, "")


@pytest.mark.usefixtures("emulated", "poison")
@pytest.mark.parametrize("spec", [pytest.param(s, id=s.name) for s in NATIVE])
def test_samples(spec: KernelSpec) -> None:
    for dtype, sample in samples_of(ops[spec.mode]):
        try:
            compare(*run(spec, sample))
        except Exception as error:
            raise AssertionError(f"{spec.name}, {short(dtype)}, sample {sample.name}: {error}") from error


@pytest.mark.usefixtures("emulated", "poison")
@pytest.mark.parametrize("spec", [pytest.param(s, id=s.name) for s in ROWS])
def test_larger_calls(spec: KernelSpec) -> None:
    """A part of them, which differs by dtype; a GPU runs all."""
    ran = 0
    for dtype, first, step in ((BF16, 0, 2), (FP32, 1, 4)):
        for sample in itertools.islice(extra_samples(spec.mode, SampleMaker(), dtype), first, None, step):
            try:
                compare(*run(spec, sample))
            except Exception as error:
                raise AssertionError(f"{spec.name}, {short(dtype)}, {sample.name}: {error}") from error
            ran += 1
    assert ran


@pytest.mark.usefixtures("emulated", "poison")
@pytest.mark.parametrize("spec", [pytest.param(s, id=s.name) for s in ROWS])
def test_odd_widths_and_layouts(spec: KernelSpec) -> None:
    """WID-01, NRM-02, LAY-01, ROP-01: bases and rows off any alignment, gaps between rows and between elements."""
    ran = 0
    for sample in layout_samples(spec.mode, SampleMaker(), BF16, WIDTHS.get(spec.mode, (7, 64))):
        try:
            compare(*run(spec, sample))
        except Exception as error:
            raise AssertionError(f"{spec.name}, {sample.name}: {error}") from error
        ran += 1
    assert ran


def every_bf16() -> torch.Tensor:
    return torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(BF16)


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("columns", [2**16, 1])
@pytest.mark.parametrize("dtype", list(FP8_MAX), ids=short)
def test_qnt_02_fp8_conversion_is_exact_for_every_bf16_value(dtype: torch.dtype, columns: int) -> None:
    """All signs, ties, subnormals, infinities and NaN, in wide and in single accesses."""
    x = every_bf16().view(-1, columns)
    data = torch.empty(x.shape, dtype=dtype)
    lib.native("quantize_scaled")(x, torch.ones(1), data, torch.empty(1))
    want = saturate_to_fp8(x, dtype)
    nan = x.isnan()
    assert bool(data.float()[nan].isnan().all())
    assert torch.equal(data.view(torch.uint8)[~nan], want.view(torch.uint8)[~nan])


@pytest.mark.usefixtures("emulated")
def test_qnt_04_mx_codes_are_exact_for_every_bf16_value() -> None:
    x = every_bf16().view(-1, 32)
    x = torch.where(x.isnan(), torch.zeros((), dtype=BF16), x)
    for op in ("quantize_mxfp4", "quantize_mxfp8"):
        spec = KernelRegistry.get().get_by_name(f"cuda/{op}/native")
        data, scale = spec.function(x)
        want_data, want_scale = ops[op].body(x)
        assert torch.equal(scale, want_scale)
        compare(data, want_data, exact=True)


@pytest.mark.usefixtures("emulated")
def test_a_nan_poisons_its_mxfp4_block_only() -> None:
    x = torch.ones(2, 96, dtype=BF16)
    x[1, 40] = float("nan")
    _, scale = KernelRegistry.get().get_by_name("cuda/quantize_mxfp4/native").function(x)
    assert (scale == 255).nonzero().tolist() == [[1, 1]]


@pytest.mark.usefixtures("emulated")
def test_ops_of_the_library_write_what_their_schemas_say() -> None:
    schemas = [s for s in torch._C._jit_get_all_schemas() if s.name.startswith("tskernel_native::")]
    assert len(schemas) >= 12
    for schema in schemas:
        assert not schema.returns, schema
        assert any(a.alias_info is not None and a.alias_info.is_write for a in schema.arguments), schema


@pytest.mark.usefixtures("emulated", "registry")
def test_a_native_kernel_is_traced_into_a_graph_as_its_operator() -> None:
    """For any number of rows; what runs then is the operator alone."""
    native = KernelRegistry.get().get_by_name("cuda/silu_and_mul_quantize_fp8/native")
    KernelRegistry.get().register(replace(native, name="emulated", solution="emulated", capability=(ANY,)))

    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return tskernel.silu_and_mul_quantize_fp8(x, granularity="group", override="emulated")

    graphs: list[str] = []

    def backend(module: Any, inputs: Any) -> Any:
        from functorch.compile import make_boxed_func
        from torch._dynamo.backends.common import aot_autograd

        def keep(graph: Any, _: Any) -> Any:
            graphs.append(str(graph.graph))
            return make_boxed_func(graph.forward)

        return aot_autograd(fw_compiler=keep)(module, inputs)

    with tskernel.inline():
        compiled = torch.compile(function, backend=backend, fullgraph=True, dynamic=True)
        for rows in (3, 5):
            x = SampleMaker().randn((rows, 512), BF16)
            compare(compiled(x), ops["silu_and_mul_quantize_fp8"].body(x, granularity="group"))
    assert len(graphs) == 1 and "tskernel_native.quantize_groups" in graphs[0] and "tokenspeed" not in graphs[0]


@pytest.mark.usefixtures("emulated")
def test_every_operator_of_the_library_has_a_fake() -> None:
    lib.load()
    for name in lib._names():
        assert torch._library.simple_registry.singleton.find(name).fake_impl.kernel is not None, name


def test_a_cpp_program_runs_a_package_with_native_operators(tmp_path: Path, emulated: Path, aoti_program: Path) -> None:
    """``examples/aoti_native``, its kernels run by the CPU; neither Python nor tskernel is in the process."""
    example = ROOT / "examples" / "aoti_native" / "package.py"
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [sys.executable, example, tmp_path, emulated], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    *table, command = done.stdout.splitlines()
    assert [row.split()[3] for row in table] == ["as", "inlined", "inlined", "inlined"]
    run = subprocess.run([aoti_program, *command.split()[1:]], capture_output=True, text=True, check=False)
    assert run.stdout == "6 results\n", run.stderr
    got, want = (torch.load(tmp_path / f"{n}.pt", weights_only=False) for n in ("results", "expected"))
    for g, w in zip(got, want, strict=True):
        compare(g, w)
    for file in (aoti_program, emulated):
        assert "libpython" not in subprocess.run(["ldd", file], capture_output=True, text=True, check=True).stdout


def test_choices_of_the_build(monkeypatch: pytest.MonkeyPatch) -> None:
    assert builder.choose("none") == ("a pure Python wheel (TSKERNEL_BUILD=none)", {})
    monkeypatch.setattr(builder, "torch_device", lambda: "cpu")
    assert builder.choose("auto") == ("a pure Python wheel (this torch has no GPU support)", {})
    monkeypatch.setattr(builder, "_find", lambda *_: None)
    with pytest.raises(RuntimeError, match="TSKERNEL_BUILD=cuda: no nvcc found"):
        builder.choose("cuda")
    with pytest.raises(ValueError, match="TSKERNEL_BUILD: expected auto or cuda"):
        builder.choose("yes")
    monkeypatch.setattr(builder, "torch_device", lambda: "cuda")
    assert builder.choose("auto") == ("a pure Python wheel (no nvcc found)", {})


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed")
def test_nvcc_compiles_without_spills(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file with the fewest kernels, for one part; all of them are built where there is a GPU."""
    monkeypatch.setenv("TSKERNEL_ARCHS", "90")
    tools = builder.cuda_toolchain(builder.torch_root())
    command = [*tools.compile, "-Xptxas", "-v", "-c", str(CSRC / "store_kvcache.cu"), "-o", str(tmp_path / "o")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    spills = re.findall(r"(\d+) bytes spill stores", done.stdout + done.stderr)
    assert len(spills) == 8 and set(spills) == {"0"}


def test_hip_compiles_without_spills(tmp_path: Path) -> None:
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        import compile_hip
    finally:
        sys.path.pop(0)
    if compile_hip.toolchain() is None:
        pytest.skip("clang-22 or triton's AMD headers are missing")
    compile_hip.compile_host("store_kvcache", tmp_path)
    found = compile_hip.resources(compile_hip.compile_header("rope", "gfx942", tmp_path))  # all: compile_hip.py
    assert found["vgpr_count"] > 0
    assert found["vgpr_spill_count"] == found["private_segment_fixed_size"] == 0, found


def test_device_code_names_its_platform_in_one_place() -> None:
    """HIP compiles the same files: nothing but platform.h and the launch in host.h may say cuda or hip."""
    for path in [*CSRC.glob("*.cu"), *(CSRC / "kernels").glob("*.cuh"), *(CSRC / "common").glob("*.h")]:
        if path.name in ("platform.h", "host.h"):
            continue
        assert not re.search(r"\b(cuda|hip)[A-Z_]\w*|<(cuda|hip)", path.read_text()), path.name
