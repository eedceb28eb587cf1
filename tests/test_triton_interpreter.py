"""Every Triton kernel on its op's samples, without a GPU: in a process of its own, by Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tskernel.dispatch.registry import builtin_kernel_modules

pytest.importorskip("triton")
OPS = sorted({op for module, op in builtin_kernel_modules() if module.rsplit(".", 1)[1] == "triton"})
ATTENTION = [op for op in OPS if op.startswith(("attn", "mha", "mla"))]
HERE = Path(__file__).parent
CONFORMANCE = """
import sys

import interpreted
interpreted.declare("sm90")

import torch
from helpers import declines, short
from test_conformance import actual, expected
from tskernel.library import ops
from tskernel.testing import compare, kernel_names, samples_of

torch.set_num_threads(1)
torch.use_deterministic_algorithms(True, warn_only=True)  # poisons what is allocated
all_dtypes = len(sys.argv) == 2
for op in map(ops.get, sys.argv[1:]):
  ran = 0
  for kernel in [k for k in kernel_names(op.name) if k.endswith("/triton")]:
    for form in op.forms if all_dtypes else op.forms[-1:]:
        # The form with the LSE does all that the others do; they need one dtype each.
        dtypes = op.dtypes if all_dtypes and form == op.forms[-1] else op.dtypes[-1:]
        for dtype, sample in samples_of(op, dtypes=dtypes):
            if declines(kernel, op, sample, form) is None:
                try:
                    compare(actual(op, kernel, sample, form), expected(op, sample, form))
                except Exception as error:
                    raise SystemExit(f"{kernel}, form {form!r}, {short(dtype)}, sample {sample.name}: {error}")
                ran += 1
  print(ran)
"""


def interpret(*command: str) -> str:
    """Run Python in a process in which the CPU is an sm90 whose Triton kernels are interpreted."""
    path = os.pathsep.join(map(str, [HERE, HERE / "ops", HERE.parent / "src"]))
    env = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": path, "TSKERNEL_TEST_PLATFORM": "sm90"}
    command = (sys.executable, "-W", "ignore::RuntimeWarning", *command)
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("op", ATTENTION)
def test_conformance_in_the_interpreter(op: str) -> None:
    assert int(interpret("-c", CONFORMANCE, op)) > 4


@pytest.mark.slow
def test_conformance_of_the_small_ops_in_the_interpreter() -> None:
    """One process for all of them, and one dtype each: a process takes longer to start than most ops to check."""
    small = [op for op in OPS if op not in ATTENTION]
    ran = list(map(int, interpret("-c", CONFORMANCE, *small).split()))
    assert len(ran) == len(small) and min(ran) > 4, dict(zip(small, ran, strict=True))


@pytest.mark.slow
def test_rows_that_do_not_fit_and_vocabularies_of_many_tiles() -> None:
    """With tiles so short that small rows are read again, and have several tiles; ties, infinities and NaN in them."""
    assert interpret("-c", SHORT_TILES).split() == ["14"]


SHORT_TILES = """
import torch
import tskernel
import interpreted
interpreted.declare("sm90")
from tskernel.backends.portable import _quantize_triton, _rows, _sample_triton
from tskernel.testing import compare, oracle

torch.set_num_threads(1)
torch.manual_seed(0)
ran = 0

def check(op, **call):
    global ran
    compare(getattr(tskernel, op)(**call, override=f"portable/{op}/triton"), oracle(op, **call))
    ran += 1

_rows.ONE_PASS = 64
x, weight = torch.randn(3, 77).bfloat16(), torch.randn(77)
check("rmsnorm", x=x, weight=weight)
check("layernorm", x=x, weight=weight, bias=-weight)
check("add_rmsnorm", x=x, residual=x.flip(0), weight=weight)
_quantize_triton._spans = lambda width, how, group: (width, 32, 1)
for call in ({"granularity": "token"}, {"granularity": "token", "ue8m0": True}):
    check("quantize_fp8_dynamic", x=x, **call)
    check("silu_and_mul_quantize_fp8", x=torch.cat((x, x.flip(1)), 1), **call)

