"""What test_vendor_attention.py runs in a process of its own, where Triton interprets and the CPU counts as an sm90."""

from __future__ import annotations

import functools
from typing import Any

import attention_cases as cases
import pytest
import torch
import vendors
from attention_cases import NAN
from helpers import declines, short
from test_conformance import actual, expected
from torch import Tensor

from tskernel.backends.cuda import _cudnn, _fa3, _fa4, _flashinfer
from tskernel.dispatch.errors import KernelRefusedError
from tskernel.dispatch.registry import KernelRegistry
from tskernel.library import Op, Sample, ops
from tskernel.testing import compare, oracle, samples_of

KERNELS = [
    s.name
    for s in KernelRegistry.get().list_kernels(family="attention")
    if s.backend == "cuda" and s.solution in vendors.LIBRARIES
]
HALVES = (torch.float16, torch.bfloat16)


@pytest.fixture(autouse=True)
def fresh() -> None:
    """Forget which library the last test installed."""
    _fa3.library.cache_clear()
    _fa3.left_out.cache_clear()
    _fa4._compiled.clear()
    _cudnn._planned.clear()
    _flashinfer._plans.clear()


def op_and_library(kernel: str) -> tuple[Op, Any]:
    _, op, solution = kernel.split("/")
    return ops[op], vendors.LIBRARIES[solution]


def run(kernel: str, arguments: dict[str, Any], *, lse: bool = True) -> Any:
    """Call through the public function with the vendor's stand-in installed."""
    op, library = op_and_library(kernel)
    with library():
        return op.front(**arguments, override=kernel, **({"return_lse": True} if lse else {}))


def check(kernel: str, arguments: dict[str, Any]) -> None:
    """Compare results, with the LSE where the kernel gives it and without, with the oracle; arguments must stay."""
    op, _ = op_and_library(kernel)
    before = {n: x.clone() for n, x in arguments.items() if isinstance(x, Tensor)}
    want = oracle(op.name, **arguments, return_lse=True)
    if KernelRegistry.get().get_by_name(kernel).lse:
        compare(run(kernel, arguments), want)
    compare(run(kernel, arguments, lse=False), want[0])
    for name, x in before.items():
        same = (arguments[name] == x) | (arguments[name].isnan() & x.isnan())
        assert bool(same.all()), f"{name} changed"


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("kernel", KERNELS)
def test_conformance(kernel: str, record_property: Any) -> None:
    op, library = op_and_library(kernel)
    ran = 0
    for form in op.forms:
        for dtype, sample in samples_of(op, dtypes=HALVES if form == op.forms[-1] else HALVES[1:]):
            with library():
                if declines(kernel, op, sample, form) is not None:
                    continue
                try:
                    compare(actual(op, kernel, sample, form), expected(op, sample, form))
                except Exception as error:
                    raise AssertionError(f"{form or 'base'!r}, {short(dtype)}, {sample.name}: {error}") from error
            ran += 1
    assert ran or op.name.startswith("mla") or kernel.endswith(("cudnn", "flashinfer")), (
        "their tests below have the widths that they take"
    )
    record_property("vendor kernel x sample x form compared with the oracle", ran)


def each(*names: str) -> Any:
    return pytest.mark.parametrize("kernel", [k for k in KERNELS if k.split("/")[1] in names])


each_prefill, each_paged = each("mha_prefill"), each("mha_extend_with_kvcache", "mha_decode_with_kvcache")
each_ragged = each("mha_prefill", "mha_extend_with_kvcache")
each_mha = each("mha_prefill", "mha_extend_with_kvcache", "mha_decode_with_kvcache")
BF16 = torch.bfloat16


def sequences(kernel: str, q: list[int], k: list[int], **options: Any) -> cases.Sequences:
    width = {"cudnn": 128, "flashinfer": 64}.get(kernel.split("/")[2], 32)
    return cases.normal(q, k, **{"heads": (4, 2), "width": width, "dtype": BF16, **options})


