"""The native library without a GPU: the same kernels run by the host compiler, and compiled for CUDA and HIP.

``common/emulate.h`` runs every thread of a block as a fiber: numbers, addresses and barriers are those of a GPU. What
it cannot show is races, timing and the device's own instructions (tests/test_gpu.py, compute-sanitizer).
"""

from __future__ import annotations

import fcntl
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import short
from test_conformance import expected

from tskernel._torch.execute import named
from tskernel._torch.runners import call_with
from tskernel.backends.cuda import _native as lib
from tskernel.dispatch.ranking import reject_reason
from tskernel.dispatch.registry import KernelRegistry
from tskernel.dispatch.spec import KernelSpec
from tskernel.library import Sample, ops
from tskernel.ops.quantization._math import FP8_MAX, saturate_to_fp8
from tskernel.testing import SampleMaker, clone_arguments, compare, samples_of

ROOT = Path(__file__).resolve().parent.parent
CSRC = ROOT / "csrc"
NATIVE = [s for s in KernelRegistry.get().list_kernels() if s.solution == "native"]
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
FP32, BF16, FP8 = torch.float32, torch.bfloat16, torch.float8_e4m3fn
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
def emulated(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Build the library for the CPU, once for all workers, and load it."""
    if shutil.which(os.environ.get("CXX", "c++")) is None:
        pytest.skip("no host compiler")
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "emulated"
    folder.mkdir(exist_ok=True)
    library = folder / builder.LIBRARY
    root = builder.torch_root()
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            builder.build_library(builder.emulated_toolchain(root), folder, library)
    torch.ops.load_library(str(library))


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


def norm_sizes() -> Iterator[tuple[int, int]]:
    """Yield rows and widths that meet every way to share a row: lanes, one to eight accesses, the long loop."""
    for width in (8, 24, 256, 264, 768, 1000, 2880, 4096, 8192):
        yield 3, width
    for width in (40, 2880, 16384, 20000, 40000, 5, 515, 3333):
        yield 2, width
    yield 270, 1032  # more rows than are given all threads
    yield 270, 521
    yield 600, 96


def extra_samples(op: str, make: SampleMaker, dtype: torch.dtype) -> Iterator[Sample]:
    """Yield calls larger than the op's own samples, and such as begin off a 16-byte boundary."""
    r = make.randn
    if op in ("rmsnorm", "gemma_rmsnorm", "layernorm", "add_rmsnorm", "fused_add_rmsnorm"):
        more = {"residual"} if "add_" in op else set()
        for rows, width in norm_sizes():
            for wdtype in {dtype, FP32}:
                tensors = {n: r((rows, width), dtype) for n in ("x", *more)}
                bias = {"bias": r((width,), wdtype)} if op == "layernorm" else {}
                yield Sample(f"{rows}x{width}", **tensors, weight=r((width,), wdtype), **bias)
        shifted = {n: r((4, 521), dtype)[:, 1:513] for n in ("x", *more)}
        yield Sample("unaligned", **shifted, weight=r((513,), dtype)[1:])
        strided = {n: r((2, 3, 4, 600), dtype)[::1, 1:, ::2, 8:520] for n in ("x", *more)}
        yield Sample("three leading strides", **strided, weight=r((512,), dtype))
    elif op == "qk_rmsnorm":
        for tokens in (3, 300):
            qkv = r((tokens, 12, 128), dtype)
            yield Sample("heads", q=qkv[:, :8], k=qkv[:, 8:10], q_weight=r((128,), dtype), k_weight=r((128,), dtype))
        yield Sample(
            "wide", q=r((3, 1, 576), dtype), k=r((3, 2, 576), dtype), q_weight=r((576,), FP32), k_weight=r((576,), FP32)
        )
    elif op.endswith("_quantize_fp8"):
        for rows, width in ((3, 768), (2, 2880), (300, 256), (2, 9216), (5, 7)):
            x = r((rows, 2 * width), dtype)
            for options in ({}, {"granularity": "group"}, {"granularity": "group", "group_size": 32, "ue8m0": True}):
                yield Sample(f"{rows}x{width}", x=x, **options)
            yield Sample(f"{rows}x{width} scaled", x=x, scale=make.tensor([0.03], FP32), granularity="tensor")
    elif op in ("silu_and_mul", "gelu_and_mul", "gelu_tanh_and_mul", "swiglu_oai"):
        for rows, width in ((3, 768), (2, 3420), (2, 2880), (300, 96), (600, 40), (2, 14336)):
            yield Sample(f"{rows}x{width}", x=r((rows, 2 * width), dtype) * 4)
            if op == "swiglu_oai":
                yield Sample(f"{rows}x{width} alternating", x=r((rows, 2 * width), dtype) * 4, interleaved=True)
        yield Sample("unaligned", x=r((4, 1025), dtype)[:, 1:])
    elif op in ("quantize_fp8_dynamic", "quantize_int8"):
        for rows, width in ((3, 768), (2, 2880), (300, 256), (2, 20000), (1, 40000), (300, 513), (7, 96)):
            x = r((rows, width), dtype) * 3
            for granularity in ("token", "tensor"):
                yield Sample(f"{rows}x{width} {granularity}", x=x, granularity=granularity)
            if op == "quantize_fp8_dynamic":
                for options in ({"group_size": 128}, {"group_size": 64, "ue8m0": True}, {"group_size": 48}):
                    yield Sample(f"{rows}x{width} {options}", x=x, granularity="group", **options)
                yield Sample(f"{rows}x{width} block", x=x, granularity="block")
        if op == "quantize_fp8_dynamic":
            yield Sample("matrices", x=r((2, 3, 130, 260), dtype), granularity="block")
            yield Sample("tensor with gaps", x=r((70, 300), dtype)[:, 8:264], granularity="tensor")
    elif op == "quantize_fp8":
        for rows, width in ((3, 768), (300, 264), (2, 5001)):
            yield Sample("rows", x=r((rows, width), dtype), scale=r((rows, 1), FP32).abs() + 0.01)
            yield Sample("one", x=r((rows, width), dtype), scale=make.tensor(0.02, FP32))
    elif op in ("quantize_mxfp8", "quantize_mxfp4"):
        for rows, width in ((3, 768), (300, 64), (2, 2880), (2, 8192), (3, 8), (3, 40), (5, 34)):
            yield Sample(f"{rows}x{width}", x=r((rows, width), dtype) * 5)
    elif op in ("store_kvcache", "store_mla_kvcache"):
        yield from store_samples(op, make, dtype)
    else:
        yield from rope_samples(op, make, dtype)


def store_samples(op: str, make: SampleMaker, dtype: torch.dtype) -> Iterator[Sample]:
    r, slots = make.randn, make.permutation(64, torch.int64)[:9]
    for cache_dtype in (dtype, BF16, FP32, FP8, torch.float8_e5m2, torch.float8_e4m3fnuz):
        for scale in (None, make.tensor([0.5], FP32)):
            if op == "store_mla_kvcache":
                cache = r((4, 16, 1, 576), cache_dtype)
                yield Sample(
                    short(cache_dtype),
                    kv_c=r((9, 512), dtype),
                    k_pe=r((9, 64), dtype),
                    kv_cache=cache,
                    slot_mapping=slots,
                    scale=scale,
                )
                continue
            caches = r((2, 4, 16, 8, 128), cache_dtype)
            for heads, width in ((8, 128), (3, 40)):
                k, v = r((9, heads, width), dtype), r((9, heads, width), dtype)
                both = {"k_cache": caches[0, :, :, :heads, :width], "v_cache": caches[1, :, :, :heads, :width]}
                yield Sample(short(cache_dtype), k=k, v=v, **both, slot_mapping=slots, k_scale=scale, v_scale=scale)


def rope_samples(op: str, make: SampleMaker, dtype: torch.dtype) -> Iterator[Sample]:
    r = make.randn
    for tokens, heads, size, rotary, neox in (
        (9, 16, 128, 128, True),
        (9, 5, 128, 64, False),
        (3, 4, 80, 48, True),
        (2, 3, 64, 64, False),
    ):
        for angle_dtype in (dtype, FP32):
            angle = make.randn((40, rotary // 2), FP32)
            args = {
                "positions": make.randint(-1, 41, (tokens,)),
                "q": r((tokens, heads, size), dtype),
                "k": r((tokens, 2, size), dtype),
                "cos_sin_cache": torch.cat((angle.cos(), angle.sin()), -1).to(angle_dtype),
                "is_neox": neox,
            }
            if op.endswith("store_kvcache_"):
                for cache_dtype, scale in ((dtype, None), (FP8, make.tensor([0.5, 0.25], FP32))):
                    caches = r((2, 4, 16, 2, size), cache_dtype)
                    slots = make.permutation(64, torch.int64)[:tokens]
                    slots[::4] = -1
                    stored = {"v": r((tokens, 2, size), dtype), "k_cache": caches[0], "v_cache": caches[1]}
                    yield Sample("large", **args, **stored, slot_mapping=slots, k_scale=scale, v_scale=scale)
            else:
                yield Sample("large", **args)


@pytest.mark.usefixtures("emulated", "poison")
@pytest.mark.parametrize("spec", [pytest.param(s, id=s.name) for s in NATIVE])
def test_larger_calls(spec: KernelSpec) -> None:
    ran = 0
    for dtype in (FP32, BF16):
        for sample in extra_samples(spec.mode, SampleMaker(), dtype):
            try:
                compare(*run(spec, sample))
            except Exception as error:
                raise AssertionError(f"{spec.name}, {short(dtype)}, {sample.name}: {error}") from error
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
    for part in ("gfx942", "gfx950"):
        found = compile_hip.resources(compile_hip.compile_header("rope", part, tmp_path))
        assert found["vgpr_count"] > 0
        assert found["vgpr_spill_count"] == found["private_segment_fixed_size"] == 0, (part, found)


def test_device_code_names_its_platform_in_one_place() -> None:
    """HIP compiles the same files: nothing but platform.h and the launch in host.h may say cuda or hip."""
    for path in [*CSRC.glob("*.cu"), *(CSRC / "kernels").glob("*.cuh"), *(CSRC / "common").glob("*.h")]:
        if path.name in ("platform.h", "host.h"):
            continue
        assert not re.search(r"\b(cuda|hip)[A-Z_]\w*|<(cuda|hip)", path.read_text()), path.name
