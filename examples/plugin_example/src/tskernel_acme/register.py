"""What the entry point calls."""

from __future__ import annotations

import torch

from tskernel.dispatch.platform import CapabilityRequirement
from tskernel.dispatch.registry import Priority, register_kernel
from tskernel.dispatch.signature import formats
from tskernel_acme.rmsnorm import rmsnorm


def register() -> None:
    """Register the kernels of this package."""
    declare = register_kernel(
        "norm",
        "rmsnorm",
        name="acme/rmsnorm/vector",
        solution="vector",
        capability=CapabilityRequirement(vendor="acme", at_least="1.0"),
        signatures=formats(x=(torch.float16, torch.bfloat16)),
        traits={"hidden": range(8, 65537, 8)},  # its vector unit takes 8 columns at a time
        priority=Priority.PLUGIN,
        traceable=True,
    )
    declare(rmsnorm)