@each_ragged
@pytest.mark.parametrize("stray", (NAN, float("inf"), 1.0))
def test_rows_and_values_of_no_sequence(kernel: str, stray: float) -> None:
    """ATT-05: results as without the spare rows, those 0 / -inf, and the arguments as they were."""
    arguments = cases.arguments_for(kernel, sequences(kernel, [40, 3], [40, 3]), spare=5)
    for name in ("q", "k", "v"):
        if name in arguments:
            arguments[name][43:] = stray
    arguments["max_seqlen_q" if "extend" in kernel else "max_seqlen"] = 500
    check(kernel, arguments)


@each_ragged
def test_rows_without_keys(kernel: str) -> None:
    """ATT-01, ATT-02: causal with more queries than keys, no keys at all, and full attention without keys."""
    for causal in (True, False):
        s = sequences(kernel, [70, 3, 2, 0], [20, 0, 4, 3])
        check(kernel, cases.arguments_for(kernel, s, is_causal=causal))


@each_mha
@pytest.mark.parametrize("dtype", (torch.float32, BF16))
@pytest.mark.parametrize("window", (-1, 2))
def test_sinks_stay_out_of_the_lse(kernel: str, dtype: torch.dtype, window: int) -> None:
    sinks = torch.tensor([3.0, -1.0, -float("inf"), 9.01]).to(dtype)
    s = sequences(kernel, [2, 2, 2], [6, 3, 0])
    check(kernel, cases.arguments_for(kernel, s, sinks=sinks, window_left=window))


@each_paged
@pytest.mark.parametrize("page_size", (1, 16, 128))
def test_unused_slots_and_entries(kernel: str, page_size: int) -> None:
    """PAGE-01, PAGE-02: NaN in unused slots, garbage entries past the length; 40 queries of 2 heads fill a tile."""
    s = sequences(kernel, [40, 40], [90, 70], heads=(4, 2))
    check(kernel, cases.arguments_for(kernel, s, page_size=page_size))


@each_paged
@pytest.mark.parametrize("page_size", (4, 64))
def test_pages_freed_before_a_window(kernel: str, page_size: int) -> None:
    """Their table entries name no page, and the last page's unused slots hold NaN."""
    arguments = cases.arguments_for(kernel, sequences(kernel, [2, 2], [150, 0]), page_size=page_size, window_left=5)
    freed = (150 - 2 - 5) // page_size
    arguments["page_table"][0, :freed] = torch.tensor((-1, 2**31 - 1, -(2**31), 99) * 20)[:freed]
    check(kernel, arguments)


@each_mha
def test_results_go_where_they_are_wanted(kernel: str) -> None:
    """An ``out`` whose rows are not on 16-byte borders, inside a buffer that must not be written elsewhere."""
    op, library = op_and_library(kernel)
    arguments = cases.arguments_for(kernel, sequences(kernel, [2, 2], [6, 3]))
    width = arguments["q"].shape[2]
    buffer = torch.full((4, 4, width + 5), -7.0, dtype=BF16)
    with library():
        op.front(**arguments, out=buffer[..., 3:-2], override=kernel)
    compare(buffer[..., 3:-2], oracle(op.name, **arguments))
    assert bool((buffer[..., :3] == -7).all()) and bool((buffer[..., -2:] == -7).all())


@each_mha
def test_memory_that_starts_off_a_border(kernel: str) -> None:
    """Selection cannot see where memory starts, so the wrapper copies."""
    arguments = cases.arguments_for(kernel, sequences(kernel, [2, 2], [6, 3]))
    for name, x in arguments.items():
        if isinstance(x, Tensor) and x.dtype == BF16:
            moved = torch.empty(x.numel() + 1, dtype=BF16)[1:].view(x.shape).copy_(x)
            arguments[name] = moved
    check(kernel, arguments)


