"""Runs Python in a process of its own, which sees this checkout."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

SOURCE = Path(__file__).resolve().parent.parent / "src"


def environment(*, path: Path | None = None, **more: str) -> dict[str, str]:
    """Return the variables of a process that sees this checkout, and one more folder to import from."""
    folders = [str(SOURCE), *([str(path)] if path else [])]
    return {**os.environ, "OMP_NUM_THREADS": "1", **more, "PYTHONPATH": os.pathsep.join(folders)}


def run_python(code: str, *arguments: str, path: Path | None = None, **variables: str) -> str:
    """Run code and return what it prints; raise AssertionError with its errors when it fails.

    ``path`` is one more folder to import from; ``variables`` are added to its environment.
    """
    command = [sys.executable, "-c", textwrap.dedent(code), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment(path=path, **variables))
    if done.returncode:
        raise AssertionError(done.stderr or f"exit status {done.returncode}")
    return done.stdout
