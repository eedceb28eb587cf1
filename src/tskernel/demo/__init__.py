"""What ``python -m tskernel demo`` runs."""

from __future__ import annotations

from tskernel.demo.main import main as main
