"""Compares SGLang's layers before and after the hooks, eager and compiled; prints ALL ALIKE.

A process of its own: SGLang cannot take a hook back.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.layers.rotary_embedding import factory
from sglang.srt.runtime_context import SpawnRanks, publish
from sglang.srt.server_args import ServerArgs
from torch.utils._python_dispatch import TorchDispatchMode

from tskernel.integrations import sglang as plugin
from tskernel.testing import compare

H, T = 64, 5
Case = tuple[Callable[[], Any], tuple[Any, ...], str | None]


class Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "tokenspeed":
            self.names.append(func._schema.name.removeprefix("tokenspeed::"))
        return func(*args, **(kwargs or {}))


def weighted(make: Callable[[], Any]) -> Callable[[], Any]:
    """Give every weight other values, the same in each layer that is made."""

    def made() -> Any:
        layer, generator = make(), torch.Generator().manual_seed(7)
        for p in layer.parameters():
            p.data.copy_(torch.randn(p.shape, generator=generator) * 0.2 + 0.5)
        with suppress(AttributeError):
            layer.refresh_gemma_weight()
        return layer

    return made


def norms() -> dict[str, Case]:
    from sglang.srt.layers import layernorm as norm

    x, r, post = (torch.randn(T, H) for _ in range(3))
    plain = weighted(lambda: norm.RMSNorm(H, 1e-5))
    cases: dict[str, Case] = {
        "rmsnorm": (plain, (x,), "rmsnorm"),
        "rmsnorm, 3 dimensions": (plain, (x.view(1, T, H),), "rmsnorm"),
        "rmsnorm, strided": (plain, (torch.randn(T, 2 * H)[:, :H],), "rmsnorm"),
        "rmsnorm, residual": (plain, (x, r), "add_rmsnorm"),
        "rmsnorm, residual and another": (plain, (x, r, post), "add_rmsnorm"),
        "rmsnorm, before a linear layer": (lambda: before_linear(torch.nn.Linear(H, H)), (x, r), "add_rmsnorm"),
        "rmsnorm, no rows": (plain, (x[:0],), "rmsnorm"),
        "rmsnorm, part of the row": (weighted(lambda: norm.RMSNorm(H, 1e-5, var_hidden_size=32)), (x,), None),
        "rmsnorm, rounded before": (
            weighted(lambda: norm.RMSNorm(H, 1e-5, cast_x_before_out_mul=True)), (x.bfloat16(),), None,
        ),
        "rmsnorm, fp32 residual": (weighted(lambda: norm.RMSNorm(H, 1e-5, fp32_residual=True)),
                                   (x.bfloat16(), r.bfloat16()), None),
        "rmsnorm, residual of another dtype": (plain, (x.bfloat16(), r), None),
        "rmsnorm, bf16 and an fp32 weight": (plain, (x.bfloat16(),), "rmsnorm"),
    }  # fmt: skip
    for cls in (norm.GemmaRMSNorm, norm.Gemma3RMSNorm):
        make = weighted(lambda cls=cls: cls(H, 1e-5))
        cases[cls.__name__] = (make, (x,), "gemma_rmsnorm")
        cases[f"{cls.__name__}, residual"] = (make, (x, r), "add_rmsnorm")
    return cases


def before_linear(linear: Any) -> Any:
    from sglang.srt.layers.layernorm import RMSNorm

    layer = weighted(lambda: RMSNorm(H, 1e-5))()
    layer.fuse_input_quant(linear)
    return layer


def check_norms_before_quantized_layers() -> None:
    """A norm on CUDA goes to the op, unless SGLang would quantize its result in the same kernel."""
    from sglang.srt.layers.quantization.fp8 import Fp8LinearMethod

    from tskernel.integrations._sglang_layers import _rmsnorm_on_cuda

    x, left = torch.randn(T, H), object()
    plain = before_linear(torch.nn.Linear(H, H))
    compare(_rmsnorm_on_cuda(lambda *_: left, plain, x), plain(x))
    method = Fp8LinearMethod.__new__(Fp8LinearMethod)
    quantized = before_linear(SimpleNamespace(quant_method=method, input_scale=torch.ones(1)))
    assert _rmsnorm_on_cuda(lambda *_: left, quantized, x) is left


def others() -> dict[str, Case]:
    from sglang.srt.layers import activation
    from sglang.srt.layers.rotary_embedding import get_rope

    x, positions = torch.randn(T, 2 * H), torch.randint(0, 100, (T,))
    q, k = torch.randn(T, 4 * 32), torch.randn(T, 2 * 32)
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    llama3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
              "original_max_position_embeddings": 64}  # fmt: skip

    def rope(size: int = 32, neox: bool = True, scaling: Any = None) -> Callable[[], Any]:
        return lambda: get_rope(32, size, 128, 10000, neox, scaling, torch.float32)

    deepseek = {"rope_type": "deepseek_yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    return {
        "silu": (activation.SiluAndMul, (x,), "silu_and_mul"),
        "gelu tanh": (activation.GeluAndMul, (x,), "gelu_tanh_and_mul"),
        "gelu": (lambda: activation.GeluAndMul("none"), (x,), "gelu_and_mul"),
        "rope": (rope(), (positions, q, k), "apply_rope"),
        "rope, heads apart": (rope(), (positions, q.view(T, 4, 32), k.view(T, 2, 32)), "apply_rope"),
        "rope, interleaved": (rope(neox=False), (positions, q, k), "apply_rope"),
        "rope, half of the head": (rope(16), (positions, q, k), "apply_rope"),
        "rope, yarn": (rope(scaling=yarn), (positions, q, k), "apply_rope"),
        "rope, llama 3": (rope(scaling=llama3), (positions, q, k), "apply_rope"),
        "rope, offsets": (rope(), (positions, q, k, torch.full((T,), 3)), None),
        "rope, DeepSeek's": (rope(scaling=deepseek), (positions, q.view(T, 4, 32), k.view(T, 2, 32)), None),
    }


def clones(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(a.clone() if isinstance(a, torch.Tensor) else a for a in arguments)


@torch.no_grad()
def main() -> None:
    torch.manual_seed(0)
    publish(ServerArgs(model_path="none", device="cpu"), role="scheduler", ranks=SpawnRanks(world_rank=0, gpu_id=0))
    cases = norms() | others()
    want = {name: make()(*clones(arguments)) for name, (make, arguments, _) in cases.items()}
    factory._ROPE_DICT.clear()  # SGLang keeps rotations, and a layer keeps the method of its first call
    plugin.register()
    plugin.register()  # harmless
    for name, (make, arguments, op) in cases.items():
        with Seen() as seen:
            got = make()(*clones(arguments))
        expected = [] if op is None else [op]
        assert seen.names == expected, f"{name}: expected {expected}, got {seen.names}"
        compare(got, want[name])
    for name in ("rmsnorm", "rmsnorm, residual", "rmsnorm, before a linear layer", "silu", "rope", "GemmaRMSNorm"):
        make, arguments, op = cases[name]
        layer, graphs = make(), []
        layer.enter_torch_compile(T)

        def keep(graph: Any, _: Any, graphs: list[Any] = graphs) -> Any:
            graphs.append([str(n.target) for n in graph.graph.nodes if "tokenspeed" in str(n.target)])
            return graph.forward

        got = torch.compile(layer, fullgraph=True, backend=keep)(*clones(arguments))
        assert graphs == [[f"tokenspeed.{op}.default"]] or graphs == [[f"tokenspeed.{op}"]], f"{name}: {graphs}"
        compare(got, want[name])
    check_norms_before_quantized_layers()
    sys.stdout.write("ALL ALIKE\n")


if __name__ == "__main__":
    main()
