"""What of benchmarks/moe.py runs without a GPU: rows, inputs, checks, orders of weights, bounds and the page."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

import _gemm_report
import _moe_peers
import _moe_report
import _moe_rows
import moe
from _moe_rows import MODELS, Experts, Model, Row
from no_graphs import options, without_graphs

from tskernel.ops.moe._weights import expert_weights
from tskernel.testing import kernel_names

OAI: dict[str, Any] = {"activation": "swiglu_oai", "biased": True}
SMALL = (
    Model("oai mxfp4", 8, 2, 64, 96, "mxfp4", **OAI),
    Model("oai bf16", 8, 2, 64, 96, **OAI),
    Model("silu bf16", 8, 3, 64, 32),
    Model("fp8", 16, 4, 192, 128, "fp8_block", local=4, score="sigmoid", n_group=4, topk_group=2, scaling=2.5),
)
each_model = pytest.mark.parametrize("model", SMALL, ids=lambda m: m.name)


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (_moe_rows, _moe_peers):
        monkeypatch.setattr(module, "DEVICE", "cpu")
    torch.manual_seed(0)


def test_rows_have_names_of_their_own_and_are_found_by_word() -> None:
    rows = _moe_rows.rows()
    assert len({r.name for r in rows}) == len(rows) == len(MODELS) * len(_moe_rows.TOKENS)
    assert {r.model.quant for r in _moe_rows.rows(["mxfp4"])} == {"mxfp4"}
    assert {r.tokens for r in _moe_rows.rows([", 8192 tokens"])} == {8192}


@each_model
def test_bytes_of_an_expert_are_those_of_its_tensors(model: Model) -> None:
    held = sum(w.nbytes for w in Experts(model).weights.values())
    assert held == model.expert_bytes * model.here


def test_gpt_oss_has_the_weights_that_it_is_known_for() -> None:
    mxfp4, bf16 = MODELS[:2]
    values = 3 * 2880 * 2880
    assert bf16.expert_bytes == 2 * (values + 3 * 2880)
    assert mxfp4.expert_bytes == values // 2 + values // 32 + 2 * 3 * 2880


@each_model
def test_the_work_is_that_of_the_experts_that_are_reached(model: Model) -> None:
    row, experts = Row(model, 5), Experts(model)
    sets = [row.draw(), row.draw()]
    weights = flops = 0
    for a in sets:
        ids = experts.route(a["logits"])[1].tolist()
        reached = {e for token in ids for e in token if e < model.here}
        weights += sum(w[e].nbytes for e in reached for w in experts.weights.values())
        flops += sum(2 * 3 * model.hidden * model.inner for token in ids for e in token if e < model.here)
    work = row.work(experts, sets)
    assert work["weight_bytes"] == weights / 2 and work["flops"] == flops / 2
    assert work["bytes"] == weights / 2 + sum(x.nbytes for x in (sets[0]["x"], sets[0]["x"]))
    rate = 1979e12 if model.quant == "fp8_block" else 989e12
    assert work["floor_us"] == pytest.approx(1e6 * max(work["bytes"] / 4.3e12, work["flops"] / rate))


@each_model
def test_no_two_logits_tie_and_experts_are_equally_likely(model: Model) -> None:
    logits = Row(model, 4000).draw()["logits"]
    assert all(row.unique().numel() == model.experts for row in logits[:50])
    first = logits.float().argmax(1).bincount(minlength=model.experts) / 4000
    assert float((first - 1 / model.experts).abs().max()) < 0.03


@pytest.mark.parametrize("model", MODELS, ids=lambda m: m.name)
def test_logits_of_the_real_models_are_exact(model: Model) -> None:
    logits = Row(model, 3).draw()["logits"]
    assert all(row.unique().numel() == model.experts for row in logits)


def test_few_tokens_send_a_rank_its_even_share() -> None:
    model = SMALL[3]
    experts = Experts(model)
    for tokens in (1, 4, 16):
        for a in Row(model, tokens).sets(experts):
            assert Row(model, tokens).slots(experts, a).numel() == tokens * model.top_k * model.here // model.experts


def test_sets_walk_over_more_than_the_cache_holds_where_there_is_as_much(monkeypatch: pytest.MonkeyPatch) -> None:
    model = SMALL[2]
    row, experts = Row(model, 1), Experts(model)
    monkeypatch.setattr(_moe_rows, "COLD", 7 * model.expert_bytes)
    sets = row.sets(experts)
    reached = {int(e) for a in sets for e in row.slots(experts, a)}
    assert 7 <= len(reached) <= 8 and 3 <= len(sets) <= _moe_rows.MOST_SETS
    assert len(Row(model, 64).sets(experts)) == 2


@each_model
def test_the_check_takes_the_right_result_and_no_other(model: Model) -> None:
    row, experts = Row(model, 21), Experts(model)
    a = row.make(experts)
    want = _moe_rows.expected(experts, a)
    assert want.shape == (2 * _moe_rows.SAMPLE, model.hidden) and want.dtype == torch.float64
    right = moe.ops["moe_fused"].front(**experts.call(a), override="reference/moe_fused")
    assert _moe_rows.check(right, want, model.quant) == ""
    last = right.clone()
    last[-1] = right[1]
    for wrong in (right * 1.2, right + 0.3, torch.zeros_like(right), right.roll(1, 0), right * float("nan"), last):
        assert _moe_rows.check(wrong, want, model.quant) != ""


@each_model
def test_our_kernels_and_the_planned_one_pass_the_check(model: Model) -> None:
    row, experts = Row(model, 6), Experts(model)
    a = row.make(experts)
    want, told = _moe_rows.expected(experts, a), moe.ops["moe_fused"].explain(**experts.call(a)).candidates
    names = {c.name for c in told if c.status != "rejected"} & set(kernel_names("moe_fused"))
    assert names and moe.selected(experts, a) in names
    for name in (None, *names):
        assert _moe_rows.check(_moe_peers.ours(name, experts, a)(), want, model.quant) == "", name


def test_a_wrong_router_is_found() -> None:
    model = SMALL[2]
    experts = Experts(model)
    a = Row(model, 4).make(experts)
    want = _moe_rows.expected(experts, a)
    shifted = _moe_peers.ours(None, experts, {**a, "logits": a["logits"].roll(1, 1)})()
    assert _moe_rows.check(shifted, want, model.quant) != ""


def values(w: dict[str, Tensor], name: str, model: Model) -> Tensor:
    return expert_weights(w[name], w.get(f"{name}_scale"), model.quant, torch.arange(model.here), torch.float64)


@each_model
def test_other_orders_hold_the_same_rows(model: Model) -> None:
    experts = Experts(model)
    plain, half = values(experts.weights, "w13", model), model.inner
    up_first = _moe_peers.up_first(experts)
    assert torch.equal(values(up_first, "w13", model), torch.cat((plain[:, half:], plain[:, :half]), 1))
    if model.quant != "fp8_block":
        mixed = values(_moe_peers.interleaved(experts), "w13", model)
        assert torch.equal(mixed[:, 0::2], plain[:, :half]) and torch.equal(mixed[:, 1::2], plain[:, half:])
    if model.biased:
        bias = _moe_peers.interleaved(experts)["w13_bias"]
        assert torch.equal(bias[:, 1::2], experts.weights["w13_bias"][:, half:])
        assert torch.equal(up_first["w13_bias"][:, :half], experts.weights["w13_bias"][:, half:])


def test_torch_grouped_is_right() -> None:
    model = SMALL[2]
    experts = Experts(model)
    a = Row(model, 9).make(experts)
    assert _moe_rows.check(_moe_peers.torch_grouped(experts, a)(), _moe_rows.expected(experts, a), "none") == ""


def test_a_run_measures_the_rows_of_two_models(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    without_graphs(monkeypatch)
    monkeypatch.setattr(_moe_peers, "MANY", 4)
    monkeypatch.setattr(_moe_rows, "COLD", 0)
    small = [Row(m, t) for m in SMALL[2:] for t in (1, 4)]
    monkeypatch.setattr(moe, "rows", lambda words: small)
    moe.run(options(out=tmp_path / "run.json"))
    data = json.loads((tmp_path / "run.json").read_text())
    assert [r["row"] for r in data["rows"]] == [r.name for r in small], data["left_out"]
    for row in data["rows"]:
        timed = {r["name"] for r in row["results"] if "us" in r}
        assert row["selected"] == "reference/moe_fused" or row["selected"] in timed
        assert ("cuBLAS, expert by expert" in timed) == (row["quant"] == "none" and row["tokens"] >= 4)
        notes = {r["name"]: r["note"] for r in row["results"]}
        assert "ModuleNotFoundError" in notes["vllm"]
    assert "## silu bf16" in capsys.readouterr().out


@pytest.mark.parametrize("rate", (_moe_peers.by_expert, _moe_peers.all_at_once))
def test_rates_do_as_many_operations(rate: Any) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    row = Row(SMALL[2], 12)
    experts = Experts(row.model)
    a = row.make(experts)
    call = rate(experts, a)
    with FlopCounterMode(display=False) as counter:
        call()
    assert counter.get_total_flops() == row.work(experts, [a])["flops"]


def test_every_row_has_the_peers_that_it_is_compared_with() -> None:
    experts: Any = None
    for row in _moe_rows.rows():
        offered = _moe_peers.contenders(row, experts, "cpu")
        made = _gemm_report.digest(made_row(row, own=1.0))
        asked = {t.what.removeprefix("selected / ") for t in _moe_report.targets(made, 4e12)}
        assert asked & {"vllm", "triton_kernels"} <= set(offered)
        rates = [n for n, c in offered.items() if c.source == "rate"]
        assert rates or "cuBLAS, as many operations" not in asked


def made_row(row: Row, **times: float) -> dict[str, Any]:
    sources = {"own": "kernel", "rate": "rate"}
    own = "portable/moe_fused/triton"
    results: list[dict[str, Any]] = [
        {"name": own if n == "own" else n, "source": sources.get(n, "peer"), "note": "", "us": us}
        for n, us in times.items()
    ]
    results.append({"name": "flashinfer", "source": "peer", "note": "absent"})
    return {
        "row": row.name, "model": row.model.name, "quant": row.model.quant, "tokens": row.tokens, "sets": 2,
        "weight_bytes": 8e8, "bytes": 9e8, "flops": 1e9, "floor_us": 210.0, "selected": own, "results": results,
    }  # fmt: skip


def verdicts(row: Row, **times: float) -> dict[str, str]:
    return {t.what: t.verdict for t in _moe_report.targets(_gemm_report.digest(made_row(row, **times)), 4e12)}


def test_targets_compare_with_the_right_times() -> None:
    gpt_mxfp4, gpt, qwen, deepseek = (Row(m, 64) for m in MODELS)
    assert verdicts(gpt, own=9.0, vllm=10.0, triton_kernels=8.0) == {
        "selected / vllm": "met", "selected / triton_kernels": "MISSED"
    }  # fmt: skip
    assert verdicts(gpt_mxfp4, own=9.0, vllm=1.0) == {"selected / triton_kernels": "not measured"}
    assert verdicts(deepseek, own=9.0, vllm=8.0) == {"selected / vllm": "MISSED"}
    what = "selected / copy of the active weights' bytes"  # 200 us
    assert verdicts(replace(qwen, tokens=16), own=280.0)[what] == "met"
    assert verdicts(replace(qwen, tokens=16), own=290.0)[what] == "MISSED"
    what = "selected / cuBLAS, as many operations"
    assert verdicts(replace(qwen, tokens=8192), own=130.0, rate=100.0)[what] == "met"
    assert verdicts(replace(qwen, tokens=8192), own=140.0, rate=100.0)[what] == "MISSED"
    assert what not in verdicts(replace(gpt_mxfp4, tokens=8192), own=1.0)


def test_the_page_has_every_row_and_every_failure(tmp_path: Path) -> None:
    made = [made_row(r, own=100.0, vllm=90.0) for r in _moe_rows.rows()]
    data: dict[str, Any] = {"date": "2026-01-01", "device": "made up", "seconds": 1.0, "packages": {"torch": "2"}}
    data |= {"bytes_per_s": 4e12, "flops_per_s": 7e14, "rows": made, "left_out": []}
    text = _moe_report.write(data, tmp_path)[0].read_text()
    assert all(f"| {r.name} |" in text for r in _moe_rows.rows())
    assert all(f"## {m.name}" in text for m in MODELS)
    assert "| flashinfer |  | absent |" in text and "MISSED" in text


def test_the_command_line_lists_rows(capsys: pytest.CaptureFixture[str]) -> None:
    moe.main(["list", "--rows", "deepseek"])
    assert len(capsys.readouterr().out.splitlines()) == len(_moe_rows.TOKENS)
