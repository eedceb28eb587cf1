from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

import _small_peers
import _small_report
import _small_rows
import attention
import small_ops
from _attention_inputs import copies, expected, make
from _attention_peers import fitting, peers, tskernel_call
from _attention_report import digest, markdown, targets
from _attention_rows import LATENT, ROPE, ROWS, Row, chosen

SMALL = [
    Row("t", "prefill", 2, 24, 24, 4, 2, 16),
    Row("t", "prefill", 2, 24, 24, 4, 2, 16, window=5, sinks=True),
    Row("t", "decode", 3, 40, 1, 4, 2, 16, page=8),
    Row("t", "decode", 3, 40, 4, 4, 2, 16, page=8, window=7),
    Row("t", "decode", 3, 40, 1, 4, 2, 16, page=8, fp8=True),
    Row("t", "extend", 2, 40, 6, 4, 2, 16, page=8),
    Row("t", "mla", 2, 40, 2, 2, 1, LATENT + ROPE, page=8),
]


def test_rows_have_names_of_their_own_and_are_found_by_group_and_word() -> None:
    assert len({r.name for r in ROWS}) == len(ROWS)
    assert {r.group for r in chosen(["mla"])} == {"mla"}
    assert all("window" in r.name for r in chosen(["window"]))
    assert chosen([]) == list(ROWS)


@pytest.mark.parametrize("row", SMALL, ids=lambda r: r.name)
def test_pairs_are_those_that_a_mask_leaves(row: Row) -> None:
    position = torch.arange(row.queries)[:, None] + row.keys - row.queries
    key = torch.arange(row.keys)
    seen = key <= position
    if row.window >= 0:
        seen &= key >= position - row.window
    assert row.pairs == int(seen.sum())
    assert row.flops == 2 * row.batch * row.heads * row.pairs * (row.width + row.value_width)


def test_bytes_of_a_decode_step_are_its_visible_keys_and_its_queries() -> None:
    row = Row("t", "decode", 64, 4096, 1, 64, 8, 128)
    assert row.bytes == 64 * 4096 * 2 * 8 * 128 * 2 + 64 * 64 * 2 * 128 * 2
    assert replace(row, fp8=True).bytes < 0.51 * row.bytes
    assert replace(row, window=127).bytes == 64 * 128 * 2 * 8 * 128 * 2 + 64 * 64 * 2 * 128 * 2
    assert copies(row) == 2 and copies(replace(row, batch=1, keys=8192)) == 8


@pytest.mark.parametrize("row", SMALL, ids=lambda r: r.name)
def test_the_check_takes_the_right_result_and_no_other(row: Row) -> None:
    torch.manual_seed(0)
    x = make(row, "cpu")
    want = expected(x)
    out = tskernel_call(None, x)().reshape(row.query_rows, row.heads, row.value_width)
    assert fitting(x)[0] is not None
    assert want.check(out) == ""
    assert want.check(out * 1.1) != ""
    assert want.check(torch.zeros_like(out)) != ""
    later = out.clone()
    later[-1] = out[0]
    assert want.check(later) != ""


def test_every_row_has_peers() -> None:
    for row in ROWS:
        names = [p.name for p in peers(row)]
        assert names and len(names) == len(set(names))


KERNELS = (("cuda/op/gluon", "own", False), ("portable/op/triton", "portable", False), ("cuda/op/fa3", "wrapped", True))


def made_row(row: Row, **times: float) -> dict[str, Any]:
    ok = {"status": "ok", "note": ""}
    results: list[dict[str, Any]] = [{"name": "tskernel", "source": "selected", "us": times["selected"], **ok}]
    results += [
        {"name": name, "source": "kernel", "us": times[key], "library": library, **ok}
        for name, key, library in KERNELS
        if key in times
    ]
    results.append({"name": "fa3", "source": "peer", "us": times["fa3"], **ok})
    if "dense" in times:
        results.append({"name": "fa3 dense", "source": "equal lengths", "us": times["dense"], **ok})
    results.append({"name": "flashinfer fa3", "source": "peer", "status": "WRONG", "note": "off | by one"})
    return {
        "row": row.name, "group": row.group, "kind": row.kind, "width": row.width, "window": row.window,
        "flops": row.flops, "bytes": row.bytes, "floor_us": 50.0, "selected": "cuda/op/fa3", "results": results,
    }  # fmt: skip


