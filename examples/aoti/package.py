"""Package a decode step's attention for a C++ program: ``python package.py FOLDER [cpu|cuda]``.

Writes FOLDER/model.pt2, FOLDER/calls.pt (inputs at three batch sizes) and FOLDER/expected.pt, and prints
which kernel serves each node, and how to build and run the program.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import Tensor, nn

import tskernel
from tskernel import export

# The Triton kernels are traced into the package; a faster one that is not would need tskernel in the process.
KERNELS: dict[str, str] = dict.fromkeys(("mha_decode_with_kvcache", "mha_prefill", "attn_merge_state"), "triton")
PAGE, COLUMNS, HEADS, KV_HEADS, WIDTH = 16, 4, 8, 2, 64


class Attention(nn.Module):
    """Attention over a paged cache, joined with attention over keys that all requests share."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, table: Tensor, lengths: Tensor, shared: Tensor) -> Tensor:
        """Return ``[B, HEADS, WIDTH]`` for one query token per request; ``shared [T, KV_HEADS, WIDTH]``."""
        own = tskernel.mha_decode_with_kvcache(q, k, v, table, lengths, COLUMNS * PAGE, return_lse=True)
        ends = torch.tensor([0, 1], dtype=torch.int32, device=q.device)
        queries, keys = ends * q.shape[0], ends * shared.shape[0]
        common = tskernel.mha_prefill(
            q,
            shared,
            shared,
            queries,
            q.shape[0],
            cu_seqlens_kv=keys,
            max_seqlen_kv=shared.shape[0],
            is_causal=False,
            return_lse=True,
        )
        return tskernel.attn_merge_state(*own, *common)[0]


def inputs(batch: int, device: str) -> tuple[Tensor, ...]:
    """Return a call's tensors."""
    dtype = torch.bfloat16
    q = torch.randn(batch, HEADS, WIDTH, dtype=dtype)
    k, v = (torch.randn(batch * COLUMNS, PAGE, KV_HEADS, WIDTH, dtype=dtype) for _ in range(2))
    table = torch.arange(batch * COLUMNS, dtype=torch.int32).view(batch, COLUMNS)
    lengths = torch.arange(1, batch + 1, dtype=torch.int32) * COLUMNS * PAGE // batch
    shared = torch.randn(40, KV_HEADS, WIDTH, dtype=dtype)
    return tuple(x.to(device) for x in (q, k, v, table, lengths, shared))


def package(folder: Path, device: str) -> None:
    """Write the package, its inputs and what they give."""
    n = torch.export.Dim("n", min=2, max=256)
    shapes = ({0: n}, {0: COLUMNS * n}, {0: COLUMNS * n}, {0: n}, {0: n}, None)
    program = torch.export.export(Attention(), inputs(4, device), dynamic_shapes=shapes)
    program = export.bind(program, overrides=KERNELS if device == "cuda" else None)
    print(export.bindings(program))
    torch._inductor.aoti_compile_and_package(program, package_path=str(folder / "model.pt2"))
    calls = [inputs(batch, device) for batch in (2, 5, 64)]
    torch.save([list(call) for call in calls], folder / "calls.pt")
    torch.save([Attention()(*call).cpu() for call in calls], folder / "expected.pt")


def build_command(folder: Path, device: str) -> list[str]:
    """Return how to compile ``run.cpp``."""
    from torch.utils.cpp_extension import include_paths

    where, packages = Path(torch.__file__).parent / "lib", Path(torch.__file__).parent.parent
    include = [*include_paths(device), *packages.glob("nvidia/*/include")]  # the toolkit's headers, or the wheels'
    cuda = ["-Wl,--no-as-needed", "-ltorch_cuda", "-lc10_cuda"] if device == "cuda" else []
    return [
        "g++", "-std=c++20", *[f"-I{p}" for p in include], str(Path(__file__).with_name("run.cpp")),
        "-o", str(folder / "run"), f"-L{where}", f"-Wl,-rpath,{where}", *cuda,
        "-ltorch", "-ltorch_cpu", "-lc10", "-ldl",
    ]  # fmt: skip


def main() -> None:
    """Package, and say how to go on."""
    folder, device = Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "cpu"
    folder.mkdir(parents=True, exist_ok=True)
    with torch.no_grad():
        package(folder, device)
    print(" ".join(build_command(folder, device)))
    print(f"{folder}/run {folder}/model.pt2 {folder}/calls.pt {folder}/results.pt")


if __name__ == "__main__":
    main()
