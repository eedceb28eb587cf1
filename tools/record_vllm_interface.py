"""Record what the vLLM plugin builds on in releases of vLLM, as tests/data/vllm_interface.json.

Usage: ``python tools/record_vllm_interface.py VERSION=WHEEL-OR-FOLDER...``, where a folder holds the package ``vllm``.
Nothing is imported: names, fields and signatures are read from source. Releases that are not given keep their entry.
"""

from __future__ import annotations

import ast
import json
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "tests" / "data" / "vllm_interface.json"
PLUGIN = ROOT / "src" / "tskernel" / "integrations"
# What the plugin's classes and calls rest on, beside what it imports.
MORE = {
    "vllm.model_executor.layers.fused_moe.fused_moe_method_base": {"FusedMoEMethodBase"},
    "vllm.model_executor.layers.quantization.base_config": {"QuantizationConfig", "QuantizeMethodBase"},
    "vllm.model_executor.layers.quantization.mxfp4": {"Mxfp4Config"},
    "vllm.model_executor.layers.quantization.utils.quant_utils": {"is_layer_skipped"},
    "vllm.model_executor.layers.rotary_embedding.base": {"RotaryEmbeddingBase"},
    "vllm.model_executor.layers.layernorm": {"RMSNorm", "GemmaRMSNorm"},
    "vllm.model_executor.layers.activation": {"SiluAndMul", "GeluAndMul", "SwigluOAIAndMul"},
    "vllm.model_executor.layers.attention.mla_attention": {
        "MLACommonBaseImpl", "MLACommonMetadata", "MLACommonDecodeMetadata", "MLACommonPrefillMetadata",
    },
    "vllm.v1.attention.backend": {"AttentionImplBase", "MLAAttentionImpl", "CommonAttentionMetadata"},
}  # fmt: skip


def wanted() -> dict[str, set[str]]:
    """Return, for each module of vLLM that the plugin imports from, what it takes; a module may be taken whole."""
    found = {module: set(more) for module, more in MORE.items()}
    for file in sorted(PLUGIN.glob("_vllm_*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vllm"):
                found.setdefault(node.module or "", set()).update(a.name for a in node.names)
    return found


def parameters(function: ast.FunctionDef) -> str:
    """Return the parameters without annotations; what defaults are does not matter, that there are some does."""
    a = function.args
    for parameter in (*a.posonlyargs, *a.args, *a.kwonlyargs, *filter(None, (a.vararg, a.kwarg))):
        parameter.annotation = None
    a.defaults = [ast.Constant(None) for _ in a.defaults]
    a.kw_defaults = [None if d is None else ast.Constant(None) for d in a.kw_defaults]
    return ast.unparse(a)


def class_entry(node: ast.ClassDef) -> dict[str, Any]:
    """Return bases, annotated or assigned fields, methods, and which of these are abstract."""
    functions = [n for n in node.body if isinstance(n, ast.FunctionDef)]
    fields = [n.target.id for n in node.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)]
    fields += [t.id for n in node.body if isinstance(n, ast.Assign) for t in n.targets if isinstance(t, ast.Name)]
    abstract = [f.name for f in functions if any("abstractmethod" in ast.unparse(d) for d in f.decorator_list)]
    return {
        "bases": [ast.unparse(b).split("[")[0].split(".")[-1] for b in node.bases],
        "fields": sorted(fields),
        "methods": {f.name: parameters(f) for f in functions},
        "abstract": sorted(abstract),
    }


def names(body: list[ast.stmt]) -> Iterator[str]:
    """Yield what a module defines or imports, also under conditions."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from (a.asname or a.name for a in node.names)
        elif isinstance(node, ast.Assign):
            yield from (t.id for t in node.targets if isinstance(t, ast.Name))
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id
        elif isinstance(node, ast.If | ast.Try):
            yield from names([*node.body, *node.orelse, *(s for h in getattr(node, "handlers", ()) for s in h.body)])


def module_entry(source: str, take: set[str]) -> dict[str, Any]:
    """Return which of ``take`` a module has, and the signatures of those that are classes and functions."""
    tree = ast.parse(source)
    return {
        "names": sorted(set(names(tree.body)) & take),
        "classes": {n.name: class_entry(n) for n in tree.body if isinstance(n, ast.ClassDef) and n.name in take},
        "functions": {n.name: parameters(n) for n in tree.body if isinstance(n, ast.FunctionDef) and n.name in take},
    }


def reader(where: Path) -> Callable[[str], str | None]:
    """Return a function from a file's path in the package to its text, None without one."""
    if where.is_dir():
        return lambda file: (where / file).read_text() if (where / file).is_file() else None
    archive = zipfile.ZipFile(where)
    known = set(archive.namelist())
    return lambda file: archive.read(file).decode() if file in known else None


def main(given: list[str]) -> None:
    """Write the entries of the given releases."""
    recorded = json.loads(TARGET.read_text()) if TARGET.exists() else {}
    for version, where in (pair.split("=", 1) for pair in given):
        read, entry = reader(Path(where)), {}
        for module, take in sorted(wanted().items()):
            path = module.replace(".", "/")
            source = read(f"{path}.py") or read(f"{path}/__init__.py")
            if source is None:
                continue
            entry[module] = module_entry(source, take)
            submodules = {t for t in take if read(f"{path}/{t}.py") or read(f"{path}/{t}/__init__.py")}
            entry[module]["names"] = sorted(submodules | set(entry[module]["names"]))
        recorded[version] = entry
        print(f"vllm {version}: {len(entry)} modules")
    TARGET.write_text(json.dumps(recorded, sort_keys=True, separators=(",", ":")).replace('"vllm.', '\n"vllm.') + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
