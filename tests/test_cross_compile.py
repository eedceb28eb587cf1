"""Every Triton kernel compiles, without a GPU, for every part it claims, within that part's resources."""

from __future__ import annotations

import importlib
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tskernel.backends.compile_case import CompileCase
from tskernel.backends.lazy_triton import resolved
from tskernel.backends.portable._attention_launch import Chip
from tskernel.dispatch.registry import builtin_kernel_modules

triton = pytest.importorskip("triton")


class Part(NamedTuple):
    """One part: Triton's target, shared memory of a block in bytes, and how its matrix instructions are written."""

    backend: str
    arch: int | str
    lanes: int
    shared: int
    matrix: str


PARTS = {
    "sm80": Part("cuda", 80, 32, 163 * 1024, r"mma\.sync"),
    "sm90": Part("cuda", 90, 32, 227 * 1024, r"wgmma|mma\.sync"),
    "sm100": Part("cuda", 100, 32, 227 * 1024, r"tcgen05\.mma|mma\.sync"),
    "gfx942": Part("hip", "gfx942", 64, 64 * 1024, r"v_mfma"),
    "gfx950": Part("hip", "gfx950", 64, 160 * 1024, r"v_mfma"),
}
# Bytes of local memory per thread (NVIDIA) and spilled vector registers (AMD) that a kernel may have.
# Only sm80 with wide heads reaches it: the tiles are made for sm90.
MAX_LOCAL, MAX_SPILLS = 256, 16
# Integer arguments that are multiples of 16 in practice; the just-in-time compiler sees that by itself.
DIVISIBLE = {"q_row", "q_head", "k_page", "k_row", "k_head", "v_page", "v_row", "v_head", "out_row", "out_head"}
MODULES = [m for m, _ in builtin_kernel_modules() if hasattr(importlib.import_module(m), "compile_cases")]


def chosen(part: str, module: Any) -> list[Any]:
    """Return all cases on one part of each vendor, the main one on the others: a compile takes seconds."""
    p = PARTS[part]
    if part not in getattr(module, "COMPILE_PARTS", PARTS):
        return []
    nvidia = p.backend == "cuda"
    found = module.compile_cases(Chip(not nvidia, p.shared, p.arch == 100, nvidia and int(p.arch) >= 89))
    return found if part in ("sm90", "gfx942") else found[:2][-1:]


def cases() -> list[Any]:
    """Return the cases of every kernel file on every part."""
    return [
        pytest.param(part, case, id=f"{part}-{module.split('.')[-2]}-{case.name}")
        for part in PARTS
        for module in MODULES
        for case in chosen(part, importlib.import_module(module))
    ]


def source_of(case: Any) -> Any:
    """Return what the just-in-time compiler would hand to the compiler; pointers are aligned."""
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    function = resolved(case.function)
    names = function.arg_names
    divisible = getattr(case, "aligned", DIVISIBLE)
    aligned = [["tt.divisibility", 16]]
    attributes = {(i,): aligned for i, n in enumerate(names) if case.signature[n].startswith("*") or n in divisible}
    constants = {(names.index(n),): v for n, v in case.constants.items()}
    kind = GluonASTSource if function.is_gluon() else ASTSource
    return kind(function, case.signature, constants, attributes)


def build(part: Part, case: Any) -> Any:
    """Compile as the just-in-time compiler would on that part."""
    from triton.backends.compiler import GPUTarget

    if isinstance(case, CompileCase):
        options = case.options
    else:
        options = {"num_warps": case.config.warps, "num_stages": case.config.stages}
        options |= {"maxnreg": case.config.registers} if case.config.registers else {}
    return triton.compile(source_of(case), target=GPUTarget(part.backend, part.arch, part.lanes), options=options)


def local_bytes(cubin: bytes) -> int:
    """Return the local memory per thread: spills and arrays that are not in registers."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    usage = re.search(r"STACK:(\d+).*LOCAL:(\d+)", text)
    assert usage, text
    return max(int(usage[1]), int(usage[2]))


@pytest.mark.parametrize(("part", "case"), cases())
def test_compiles_within_the_parts_resources(part: str, case: Any) -> None:
    limits = PARTS[part]
    if part == "sm80" and "fp8e4nv" in str(case.signature.values()):
        pytest.skip("Triton reads e4m3fn from sm89 on; the kernel declines there")
    built = build(limits, case)
    assert built.metadata.shared <= limits.shared
    if limits.backend == "cuda":
        assert local_bytes(built.asm["cubin"]) <= MAX_LOCAL
    else:
        spills = re.search(r"\.vgpr_spill_count:\s*(\d+)", built.asm["amdgcn"])
        assert spills and int(spills[1]) <= MAX_SPILLS
    if "BLOCK_M" in case.constants:
        assert re.search(limits.matrix, built.asm["ptx" if limits.backend == "cuda" else "amdgcn"])
