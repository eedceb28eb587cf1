"""The command line says what is here and why a kernel serves, and needs its extra only when it is used."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest

pytest.importorskip("typer")
pytest.importorskip("rich")

import typer.testing

import tskernel
from tskernel import cli
from tskernel.dispatch.platform import ANY, CapabilityRequirement
from tskernel.dispatch.registry import KernelRegistry, register_kernel
from tskernel.library import ops

PLATFORMS = ("sm80", "sm90", "sm100", "gfx942", "gfx950", "gfx1250", "ascend910b", "cpu")


@pytest.fixture
def run():
    runner = typer.testing.CliRunner()

    def invoke(*arguments: str, code: int = 0) -> str:
        result = runner.invoke(cli.app, list(arguments))
        assert result.exit_code == code, result.output
        return result.output

    return invoke


@pytest.fixture
def scratch_kernel():
    """Register kernels of rmsnorm for a test, with the body's signature."""
    names = []

    def add(name: str, **options: object) -> None:
        register_kernel("norm", "rmsnorm", name=name, **options)(ops["rmsnorm"].body)
        names.append(name)

    yield add
    for name in names:
        KernelRegistry.get().unregister(name)


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(Path(tskernel.__file__).parent.parent)}
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False, env=environment)


def test_info_shows_devices_backends_packages_and_counts(run, scratch_kernel):
    needs = CapabilityRequirement(vendor="nvidia", at_least="sm90", packages=("no_such_vendor_package",))
    scratch_kernel("scratch/rmsnorm/vendor", capability=needs, backend="cuda")
    text = run("info")
    assert f"tskernel {tskernel.__version__}" in text
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert any(line.startswith("cpu cpu") for line in lines)
    assert "no_such_vendor_package package no_such_vendor_package is not installed 1" in lines
    assert any(line.startswith("cuda ") and "needs nvidia, cpu is cpu" in line for line in lines)
    for op in ops.values():
        assert any(line.startswith(f"{op.family}.{op.name} ") for line in lines)


def test_kernels_of_one_op_and_of_all(run):
    one = run("kernels", "norm.rmsnorm")
    assert "reference/rmsnorm: norm.rmsnorm, solution reference" in one and "mha_prefill" not in one
    every = run("kernels")
    for spec in KernelRegistry.get().list_kernels():
        assert spec.name in every


@pytest.mark.parametrize("op", sorted(ops))
def test_explain_gives_a_winner_or_every_reason_for_each_platform(run, op):
    arguments = [part for name in PLATFORMS for part in ("--platform", name)]
    results = json.loads(run("explain", f"{ops[op].family}.{op}", *arguments, "--json"))
    assert [r["platform"] for r in results] == list(PLATFORMS)
    kernels = {spec.name for spec in KernelRegistry.get().list_kernels(mode=op)}
    for result in results:
        assert {c["name"] for c in result["candidates"]} == kernels
        assert result["winner"] in kernels
        assert [c["name"] for c in result["candidates"] if c["status"] == "selected"] == [result["winner"]]
        assert all(c["reason"] for c in result["candidates"] if c["status"] == "rejected")


def test_explain_text_with_formats_and_traits(run):
    text = run(
        "explain", "attention.mha_prefill", "--platform", "gfx950", "--dtype", "bfloat16", "--trait", "head_dim=80"
    )
    assert text.startswith("attention.mha_prefill on gfx950: ")
    assert "q=bfloat16" in text and "head_dim=80" in text and "selected" in text


def test_explain_takes_traits_dtypes_and_plain_names(run, scratch_kernel):
    scratch_kernel("scratch/rmsnorm/narrow", priority=19, traits={"hidden": {64}, "contiguous": {True}})
    assert "rmsnorm on cpu: scratch/rmsnorm/narrow" in run(
        "explain", "rmsnorm", "--platform", "cpu", "--trait", "hidden=64"
    )
    text = run("explain", "rmsnorm", "--platform", "cpu", "--trait", "hidden=64", "--trait", "contiguous=false")
    assert "contiguous=False is not in {True}" in text
    assert "formats: x=float16" in run("explain", "rmsnorm", "--platform", "cpu", "--role", "x=float16")