_sample_triton.TILE = 128
logits = (torch.randn(6, 150) * 3).bfloat16()
logits[1] = logits[1].round()
logits[2], logits[3, 140], logits[4], logits[5, ::2] = 1.0, float("inf"), float("nan"), float("-inf")
k = torch.tensor([10, 37, 130, 3, 5, -1], dtype=torch.int32)
p = torch.tensor([0.5, 0.8, 0.31, 0.9, 0.5, 0.99])
seeds = {"seed": torch.arange(6) * 12345678901, "offset": torch.arange(6) + 2**33}
for x, some in ((logits, slice(None)), (logits[1:2].float(), slice(1, 2))):
    rest = {n: v[some] for n, v in {"top_k": k, "top_p": p, "temperature": 2 * p, **seeds}.items()}
    check("top_k_top_p_sample", logits=x, **rest)
check("argmax", logits=logits)
probs = logits.float().nan_to_num(-5, 3, -9).softmax(-1).bfloat16()
probs[1], probs[2], probs[3, 7], probs[4], probs[5, 1::2] = (probs[1] * 16).round() / 16, 0.25, float("inf"), 0, -1
check("top_k_renorm", probs=probs, top_k=k)
check("top_p_renorm", probs=probs, top_p=p)
check("min_p_renorm", probs=probs, min_p=p)
ids = torch.randint(-1, 7, (50, 3), dtype=torch.int32)
check("moe_dispatch", topk_ids=ids, num_experts=6, block_size=4)
print(ran)
"""


@pytest.mark.slow
def test_products_in_shares_tails_and_odd_groups() -> None:
    """K in up to six shares, the last of them short or empty; scales of any number of columns; empty groups."""
    assert interpret("-c", PRODUCTS).split() == ["14"]


PRODUCTS = """
import torch
import tskernel
import interpreted
interpreted.declare("sm90")
from tskernel.backends.portable import _gemm
from tskernel.testing import SampleMaker, compare, oracle
from tskernel.ops.gemm._samples import quantized_pairs

torch.set_num_threads(1)
torch.use_deterministic_algorithms(True, warn_only=True)  # poisons what is allocated
ran, make, whole = 0, SampleMaker(), _gemm.tile_of
_gemm.tile_of = lambda *a, **k: whole(*a, **k)._replace(splits=6)
for name, pair in quantized_pairs(make, 3, 70, 416, torch.bfloat16):
    call = {**pair, "bias": make.randn((70,), torch.float32), "out_dtype": torch.float32}
    if pair["quant"] == "w4a16":  # groups of 26 columns
        call["b_scale"] = make.rand((70, 16), torch.float32)
    compare(tskernel.mm(**call, override="portable/mm/triton"), oracle("mm", **call))
    ran += 1
b = torch.randn(2, 70, 416)
call = {"a": torch.randn(2, 5, 416), "b": b, "alpha": torch.tensor([0.5, -2.0])}
compare(tskernel.bmm(**call, override="portable/bmm/triton"), oracle("bmm", **call))
ran += 1
_gemm.tile_of = whole
for ends in ([0, 0, 19, 19], [3, 20, 20, 40]):
    a, offsets = torch.randn(23, 64), torch.tensor(ends, dtype=torch.int32).clamp(max=23)
    a[int(offsets[-1]) :] = float("nan")
    call = {"a": a, "b": torch.randn(4, 33, 64), "offsets": offsets, "bias": torch.randn(4, 33)}
    got = tskernel.grouped_mm(**call, override="portable/grouped_mm/triton")
    compare(got, oracle("grouped_mm", **call))
    ran += 1
print(ran)
"""


@pytest.mark.slow
def test_experts_of_sorted_slots() -> None:
    """Every sample of ``moe_fused`` as if its slots were too many to look among: by blocks of one expert."""
    assert int(interpret("-c", EXPERTS)) >= 16


EXPERTS = """
import torch
import interpreted
interpreted.declare("sm90")
from helpers import declines
from test_conformance import actual, expected
from tskernel.backends.portable import _moe
from tskernel.library import ops
from tskernel.testing import compare, samples_of

torch.set_num_threads(1)
torch.use_deterministic_algorithms(True, warn_only=True)  # poisons what is allocated
_moe.FEW_SLOTS, op, kernel, ran = 0, ops.get("moe_fused"), "portable/moe_fused/triton", 0
for dtype, sample in samples_of(op, dtypes=[torch.bfloat16]):
    if declines(kernel, op, sample, "") is None:
        compare(actual(op, kernel, sample, ""), expected(op, sample, ""))
        ran += 1
