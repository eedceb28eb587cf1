"""Compare what a C++ program wrote with what Python expects: ``python same_results.py FOLDER``."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

from tskernel.testing import compare

folder = Path(sys.argv[1])
got, want = (torch.load(folder / f"{name}.pt", weights_only=False) for name in ("results", "expected"))
for g, w in zip(got, want, strict=True):
    compare(g, w)
    print(tuple(w.shape), "largest difference", float((g.cpu().float() - w.float()).abs().max()))
