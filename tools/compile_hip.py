"""Compile the kernels of csrc/ for AMD devices without ROCm, with Debian's clang-22 and the HIP headers of triton.

For the device the headers in csrc/kernels, which are free of torch, are included and instantiated. For the host each
op's file is compiled with stand-ins for the three headers of ROCm that torch's own include. Linking and running are
not shown. ``python tools/compile_hip.py OUT`` prints registers, spills and scratch per header and part.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

CSRC = Path(__file__).resolve().parent.parent / "csrc"
PARTS = {"gfx90a": 9010, "gfx942": 9402, "gfx950": 9500}
# What clang's device library would declare; values as for a wave of 64 and IEEE arithmetic.
OCLC = {
    "ABI_version": "i32 600",
    "ISA_version": "i32 {isa}",
    "wavefrontsize64": "i8 1",
    "finite_only_opt": "i8 0",
    "unsafe_math_opt": "i8 0",
    "daz_opt": "i8 0",
    "correctly_rounded_sqrt32": "i8 1",
}


def toolchain() -> tuple[str, Path] | None:
    """Return clang and the folder of triton's AMD backend, or None where one is missing."""
    clang = shutil.which("clang++-22")
    triton = find_spec("triton")
    if clang is None or shutil.which("llvm-as-22") is None or triton is None or triton.origin is None:
        return None
    amd = Path(triton.origin).parent / "backends" / "amd"
    return (clang, amd) if (amd / "include" / "hip" / "hip_runtime.h").exists() else None


def constants(part: str, out: Path) -> Path:
    """Write the constants that ROCm's device library would bring, as bitcode."""
    lines = ['target triple = "amdgcn-amd-amdhsa"']
    for name, value in OCLC.items():
        kind = "linkonce_odr hidden local_unnamed_addr addrspace(4) constant"
        lines.append(f"@__oclc_{name} = {kind} {value.format(isa=PARTS[part])}")
    text = out / f"oclc.{part}.ll"
    text.write_text("\n".join(lines) + "\n")
    subprocess.run(["llvm-as-22", str(text), "-o", str(text.with_suffix(".bc"))], check=True)
    return text.with_suffix(".bc")


# Kernels of each header, with {T} and {W} for the element and weight types and {N} for the values in 16 bytes.
KERNELS = {
    "norm": [
        "norm_kernel<{T}, {W}, {N}, 4, false, NORM_RMS>(const NormArgs)",
        "norm_kernel<{T}, {W}, {N}, 1, false, NORM_ADD>(const NormArgs)",
        "norm_kernel<{T}, {W}, {N}, 4, false, NORM_ADD>(const NormArgs)",
        "norm_kernel<{T}, {W}, {N}, 2, false, NORM_LAYER>(const NormArgs)",
        "norm_kernel<{T}, {W}, 1, 1, true, NORM_RMS>(const NormArgs)",
        "norm_long_kernel<{T}, {W}, NORM_LAYER>(const NormArgs)",
    ],
    "activation": [
        f"gated_kernel<{{T}}, {n}, {kind}>(const Source, const Result, unsigned)"
        for n in ("{N}", "1")
        for kind in ("SILU", "GELU", "GELU_TANH", "SWIGLU_OAI")
    ],
    "quantize": [
        "scaled_kernel<{T}, {N}, ANY_ACTIVATION>(const Source, const Target, const Scales, unsigned)",
        "amax_kernel<{T}, {N}>(const Source, float*, unsigned, unsigned)",
        "token_kernel<{T}, {N}, 4, PLAIN>(const Source, const Target)",
        "token_kernel<{T}, {N}, 4, ANY_ACTIVATION>(const Source, const Target)",
        "group_kernel<{T}, {N}, PLAIN>(const Source, const Target, int, unsigned)",
        "any_group_kernel<{T}, PLAIN>(const Source, const Target, int64_t, int64_t, int64_t, int64_t)",
    ],
    "rope": [
        "rope_kernel<{T}, {N}, true>(const RopeArgs, unsigned)",
        "rope_kernel<{T}, {N}, false>(const RopeArgs, unsigned)",
        "store_kernel<{T}, {N}>(const StoreArgs, unsigned)",
    ],
    "argmax": ["argmax_kernel<{T}, {N}>(const Vocab, Wide*, int*)"],
    "min_p": [
        "min_p_mass_kernel<{T}, {N}>(const Vocab, const float*, const Work)",
        "min_p_kernel<{T}, {N}>(const Vocab, const float*, const Work, {T}*)",
    ],
    "penalties": ["penalties_kernel<{T}, {N}>(const Penalties)", "penalties_kernel<{T}, 1>(const Penalties)"],
    "filter": [
        *(f"maxima_kernel<{{T}}, {{N}}, {kind}>(const Vocab, const Work, int)" for kind in ("LOGITS", "PROBS")),
        *(
            f"histogram_kernel<{{T}}, {{N}}, {kind}>(const Vocab, const Rules, const Work)"
            for kind in ("LOGITS", "PROBS")
        ),
        *(
            f"list_kernel<{{T}}, {{N}}, {kind}>(const Vocab, const Rules, const Work, int*)"
            for kind in ("LOGITS", "PROBS")
        ),
        "renorm_kernel<{T}, {N}>(const Vocab, const Work, {T}*)",
        "race_kernel<{T}, {N}>(const Vocab, const Rules, const Work, int*)",
    ],
    "route": ["route_kernel<{T}, 4>(const RouteArgs)", "route_kernel<{T}, 16>(const RouteArgs)"],
    "dispatch": [
        "count_kernel<{N} / 2>(const DispatchArgs)",
        "dispatch_kernel<{N} / 2>(const DispatchArgs)",
    ],
    "verify": ["verify_kernel<{N} * 4>(const Ids, const Ids, int*, int*, int64_t, int)"],
}


