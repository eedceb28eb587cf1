"""Tensor parallel on two processes that really exchange data: DTensor through the ops, and a model of transformers."""

from __future__ import annotations

import socket
import subprocess
import sys
import textwrap

import pytest
from processes import SOURCE, environment

RANKS = 2
SETUP = """
import sys, warnings
warnings.filterwarnings("ignore")
import torch, tskernel
import torch.distributed as dist
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor, init_device_mesh
torch.set_grad_enabled(False)
dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
mesh = init_device_mesh("cpu", (ranks,))
torch.manual_seed(0)  # the same numbers on every rank
"""
LAYER = """
HEADS, KV_HEADS, HEAD, HIDDEN, INNER, EXPERTS = 4, 2, 16, 64, 48, 6


class Layer(torch.nn.Module):
    '''Attention with its heads dealt out, an MLP with its rows and then its columns, experts with their tokens.'''

    def __init__(self):
        super().__init__()
        sizes = {"q": (HEADS * HEAD, HIDDEN), "k": (KV_HEADS * HEAD, HIDDEN), "v": (KV_HEADS * HEAD, HIDDEN),
                 "o": (HIDDEN, HEADS * HEAD), "up": (INNER, HIDDEN), "down": (HIDDEN, INNER),
                 "router": (EXPERTS, HIDDEN), "w13": (EXPERTS, 2 * INNER, HIDDEN), "w2": (EXPERTS, HIDDEN, INNER)}
        for name, shape in sizes.items():
            self.register_parameter(name, torch.nn.Parameter(torch.randn(shape) / shape[-1] ** 0.5, False))
        self.norm = torch.nn.Parameter(torch.rand(HIDDEN), False)

    def forward(self, x, cu, whole, rows):
        h = tskernel.rmsnorm(x, self.norm)
        q, k, v = (tskernel.mm(h, w).unflatten(1, (-1, HEAD)) for w in (self.q, self.k, self.v))
        out = tskernel.mha_prefill(q, k, v, cu, 5)
        x = x + whole(tskernel.mm(out.flatten(1), self.o))
        h = tskernel.rmsnorm(x, self.norm)
        x = x + whole(tskernel.mm(torch.nn.functional.silu(tskernel.mm(h, self.up)), self.down))
        h = rows(x)
        weights, ids = tskernel.moe_topk(tskernel.mm(h, self.router), 2)
        return x + whole(tskernel.moe_fused(h, self.w13, self.w2, weights, ids))


layer, x, cu = Layer(), torch.randn(8, HIDDEN), torch.tensor([0, 5, 8], dtype=torch.int32)
want = layer(x, cu, lambda t: t, lambda t: t)
columns, rows = [Shard(0)], [Shard(1)]
places = {"q": columns, "k": columns, "v": columns, "up": columns, "o": rows, "down": rows}
for name, parameter in list(layer.named_parameters()):
    split = distribute_tensor(parameter.data, mesh, places.get(name, [Replicate()]))
    setattr(layer, name, torch.nn.Parameter(split, False))
assert layer.q.to_local().shape[0] == HEADS * HEAD // ranks
seen = []


def whole(t):
    seen.append(t.placements)
    return t.redistribute(placements=[Replicate()])


arguments = (distribute_tensor(x, mesh, [Replicate()]), distribute_tensor(cu, mesh, [Replicate()]), whole,
             lambda t: t.redistribute(placements=[Shard(0)]))
got = layer(*arguments)
assert seen == [(Partial(),), (Partial(),), (Shard(0),)], seen  # no op gathered what it need not
torch.testing.assert_close(got.to_local(), want)
# The result is the same on every rank, bit for bit: what is computed from it must not part.
first = got.to_local().clone()
dist.broadcast(first, 0)
assert torch.equal(first, got.to_local())
compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
torch.testing.assert_close(compiled(*arguments).to_local(), want)
print("ok", flush=True)
dist.destroy_process_group()
"""
MODEL = """
import transformers
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from tskernel.integrations.transformers import enable

config = transformers.LlamaConfig(
    vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, initializer_range=0.3, pad_token_id=0, eos_token_id=None, bos_token_id=None)
model = transformers.LlamaForCausalLM(config).eval()
ids = torch.randint(3, 97, (2, 7))
options = {"max_new_tokens": 6, "do_sample": False, "attention_mask": torch.ones_like(ids)}
want = model.generate(ids, **options)
columns, rows = ColwiseParallel(), RowwiseParallel()
plan = {f"self_attn.{n}_proj": columns for n in "qkv"} | {f"mlp.{n}_proj": columns for n in ("gate", "up")}
plan |= {"self_attn.o_proj": rows, "mlp.down_proj": rows}
for layer in model.model.layers:
    parallelize_module(layer, mesh, plan)
report = enable(model)
assert (report.norms, report.activations, report.skipped) == (5, 2, ()), report
got = model.generate(ids, **options)
assert want.unique().numel() > 8
assert torch.equal(got, want), (got, want)
print("ok", flush=True)
dist.destroy_process_group()
"""


def on_ranks(code: str) -> list[str]:
    """Run code in a process per rank and return what each printed; raise AssertionError when one fails."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(RANKS), "GLOO_SOCKET_IFNAME": "lo"}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(code)],
            env=environment(RANK=str(rank), **group),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=SOURCE.parent,
        )
        for rank in range(RANKS)
    ]
    done = [process.communicate(timeout=240) for process in started]
    for process, (_, errors) in zip(started, done, strict=True):
        if process.returncode:
            raise AssertionError(errors or f"exit status {process.returncode}")
    return [printed.strip() for printed, _ in done]


def test_a_layer_of_dtensors_on_two_ranks_is_the_whole_layer() -> None:
    assert on_ranks(SETUP + LAYER) == ["ok"] * RANKS


def test_a_transformers_model_on_two_ranks_gives_the_tokens_of_one() -> None:
    pytest.importorskip("transformers")
    assert on_ranks(SETUP + MODEL) == ["ok"] * RANKS
