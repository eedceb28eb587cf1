"""The table and the plots of a run of benchmarks/attention.py, and which of issue 3's targets it meets."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from _report import Target, ratio, ratio_text, table, target_table, trouble, us_text

TITLES = {
    "prefill": "Prefill",
    "gpt-oss": "Prefill, GPT-OSS shapes (D 64, 64/8 heads, sinks)",
    "decode": "Decode",
    "extend": "Extend",
    "mla": "MLA decode (absorbed, 512 + 64)",
}
Result = dict[str, Any]
FAULTS = ("WRONG", "failed")


class Found(NamedTuple):
    """The times of one row, in microseconds; None where nothing was timed.

    ``peer`` does the op's work, on packed sequences; ``equal`` is the fastest that is told that all lengths are equal.
    """

    row: dict[str, Any]
    selected: float | None
    own: Result | None
    portable: Result | None
    peer: Result | None
    equal: Result | None

    @property
    def name(self) -> str:
        """The row's name."""
        return self.row["row"]


def digest(row: dict[str, Any]) -> Found:
    """Pick the selected time, the fastest kernel of ours, the portable one and the fastest peer."""
    timed = [r for r in row["results"] if "us" in r]

    def best(keep: Callable[[Result], bool]) -> Result | None:
        return min((r for r in timed if keep(r)), key=lambda r: r["us"], default=None)

    selected = best(lambda r: r["source"] == "selected")
    own = best(lambda r: r["source"] == "kernel" and not r["library"])
    portable = best(lambda r: r["source"] == "kernel" and not r["library"] and r["name"].startswith("portable/"))
    peer, equal = best(lambda r: r["source"] == "peer"), best(lambda r: r["source"] == "equal lengths")
    return Found(row, us_of(selected), own, portable, peer, equal)


def us_of(result: Result | None) -> float | None:
    """Return the time of a result, if there is one."""
    return None if result is None else result["us"]


def peer_us(found: Found, prefix: str) -> float | None:
    """Return the fastest time of the peers whose names begin with a word."""
    names = [r for r in found.row["results"] if r["source"] == "peer" and r["name"].startswith(prefix) and "us" in r]
    return min((r["us"] for r in names), default=None)


# targets


def targets(found: Found, rows: Sequence[Found]) -> Iterator[Target]:
    """Yield what issue 3 asks of a row."""
    group, own = found.row["group"], us_of(found.own)
    portable, peer = us_of(found.portable), us_of(found.peer)
    if found.row["kind"] == "prefill" and found.row["window"] >= 0:
        yield Target("selected / FA3", ratio(found.selected, peer_us(found, "fa3")), 1.0)
    elif found.row["kind"] == "prefill":
        yield Target("selected / best peer", ratio(found.selected, peer), 1.02)
        if found.row["width"] in (64, 128):
            yield Target("own / best peer", ratio(own, peer), 1 / (0.95 if found.row["width"] == 64 else 0.9))
        yield Target("portable / FA3", ratio(portable, peer_us(found, "fa3")), 1 / 0.7)
        if found.equal is not None:
            yield Target("selected / best that is told equal lengths", ratio(found.selected, us_of(found.equal)), 1.02)
    elif group == "extend":
        yield Target("selected / best peer", ratio(found.selected, peer), 1.05)
    elif group == "mla":
        yield Target("selected / FlashInfer", ratio(found.selected, peer_us(found, "flashinfer")), 1.1)
        yield Target("portable / FlashInfer", ratio(portable, peer_us(found, "flashinfer")), 2.0)
    else:
        yield from _decode_targets(found, own, rows)


def _decode_targets(found: Found, own: float | None, rows: Sequence[Found]) -> Iterator[Target]:
    if "fp8" in found.name:
        plain = next((r for r in rows if f"{r.name} fp8 KV" == found.name), None)
        yield Target("own fp8 / own bf16", ratio(own, us_of(plain.own) if plain else None), 1 / 1.7)
        return
    yield Target("own / FlashInfer", ratio(own, peer_us(found, "flashinfer")), 1.03)
    yield Target("own / FA3", ratio(own, peer_us(found, "fa3")), 1.0)
    if found.row["window"] >= 0:
        yield Target("own, us", own, 10.0)
    if "1 x 131072" in found.name:
        yield Target("own, us for 4.0 TB/s", own, found.row["bytes"] / 4e12 * 1e6)


# text


def named(result: Result | None) -> str:
    """Return a time and whose it is."""
    return "-" if result is None else f"{us_text(result['us'])} {result['name']}"


def rate_text(row: dict[str, Any], us: float | None) -> str:
    """Return the rate of a time."""
    if us is None:
        return "-"
    return f"{row['flops'] / us / 1e6:.0f} TF" if row["kind"] == "prefill" else f"{row['bytes'] / us / 1e6:.2f} TB/s"


def summary(rows: Sequence[Found]) -> list[str]:
    """Return the main table of a group."""
    head = ["row", "selected, us", "rate", "kernel", "best own, us", "best peer, us", "selected / peer", "own / peer",
            "selected / floor", "told equal lengths, us"]  # fmt: skip
    lines = []
    for f in rows:
        peer = us_of(f.peer)
        lines.append([
            f.name, us_text(f.selected), rate_text(f.row, f.selected), f.row["selected"] or "-", named(f.own),
            named(f.peer), ratio_text(ratio(f.selected, peer)), ratio_text(ratio(us_of(f.own), peer)),
            ratio_text(ratio(f.selected, f.row["floor_us"])), named(f.equal),
        ])  # fmt: skip
    return table(head, lines)


