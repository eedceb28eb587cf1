"""The Hopper flash attention without a GPU: its own source, emulated, against the oracle."""

from __future__ import annotations

import itertools
import types
from typing import Any

import gluon_emulation
import pytest
import torch

from tskernel.backends.cuda import _flash_hopper as flash
from tskernel.testing import compare, oracle

ASSEMBLY = {
    "_exp2": torch.exp2,
    "_pack": lambda weights, dtype, _width: weights.to(dtype),
    "_unpack": lambda pairs, _dtype, _width, _layout: pairs,
    "_fade": lambda total, shrink: total * shrink[:, None],
}


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let launches run here, on three made-up multiprocessors."""
    kernel = gluon_emulation.emulate(flash.device.DECLARED, **ASSEMBLY)["attend"]
    monkeypatch.setattr(flash, "device", types.SimpleNamespace(_attend=kernel))
    monkeypatch.setattr(flash, "multiprocessors", lambda _device: 3)
    monkeypatch.setattr(flash, "tensor_map", lambda x, box: gluon_emulation.Descriptor(x, x.shape, x.stride(), box))


def call(lens: list[int], heads: int, kv_heads: int, width: int, value_width: int, lens_k: list[int]) -> dict[str, Any]:
    """Return a call with three rows that no sequence owns; they are NaN."""
    torch.manual_seed(sum(lens) + width)
    cu_q, cu_k = ([0, *itertools.accumulate(x)] for x in (lens, lens_k))

    def rows(count: int, n: int, columns: int) -> torch.Tensor:
        x = torch.full((count + 3, n, columns), float("nan"), dtype=torch.bfloat16)
        x[:count] = torch.randn(count, n, columns)
        return x

    return {
        "q": rows(cu_q[-1], heads, width),
        "k": rows(cu_k[-1], kv_heads, width),
        "v": rows(cu_k[-1], kv_heads, value_width),
        "cu_seqlens": torch.tensor(cu_q, dtype=torch.int32),
        "max_seqlen": max(lens),
        "cu_seqlens_kv": torch.tensor(cu_k, dtype=torch.int32),
        "max_seqlen_kv": max(lens_k),
    }


def check(given: dict[str, Any], config: flash.Config | None, spread: bool, **options: Any) -> None:
    """Compare out and LSE, written into poisoned buffers, with the reference in wider precision."""
    q, v = given["q"], given["v"]
    shape = (q.shape[0], q.shape[1], v.shape[2])
    out = torch.full(shape, float("nan"), dtype=q.dtype)
    if spread:  # heads first, which the copy engine writes too
        out = torch.full((shape[1], shape[0], shape[2]), float("nan"), dtype=q.dtype).transpose(0, 1)
    lse = torch.full(shape[:2], float("nan"))
    flash.attend(
        q, given["k"], v, out, lse, given["cu_seqlens"], given["cu_seqlens_kv"],
        max_k=given["max_seqlen_kv"], scale=q.shape[2] ** -0.5, causal=options.get("is_causal", True),
        window=options.get("window_left", -1), cap=options.get("logit_cap", 0.0), sinks=options.get("sinks"),
        config=config,
    )  # fmt: skip
    want, want_lse = oracle("mha_prefill", **given, **options, return_lse=True)
    compare(out, want)
    compare(lse, want_lse, dtype=torch.bfloat16)


LENS = [33, 0, 160, 5, 128]
WAYS = {
    "late, by the copy engine": flash.Config(2, 128, 2, 2, 240, late=True),
    "late, by threads": flash.Config(2, 128, 3, 2, 240, late=True, bulk=False),
    "in turns": flash.Config(3, 128, 2, 2, 160, turns=True),
    "one stage of queries": flash.Config(2, 64, 2, 1, 240, bulk=False),
}


@pytest.mark.usefixtures("program")
@pytest.mark.parametrize("way", WAYS)
def test_each_way_gives_what_the_oracle_gives(way: str) -> None:
    check(call(LENS, 8, 1, 64, 64, LENS), WAYS[way], spread=False)
    check(call([70, 10, 3], 4, 2, 64, 64, [300, 0, 150]), WAYS[way], spread=True, window_left=30)
    check(call([300, 40], 4, 2, 64, 64, [40, 300]), WAYS[way], spread=False, is_causal=False)


@pytest.mark.usefixtures("program")
@pytest.mark.parametrize(
    ("width", "value_width", "heads"), [(40, 40, 8), (64, 64, 5), (128, 128, 6), (192, 128, 2), (256, 256, 2)]
)
def test_what_is_chosen_gives_what_the_oracle_gives(width: int, value_width: int, heads: int) -> None:
    given = call([70, 0, 160], heads, 1, width, value_width, [70, 0, 160])
    check(given, None, spread=False, sinks=torch.randn(heads), logit_cap=5.0)
    check(given, None, spread=True, window_left=20)
