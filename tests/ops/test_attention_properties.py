"""Attention over drawn lengths, heads, pages and options, against per-sequence softmax and across forms."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from attention_cases import (
    Sequences,
    arguments_for,
    check,
    dense,
    kernels_of,
    latent_call,
    normal,
    op_of,
    ragged_call,
    run,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from tskernel.library import ops
from tskernel.testing import compare

few = settings(max_examples=25, deadline=None, derandomize=True)
HEADS = ((1, 1), (4, 2), (6, 2), (5, 1), (3, 3))


@dataclass(frozen=True)
class Case:
    """Lengths, heads and options of one drawn call."""

    lengths: list[tuple[int, int]]
    heads: tuple[int, int]
    width: int
    page_size: int
    window: int
    cap: float
    sinks: bool
    seed: int

    def sequences(self) -> Sequences:
        """Return the drawn sequences."""
        q, k = [a for a, _ in self.lengths], [b for _, b in self.lengths]
        return normal(q, k, self.heads, self.width, self.width + 3, seed=self.seed)

    def options(self) -> dict[str, Any]:
        """Return the options by name."""
        sinks = torch.randn(self.heads[0], generator=torch.Generator().manual_seed(self.seed)) if self.sinks else None
        return {"window_left": self.window, "logit_cap": self.cap, "sinks": sinks}


def cases(*, options: bool = True, uniform_queries: int | None = None) -> st.SearchStrategy[Case]:
    """Draw calls; with ``uniform_queries`` every sequence has that many queries, as decode needs."""
    queries = st.integers(0, 5) if uniform_queries is None else st.just(uniform_queries)
    return st.builds(
        Case,
        lengths=st.lists(st.tuples(queries, st.integers(0, 9)), min_size=1, max_size=4).filter(
            lambda x: sum(a for a, _ in x) > 0
        ),
        heads=st.sampled_from(HEADS),
        width=st.sampled_from((1, 7, 16)),
        page_size=st.sampled_from((1, 3, 4)),
        window=st.sampled_from((-1, 0, 2, 20)) if options else st.just(-1),
        cap=st.sampled_from((0.0, 0.0, 1.5)) if options else st.just(0.0),
        sinks=st.booleans() if options else st.just(False),
        seed=st.integers(0, 99),
    )


def accepted(kernel: str, case: Case) -> bool:
    """Whether the kernel takes the options: the portable ones have neither cap nor sinks."""
    return kernel.startswith("reference") or not (case.cap or case.sinks)


def check_case(kernel: str, case: Case) -> None:
    """Compare a kernel with the per-sequence softmax."""
    if not accepted(kernel, case):
        return
    s = case.sequences()
    want, lse = dense(s, **case.options())
    check(kernel, arguments_for(kernel, s, page_size=case.page_size, **case.options()), want, lse)


@few
@given(case=cases())
@pytest.mark.parametrize("kernel", kernels_of("mha_prefill", "mha_extend_with_kvcache"))
def test_ragged_queries_equal_per_sequence_softmax(kernel: str, case: Case) -> None:
    check_case(kernel, case)


@few
@given(case=cases(options=False))
@pytest.mark.parametrize("kernel", kernels_of("mha_prefill", "mha_extend_with_kvcache"))
def test_full_attention_equals_per_sequence_softmax(kernel: str, case: Case) -> None:
    s = case.sequences()
    want, lse = dense(s, causal=False)
    check(kernel, arguments_for(kernel, s, page_size=case.page_size, is_causal=False), want, lse)


@few
@given(data=st.data(), q_len=st.integers(1, 3))
@pytest.mark.parametrize("kernel", kernels_of("mha_decode_with_kvcache"))
def test_decode_equals_per_sequence_softmax(kernel: str, data: st.DataObject, q_len: int) -> None:
    check_case(kernel, data.draw(cases(uniform_queries=q_len)))


@few
@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=3), new=st.integers(1, 3), seed=st.integers(0, 99))
@pytest.mark.parametrize("kernel", kernels_of("mha_extend_with_kvcache", "mha_decode_with_kvcache"))
def test_cached_forms_equal_the_last_rows_of_prefill(kernel: str, lengths: list[int], new: int, seed: int) -> None:
    new = min(new, *lengths)
    whole = normal(lengths, lengths, seed=seed)
    full = ops["mha_prefill"].front(**ragged_call(whole), override="reference").split(lengths)
    last = Sequences([q[-new:] for q in whole.q], whole.k, whole.v)
    compare(run(kernel, arguments_for(kernel, last))[0], torch.cat([x[-new:] for x in full]).double())


@few
@given(lengths=st.lists(st.integers(0, 9), min_size=1, max_size=3), q_len=st.integers(1, 3), seed=st.integers(0, 99))
@pytest.mark.parametrize("kernel", kernels_of("mla_extend_with_kvcache", "mla_decode_with_kvcache"))
def test_latent_attention_is_attention_with_one_kv_head(kernel: str, lengths: list[int], q_len: int, seed: int) -> None:
    make = torch.Generator().manual_seed(seed)
    latents = [torch.randn(n, 20, generator=make) for n in lengths]
    q = [torch.randn(q_len, 3, 20, generator=make) for _ in lengths]
    want, lse = dense(
        Sequences(q, [x[:, None] for x in latents], [x[:, None, :12] for x in latents]), scale=(16 + 8) ** -0.5
    )
    check(kernel, latent_call(op_of(kernel), q, latents, 12), want, lse)
