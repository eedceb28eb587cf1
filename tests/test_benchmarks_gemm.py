"""What of benchmarks/gemm.py runs without a GPU: rows, inputs, checks, bounds and the page."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

import _gemm_peers
import _gemm_report
import _gemm_rows
import _side_by_side
import gemm
from _gemm_rows import FORMATS, Row
from no_graphs import options, without_graphs

from tskernel.library import ops
from tskernel.ops.gemm._operands import plain_operands
from tskernel.testing import kernel_names

SMALL = [Row("t", name, m, 256, 512) for name in FORMATS for m in (1, 3, 40)]
PARTIAL = [Row("t", name, 5, 130, 192) for name, f in FORMATS.items() if f.quant != "w4a16"]
each_small = pytest.mark.parametrize("row", SMALL, ids=lambda r: r.name)


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_gemm_rows, "DEVICE", "cpu")
    monkeypatch.setattr(_gemm_peers, "DEVICE", "cpu")
    torch.manual_seed(0)


def test_rows_have_names_of_their_own_and_are_found_by_group_and_word() -> None:
    rows = _gemm_rows.rows()
    assert len({r.name for r in rows}) == len(rows)
    assert {r.group for r in _gemm_rows.rows(["blocks"])} == {"blocks"}
    assert {r.format for r in _gemm_rows.rows(["mxfp4 weights"])} == {"mxfp4 weights"}
    assert {r.group for r in rows} == set(_gemm_report.TITLES)


@pytest.mark.parametrize("row", [*SMALL, *PARTIAL], ids=lambda r: r.name)
def test_bytes_are_those_of_the_tensors_and_the_result(row: Row) -> None:
    made = row.make()
    held = sum(x.nbytes for x in made.values() if isinstance(x, Tensor))
    assert row.bytes == held + 2 * row.m * row.n
    x, w = plain_operands(made["a"], made["b"], made.get("a_scale"), made.get("b_scale"), row.what.quant)
    with FlopCounterMode(display=False) as counter:
        x @ w.t()
    assert row.flops == counter.get_total_flops()
    rate = 989e12 if made["a"].dtype == torch.bfloat16 else 1979e12
    assert row.floor_us == pytest.approx(1e6 * max(row.bytes / 4.3e12, row.flops / rate))


@each_small
def test_results_are_about_one(row: Row) -> None:
    """What is drawn fills the range of its format, and products keep clear of the ends of bf16."""
    made = row.make()
    x, w = plain_operands(made["a"], made["b"], made.get("a_scale"), made.get("b_scale"), row.what.quant)
    assert 0.3 < float((x @ w.t()).square().mean().sqrt()) < (3 if row.what.quant != "nvfp4" else 12)


@each_small
def test_the_check_takes_the_right_result_and_no_other(row: Row) -> None:
    made = row.make()
    want = gemm.expected(made)
    right = ops["mm"].front(**made, out=_gemm_peers.result(made), override="reference/mm")
    assert want.shape == (min(row.m, 2 * gemm.SAMPLE), row.n)
    assert gemm.check(right, want) == ""
    for wrong in (right * 1.1, torch.zeros_like(right), right.roll(1, 1), torch.full_like(right, float("nan"))):
        assert gemm.check(wrong, want) != ""
    if row.m > 2 * gemm.SAMPLE:
        last = right.clone()
        last[-1] = right[0]
        assert gemm.check(last, want) != ""


@each_small
def test_our_kernels_pass_the_check(row: Row) -> None:
    """Each that is for the CPU and takes the row, through the call that is recorded."""
    made = row.make()
    want, told = gemm.expected(made), {c.name: c.status for c in ops["mm"].explain(**made).candidates}
    for name in kernel_names("mm"):
        if told[name] != "rejected":
            assert gemm.check(_gemm_peers.ours(name, made)(), want) == "", name


@pytest.mark.parametrize("name", [n for n, f in FORMATS.items() if f.quant not in ("none", "fp8_block", "int8")])
def test_unpacked_operands_mean_the_same(name: str) -> None:
    made = Row("t", name, 5, 64, 256).make()
    assert gemm.check(_gemm_peers.unpacked(made)(), gemm.expected(made)) == ""


def blocks(**changes: Any) -> tuple[Row, dict[str, Any]]:
    row = replace(Row("t", "fp8 block", 6, 256, 640), **changes)
    return row, row.make()


def test_scales_of_torch_are_laid_out_as_it_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    """1 x 128: [M, K/128], column by column; 128 x 128: [K/128, N/128], K next to K, padded to four."""
    seen: dict[str, Tensor] = {}

    def stand_in(a: Tensor, b: Tensor, x: Tensor, _: Any, w: Tensor, __: Any, **options: Any) -> Tensor:
        seen.update(x=x, w=w)
        return torch.zeros(a.shape[0], b.shape[1], dtype=options["output_dtype"])

    monkeypatch.setattr(torch.nn.functional, "scaled_mm", stand_in)
    row, made = blocks()
    _gemm_peers.scaled_blocks(made)()
    assert torch.equal(seen["x"], made["a_scale"]) and seen["x"].stride() == (1, row.m)
    assert torch.equal(seen["w"], made["b_scale"].t()) and seen["w"].stride() == (1, 8)


def test_every_row_has_peers_or_another_storage() -> None:
    for row in _gemm_rows.rows():
        sources = {c.source for c in _gemm_peers.contenders(row, "cpu").values()}
        assert sources & {"peer", "other"} and "kernel" in sources


# the race, without graphs


def test_what_is_wrong_or_absent_gets_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    without_graphs(monkeypatch)

    def absent(_: Any) -> Any:
        import a_package_that_nobody_has  # pyright: ignore[reportMissingImports]

        return a_package_that_nobody_has

    def only_once(a: Any) -> Any:
        held = [_gemm_peers.torch_mm(a)().clone()]
        return lambda: held.pop() if held else torch.zeros(4, 32, dtype=torch.bfloat16)

    contenders = {
        "good": _side_by_side.Contender(_gemm_peers.torch_mm),
        "wrong": _side_by_side.Contender(lambda a: lambda: 2 * _gemm_peers.torch_mm(a)()),
        "wrong, a rate": _side_by_side.Contender(lambda a: lambda: 2 * _gemm_peers.torch_mm(a)(), "rate"),
        "wrong when replayed": _side_by_side.Contender(only_once),
        "absent": _side_by_side.Contender(absent),
        "not asked for": _side_by_side.Contender(absent),
    }
    sets = [Row("t", "bf16", 4, 32, 64).make()]
    want = gemm.expected(sets[0])
    found = _side_by_side.race(
        contenders, sets, lambda c: gemm.check(c.prepare(sets[0])(), want),
        options(kernels=["good", "wrong", "absent"]),
        replayed=lambda got: gemm.check(got, want),
    )  # fmt: skip
    assert [r["name"] for r in found if "us" in r] == ["good", "wrong, a rate"]
    notes = {r["name"]: r["note"] for r in found}
    assert "differ" in notes["wrong"] and "differ" in notes["wrong when replayed"]
    assert "ModuleNotFoundError" in notes["absent"] and "not asked for" not in notes


def test_a_run_measures_rows_writes_each_and_stops_at_its_limit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    without_graphs(monkeypatch)
    small = [Row("dense", "bf16", 20, 64, 128), Row("blocks", "fp8 block", 3, 128, 256)]
    monkeypatch.setattr(gemm, "rows", lambda words: small)
    gemm.run(options(out=tmp_path / "run.json"))
    data = json.loads((tmp_path / "run.json").read_text())
    assert [r["row"] for r in data["rows"]] == [r.name for r in small] and data["left_out"] == []
    for row in data["rows"]:
        timed = {r["name"] for r in row["results"] if "us" in r}
        assert row["selected"] == "reference/mm" or row["selected"] in timed
        assert all(bool(r["note"]) != ("us" in r) for r in row["results"])
        assert "torch.mm" in timed or row["format"] != "bf16"
    assert "## Targets of issue 5" in capsys.readouterr().out
    gemm.run(options(out=tmp_path / "none.json", limit=-1.0))
    assert json.loads((tmp_path / "none.json").read_text())["left_out"] == [f"{r.name}: out of time" for r in small]


# the page


def made_row(row: Row, **times: float) -> dict[str, Any]:
    """Return a row of results: names are contenders', "own" is the selected kernel."""
    sources = {"own": "kernel", "cublas_by_rows": "rate", "unpacked": "other"}
    names = {"own": "portable/mm/triton", "scaled": "torch._scaled_mm", "unpacked": "torch.mm, unpacked"}
    results: list[dict[str, Any]] = [
        {"name": names.get(n, n), "source": sources.get(n, "peer"), "note": "", "us": us} for n, us in times.items()
    ]
    results.append({"name": "quack", "source": "peer", "note": "ModuleNotFoundError: | absent"})
    return {
        "row": row.name, "group": row.group, "format": row.format, "m": row.m, "n": row.n, "k": row.k,
        "bytes": row.bytes, "flops": row.flops, "floor_us": row.floor_us, "selected": "portable/mm/triton",
        "results": results,
    }  # fmt: skip