print(ran)
"""


EDGES = [
    "tests/ops/test_attention_masks.py::test_att_01_empty_sequences",
    "tests/ops/test_attention_masks.py::test_att_04_padded_batch",
    "tests/ops/test_attention_masks.py::test_att_05_rows_past_the_last_sequence",
    "tests/ops/test_attention_masks.py::test_win_01_keys_before_every_window_are_not_read",
    "tests/ops/test_attention_layouts.py::test_page_02_nan_in_unused_slots",
]


@pytest.mark.slow
def test_edge_cases_in_the_interpreter() -> None:
    """A fast part of what ``TSKERNEL_TEST_PLATFORM=sm90 TRITON_INTERPRET=1 pytest tests/ops -k triton`` runs."""
    root = HERE.parent
    options = ["-q", "-p", "no:cacheprovider", "-k", "triton", f"--rootdir={root}", f"-c{root / 'pyproject.toml'}"]
    last = interpret("-m", "pytest", *options, *(str(root / e) for e in EDGES)).splitlines()[-1]
    assert " passed" in last and "failed" not in last, last


@pytest.mark.slow
def test_any_number_of_parts_gives_the_same_result() -> None:
    """Keys cut into more parts than there are blocks, over page sizes around a tile, with and without a window."""
    assert interpret("-c", PARTS).split() == ["8"]


PARTS = """
import torch
import tskernel
from attention_cases import normal, paged_call
import interpreted
interpreted.declare("sm90")
from tskernel.backends.portable import _attention_launch as flash
from tskernel.testing import compare, oracle

torch.set_num_threads(1)
ran = 0
for op, queries in (("mha_decode_with_kvcache", [2, 2, 2]), ("mha_extend_with_kvcache", [3, 1, 0])):
    for parts in (2, 7):
        flash.choose_config = lambda *_: flash.Config(16, 16, 4, 2, parts)
        for page_size in (3 + 13 * (parts == 7),):
            for window in (-1, 20):
                s = normal(queries, [70, 2, 33], heads=(6, 2), width=40, value_width=24, dtype=torch.bfloat16)
                sinks = torch.tensor([0.5, -1.0, 2.0, 0.0, float("-inf"), 3.0])
                call = paged_call(op, s, page_size, window_left=window, sinks=sinks)
                got = getattr(tskernel, op)(**call, return_lse=True, override=f"portable/{op}/triton")
                compare(got, oracle(op, **call, return_lse=True))
                ran += 1
print(ran)
"""


@pytest.mark.slow
def test_dealt_sequences_give_the_same_result() -> None:
    """Programs that find sequence and part by the true lengths; the second call of each follows a plan."""
    assert interpret("-c", DEALS).split() == ["12"]


DEALS = """
import torch
import tskernel
from attention_cases import normal, paged_call
import interpreted
interpreted.declare("sm90")
from tskernel.backends.portable import _attention_launch as flash
from tskernel.testing import compare, oracle

torch.set_num_threads(1)
op, ran = "mha_decode_with_kvcache", 0
for parts in (1, 2, 5):
    for queries, page_size in ((1, 16), (2, 5)):
        flash.choose_config = lambda *_: flash.Config(16, 16, 4, 2, parts, True)
        flash._plans.clear()
        s = normal([queries] * 5, [70, 2, 0, 133, 33], heads=(6, 2), width=40, value_width=24, dtype=torch.bfloat16)
        sinks = torch.tensor([0.5, -1.0, 2.0, 0.0, float("-inf"), 3.0])
        call = paged_call(op, s, page_size, sinks=sinks)
        for lengths in ([70, 2, 0, 133, 33], [64, 1, 0, 133, 0]):
            call["cache_seqlens"] = torch.tensor(lengths, dtype=torch.int32)
            got = getattr(tskernel, op)(**call, return_lse=True, override=f"portable/{op}/triton")
            compare(got, oracle(op, **call, return_lse=True))
            ran += 1
        (((_, plan),),) = flash._plans._seen.values()
        assert plan.floats == (0 if parts == 1 else 5 * queries * 6 * parts * 25 + 2 * 5), plan
