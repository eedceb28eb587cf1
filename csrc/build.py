"""Builds csrc/: libtskernel_ops.so from every *.cu, and the extension modules beside it. Used by setup.py and tests.

TSKERNEL_BUILD chooses: "auto" (unset) builds for CUDA or HIP where both the compiler and a torch for that device are
here; "cuda" and "hip" insist; "gate" builds only the C++ front, which needs a host compiler; "none" is a pure wheel.
TSKERNEL_ARCHS lists architectures ("90", "80 90 100", "gfx942"); MAX_JOBS bounds the compilers at work.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from setuptools import Extension
from setuptools.command.build_ext import build_ext

CSRC = Path(__file__).resolve().parent
LIBRARY = "libtskernel_ops.so"
CUDA_ARCHS = ("80", "90", "100")  # no kernel uses what only 90a or 100a has; the last one is kept as PTX too
HIP_ARCHS = ("gfx942", "gfx950")
STABLE_ABI = 0x020B000000000000  # torch 2.11: nothing newer is used, so one library serves that and all later ones
CHOICES = ("auto", "cuda", "hip", "gate", "none")


@dataclass
class Toolchain:
    """How to compile one .cu file and how to link the objects."""

    name: str
    compile: list[str]
    link: list[str]
    archs: list[str] = field(default_factory=list)


def sources() -> list[Path]:
    """Return every op's file."""
    return sorted(CSRC.glob("*.cu"))


def torch_root() -> Path | None:
    """Return the folder of torch, found without importing it."""
    from importlib.util import find_spec

    spec = find_spec("torch")
    return Path(spec.origin).parent if spec is not None and spec.origin else None


def torch_device() -> str:
    """Return what the installed torch was built for: "cuda", "hip" or "cpu"."""
    root = torch_root()
    lib = root / "lib" if root is not None else Path()
    return "cuda" if (lib / "libtorch_cuda.so").exists() else "hip" if (lib / "libtorch_hip.so").exists() else "cpu"


def common_flags(root: Path) -> list[str]:
    """Return preprocessor flags of all compilers."""
    return [f"-DTORCH_TARGET_VERSION={STABLE_ABI:#x}", "-isystem", str(root / "include")]


def torch_libraries(root: Path, device: str) -> list[str]:
    """Return linker arguments: torch's libraries by name, without a path, as the process has loaded them already."""
    names = ["torch_cpu", "c10"] + ([f"torch_{device}"] if (root / f"lib/libtorch_{device}.so").exists() else [])
    return [f"-L{root / 'lib'}", *(f"-l{n}" for n in names)]


