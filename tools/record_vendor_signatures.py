"""Record the interfaces of the vendor libraries that the wrappers call, as tests/data/vendor_signatures.json.

Usage: ``python tools/record_vendor_signatures.py WHEEL-OR-FILE...``. Nothing is imported: Python signatures are read
from source, op schemas from the strings of shared objects. Libraries that are not given keep their entry. What has no
wheel is given as ``NAME-VERSION-anything.py``, a copy of its source file, such as ``flash_mla-9241ae3-interface.py``,
or as ``.hpp`` where pybind11 makes the interface, such as ``deep_gemm-54e2261-gemm.hpp``.
"""

from __future__ import annotations

import ast
import json
import re
import sys
import zipfile
from pathlib import Path
from typing import Any

TARGET = Path(__file__).resolve().parent.parent / "tests" / "data" / "vendor_signatures.json"

# Distribution -> what is called in it: a function or method of a source file, or the op schema in a shared object.
FUNCTIONS: dict[str, dict[str, tuple[str, ...]]] = {
    "flash_attn_4": {"flash_attn/cute/interface.py": ("_flash_attn_fwd",)},
    "flashinfer_python": {
        "flashinfer/cudnn/prefill.py": ("cudnn_batch_prefill_with_kv_cache",),
        "flashinfer/decode.py": tuple(
            f"BatchDecodeWithPagedKVCacheWrapper.{n}" for n in ("__init__", "_plan_impl", "run")
        ),
        "flashinfer/fused_moe/core.py": ("cutlass_fused_moe",),
        "flashinfer/gemm/gemm_base.py": ("fp8_blockscale_gemm_sm90",),
    },
}
FILES = {
    "deep_gemm": ("fp8_gemm_nt", "m_grouped_fp8_gemm_nt_contiguous"),
    "flash_mla": ("get_mla_metadata", "flash_mla_with_kvcache"),
}
CPP_VALUES = {"std::nullopt": "None", "false": "False", "true": "True"}
SCHEMAS: dict[str, dict[str, str]] = {"tokenspeed_fa3": {"flash_attn_3/_C.abi3.so": "fwd"}}
CONSTANTS: dict[str, dict[str, str]] = {"tokenspeed_fa3": {"flash_attn_config.py": "CONFIG"}}


def parameters(function: ast.FunctionDef) -> str:
    """Return the parameters with their defaults, without annotations."""
    a = function.args
    for parameter in (*a.posonlyargs, *a.args, *a.kwonlyargs, *filter(None, (a.vararg, a.kwarg))):
        parameter.annotation = None
    return ast.unparse(a)


def find(tree: ast.Module, name: str) -> ast.FunctionDef:
    """Return the last definition of ``function`` or ``Class.method``. Raises: LookupError without one."""
    scope: list[ast.stmt] = tree.body
    *owners, last = name.split(".")
    for owner in owners:
        scope = next(n.body for n in scope if isinstance(n, ast.ClassDef) and n.name == owner)
    named = [n for n in scope if isinstance(n, ast.FunctionDef) and n.name == last]
    if not named:
        raise LookupError(f"no {name}")
    return named[-1]


def bound(source: str, name: str) -> str:
    """Return the parameters of a function that pybind11 binds, also under another name. Raises: LookupError."""
    alias = re.search(rf'm\.attr\("{name}"\) = m\.attr\("(\w+)"\)', source)
    found = re.search(rf'm\.def\("{alias[1] if alias else name}",(.*?)\);', source, re.DOTALL)
    if found is None:
        raise LookupError(f"no {name}")
    parts = re.findall(r'py::arg\("(\w+)"\)(?:\s*=\s*([^,]+?))?(?=\s*(?:,|$))', found[1])
    return ", ".join(n if not value else f"{n}={CPP_VALUES.get(value, value)}" for n, value in parts)


def schema(binary: bytes, name: str) -> str:
    """Return the op schema that starts with ``name(``. Raises: LookupError without one."""
    match = re.search(rb"(?<![\w])" + name.encode() + rb"\(Tensor[^\x00]{40,}", binary)
    if match is None:
        raise LookupError(f"no schema of {name}")
    return match[0].decode()


def record(wheel: Path) -> tuple[str, dict[str, Any]]:
    """Return the distribution of a wheel and its entry."""
    distribution, version = wheel.name.split("-")[:2]
    entry: dict[str, Any] = {"version": version}
    if wheel.suffix == ".py":
        tree = ast.parse(wheel.read_text())
        return f"{distribution} {version}", entry | {n: parameters(find(tree, n)) for n in FILES[distribution]}
    if wheel.suffix == ".hpp":
        source = wheel.read_text()
        return f"{distribution} {version}", entry | {n: bound(source, n) for n in FILES[distribution]}
    with zipfile.ZipFile(wheel) as archive:
        for file, names in FUNCTIONS.get(distribution, {}).items():
            tree = ast.parse(archive.read(file))
            entry |= {f"{file}:{name}": parameters(find(tree, name)) for name in names}
        for file, name in SCHEMAS.get(distribution, {}).items():
            entry[f"{file}:{name}"] = schema(archive.read(file), name)
        for file, name in CONSTANTS.get(distribution, {}).items():
            assigned = (n for n in ast.parse(archive.read(file)).body if isinstance(n, ast.Assign))
            value = next(n.value for n in assigned if isinstance(n.targets[0], ast.Name) and n.targets[0].id == name)
            entry[f"{file}:{name}"] = ast.literal_eval(value)
    return distribution, entry


def main(wheels: list[str]) -> None:
    """Write the entries of the wheels that hold something to record."""
    known = json.loads(TARGET.read_text()) if TARGET.exists() else {}
    for wheel in map(Path, wheels):
        distribution, entry = record(wheel)
        if len(entry) > 1:
            known[distribution] = entry
            print(f"{distribution} {entry['version']}: {len(entry) - 1} recorded")
    TARGET.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
