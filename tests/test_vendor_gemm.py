"""The vendor wrappers of matrix products and experts against stand-ins with the vendors' recorded signatures.

See test_vendor_attention.py; on a GPU tests/test_gpu.py runs the samples through the real libraries.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from test_triton_interpreter import interpret

pytest.importorskip("triton")
CASES = Path(__file__).parent / "vendor_gemm_cases.py"


def test_wrappers_keep_the_contract() -> None:
    root = CASES.parent.parent
    options = ["-q", "-p", "no:cacheprovider", f"--rootdir={root}", f"-c{root / 'pyproject.toml'}"]
    last = interpret("-m", "pytest", *options, str(CASES)).splitlines()[-1]
    passed = re.search(r"(\d+) passed", last)
    assert passed and int(passed[1]) > 50 and "failed" not in last and "skipped" not in last, last