@each_mha
def test_declines_what_the_vendor_cannot_read(kernel: str) -> None:
    op, library = op_and_library(kernel)
    arguments = cases.arguments_for(kernel, sequences(kernel, [2, 2], [6, 3]))
    q = arguments["q"]
    width = q.shape[2]
    for change, why in (
        ({"q": torch.cat([q, q], -1)[..., 8 : 8 + width]}, None),
        ({"q": torch.empty(*q.shape[:2], width + 4, dtype=BF16)[..., :width]}, "16-byte"),
        ({"softmax_scale": 0.0}, "softmax_scale"),
    ):
        with library():
            text = declines(kernel, op, Sample("", **{**arguments, **change}), "")
        assert text is None if why is None else text is not None and why in text


@each("mla_prefill")
@pytest.mark.parametrize("causal", (True, False))
def test_mla_prefill_of_deepseek(kernel: str, causal: bool) -> None:
    s = sequences(kernel, [40, 3, 2], [40, 2, 0], heads=(2, 2), width=192, value_width=128)
    check(kernel, {
        "q": cases.packed(s.q, s.q[0], 3), "k": cases.packed(s.k, s.k[0], 3), "v": cases.packed(s.v, s.v[0], 3),
        "cu_seqlens_q": cases.offsets(s.q), "cu_seqlens_kv": cases.offsets(s.k), "max_seqlen_q": 40,
        "max_seqlen_kv": 400, "is_causal": causal,
    })  # fmt: skip


@each("mla_decode_with_kvcache")
@pytest.mark.parametrize("version", ("414a2f3", "9241ae3"))
@pytest.mark.parametrize("queries", (1, 3))
def test_mla_decode_of_deepseek(kernel: str, version: str, queries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both interfaces; unused slots hold NaN, entries past a length are out of range, some rows see no key."""
    monkeypatch.setitem(vendors.LIBRARIES, "flashmla", functools.partial(vendors.flash_mla, version))
    torch.manual_seed(0)
    q = [torch.randn(queries, 4, 576).to(BF16) for _ in range(4)]
    latents = [torch.randn(n, 576).to(BF16) for n in (130, 64, 0, 1)]
    arguments = cases.latent_call("mla_decode_with_kvcache", q, latents, 512, nope=128)
    paged = cases.pages([x.unsqueeze(1) for x in latents], 64)
    check(kernel, {**arguments, **dict(zip(("kv_cache", "page_table", "cache_seqlens"), paged, strict=True))})


@each("mha_decode_with_kvcache")
def test_decodes_several_tokens_with_fewer_keys(kernel: str) -> None:
    """Rows without keys beside rows with some, windows and a table that is a slice of a wider one."""
    for window in (-1, 0, 3, 70):
        arguments = cases.arguments_for(kernel, sequences(kernel, [3] * 4, [90, 2, 0, 3]), window_left=window)
        wide = torch.full((4, 70), 2**31 - 1, dtype=torch.int32)
        wide[:, 5 : 5 + arguments["page_table"].shape[1]] = arguments["page_table"]
        arguments["page_table"] = wide[:, 5 : 5 + arguments["page_table"].shape[1]]
        check(kernel, arguments)


@each("mha_prefill", "mla_prefill")
def test_compiles_nothing_during_capture(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashAttention-4 compiles and cuDNN plans at first use; FlashAttention-3 is compiled already."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    function = KernelRegistry.get().get_by_name(kernel).function
    s = sequences(kernel, [4], [4], heads=(2, 2))
    names = ("cu_seqlens",) if "mha" in kernel else ("cu_seqlens_q", "cu_seqlens_kv")
    lengths = {"max_seqlen": 4} if "mha" in kernel else {"max_seqlen_q": 4, "max_seqlen_kv": 4}
    arguments = {"q": s.q[0], "k": s.k[0], "v": s.v[0], **dict.fromkeys(names, cases.offsets(s.q)), **lengths}
    out = torch.empty_like(s.q[0])
    with op_and_library(kernel)[1]():
        if "fa3" not in kernel:
            with pytest.raises(KernelRefusedError, match="being captured"):
                function(**arguments, out=out)
            monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
            function(**arguments, out=out)
            monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        function(**arguments, out=out)
