"""Time the Triton attention kernels on the GPU at hand, over a grid of tile sizes, beside torch's own attention.

``python benchmarks/attention.py grid OUT.json`` times every tile size, ``rows OUT.json`` the chosen ones and the peers;
``warm K N`` only compiles the K-th of N shares of the grid, so that several processes can fill Triton's cache first.
Decode calls are recorded in a CUDA graph that walks over copies of the inputs larger than the L2 cache.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "src"))
from tskernel.backends.portable import _attention_launch as flash

Config = flash.Config
BYTES_PER_S, FLOPS_PER_S = 4.3e12, 790e12  # what a copy and a bf16 matrix product reach on an H200
COLD = 256 << 20


class Decode(NamedTuple):
    """A decode step: requests, context, heads, widths, page size, window, query tokens, dtype of the cache."""

    batch: int
    context: int
    heads: int
    kv_heads: int
    width: int
    page: int = 64
    window: int = -1
    q_len: int = 1
    fp8: bool = False
    prefix: bool = False  # as an extend call: ragged queries


class Prefill(NamedTuple):
    """Packed sequences of one length."""

    batch: int
    length: int
    heads: int
    kv_heads: int
    width: int
    window: int = -1
    sinks: bool = False


class Latent(NamedTuple):
    """An absorbed latent decode step, 512 + 64 wide."""

    batch: int
    context: int
    heads: int
    q_len: int = 1


DECODE = [
    Decode(1, 8192, 64, 8, 128),
    Decode(1, 131072, 64, 8, 128),
    Decode(8, 8192, 64, 8, 128),
    Decode(32, 2048, 32, 8, 128, page=16),
    Decode(64, 4096, 64, 8, 128),
    Decode(256, 1024, 64, 8, 64),
    Decode(64, 4096, 64, 8, 64, window=127),
    Decode(128, 4096, 8, 1, 128),
    Decode(16, 4096, 64, 8, 128, q_len=4),
    Decode(64, 4096, 64, 8, 128, fp8=True),
    Decode(64, 32768, 64, 8, 128, q_len=4, prefix=True),
    Decode(16, 8192, 64, 8, 128, q_len=64, prefix=True),
]
PREFILL = [
    Prefill(1, 8192, 64, 8, 128),
    Prefill(4, 4096, 64, 8, 128),
    Prefill(16, 1024, 32, 8, 128),
    Prefill(1, 32768, 32, 8, 128),
    Prefill(4, 4096, 64, 8, 64),
    Prefill(1, 8192, 16, 16, 256),
    Prefill(4, 4096, 64, 8, 64, window=127, sinks=True),
    Prefill(4, 4096, 64, 8, 64, sinks=True),
]
LATENT = [
    Latent(1, 8192, 128),
    Latent(16, 4096, 128),
    Latent(64, 4096, 128),
    Latent(64, 4096, 128, 2),
    Latent(64, 4096, 16),
    Latent(128, 4096, 16),
]
Row = Decode | Prefill | Latent


def configs(row: Row) -> list[Config | None]:
    """Return the tile sizes to try; None is the host's choice."""
    if isinstance(row, Prefill):
        tiles = {
            64: [(128, 128, 8, 3), (128, 64, 4, 3), (128, 64, 8, 3), (64, 64, 4, 3), (128, 128, 4, 2)],
            128: [(128, 64, 8, 3), (128, 128, 8, 2), (64, 64, 4, 3), (128, 64, 8, 2), (128, 64, 4, 3)],
            256: [(128, 32, 8, 3), (128, 64, 8, 2), (64, 32, 4, 3), (128, 32, 8, 2)],
        }[row.width]
        return [None, *(Config(*t, 1) for t in tiles)]
    if isinstance(row, Latent):
        if row.heads == 16:
            return [None, *(Config(*t, s) for t in [(16, 64, 4, 2), (16, 64, 8, 2), (16, 128, 8, 2)] for s in (2, 4))]
        return [None, *(Config(*t, s) for t in [(64, 64, 8, 2), (128, 32, 16, 2), (64, 64, 16, 2)] for s in (1, 4))]
    if row.q_len > 4:
        return [None, *(Config(*t, s) for t in [(128, 64, 8, 3), (64, 64, 4, 3)] for s in (1, 2))]
    m = 16 if row.q_len == 1 else 32
    tiles = [(m, 64, 4, 3), (m, 64, 4, 4), (m, 32, 4, 4), (m, 128, 4, 2), (m, 128, 8, 3), (m, 64, 8, 4), (m, 64, 2, 3)]
    if row.page < 64:
        tiles = [(m, 128, 4, 2), (m, 128, 8, 2), (m, 64, 4, 2), (m, 64, 8, 2), (m, 128, 2, 2), (m, 64, 2, 4)]
    if row.fp8:
        tiles = [
            (m, 64, 2, 3),
            (m, 64, 4, 2),
            (m, 64, 2, 2),
            (m, 32, 2, 4),
            (m, 32, 4, 3),
            (m, 128, 4, 2),
            (m, 64, 4, 3),
        ]
    base = row.batch * row.kv_heads
    splits = sorted({min(64, max(1, round(132 * f / base))) for f in (1, 2, 3, 4, 6)})
    if row.window >= 0:
        splits = [1, 2, 3]
    return [None, *(Config(*t, s) for t in tiles for s in splits)]