def unit(header: str) -> str:
    """Return a source file that instantiates a header's kernels for bf16 and fp32."""
    lines = [f'#include "kernels/{header}.cuh"', "namespace tsk {"]
    for t, w, n in (("bf16", "float", "8"), ("float", "float", "4")):
        for kernel in KERNELS[header]:
            lines.append(f"template __global__ void {kernel.format(T=t, W=w, N=n)};")
    return "\n".join([*lines, "}", ""])


def compile_header(header: str, part: str, out: Path) -> str:
    """Compile one header's kernels for one part and return the assembly.

    Raises: RuntimeError with the compiler's words.
    """
    tools = toolchain()
    if tools is None:
        raise RuntimeError("clang++-22, llvm-as-22 or triton's AMD headers are missing")
    clang, amd = tools
    source = out / f"{header}.hip"
    source.write_text(unit(header))
    target = out / f"{header}.{part}.s"
    command = [clang, "-x", "hip", "--offload-device-only", "-S", "-nogpulib", "-nogpuinc", "-O3", "-std=c++17"]
    command += [f"--offload-arch={part}", "-include", "__clang_hip_runtime_wrapper.h", "-D__HIP_PLATFORM_AMD__"]
    command += ["-I", str(amd / "include"), "-I", str(CSRC), "-Wno-everything"]
    for file in (amd / "lib" / "ocml.bc", amd / "lib" / "ockl.bc", constants(part, out)):
        command += ["-Xclang", "-mlink-builtin-bitcode", "-Xclang", str(file)]
    done = subprocess.run([*command, str(source), "-o", str(target)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr}")
    return target.read_text()


# What torch's headers want of ROCm's; no code of csrc/ uses any of it.
STAND_INS = {
    "hip/hip_fp16.h": "struct __half { unsigned short bits; };\ninline float __half2float(__half) { return 0; }\n"
    "inline __half __float2half(float) { return {}; }\n",
    "hip/hip_bf16.h": "struct __hip_bfloat16 { unsigned short bits; };\n",
    "thrust/complex.h": "namespace thrust {\ntemplate <class T> struct complex { T a, b; T real() const { return a; } "
    "T imag() const { return b; } };\ntemplate <class T> complex<T> polar(T r, T t) { return {r, t}; }\n}\n",
}


def compile_host(name: str, out: Path) -> None:
    """Compile the host side of one op's file, csrc/NAME.cu.

    Raises: RuntimeError with the compiler's words.
    """
    tools, torch = toolchain(), find_spec("torch")
    if tools is None or torch is None or torch.origin is None:
        raise RuntimeError("clang++-22, triton's AMD headers or torch are missing")
    for header, text in STAND_INS.items():
        path = out / "stand-ins" / header
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#pragma once\n{text}")
    clang, amd = tools
    command = [clang, "-x", "hip", "--offload-host-only", "-fsyntax-only", "-nogpulib", "-nogpuinc", "-std=c++17"]
    command += ["--offload-arch=gfx942", "-include", "__clang_hip_runtime_wrapper.h", "-D__HIP_PLATFORM_AMD__"]
    command += ["-I", str(out / "stand-ins"), "-I", str(amd / "include"), "-Wno-everything"]
    command += ["-isystem", str(Path(torch.origin).parent / "include"), "-DTORCH_TARGET_VERSION=0x020B000000000000"]
    done = subprocess.run([*command, str(CSRC / f"{name}.cu")], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr}")


def resources(assembly: str) -> dict[str, int]:
    """Return the largest of every resource over a file's kernels."""
    fields = ("vgpr_count", "vgpr_spill_count", "sgpr_spill_count", "private_segment_fixed_size")
    return {f: max((int(v) for v in re.findall(rf"\.{f}:\s+(\d+)", assembly)), default=-1) for f in fields}


def main() -> None:
    """Compile every header for every part, and every file's host side."""
    out = Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    for source in sorted(CSRC.glob("*.cu")):
        compile_host(source.stem, out)
        print(source.name, "host side compiles", flush=True)
    for header in KERNELS:
        for part in PARTS:
            print(header, part, resources(compile_header(header, part, out)), flush=True)


if __name__ == "__main__":
    main()