def verdicts(*made: dict[str, Any], bytes_per_s: float = 4e12) -> dict[str, str]:
    """Return the targets of the first row."""
    rows = [_gemm_report.digest(r) for r in made]
    return {t.what: t.verdict for t in _gemm_report.targets(rows[0], rows, bytes_per_s)}


def find(name: str) -> Row:
    return next(r for r in _gemm_rows.rows() if r.name == name)


def test_dense_rows_are_compared_with_the_best_peer() -> None:
    row = find("bf16 512 x 8192 x 8192")
    assert verdicts(made_row(row, own=102.0, cublas=100.0, other=101.0)) == {"selected / best peer": "met"}
    assert verdicts(made_row(row, own=103.0, cublas=100.0, other=101.0)) == {"selected / best peer": "MISSED"}
    assert verdicts(made_row(row, own=103.0)) == {"selected / best peer": "not measured"}
    # what stores or sums in another way is no peer
    assert verdicts(made_row(row, own=102.0, cublas=100.0, unpacked=50.0)) == {"selected / best peer": "met"}


def test_one_row_of_bf16_is_compared_with_the_copy() -> None:
    row = find("bf16 1 x 8192 x 8192")
    copied = 1e6 * row.bytes / 4e12
    what = "selected / copy of the same bytes"
    assert verdicts(made_row(row, own=copied / 0.91))[what] == "met"
    assert verdicts(made_row(row, own=copied / 0.89))[what] == "MISSED"