def test_explain_override_and_solution(run, scratch_kernel):
    scratch_kernel("scratch/rmsnorm/gpu", capability=CapabilityRequirement(vendor="nvidia"), solution="gpu")
    text = run("explain", "rmsnorm", "--platform", "cpu", "--override", "scratch/rmsnorm/gpu", code=1)
    assert "no kernel fits" in text and "needs nvidia, cpu is cpu" in text
    text = run("explain", "rmsnorm", "--platform", "sm90", "--override", "gpu")
    assert "rmsnorm on sm90: scratch/rmsnorm/gpu" in text and "override: gpu by override=" in text
    assert "asked for nothing_like_it" in run("explain", "rmsnorm", "--solution", "nothing_like_it", code=1)
    scratch_kernel("scratch/rmsnorm/picky", capability=ANY, rejects=lambda x: None, solution="picky")
    text = run("explain", "rmsnorm", "--override", "picky")
    assert "rmsnorm on cpu: scratch/rmsnorm/picky" in text and "unless it rejects the call by x" in text


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["rmsnorn"], "near: "),
        (["attention.rmsnorm"], "no op 'attention.rmsnorm'"),
        (["zzz"], "python -m tskernel kernels lists them"),
        (["rmsnorm", "--platform", "toaster"], "expected cpu, sm<N>"),
        (["rmsnorm", "--dtype", "half_float"], "no dtype 'half_float'"),
        (["rmsnorm", "--dtype", "nn"], "no dtype 'nn'"),
        (["rmsnorm", "--role", "z=float16"], "role 'z': expected one of x"),
        (["mha_prefill", "--role", "q=float16"], "no dtype for role kv"),
        (["rmsnorm", "--trait", "depth=3"], "trait 'depth': expected one of hidden, contiguous"),
        (["rmsnorm", "--trait", "hidden"], "expected NAME=VALUE"),
        (["rmsnorm", "--trait", "contiguous=1"], "expected true or false, got 1"),
        (["rmsnorm", "--trait", "hidden=true"], "expected a value like 4096, got true"),
        (["rmsnorm", "--override", "turbo"], "no kernel or solution 'turbo'"),
    ],
)
def test_explain_names_what_is_wrong(run, monkeypatch, arguments, sentence):
    monkeypatch.setenv("COLUMNS", "400")
    monkeypatch.setenv("TERMINAL_WIDTH", "400")
    text = " ".join(run("explain", *arguments, code=2).replace("│", " ").split())
    assert sentence in text


@pytest.mark.parametrize(
    ("text", "value"),
    [("128", 128), ("1", 1), ("true", True), ("False", False), ("none", None), ("0.5", 0.5), ("mxfp4", "mxfp4")],
)
def test_trait_values_keep_their_type(text, value):
    got = cli._value(text)
    assert got == value and type(got) is type(value)


def test_demo_runs_the_demo_package(run, monkeypatch):
    module = types.ModuleType("tskernel.demo")
    monkeypatch.setitem(sys.modules, "tskernel.demo", module)
    monkeypatch.setattr(tskernel, "demo", module, raising=False)
    module.main = lambda: 3
    run("demo", code=3)
    module.main = lambda: None
    run("demo", code=0)


def test_importing_tskernel_loads_neither_typer_nor_rich():
    done = python(
        "-c", "import sys, tskernel; print(sorted({'typer', 'rich', 'click', 'tskernel.cli'} & sys.modules.keys()))"
    )
    assert done.stdout == "[]\n", done.stderr


def test_a_missing_extra_is_one_sentence():
    code = "import sys; sys.modules['typer'] = None; import tskernel.__main__ as m; sys.exit(m.main())"
    done = python("-c", code)
    assert done.returncode == 2
    assert done.stderr == "python -m tskernel needs typer; install it with: pip install 'tskernel[cli]'\n"


def test_python_dash_m():
    done = python("-m", "tskernel", "explain", "norm.rmsnorm", "--platform", "ascend910b")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("norm.rmsnorm on ascend910b: ")
    assert python("-m", "tskernel").returncode == 2
