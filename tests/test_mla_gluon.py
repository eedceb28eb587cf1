"""The Hopper latent attention without a GPU: its own source, emulated, against the oracle."""

from __future__ import annotations

import random
import weakref
from typing import Any

import gluon_emulation
import pytest
import torch

from tskernel.backends.cuda import _mla_launch as latent
from tskernel.backends.plans import Plans
from tskernel.testing import compare, oracle


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let launches run here, on three made-up multiprocessors."""
    for file in (latent.device, latent.few):
        monkeypatch.setattr(file, "DECLARED", gluon_emulation.emulate(file.DECLARED))
    monkeypatch.setattr(latent, "_launches", Plans())
    monkeypatch.setattr(latent, "multiprocessors", lambda _device: 3)
    monkeypatch.setattr(latent, "_map", gluon_emulation.Descriptor)


def call(lens: list[int], heads: int, q_len: int, page: int, dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    """Return a call whose unused slots are NaN and whose unused table entries are garbage."""
    torch.manual_seed(sum(lens) + page)
    need = [-(-n // page) for n in lens]
    pages = sum(need) + 1
    order = random.Random(0).sample(range(pages), pages)
    table = torch.full((len(lens), max(need) + 1), -1, dtype=torch.int32)
    table[:, -1] = 2**31 - 1
    kv = torch.full((pages, page, 1, 576), float("nan"))
    for i, n in enumerate(lens):
        for j in range(need[i]):
            table[i, j] = page_id = order.pop()
            kv[page_id, : n - j * page] = torch.randn(min(page, n - j * page), 1, 576)
    return {
        "q": torch.randn(len(lens), q_len, heads, 576).to(dtype),
        "kv_cache": kv.to(dtype),
        "page_table": table,
        "cache_seqlens": torch.tensor(lens, dtype=torch.int32),
    }


def attend(given: dict[str, Any], plan: latent.Plan = latent.DEFAULT, scale: float = 0.07) -> tuple[Any, Any]:
    """Run the kernel into poisoned buffers."""
    q = given["q"]
    out = torch.full((*q.shape[:3], 512), -7.0, dtype=q.dtype)
    lse = torch.full(q.shape[:3], -7.0)
    latent.attend(q, given["kv_cache"], given["page_table"], given["cache_seqlens"], out, lse, scale, plan)
    return out, lse


CASES = {
    "one key": ([1], 40, 1, 64, latent.DEFAULT),
    "chunks": ([200, 64, 0, 130], 40, 1, 64, latent.Plan(1, 100)),
    "flat line": ([200, 64, 0, 130, 70, 500], 40, 1, 64, latent.Plan(1, 0)),
    "flat line of whole tiles": ([128, 128, 128, 128], 100, 1, 64, latent.DEFAULT),
    "verify, two tiles": ([1, 3, 66, 0, 129], 30, 3, 64, latent.DEFAULT),
    "page 16": ([1, 17, 64, 100], 20, 2, 16, latent.Plan(1, 1)),
    "page 128": ([127, 129, 300], 40, 1, 128, latent.Plan(1, 1)),
    "three lanes, flat line": ([200, 64, 0, 130], 50, 3, 64, latent.Plan(1, 0)),
    "three lanes of two tiles, chunks": ([200, 64], 70, 5, 64, latent.Plan(1, 100)),
    "three lanes of two tiles, flat line": ([200, 64, 0, 129, 500], 70, 5, 64, latent.Plan(1, 0)),
    "few rows, one key": ([1], 4, 1, 64, latent.DEFAULT),
    "few rows, one request cut three times": ([1000], 16, 1, 64, latent.Plan(1, 4)),
    "few rows, chunks": ([200, 64, 0, 130], 16, 1, 64, latent.Plan(1, 100)),
    "few rows, one chunk each": ([449, 65], 16, 1, 64, latent.Plan(8, 4)),
    "few rows, flat line": ([200, 64, 0, 130, 70, 500], 16, 1, 64, latent.Plan(1, 0)),
    "few rows, verify": ([1, 66, 0, 129], 5, 5, 64, latent.DEFAULT),
    "few rows, page 16": ([1, 17, 64, 100], 16, 2, 16, latent.Plan(1, 1)),
    "few rows, page 32": ([33, 95, 64], 16, 1, 32, latent.DEFAULT),
    "few rows, page 128": ([127, 129, 300], 16, 1, 128, latent.Plan(1, 1)),
}


@pytest.mark.usefixtures("programs")
@pytest.mark.parametrize("case", CASES)
def test_the_emulated_kernel_equals_the_oracle(case: str) -> None:
    lens, heads, q_len, page, plan = CASES[case]
    given = call(lens, heads, q_len, page)
    rest = {"max_seqlen_k": max(lens), "kv_lora_rank": 512, "qk_nope_head_dim": 128, "softmax_scale": 0.07}
    want, want_lse = oracle("mla_decode_with_kvcache", **given, **rest, return_lse=True)
    got, got_lse = attend(given, plan)
    compare(got, want)
    compare(got_lse, want_lse, dtype=torch.float16)


@pytest.mark.usefixtures("programs")
@pytest.mark.parametrize("slots", [4, 7])
@pytest.mark.parametrize("plan", [latent.Plan(1, 0), latent.Plan(1, 100)])
def test_lanes_of_programs_share_out_the_same_keys(
    slots: int, plan: latent.Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(latent, "multiprocessors", lambda _device: slots)
    monkeypatch.setattr(latent, "lanes_of", lambda tiles, _slots: tiles)
    lens = [300, 64, 0, 129, 190]
    given = call(lens, 60, 2, 64)
    rest = {"max_seqlen_k": max(lens), "kv_lora_rank": 512, "qk_nope_head_dim": 128, "softmax_scale": 0.07}
    want, want_lse = oracle("mla_decode_with_kvcache", **given, **rest, return_lse=True)
    got, got_lse = attend(given, plan)
    compare(got, want)
    compare(got_lse, want_lse, dtype=torch.float16)


def test_no_lane_leaves_many_multiprocessors_idle() -> None:
    assert [latent.lanes_of(tiles, 132) for tiles in (1, 2, 3, 4, 5, 8, 50, 127)] == [1, 2, 3, 4, 5, 8, 25, 127]
    assert [latent.lanes_of(tiles, 78) for tiles in (2, 7, 64)] == [2, 7, 4]


@pytest.mark.usefixtures("programs")
@pytest.mark.parametrize(("lens", "heads"), [([700], 40), ([900, 0, 64], 40), ([700], 16), ([900, 0, 64], 5)])
def test_a_tile_may_have_more_parts_than_the_join_reads_together(
    lens: list[int], heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(latent, "multiprocessors", lambda _device: 12)
    given = call(lens, heads, 1, 64)
    rest = {"max_seqlen_k": max(lens), "kv_lora_rank": 512, "qk_nope_head_dim": 128, "softmax_scale": 0.07}
    want, want_lse = oracle("mla_decode_with_kvcache", **given, **rest, return_lse=True)
    got, got_lse = attend(given, latent.Plan(1, 4))
    compare(got, want)
    compare(got_lse, want_lse, dtype=torch.float16)


@pytest.mark.usefixtures("programs")
@pytest.mark.parametrize("heads", [16, 40])
@pytest.mark.parametrize("power", [-40, 40])
def test_parts_keep_values_that_fp16_could_not(power: int, heads: int) -> None:
    given = call([200, 64, 0, 130], heads, 1, 64)
    plan = latent.Plan(1, 100)
    want, _ = attend(given, plan)
    given["kv_cache"] = given["kv_cache"] * 2.0**power
    got, _ = attend(given, plan, 0.07 * 2.0**-power)
    compare(got * 2.0**-power, want)


@pytest.mark.usefixtures("programs")
def test_an_empty_batch_of_requests_writes_zeros() -> None:
    out, lse = attend(call([0, 0], 16, 1, 64))
    compare(out, torch.zeros_like(out), exact=True)
    compare(lse, torch.full_like(lse, float("-inf")), exact=True)


@pytest.mark.parametrize(
    ("page", "strides", "reason"),
    [
        (48, (48 * 576, 576, 576, 1), "page size"),
        (64, (64 * 580, 580, 580, 1), "strides"),
        (64, (0, 576, 576, 1), "strides"),
    ],
)
def test_what_a_tensor_map_cannot_describe_is_declined(page: int, strides: tuple[int, ...], reason: str) -> None:
    kv = torch.empty_strided((2, page, 1, 576), strides)
    why = latent.unsuitable(torch.empty(1, 1, 16, 576), kv)
    assert why is not None and reason in why


def test_the_stride_of_a_single_page_does_not_matter() -> None:
    assert latent.unsuitable(torch.empty(1, 1, 16, 576), torch.empty_strided((1, 64, 1, 576), (3, 576, 7, 1))) is None


def test_a_tensor_map_is_made_once_and_does_not_keep_the_tensor() -> None:
    pytest.importorskip("triton")
    x = torch.zeros(4, 64, dtype=torch.bfloat16)
    view = latent.View((4, 64), (64, 1), ((16, 64), (32, 64)))
    first, second = view.maps(x)
    assert (first.block_shape, second.block_shape) == ([16, 64], [32, 64])
    assert view.maps(x)[0] is first
    assert view.maps(torch.zeros_like(x))[0].base.data_ptr() != first.base.data_ptr() == x.data_ptr()
    gone = weakref.ref(x)
    del x
    assert gone() is None


@pytest.mark.parametrize(("batch", "rows"), [(1, 128), (1, 16), (16, 128), (64, 128), (300, 256)])
def test_the_join_covers_all_columns_and_rows(batch: int, rows: int) -> None:
    sizes = latent.join_sizes(batch, rows, -(-rows // latent.height_of(rows)), 132)
    assert sizes["TAKE"] % (4 // sizes["SPREAD"]) == 0 and latent.height_of(rows) % sizes["TAKE"] == 0
    assert sizes["PARTS"] % sizes["SPREAD"] == 0