def everything(rows: Sequence[Found]) -> list[str]:
    """Return every time of a group: one column per contender."""
    columns = contenders(rows)
    lines = []
    for f in rows:
        cells = {r["name"]: us_text(r["us"]) if "us" in r else r["status"] for r in f.row["results"]}
        lines.append([f.name, us_text(f.row["floor_us"]), *(cells.get(c, "") for c in columns)])
    return table(["row", "floor", *columns], lines)


def contenders(rows: Sequence[Found]) -> list[str]:
    """Return the names that were timed on any of the rows or found wrong, ours first."""
    order = {"selected": 0, "kernel": 1, "peer": 2, "equal lengths": 3}
    results = [r for f in rows for r in f.row["results"] if r["status"] != "declined"]
    return [n for _, n in sorted({(order[r["source"]], r["name"]) for r in results})]


def markdown(data: dict[str, Any], plots: dict[str, str]) -> str:
    """Return the page."""
    rows = [digest(r) for r in data["rows"]]
    rates, versions = data["machine"], ", ".join(f"{k} {v}" for k, v in data["packages"].items())
    text = [
        f"# Attention on one {data['device']}, {data['date']}", "",
        f"Medians in microseconds from one run of `benchmarks/attention.py` ({data['seconds']:.0f} s); bf16 unless "
        "said. "
        f"CUDA {data['cuda']}, cuDNN {data['cudnn']}; {versions}. In the same run a copy moved "
        f"{rates['bytes_per_s'] / 1e12:.2f} TB/s and a bf16 product of 8192 x 8192 matrices reached "
        f"{rates['flops_per_s'] / 1e12:.0f} TFLOP/s: the floor is the slower of the least bytes and the operations at "
        "these rates. All calls are in CUDA graphs that take turns; decode, extend and MLA walk over more inputs than "
        "the L2 cache holds. Host work that a peer does once per step (plan, scheduler metadata) is not in its time. "
        "Prefill takes packed sequences of lengths that only the device knows; what is told that they are equal is "
        "listed apart.",
    ]  # fmt: skip
    text += [f"\n{note}" for note in data.get("notes", ())]
    for group, title in TITLES.items():
        chosen = [f for f in rows if f.row["group"] == group]
        if chosen:
            text += ["", f"## {title}", "", f"![{title}]({plots[group]})"] if group in plots else ["", f"## {title}"]
            text += ["", *summary(chosen), "", "All times:", "", *everything(chosen)]
    text += ["", "## Targets of issue 3", "", *target_table([(f.name, t) for f in rows for t in targets(f, rows)])]
    if data["host"]:
        text += ["", "## Host time of one eager decode call, one request, one token", ""]
        text += table(
            ["call", "us"], [[h["name"], us_text(h.get("us")) if "us" in h else h["note"]] for h in data["host"]]
        )
    text += [
        "",
        "## Wrong or failed",
        "",
        *trouble([(f.name, r) for f in rows for r in f.row["results"] if r["status"] in FAULTS]),
    ]
    return "\n".join(text) + "\n"


# plots


def plot(rows: Sequence[Found], title: str, path: Path) -> None:
    """Draw each contender's rate per row as bars beside each other, and the floor as a line over them."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    names = contenders(rows)
    prefill = rows[0].row["kind"] == "prefill"
    unit, amount = ("TFLOP/s", "flops") if prefill else ("TB/s", "bytes")
    figure, axes = pyplot.subplots(figsize=(max(7.0, 1.0 + 0.13 * len(names) * len(rows)), 4.6), layout="constrained")
    width = 0.85 / max(1, len(names))
    colours = pyplot.get_cmap("tab20")
    for i, name in enumerate(names):
        heights = []
        for f in rows:
            us = next((r["us"] for r in f.row["results"] if r["name"] == name and "us" in r), None)
            heights.append(f.row[amount] / us / 1e6 if us else 0.0)
        places = [j + (i - (len(names) - 1) / 2) * width for j in range(len(rows))]
        axes.bar(places, heights, width, label=name, color=colours(i % 20))
    for j, f in enumerate(rows):
        floor = f.row[amount] / f.row["floor_us"] / 1e6
        axes.hlines(floor, j - 0.45, j + 0.45, colors="black", linewidth=1, label="floor" if j == 0 else None)
    kind = rows[0].row["kind"]
    axes.set_xticks(
        range(len(rows)), [f.name.removeprefix(f"{kind} ") for f in rows], rotation=30, ha="right", fontsize=7
    )
    axes.set_ylabel(unit)
    axes.set_title(title)
    axes.legend(fontsize=6, ncols=2, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def write(data: dict[str, Any], to: Path, stem: str = "attention-peers-h200") -> list[Path]:
    """Write data, page and plots into a folder and return their paths."""
    import json

    to.mkdir(parents=True, exist_ok=True)
    rows = [digest(r) for r in data["rows"]]
    made, plots = [to / f"{stem}.json", to / f"{stem}.md"], {}
    for group, title in TITLES.items():
        chosen = [f for f in rows if f.row["group"] == group]
        if chosen:
            plots[group] = f"{stem}-{group}.png"
            made.append(to / plots[group])
            plot(chosen, f"{title}, {data['device']}, {data['date']}", made[-1])
    made[0].write_text(json.dumps(data, indent=1) + "\n")
    made[1].write_text(markdown(data, plots))
    return made