def cuda_toolchain(root: Path) -> Toolchain | None:
    """Return nvcc with the architectures it knows, or None."""
    nvcc = _find("nvcc", "CUDA_HOME", "CUDA_PATH")
    if nvcc is None:
        return None
    known = subprocess.run([nvcc, "--list-gpu-code"], capture_output=True, text=True, check=True).stdout.split()
    wanted = os.environ.get("TSKERNEL_ARCHS", "").replace(",", " ").split() or CUDA_ARCHS
    archs = [a for a in wanted if f"sm_{a}" in known]
    flags = [f"-gencode=arch=compute_{a},code=sm_{a}" for a in archs]
    flags += [f"-gencode=arch=compute_{a},code=compute_{a}" for a in archs[-1:]]
    flags += ["--threads", str(max(1, min(len(archs) + 1, _jobs() // len(sources()))))]  # architectures side by side
    compile_ = [nvcc, "-std=c++17", "-O3", "-Xcompiler", "-fPIC,-fvisibility=hidden", *flags, *common_flags(root)]
    link = [nvcc, "-shared", "-cudart", "static", "-Xlinker", "--no-as-needed", *torch_libraries(root, "cuda")]
    return Toolchain("CUDA", compile_, link, archs)


def hip_toolchain(root: Path) -> Toolchain | None:
    """Return hipcc, or None. Never run yet on a machine with ROCm."""
    hipcc = _find("hipcc", "ROCM_HOME", "ROCM_PATH")
    if hipcc is None:
        return None
    archs = os.environ.get("TSKERNEL_ARCHS", "").replace(",", " ").split() or list(HIP_ARCHS)
    flags = [f"--offload-arch={a}" for a in archs]
    compile_ = [hipcc, "-x", "hip", "-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", *flags, *common_flags(root)]
    link = [hipcc, "-shared", "-Wl,--no-as-needed", *torch_libraries(root, "hip")]
    return Toolchain("HIP", compile_, link, archs)


def emulated_toolchain(root: Path) -> Toolchain:
    """Return the host compiler: kernels run thread by thread on the CPU (common/emulate.h), for tests."""
    cxx = os.environ.get("CXX", "c++")
    flags = ["-std=c++17", "-O1", "-fPIC", "-mf16c", "-ffp-contract=off", "-DTSK_EMULATE", "-Wno-unknown-pragmas"]
    flags += ["-U_FORTIFY_SOURCE"]  # it would take a jump between fibers for a mistake
    return Toolchain(
        "CPU", [cxx, "-x", "c++", *flags, *common_flags(root)], [cxx, "-shared", *torch_libraries(root, "")]
    )


def _find(name: str, *homes: str) -> str | None:
    for home in homes:
        path = Path(os.environ.get(home, "/nowhere")) / "bin" / name
        if path.exists():
            return str(path)
    return shutil.which(name)


def _jobs() -> int:
    return int(os.environ.get("MAX_JOBS", "0")) or os.cpu_count() or 1


def build_library(tools: Toolchain, objects: Path, target: Path, files: list[Path] | None = None) -> None:
    """Compile the files side by side and link them; an object that is newer than all sources is kept.

    Raises: RuntimeError with the compiler's words.
    """
    objects.mkdir(parents=True, exist_ok=True)
    newest = max(p.stat().st_mtime for p in CSRC.rglob("*") if p.suffix in (".h", ".cuh", ".py"))

    def compile_one(source: Path) -> Path:
        made = objects / f"{source.stem}.o"
        if not made.exists() or made.stat().st_mtime < max(newest, source.stat().st_mtime):
            _run([*tools.compile, "-c", str(source), "-o", str(made)])
        return made

    with ThreadPoolExecutor(_jobs()) as pool:
        made = list(pool.map(compile_one, files or sources()))
    target.parent.mkdir(parents=True, exist_ok=True)
    command = [*tools.link[:2], "-o", str(target), *map(str, made), *tools.link[2:]]
    _run(command)


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stdout}{done.stderr}")


class NativeBuild(build_ext):
    """Builds the library before the module that is linked to it, and keeps the two together."""

    toolchain: Toolchain | None = None

    def build_extension(self, ext: Any) -> None:
        """Build one extension module, and what it needs."""
        if ext.name == "tskernel._native" and self.toolchain is not None:
            folder = Path(self.get_ext_fullpath(ext.name)).parent
            build_library(self.toolchain, Path(self.build_temp) / self.toolchain.name, folder / LIBRARY)
            ext.library_dirs.append(str(folder))
        super().build_extension(ext)

    def copy_extensions_to_source(self) -> None:
        """Copy the library beside the module of an editable install."""
        super().copy_extensions_to_source()
        built = Path(self.build_lib) / "tskernel" / LIBRARY
        if built.exists():
            build_py: Any = self.get_finalized_command("build_py")
            package = build_py.get_package_dir("tskernel")
            shutil.copy2(built, Path(package) / LIBRARY)

    def get_outputs(self) -> list[str]:
        """Name the library among what is installed."""
        built = Path(self.build_lib) / "tskernel" / LIBRARY
        return [*super().get_outputs(), *([str(built)] if self.toolchain is not None else [])]


def native_module() -> Extension:
    """Return the module that stands for the library."""
    return Extension(
        "tskernel._native",
        ["csrc/module.c"],
        libraries=["tskernel_ops"],
        runtime_library_dirs=["$ORIGIN"],
        extra_link_args=["-Wl,--no-as-needed"],
        py_limited_api=True,
    )


def gate_module(root: Path, *, optional: bool = True) -> Extension | None:
    """Return the C++ front, where its sources are; an ``optional`` one may fail to build: Python serves then."""
    files = sorted(str(p.relative_to(CSRC.parent)) for p in (CSRC / "gate").glob("*.cpp"))
    if not files:
        return None
    include = root / "include"
    return Extension(
        "tskernel._gate",
        files,
        include_dirs=[str(include), str(include / "torch/csrc/api/include")],
        library_dirs=[str(root / "lib")],
        libraries=["torch_python", "torch_cpu", "torch", "c10"],
        extra_compile_args=["-std=c++20", "-O2", "-fvisibility=hidden"],
        language="c++",
        optional=optional,
    )


def choose(choice: str) -> tuple[str, dict[str, Any]]:
    """Return a sentence that says what is built, and the arguments of setup() for it."""
    if choice not in CHOICES:
        raise ValueError(f"TSKERNEL_BUILD: expected {' or '.join(CHOICES)}, got {choice!r}")
    if choice == "none":
        return "a pure Python wheel (TSKERNEL_BUILD=none)", {}
    root = torch_root()
    if root is None:
        return _pure(choice, "torch is not importable here; try --no-build-isolation")
    device = torch_device()
    if choice == "gate":
        return "the C++ front", _options(None, [m for m in [gate_module(root, optional=False)] if m])
    if choice == "auto" and device == "cpu":
        return _pure(choice, "this torch has no GPU support")
    hip = choice == "hip" or (choice == "auto" and device == "hip")
    tools = hip_toolchain(root) if hip else cuda_toolchain(root)
    if tools is None:
        return _pure(choice, f"no {'hipcc' if hip else 'nvcc'} found")
    text = f"{len(sources())} native sources for {tools.name} ({', '.join(tools.archs)})"
    if device != ("hip" if hip else "cuda"):
        text += "; this torch cannot run them"
    modules = [native_module(), gate_module(root)]
    return text, _options(tools, [m for m in modules if m])


def _pure(choice: str, why: str) -> tuple[str, dict[str, Any]]:
    if choice in ("cuda", "hip", "gate"):
        raise RuntimeError(f"TSKERNEL_BUILD={choice}: {why}")
    return f"a pure Python wheel ({why})", {}


def _options(tools: Toolchain | None, modules: list[Extension]) -> dict[str, Any]:
    command = type("build_ext", (NativeBuild,), {"toolchain": tools})
    return {"ext_modules": modules, "cmdclass": {"build_ext": command}}


if __name__ == "__main__":
    kind, objects_, target_ = sys.argv[1:4]
    torch_folder = torch_root()
    if torch_folder is None:
        raise SystemExit("torch is not importable")
    made_by = {"cuda": cuda_toolchain, "hip": hip_toolchain, "emulate": emulated_toolchain}[kind](torch_folder)
    if made_by is None:
        raise SystemExit(f"no compiler for {kind}")
    build_library(made_by, Path(objects_), Path(target_))
