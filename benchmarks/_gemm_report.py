"""The page of the GEMM benchmark, and which of issue 5's targets a run meets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from _report import Target, ratio, ratio_text, save, table, target_table, trouble, us_text

TITLES = {
    "dense": "Dense: bf16, fp8 by tensor, fp8 by token and channel",
    "blocks": "fp8 blocks, 1 x 128 by 128 x 128, at DeepSeek's shapes",
    "few": "Few rows: mxfp4 weights, and bf16 on the same shapes",
    "others": "Other formats",
}
Row = dict[str, Any]


class Found(NamedTuple):
    """The times of a row, in microseconds by contender, and what each contender is."""

    row: Row
    us: dict[str, float]
    source: dict[str, str]

    @property
    def selected(self) -> float | None:
        """The time of the kernel that is selected."""
        return self.us.get(self.row["selected"])

    def best(self, *sources: str) -> str | None:
        """Return the fastest contender of some kinds."""
        names = [n for n in self.us if self.source[n] in sources]
        return min(names, key=lambda n: self.us[n], default=None)

    def best_us(self, *sources: str) -> float | None:
        """Return the least time of contenders of some kinds."""
        name = self.best(*sources)
        return None if name is None else self.us[name]


def digest(row: Row) -> Found:
    """Return a row's times."""
    timed = {r["name"]: r["us"] for r in row["results"] if "us" in r}
    return Found(row, timed, {r["name"]: r["source"] for r in row["results"]})


def same_shape(found: Found, format: str, rows: Sequence[Found]) -> Found | None:
    """Return the row of another format with the same M, N and K."""
    shape = [found.row[x] for x in "mnk"]
    return next((f for f in rows if f.row["format"] == format and [f.row[x] for x in "mnk"] == shape), None)


def targets(found: Found, rows: Sequence[Found], bytes_per_s: float) -> Iterator[Target]:
    """Yield what issue 5 asks of a row."""
    format, few = found.row["format"], found.row["m"]
    if found.row["group"] == "dense":
        yield Target("selected / best peer", ratio(found.selected, found.best_us("peer")), 1.02)
        if format == "bf16" and few == 1:
            copied = 1e6 * found.row["bytes"] / bytes_per_s
            yield Target("selected / copy of the same bytes", ratio(found.selected, copied), 1 / 0.9)
        if format == "fp8 token" and few == 1:
            other = same_shape(found, "fp8 tensor", rows)
            cublas = None if other is None else other.us.get("torch._scaled_mm")
            yield Target("selected / cuBLAS by tensor", ratio(found.selected, cublas), 1.15)
    elif format == "fp8 block" and "deep_gemm" in found.us:
        yield Target("selected / DeepGEMM", ratio(found.selected, found.us["deep_gemm"]), 1 / 0.9)
    elif format == "fp8 block":
        yield Target("selected / cuBLAS by rows", ratio(found.selected, found.best_us("rate")), 1 / 0.85)
    elif format == "mxfp4 weights":
        plain = same_shape(found, "bf16", rows)
        times = [
            found.us.get("torch.mm, unpacked"),
            *([] if plain is None else [plain.selected, plain.best_us("peer")]),
        ]
        fastest = min((t for t in times if t is not None), default=None)
        yield Target("selected / bf16", ratio(found.selected, fastest), 1 / 2.5)


def rate_text(found: Found) -> str:
    """Return what the selected kernel reaches of what limits the row."""
    if found.selected is None:
        return "-"
    row = found.row
    if row["floor_us"] > 1.01e6 * row["bytes"] / 4.3e12:
        return f"{row['flops'] / found.selected / 1e6:.0f} TF"
    return f"{row['bytes'] / found.selected / 1e6:.2f} TB/s"


def summary(rows: Sequence[Found]) -> list[str]:
    """Return the main table of a group."""
    head = ["row", "bytes at 4.3 TB/s, us", "floor, us", "selected, us", "rate", "floor / selected", "kernel",
            "best peer", "us", "selected / peer"]  # fmt: skip
    lines = []
    for f in rows:
        peer, copied = f.best_us("peer"), 1e6 * f.row["bytes"] / 4.3e12
        lines.append([
            f.row["row"], us_text(copied), us_text(f.row["floor_us"]), us_text(f.selected), rate_text(f),
            ratio_text(ratio(f.row["floor_us"], f.selected)), f.row["selected"] or "-", f.best("peer") or "-",
            us_text(peer), ratio_text(ratio(f.selected, peer)),
        ])  # fmt: skip
    return table(head, lines)


def everything(rows: Sequence[Found]) -> list[str]:
    """Return every time of a group, one column per contender, ours first."""
    order = {"kernel": 0, "peer": 1, "other": 2, "rate": 3}
    names = [n for _, n in sorted({(order[f.source[n]], n) for f in rows for n in f.us})]
    return table(["row", *names], [[f.row["row"], *(us_text(f.us.get(n)) for n in names)] for f in rows])


def head(data: dict[str, Any], title: str, script: str) -> list[str]:
    """Return the first lines of a page: where and how it was measured."""
    packages = ", ".join(f"{n} {v}" for n, v in data["packages"].items())
    return [
        f"# {title} on one {data['device']}, {data['date']}", "",
        f"Medians in microseconds of one call, from one run of `benchmarks/{script}` ({data['seconds']:.0f} s), all in "
        f"CUDA graphs that take turns and walk over more bytes than the L2 cache holds. {packages}. In the same run a "
        f"copy moved {data['bytes_per_s'] / 1e12:.2f} TB/s and a bf16 product of 8192 x 8192 matrices reached "
        f"{data['flops_per_s'] / 1e12:.0f} TFLOP/s. The floor is the longer of the least bytes at 4.3 TB/s and the "
        "operations at the part's dense matrix rate (989 TFLOP/s for 16-bit numbers, 1979 for 8-bit ones).",
    ]  # fmt: skip


def tail(data: dict[str, Any], found: Sequence[tuple[str, Target]]) -> list[str]:
    """Return the last lines of a page: the targets, and what has no time."""
    failed = [(r["row"], x) for r in data["rows"] for x in r["results"] if x["note"]]
    text = ["", "## Targets of issue 5", "", *target_table(found), "", "## Without a time", "", *trouble(failed)]
    return text + (["", "Rows left out:", "", *(f"- {x}" for x in data["left_out"])] if data["left_out"] else [])


def page(data: dict[str, Any]) -> list[str]:
    """Return the page."""
    rows = [digest(r) for r in data["rows"]]
    text = head(data, "Matrix products", "gemm.py")
    for group, title in TITLES.items():
        chosen = [f for f in rows if f.row["group"] == group]
        if chosen:
            text += ["", f"## {title}", "", *summary(chosen), "", "All times:", "", *everything(chosen)]
    found = [(f.row["row"], t) for f in rows for t in targets(f, rows, data["bytes_per_s"])]
    return text + tail(data, found)


def write(data: dict[str, Any], to: Path, stem: str = "gemm-h200") -> list[Path]:
    """Write the page and the data behind it."""
    return save(data, page(data), to, stem)