def test_one_row_of_fp8_by_token_is_compared_with_cublas_by_tensor() -> None:
    row, tensor = find("fp8 token 1 x 8192 x 8192"), find("fp8 tensor 1 x 8192 x 8192")
    what = "selected / cuBLAS by tensor"
    slower = made_row(find("fp8 tensor 16 x 8192 x 8192"), scaled=1.0)
    for own, verdict in ((114.0, "met"), (116.0, "MISSED")):
        assert verdicts(made_row(row, own=own), slower, made_row(tensor, scaled=100.0))[what] == verdict
    assert verdicts(made_row(row, own=1.0))[what] == "not measured"


def test_blocks_are_compared_with_deep_gemm_or_else_with_rows() -> None:
    row = find("fp8 block 64 x 7168 x 2048")
    for own, verdict in ((110.0, "met"), (112.0, "MISSED")):
        made = made_row(row, own=own, deep_gemm=100.0, cublas_by_rows=1.0)
        assert verdicts(made) == {"selected / DeepGEMM": verdict}
    for own, verdict in ((117.0, "met"), (118.0, "MISSED")):
        assert verdicts(made_row(row, own=own, cublas_by_rows=100.0)) == {"selected / cuBLAS by rows": verdict}


def test_mxfp4_weights_are_compared_with_the_fastest_bf16() -> None:
    row, plain = find("mxfp4 weights 2 x 8192 x 8192"), find("bf16 2 x 8192 x 8192")
    fast = made_row(plain, own=30.0, cublas=25.0)
    for own, verdict in ((9.9, "met"), (10.1, "MISSED")):
        assert verdicts(made_row(row, own=own, unpacked=40.0), fast) == {"selected / bf16": verdict}
    assert verdicts(made_row(row, own=15.9, unpacked=40.0)) == {"selected / bf16": "met"}


def test_every_few_row_has_bf16_on_its_shape() -> None:
    rows = [_gemm_report.digest(made_row(r)) for r in _gemm_rows.rows()]
    for found in rows:
        if found.row["format"] == "mxfp4 weights":
            assert _gemm_report.same_shape(found, "bf16", rows) is not None


def test_the_page_has_every_row_and_every_failure(tmp_path: Path) -> None:
    made = [made_row(r, own=100.0, cublas=90.0) for r in _gemm_rows.rows()]
    data: dict[str, Any] = {"date": "2026-01-01", "device": "made up", "seconds": 1.0, "packages": {"torch": "2"}}
    data |= {"bytes_per_s": 4e12, "flops_per_s": 7e14, "rows": made, "left_out": ["bf16 9 x 9 x 9"]}
    paths = _gemm_report.write(data, tmp_path)
    text = paths[0].read_text()
    assert all(f"| {r.name} |" in text for r in _gemm_rows.rows())
    assert "ModuleNotFoundError: / absent" in text and "bf16 9 x 9 x 9" in text and "MISSED" in text


def test_the_command_line_names_its_modes(capsys: pytest.CaptureFixture[str]) -> None:
    gemm.main(["list", "--rows", "blocks"])
    assert len(capsys.readouterr().out.splitlines()) == len(_gemm_rows.rows(["blocks"]))
    parse = partial(_side_by_side.arguments_of, "", {"run": gemm.run, "warm": gemm.warm}, Path())
    options = parse(["run", "out.json", "--rows", "few", "--kernels", "triton", "--limit", "100"])
    assert options.rows == ["few"] and options.kernels == ["triton"] and options.limit == 100.0
