"""The vLLM plugin fits what each recorded release of vLLM has (tools/record_vllm_interface.py). Needs no vLLM."""

from __future__ import annotations

import ast
import inspect
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
PLUGIN = ROOT / "src" / "tskernel" / "integrations"
RECORDED: dict[str, dict[str, Any]] = json.loads((ROOT / "tests" / "data" / "vllm_interface.json").read_text())
FILES = {file.name: ast.parse(file.read_text()) for file in sorted(PLUGIN.glob("_vllm_*.py"))}
RELEASES = pytest.mark.parametrize("release", RECORDED)
# A function of the plugin that becomes a method of a class: which one's it must be.
FORWARDS = {
    "_rmsnorm": ("RMSNorm", "forward_native"),
    "_gemma_rmsnorm": ("GemmaRMSNorm", "forward_native"),
    "_gelu_and_mul": ("GeluAndMul", "forward_native"),
    "_swiglu_oai": ("SwigluOAIAndMul", "forward_native"),
    "_rotary_embedding": ("RotaryEmbedding", "forward_native"),
    "_without_compilation": ("SiluAndMul", "__init__"),
}


def classes(release: str) -> dict[str, dict[str, Any]]:
    return {name: entry for module in RECORDED[release].values() for name, entry in module["classes"].items()}


def lineage(release: str, name: str) -> Iterator[dict[str, Any]]:
    """Yield the recorded class and those that it inherits from."""
    entry = classes(release).get(name)
    if entry is not None:
        yield entry
        for base in entry["bases"]:
            yield from lineage(release, base)


def signature(parameters: str) -> inspect.Signature:
    scope: dict[str, Any] = {}
    exec(f"def f({parameters}): pass", scope)
    return inspect.signature(scope["f"])


def of_source(function: ast.FunctionDef) -> inspect.Signature:
    a = ast.parse(ast.unparse(function.args).join(("def f(", "): pass"))).body[0].args
    for p in (*a.posonlyargs, *a.args, *a.kwonlyargs, *filter(None, (a.vararg, a.kwarg))):
        p.annotation = None
    a.defaults = [ast.Constant(None) for _ in a.defaults]
    a.kw_defaults = [None if d is None else ast.Constant(None) for d in a.kw_defaults]
    return signature(ast.unparse(a))


def misfit(ours: inspect.Signature, theirs: inspect.Signature) -> str | None:
    """Return why a call that ``theirs`` takes does not fit ``ours``, or None."""
    mine, keywords = dict(ours.parameters), {p.kind: p.name for p in ours.parameters.values()}
    catches = inspect.Parameter.VAR_KEYWORD in keywords
    order = [n for n, p in mine.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    for place, (name, p) in enumerate(theirs.parameters.items()):
        if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD):
            continue
        if name not in mine:
            if not catches:
                return f"no parameter {name}"
        elif mine[name].kind is p.KEYWORD_ONLY:
            continue  # a name of one release only, which vLLM gives by name
        elif p.kind is p.POSITIONAL_OR_KEYWORD and order.index(name) != place:
            return f"{name} in place {order.index(name)}, expected {place}"
        elif p.default is not p.empty and mine[name].default is p.empty:
            return f"{name} without a default"
    extra = [n for n, p in mine.items() if n not in theirs.parameters and p.default is p.empty]
    catching = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    extra = [n for n in extra if mine[n].kind not in catching]
    return f"{extra[0]} is one more and has no default" if extra else None


def own_classes() -> Iterator[tuple[ast.ClassDef, str]]:
    for tree in FILES.values():
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                yield from ((node, base.id) for base in node.bases if isinstance(base, ast.Name))


@RELEASES
def test_what_is_imported_is_there(release: str) -> None:
    missing = []
    for file, tree in FILES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vllm"):
                has = RECORDED[release].get(node.module, {"names": ()})["names"]
                lazy = {"current_platform"} if node.module == "vllm.platforms" else set()
                missing += [f"{file}: {node.module}.{a.name}" for a in node.names if a.name not in {*has, *lazy}]
    assert not missing


@RELEASES
def test_methods_take_what_vllm_gives_them(release: str) -> None:
    checked, wrong = 0, []
    for own, base in own_classes():
        theirs = list(lineage(release, base))
        for function in (n for n in own.body if isinstance(n, ast.FunctionDef)):
            found = next((e["methods"][function.name] for e in theirs if function.name in e["methods"]), None)
            if found is not None:
                checked += 1
                why = misfit(of_source(function), signature(found))
                wrong += [f"{own.name}.{function.name}: {why}"] if why else []
    assert not wrong and checked > 40


@RELEASES
def test_what_vllm_leaves_open_is_filled(release: str) -> None:
    for own, base in own_classes():
        theirs = list(lineage(release, base))
        mine = {n.name for n in own.body if isinstance(n, ast.FunctionDef)}
        filled = {m for entry in theirs for m in entry["methods"] if m not in entry["abstract"]}
        opened = {m for entry in theirs for m in entry["abstract"]}
        assert opened <= mine | filled, own.name


@RELEASES
def test_replaced_forwards_take_what_vllm_gives_them(release: str) -> None:
    functions = {n.name: n for n in FILES["_vllm_layers.py"].body if isinstance(n, ast.FunctionDef)}
    for name, (owner, method) in FORWARDS.items():
        found = next(entry["methods"][method] for entry in lineage(release, owner) if method in entry["methods"])
        assert misfit(of_source(functions[name]), signature(found)) is None, name


@RELEASES
def test_what_is_read_of_a_batch_is_there(release: str) -> None:
    fields = set(classes(release)["CommonAttentionMetadata"]["fields"])
    read = {
        node.attr
        for node in ast.walk(FILES["_vllm_attention.py"])
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "batch"
    }
    assert len(read) > 7 and read <= fields


@RELEASES
def test_what_is_read_of_latent_batches_is_there(release: str) -> None:
    read: dict[str, set[str]] = {}
    for node in ast.walk(FILES["_vllm_mla.py"]):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            read.setdefault(node.value.id, set()).add(node.attr)
    known = classes(release)
    assert read["attn_metadata"] | read["metadata"] <= set(known["MLACommonMetadata"]["fields"])
    assert read["decode"] <= set(known["MLACommonDecodeMetadata"]["fields"])
    assert read["batch"] <= set(known["MLACommonPrefillMetadata"]["fields"])


@RELEASES
def test_functions_are_called_as_they_are_declared(release: str) -> None:
    functions = {n: p for module in RECORDED[release].values() for n, p in module["functions"].items()}
    checked = 0
    for tree in FILES.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in functions:
                keywords = {k.arg: None for k in node.keywords if k.arg}
                signature(functions[node.func.id]).bind_partial(*node.args, **keywords)
                checked += 1
    assert checked > 12


def test_a_misfit_is_seen() -> None:
    theirs = signature("self, a, b=None")
    assert misfit(signature("self, a, b=None, c=None"), theirs) is None
    assert misfit(signature("self, a, **more"), theirs) is None
    assert misfit(signature("self, b=None, a=None"), theirs) == "a in place 2, expected 1"
    assert misfit(signature("self, a"), theirs) == "no parameter b"
    assert misfit(signature("self, a, b"), theirs) == "b without a default"
    assert misfit(signature("self, a, c, b=None"), theirs) == "b in place 3, expected 2"
    assert misfit(signature("self, a, b=None, *, c"), theirs) == "c is one more and has no default"
