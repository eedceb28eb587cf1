"""Package a feed-forward block with native kernels for a C++ program: ``python package.py FOLDER [LIBRARY]``.

Writes FOLDER/model.pt2, FOLDER/calls.pt (inputs at three batch sizes) and FOLDER/expected.pt, and prints which kernel
serves each node and how to run it with the program of ../aoti. Without LIBRARY it is for the GPU and the tskernel that
is installed. LIBRARY is a build of csrc/ for the CPU, made by ``python csrc/build.py emulate OBJECTS LIBRARY``.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

import tskernel
from tskernel import export
from tskernel.dispatch.platform import ANY
from tskernel.dispatch.registry import KernelRegistry

HIDDEN, WIDTH = 256, 384
OPS = ("rmsnorm", "add_rmsnorm", "silu_and_mul")


class Block(nn.Module):
    """A gated feed-forward block between two norms."""

    def __init__(self, device: str) -> None:
        """Draw weights."""
        super().__init__()
        options = {"dtype": torch.bfloat16, "device": device}
        self.up = nn.Parameter(torch.randn(2 * WIDTH, HIDDEN, **options) / HIDDEN**0.5)
        self.down = nn.Parameter(torch.randn(HIDDEN, WIDTH, **options) / WIDTH**0.5)
        self.weight = nn.Parameter(torch.rand(HIDDEN, **options))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the next norm's result and the residual for ``x [T, HIDDEN]``."""
        gated = tskernel.silu_and_mul(tskernel.rmsnorm(x, self.weight) @ self.up.T)
        return tskernel.add_rmsnorm(gated @ self.down.T, x, self.weight)


def emulate(library: str) -> None:
    """Load a build of the native library for the CPU, and let its kernels serve there."""
    torch.ops.load_library(library)
    registry = KernelRegistry.get()
    for op in OPS:
        native = registry.get_by_name(f"cuda/{op}/native")
        registry.register(replace(native, name=f"emulated/{op}", solution="emulated", capability=(ANY,)))


def package(folder: Path, device: str, solution: str) -> None:
    """Write the package, its inputs and what they give."""
    block = Block(device).requires_grad_(False)
    shapes = ({0: torch.export.Dim("n", min=2, max=256)},)
    inputs = [torch.randn(n, HIDDEN, dtype=torch.bfloat16, device=device) for n in (4, 2, 7, 64)]
    program = torch.export.export(block, (inputs[0],), dynamic_shapes=shapes)
    program = export.bind(program, overrides=dict.fromkeys(OPS, solution))
    print(export.bindings(program))
    torch._inductor.aoti_compile_and_package(program, package_path=str(folder / "model.pt2"))
    torch.save([[x] for x in inputs[1:]], folder / "calls.pt")
    torch.save([y.cpu() for x in inputs[1:] for y in block(x)], folder / "expected.pt")


def main() -> None:
    """Package, and say how to go on."""
    folder, given = Path(sys.argv[1]), sys.argv[2:]
    folder.mkdir(parents=True, exist_ok=True)
    device, solution = ("cpu", "emulated") if given else ("cuda", "native")
    if given:
        emulate(given[0])
    library = given[0] if given else export.native_library()
    with torch.no_grad():
        package(folder, device, solution)
    print(f"run {folder}/model.pt2 {folder}/calls.pt {folder}/results.pt {library}")


if __name__ == "__main__":
    main()