def test_targets_compare_with_the_right_times() -> None:
    row = next(r for r in ROWS if r.group == "prefill" and r.width == 64 and r.window < 0)
    found = digest(made_row(row, selected=103.0, own=104.0, portable=150.0, wrapped=90.0, fa3=100.0, dense=95.0))
    assert found.own is not None and found.own["us"] == 104.0
    verdicts = {t.what: t.verdict for t in targets(found, [found])}
    told = verdicts.pop("selected / best that is told equal lengths")
    assert verdicts == {"selected / best peer": "MISSED", "own / best peer": "met", "portable / FA3": "MISSED"}
    assert told == "MISSED" and found.peer is not None and found.peer["us"] == 100.0


def test_fp8_decode_is_compared_with_the_same_row_in_bf16() -> None:
    fp8 = next(r for r in ROWS if r.fp8)
    rows = [
        digest(made_row(r, selected=t, own=t, fa3=500.0)) for r, t in ((fp8, 150.0), (replace(fp8, fp8=False), 250.0))
    ]
    (target,) = targets(rows[0], rows)
    assert target.value == 0.6 and target.verdict == "MISSED"


def test_the_page_has_every_row_and_every_failure() -> None:
    data: dict[str, Any] = {"date": "2026-01-01", "device": "made up", "cuda": "13.0", "cudnn": 1, "seconds": 1.0}
    data |= {"packages": {"torch": "2"}, "machine": {"bytes_per_s": 4e12, "flops_per_s": 7e14}}
    data["host"] = [{"name": "tskernel", "us": 12.0}]
    data["rows"] = [made_row(r, selected=100.0, own=100.0, portable=100.0, fa3=100.0) for r in ROWS]
    page = markdown(data, {"decode": "decode.png"})
    assert all(f"| {r.name} |" in page for r in ROWS)
    assert "off / by one" in page and "(decode.png)" in page and "| tskernel | 12.0 |" in page


def test_the_command_line_names_its_modes(capsys: pytest.CaptureFixture[str]) -> None:
    assert attention.main(["list", "--rows", "extend"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(chosen(["extend"]))
    options = attention.parser().parse_args(["run", "out.json", "--rows", "decode", "mla", "--kernels", "fa3"])
    assert options.rows == ["decode", "mla"] and options.kernels == ["fa3"]


def test_small_rows_have_names_of_their_own() -> None:
    names = [r.name for r in _small_rows.rows()]
    assert len(set(names)) == len(names) and {r.case.op for r in _small_rows.rows(["mxfp4"])} == {"quantize_mxfp4"}


@pytest.mark.parametrize("op", sorted({r.case.op for r in _small_rows.rows()}))
def test_the_check_of_small_ops_takes_the_right_result_and_no_other(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of a peer that returns what the op writes in place."""
    monkeypatch.setattr(_small_rows, "DEVICE", "cpu")
    monkeypatch.setattr(_small_rows, "MAX_POSITION", 64)
    case = next(r.case for r in _small_rows.rows() if r.case.op == op)
    row = _small_rows.Row(case, 3)
    arguments = case.make(row.tokens)
    want = small_ops.expected(row, arguments)
    assert small_ops.check(row, _small_peers.ours(op, f"reference/{op}"), want, arguments) == ""
    assert small_ops.check(row, lambda a: lambda: (*want, None), want, arguments) == ""
    wrong = (torch.full_like(want[0].float(), 77).to(want[0].dtype), *want[1:])
    assert "differ" in small_ops.check(row, lambda a: lambda: wrong, want, arguments)


def test_the_table_of_small_ops_compares_with_the_best_peer() -> None:
    times = {"cuda/rmsnorm/native": 2.0, "quack": 1.6, "inductor": 2.5, "copy": 1.0}
    results = [{"name": n, "us": us, "note": ""} for n, us in times.items()] + [
        {"name": "flashinfer", "note": "absent"}
    ]
    data = {"rows": [{"row": "rmsnorm 1 x 8", "selected": "cuda/rmsnorm/native", "results": results}]}
    *_, line, _, verdict = _small_report.table(data)
    assert line == "| rmsnorm 1 x 8 | cuda/rmsnorm/native | 2.00 | quack | 1.60 | 1.25 | 0.50 |"
    assert verdict == "0 of 1 rows at or below the best peer."