def random(shape: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Return normal values; fp8 ones are drawn in bf16."""
    made = torch.randn(shape, dtype=torch.bfloat16, device="cuda")
    return made if dtype == torch.bfloat16 else made.to(dtype)


def paged(row: Decode | Latent, page: int) -> dict[str, Any]:
    """Return a shuffled page table and the lengths."""
    columns = -(-row.context // page)
    table = torch.randperm(row.batch * columns, device="cuda").int().view(row.batch, columns)
    lengths = torch.full((row.batch,), row.context, dtype=torch.int32, device="cuda")
    return {"table": table, "lengths": lengths, "max_q": row.q_len, "max_k": row.context, "causal": True}


def inputs(row: Row) -> dict[str, Any]:
    """Return the arguments of ``flash.attend`` for one call."""
    if isinstance(row, Prefill):
        rows = row.batch * row.length
        both = {n: random((rows, row.kv_heads, row.width)) for n in "kv"}
        cu = torch.arange(row.batch + 1, dtype=torch.int32, device="cuda") * row.length
        q, rest = random((rows, row.heads, row.width)), {"cu_q": cu, "cu_k": cu, "max_q": row.length}
        rest |= {"max_k": row.length, "causal": True, "window": row.window, "scale": row.width**-0.5}
        if row.sinks:
            rest["sinks"] = torch.randn(row.heads, device="cuda")
        return {"q": q, **both, "out": torch.empty_like(q), "lse": None, **rest}
    if isinstance(row, Latent):
        cache = random((row.batch * row.context // 64, 64, 1, 576))
        q = random((row.batch * row.q_len, row.heads, 576))
        out = torch.empty((*q.shape[:2], 512), dtype=q.dtype, device="cuda")
        rest = paged(row, 64)
        return {"q": q, "k": cache, "v": cache[..., :512], "out": out, "lse": None, "scale": 192**-0.5, **rest}
    dtype = torch.float8_e4m3fn if row.fp8 else torch.bfloat16
    pages = row.batch * -(-row.context // row.page)
    both = {n: random((pages, row.page, row.kv_heads, row.width), dtype) for n in "kv"}
    q = random((row.batch * row.q_len, row.heads, row.width))
    rest = paged(row, row.page) | {"window": row.window, "scale": row.width**-0.5}
    if row.prefix:
        rest["cu_q"] = torch.arange(row.batch + 1, dtype=torch.int32, device="cuda") * row.q_len
    return {"q": q, **both, "out": torch.empty_like(q), "lse": None, **rest}


def moved(row: Row) -> float:
    """Return the bytes a call must at least move."""
    if isinstance(row, Prefill):
        return 2 * row.batch * row.length * row.width * 2 * (row.heads + row.kv_heads)
    if isinstance(row, Latent):
        return row.batch * (row.context * 576 * 2 + row.q_len * row.heads * (576 + 512) * 2)
    keys = row.context if row.window < 0 else min(row.context, row.window + row.q_len)
    per_key = 2 * row.kv_heads * row.width * (1 if row.fp8 else 2)
    return row.batch * (keys * per_key + 2 * row.q_len * row.heads * row.width * 2)


def flops(row: Row) -> float:
    """Return the floating-point operations of a call; causal pairs count once."""
    if isinstance(row, Latent):
        return 2 * row.batch * row.q_len * row.heads * row.context * (576 + 512)
    if isinstance(row, Decode):
        keys = row.context if row.window < 0 else row.window + 1
        return 4 * row.batch * row.q_len * row.heads * keys * row.width
    pairs = row.length * row.length / 2 if row.window < 0 else row.length * (row.window + 1)
    return 4 * row.batch * row.heads * pairs * row.width


def floor_us(row: Row) -> float:
    """Return the time under which no call can go, by bytes or by operations."""
    return 1e6 * max(moved(row) / BYTES_PER_S, flops(row) / FLOPS_PER_S)


def time_us(calls: list[Callable[[], Any]], repeats: int = 9) -> float:
    """Return the median time of one call; the calls are recorded in one graph and work on different memory."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1e3 * start.elapsed_time(end) / len(calls))
    return statistics.median(times)


def copies(row: Row) -> list[dict[str, Any]]:
    """Return as many sets of inputs as it takes to outgrow the L2 cache."""
    count = 1 if isinstance(row, Prefill) else max(2, min(24, math.ceil(COLD / moved(row))))
    return [inputs(row) for _ in range(count)]


def ours(sets: list[dict[str, Any]], config: Config | None) -> float:
    """Time our kernel with one set of tile sizes."""
    return time_us([lambda s=s: flash.attend(**s, config=config) for s in sets])


def peers(row: Row) -> Iterator[tuple[str, float]]:
    """Yield torch's attention on the same shape: packed heads-first, for decode on contiguous keys of one length."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    if isinstance(row, Latent) or row.window >= 0 or getattr(row, "sinks", False) or getattr(row, "fp8", False):
        return
    prefill = isinstance(row, Prefill)
    if not prefill and row.q_len > 1:
        return
    queries, keys = (row.length, row.length) if isinstance(row, Prefill) else (row.q_len, row.context)
    count = 1 if prefill else max(2, min(24, math.ceil(COLD / moved(row))))
    sets = [
        (
            random((row.batch, row.heads, queries, row.width)),
            *(random((row.batch, row.kv_heads, keys, row.width)) for _ in range(2)),
        )
        for _ in range(count)
    ]
    for name, backend in (("cudnn", SDPBackend.CUDNN_ATTENTION), ("flash2", SDPBackend.FLASH_ATTENTION)):

        def call(s: tuple[torch.Tensor, ...], backend: SDPBackend = backend) -> torch.Tensor:
            with sdpa_kernel(backend):
                return scaled_dot_product_attention(*s, is_causal=prefill, enable_gqa=True)

        try:
            yield name, time_us([lambda s=s: call(s) for s in sets])
        except RuntimeError as error:
            print(f"  {name}: {str(error).splitlines()[0]}")


def label(row: Row) -> str:
    """Return a row's name."""
    changed = {k: v for k, v in row._asdict().items() if k not in row._field_defaults or v != row._field_defaults[k]}
    return f"{type(row).__name__.lower()} " + " ".join(f"{k}={v}" for k, v in changed.items())


def describe(row: Row, us: float) -> str:
    """Return a time as a rate and against the floor."""
    rate = f"{flops(row) / us / 1e6:.0f} TF" if isinstance(row, Prefill) else f"{moved(row) / us / 1e6:.2f} TB/s"
    return f"{us:9.1f} us  {rate:>9}  {us / floor_us(row):5.2f} x floor"


def warm(share: int, shares: int) -> None:
    """Compile every ``shares``-th tile size of the grid."""
    # The code depends on widths, options and whether sizes are multiples of 16, not on the context: keep that small.
    small = [r._replace(context=min(r.context, 2048)) for r in [*DECODE, *LATENT]]
    distinct = {(row, c and (c[:4], c.splits > 1)): (row, c) for row in [*small, *PREFILL] for c in configs(row)}
    made: dict[Row, dict[str, Any]] = {}
    for row, c in list(distinct.values())[share::shares]:
        if row not in made:
            made = {row: inputs(row)}
        try:
            flash.attend(**made[row], config=c)
        except Exception as error:
            print(row, c, str(error)[:200])
    torch.cuda.synchronize()


def grid(budget_s: float, *words: str) -> list[dict[str, Any]]:
    """Time all tile sizes of all rows, or of those whose label has one of ``words``; the host's choice comes first."""
    found, began = [], time.monotonic()
    for row in [*DECODE, *PREFILL, *LATENT]:
        if time.monotonic() - began > budget_s:
            print("out of time before", label(row))
            break
        if words and not any(w in label(row) for w in words):
            continue
        sets, results = copies(row), []
        for c in configs(row):
            try:
                results.append((ours(sets, c), c))
            except Exception as error:
                print(f"  {label(row)} {c}: {str(error)[:120]}")
        del sets
        torch.cuda.empty_cache()
        others = dict(peers(row))
        results[1:] = sorted(results[1:], key=lambda r: r[0])
        print(f"{label(row)}\n  chosen {describe(row, results[0][0])}   peers {others}")
        for us, c in results[1:4]:
            print(f"  {tuple(c) if c else None!s:24} {describe(row, us)}")
        found.append({"row": label(row), "floor_us": floor_us(row), "chosen_us": results[0][0], "peers": others,
                      "grid": [[us, c] for us, c in results[1:]]})  # fmt: skip
    return found


def rows() -> list[dict[str, Any]]:
    """Time the host's choice and the peers."""
    found = []
    for row in [*DECODE, *PREFILL, *LATENT]:
        sets = copies(row)
        us = ours(sets, None)
        del sets
        torch.cuda.empty_cache()
        others = dict(peers(row))
        print(f"{label(row):60} {describe(row, us)}  " + "  ".join(f"{n} {t:.1f} us" for n, t in others.items()))
        found.append({"row": label(row), "floor_us": floor_us(row), "us": us, "peers": others})
    return found


def main(arguments: list[str]) -> None:
    """Run one of the modes."""
    torch.manual_seed(0)
    if arguments[0] == "warm":
        warm(int(arguments[1]), int(arguments[2]))
        return
    import triton

    result = {
        "date": time.strftime("%Y-%m-%d"),
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "rows": grid(float(arguments[2]), *arguments[3:]) if arguments[0] == "grid" else rows(),
    }
    Path(arguments[1]).write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main(sys.argv[1:])
