"""The vendor attention wrappers against stand-ins with the vendors' recorded signatures and manners (vendors.py).

The stand-ins run on the CPU, the programs around them in Triton's interpreter; on a GPU tests/test_gpu.py runs the
samples through the real libraries.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import vendors
from test_triton_interpreter import interpret

pytest.importorskip("triton")
CASES = Path(__file__).parent / "vendor_cases.py"


@pytest.mark.parametrize("library", sorted(vendors.LIBRARIES))
def test_wrappers_keep_the_contract(library: str) -> None:
    root = CASES.parent.parent
    options = ["-q", "-p", "no:cacheprovider", "-k", library, f"--rootdir={root}", f"-c{root / 'pyproject.toml'}"]
    last = interpret("-m", "pytest", *options, str(CASES)).splitlines()[-1]
    passed = re.search(r"(\d+) passed", last)
    assert passed and int(passed[1]) > 1 and "failed" not in last and "skipped" not in last, last
