"""Run our kernels on the conformance samples under NVIDIA's compute-sanitizer, in several processes.

    python tools/sanitize.py [--tool memcheck] [--kernels WORD ...] [--calls 12] [--processes 8] [--seconds 200]

``--kernels`` keeps the kernels whose name holds one of the words; by default all written in Triton, Gluon or C++. Each
gets at most ``--calls`` of its op's samples, the smallest first, in every dtype. Prints a line per kernel and the
sanitizer's first complaints; exits with 1 if it had any, if a call failed, or if a kernel got no call in time.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
OWN = ("triton", "gluon", "native")


def own_kernels(words: list[str]) -> list[tuple[str, str]]:
    """Return (op, kernel) of what runs on this GPU and is named by a word."""
    from tskernel.library import ops
    from tskernel.testing import kernel_names

    names = [(op, name) for op in ops for name in kernel_names(op, "cuda")]
    return [pair for pair in names if any(word in pair[1] for word in words)]


def sizes(sample: Any) -> int:
    """Return how many elements the tensors of a sample have."""
    return sum(x.numel() for x in sample.arguments.values() if hasattr(x, "numel"))


def run_share(kernels: list[list[str]], calls: int, seconds: float, note: Path) -> None:
    """Run each kernel's calls and leave what came of them in ``note``."""
    sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]
    import torch
    from helpers import declines  # pyright: ignore[reportMissingImports]
    from test_conformance import actual  # pyright: ignore[reportMissingImports]

    from tskernel.library import ops
    from tskernel.testing import samples_of

    began, results = time.monotonic(), {name: {"calls": 0, "failed": []} for _, name in kernels}
    for op_name, name in kernels:
        op, result = ops[op_name], results[name]
        for _, sample in sorted(samples_of(op, "cuda"), key=lambda pair: sizes(pair[1])):
            for form in op.forms:
                if result["calls"] >= calls or time.monotonic() - began > seconds:
                    break
                if declines(name, op, sample, form) is None:
                    try:
                        actual(op, name, sample, form)
                        torch.cuda.synchronize()
                    except Exception as error:
                        result["failed"].append(f"{sample.name}: {type(error).__name__}: {error}"[:300])
                    result["calls"] += 1
        note.write_text(json.dumps(results))


def sanitized(share: list[tuple[str, str]], tool: str, calls: int, seconds: float) -> tuple[dict[str, Any], str]:
    """Run a share of the kernels in a process under the sanitizer; return its notes and its report."""
    with tempfile.TemporaryDirectory() as folder:
        note, report = Path(folder, "note"), Path(folder, "report")
        worker = [sys.executable, __file__, "--worker", json.dumps([share, calls, seconds, str(note)])]
        command = ["compute-sanitizer", "--tool", tool, "--log-file", str(report), "--target-processes", "all", *worker]
        # Each tensor has an allocation of its own, or reads past its end would meet the allocator's own memory.
        environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
        try:
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=seconds + 90)
            said = done.stderr[-600:] if done.returncode else ""
        except subprocess.TimeoutExpired:
            said = f"stopped after {seconds + 90:.0f} s"
        notes = (
            json.loads(note.read_text()) if note.exists() else {name: {"calls": 0, "failed": []} for _, name in share}
        )
        text = report.read_text() if report.exists() else "no report"
        return notes, text + said


def main() -> int:
    """Deal the kernels to processes and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tool", default="memcheck", choices=("memcheck", "racecheck", "synccheck", "initcheck"))
    parser.add_argument("--kernels", nargs="*", default=list(OWN))
    parser.add_argument("--calls", type=int, default=12)
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=200)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        share, calls, seconds, note = json.loads(options.worker)
        run_share(share, calls, seconds, Path(note))
        return 0
    if shutil.which("compute-sanitizer") is None:
        parser.error("compute-sanitizer is not on PATH; it comes with the CUDA toolkit")
    sys.path.insert(0, str(ROOT / "src"))
    kernels = own_kernels(options.kernels)
    shares = [s for s in (kernels[i :: options.processes] for i in range(options.processes)) if s]
    with ThreadPoolExecutor(len(shares)) as pool:
        found = list(pool.map(lambda s: sanitized(s, options.tool, options.calls, options.seconds), shares))
    return report(found)


def report(found: list[tuple[dict[str, Any], str]]) -> int:
    """Print what was found; return the exit status."""
    bad = 0
    for notes, text in found:
        for name, result in notes.items():
            print(f"{name}: {result['calls']} calls, {len(result['failed'])} failed", *result["failed"][:2])
            bad += bool(result["failed"]) or not result["calls"]
        complaints = [line for line in text.splitlines() if "ERROR SUMMARY" in line or "RACECHECK SUMMARY" in line]
        if not complaints or any(": 0 " not in line for line in complaints):
            bad += 1
            print(text[:3000])
    print(f"{sum(len(n) for n, _ in found)} kernels, {bad} of them or of the processes with complaints")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