print(ran)
"""


@pytest.mark.slow
def test_every_part_is_dealt_once() -> None:
    assert interpret(str(HERE / "deal_program.py")).split() == ["33"]


@pytest.mark.slow
def test_fp8_values_in_pairs_give_the_same_result() -> None:
    """Two columns of values as one number where addresses allow it, with queries too large and too small for fp16."""
    assert interpret("-c", PAIRS).split() == ["8", "16"]


PAIRS = """
import torch
import tskernel
from attention_cases import normal, paged_call
import interpreted
interpreted.declare("sm90")
from tskernel.backends.portable import _attention_launch as flash
from tskernel.testing import compare, oracle

torch.set_num_threads(1)
paired = ran = 0
plain = flash._choose
def choose(*given):
    global paired
    choice = plain(*given)
    paired += choice.flags["PAIRS"]
    return choice
flash._choose = choose
op = "mha_decode_with_kvcache"
for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
    for aligned in (True, False):
        for size in (1.0, 1e30, 1e-30, 0.0):
            flash._plans.clear()
            s = normal([1] * 3, [70, 0, 33], heads=(6, 2), width=40, value_width=24, dtype=torch.bfloat16)
            s.k[:], s.v[:] = [x.to(dtype) for x in s.k], [x.to(dtype) for x in s.v]
            s.q[:] = [x * size for x in s.q]
            call = paged_call(op, s, 16, softmax_scale=40**-0.5 / (size or 1.0))
            if not aligned:
                v = call["v_cache"]
                wide = torch.zeros((*v.shape[:-1], 25), dtype=torch.uint8)
                wide[..., 1:] = v.view(torch.uint8)
                call["v_cache"] = wide.view(dtype)[..., 1:]
            got = getattr(tskernel, op)(**call, return_lse=True, override=f"portable/{op}/triton")
            compare(got, oracle(op, **call, return_lse=True))
            ran += 1
print(paired, ran)
"""


@pytest.mark.slow
def test_programs_for_sm90_give_the_same_result() -> None:
    """Values a round behind, near rows, and latent scores shared out: chosen by shared memory, which a CPU has not."""
    assert interpret("-c", HOPPER).split() == ["AHEAD", "6", "APART", "4", "NEAR", "4"]


HOPPER = """
from collections import Counter

import torch
import tskernel
from attention_cases import latent_call, normal, pages, ragged_call
import interpreted
interpreted.declare("sm90")
from tskernel.backends.portable import _attention_launch as flash
from tskernel.testing import compare, oracle

torch.set_num_threads(1)
flash.chip_of = lambda _: flash.Chip(False, 227 << 10, False, True)
plain, seen = flash._choose, Counter()
def choose(*given):
    choice = plain(*given)
    seen.update(n for n in ("AHEAD", "APART", "NEAR") if choice.flags[n])
    return choice
flash._choose = choose

def same(op, call):
    call["return_lse"] = True
    compare(getattr(tskernel, op)(**call, override=f"portable/{op}/triton"), oracle(op, **call))

for width in (256, 128):
    more = {"logit_cap": 5.0, "sinks": torch.tensor([0.5, -1.0, 2.0, float("-inf")])}
    for q, k, options in (
        ([150, 0, 64, 1], [150, 0, 64, 1], {}),
        ([70, 33, 20], [200, 10, 0], more),
        ([70, 33], [33, 130], {"is_causal": False}),
    )[: 3 if width == 256 else 2]:
        for spare in (0, 3) if width == 256 or not options else (3,):
            same("mha_prefill", ragged_call(normal(q, k, (4, 2), width, dtype=torch.bfloat16), spare, **options))
            if width == 128 and spare == 3 and not options:
                same("mha_prefill", ragged_call(normal(q, k, (4, 2), 64, dtype=torch.bfloat16), spare))
for size in (64, 16):
    for tokens in (1, 2):
        make = torch.Generator().manual_seed(1)
        q = [torch.randn(tokens, 64 // tokens, 576, generator=make).bfloat16() for _ in range(3)]
        latents = [torch.randn(n, 576, generator=make).bfloat16() for n in (70, 130, tokens)]
        call = latent_call("mla_decode_with_kvcache", q, latents, 512, nope=128)
        names = ("kv_cache", "page_table", "cache_seqlens")
        same("mla_decode_with_kvcache", call | dict(zip(names, pages([x.unsqueeze(1) for x in latents], size))))
for name in sorted(seen):
    print(name, seen[name])
"""
