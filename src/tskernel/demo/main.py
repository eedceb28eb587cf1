"""The demo: an embedding model and a decoder through torch.ops.tokenspeed, against plain transformers and torch."""

from __future__ import annotations

import functools
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text
from torch import Tensor

from tskernel.demo.decoder import Decoder
from tskernel.demo.embeddings import SENTENCES, MiniLM, pack
from tskernel.demo.observe import Observer, reason, winner
from tskernel.demo.plain import PlainDecoder
from tskernel.demo.weights import Config, load_weights
from tskernel.dispatch.platform import platform_of
from tskernel.library import ops

COSINE = 0.9999
NEW_TOKENS = 64
PROMPTS = (
    "Every operator of a language model is a real PyTorch operator here, and each call is bound to the fastest kernel "
    "that can run it on the device at hand. This prompt is longer than the window of 128 tokens.",
    "A short one.",
    "Requests of different lengths share one batch: their tokens are packed for the prefill, and their keys and values "
    "live in pages that need not be neighbours.",
    "Pages hold sixteen tokens each.",
)

console = Console()


def main() -> int:
    """Run both parts; return 0 when all results agree, else 1."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    start = time.perf_counter()
    # Sizes here are far below what threads pay for, and on a shared machine waiting for them costs most of the time.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        good = run()
    finally:
        torch.set_num_threads(threads)
    verdict = "[bold green]all results agree[/]" if good else "[bold red]results differ[/]"
    console.rule(f"{verdict} in {time.perf_counter() - start:.0f} s", style="dim")
    return 0 if good else 1


def run() -> bool:
    """Show both parts; return whether all results agree."""
    with torch.inference_mode():
        console.rule(f"[bold]tskernel[/] on {platform_of(torch.device('cpu'))}: {len(ops)} operators", style="dim")
        try:
            good = [show_embeddings(), show_decoder()]
        except FileNotFoundError as error:
            console.print(f"[bold red]{error}[/]")
            return False
    return all(good)


def show_embeddings(sentences: tuple[str, ...] = SENTENCES, backend: str = "inductor") -> bool:
    """Embed sentences with MiniLM, packed and compiled, and compare with transformers' padded batch."""
    from tskernel.integrations.transformers import enable

    console.print("\n[bold]1  Sentence embeddings[/]  all-MiniLM-L6-v2, its real weights, in transformers")
    lm = MiniLM()
    rows = lm.tokens(sentences)
    want = lm.padded(rows)
    enable(lm.model)
    with Observer() as observer:
        lm.packed(rows)
    compiled = torch.compile(lm.packed_rows, fullgraph=True, backend=backend)
    with console.status("torch.compile(fullgraph=True) of the packed model"):
        seconds, got = timed(lambda: compiled(*pack(rows), len(rows)))
    cosines = torch.nn.functional.cosine_similarity(got.double(), want.double())
    near = (got @ got.T).fill_diagonal_(-1).max(1)
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("sentence")
    for column, width in (("tokens", 6), ("cosine", 9), ("nearest", 7), ("similarity", 10)):
        table.add_column(column, justify="right", min_width=width)
    for i, sentence in enumerate(sentences):
        style = "green" if cosines[i] >= COSINE else "red"
        nearest = (str(int(near.indices[i]) + 1), f"{near.values[i]:.2f}")
        table.add_row(
            Text(f"{i + 1} {sentence}", no_wrap=True, overflow="ellipsis"),
            str(len(rows[i])),
            f"[{style}]{cosines[i]:.7f}[/]",
            *nearest,
        )
    console.print(table)
    tokens, longest = sum(map(len, rows)), max(map(len, rows))
    calls = " and ".join(f"{count} {name}" for name, count in observer.calls.items())
    console.print(
        f"cosine: to transformers' own attention. {calls} per pass; {tokens} tokens packed instead of "
        f"{longest * len(rows)} padded; compiled in {seconds:.1f} s",
        style="dim",
    )
    print_kernels(observer)
    return bool((cosines >= COSINE).all())


def show_decoder(config: Config | None = None, new_tokens: int = NEW_TOKENS, backend: str = "inductor") -> bool:
    """Decode greedily with the operators, compiled, and with the plain model; compare the tokens."""
    config = config or Config()
    console.print(
        f"\n[bold]2  Decoder[/]  GPT-OSS in small, random weights: {config.layers} layers, window {config.window} "
        f"in every second, {config.q_heads}/{config.kv_heads} heads with sinks, "
        f"{config.top_k} of {config.experts} experts"
    )
    with tempfile.TemporaryDirectory() as folder:
        weights = load_weights(Path(folder) / "decoder.pt", config)
    prompts = [torch.tensor(list(p.encode())) for p in PROMPTS]
    decoder = Decoder(config, weights, len(prompts), max(map(len, prompts)) + new_tokens)
    with Observer() as observer:
        first = decoder.prefill(prompts)
        decoder()
    first = decoder.prefill(prompts)  # the cache is as the prompts left it: the observed step is overwritten
    step = torch.compile(decoder, fullgraph=True, backend=backend)
    with console.status("torch.compile(fullgraph=True) of the decode step"):
        compile_seconds, second = timed(step)
    with progress() as bars:
        plain_seconds, want = plain_tokens(config, weights, prompts, new_tokens, bars)
        seconds, got = decode(step, [first, second], new_tokens, bars)
    return report_decoder(got, want, seconds, plain_seconds, compile_seconds, observer)


def report_decoder(
    got: Tensor, want: Tensor, seconds: float, plain_seconds: float, compile_seconds: float, observer: Observer
) -> bool:
    """Print what was decoded and how fast; return whether the tokens are equal."""
    batch, steps = got.shape
    equal = bool((got == want).all())
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("model", "tokens", "tokens/s", "tokens equal"):
        table.add_column(column, justify="left" if column == "model" else "right")
    table.add_row(
        "plain torch, one prompt after the other", str(want.numel()), f"{batch * (steps - 1) / plain_seconds:.0f}", ""
    )
    same = f"[{'green' if equal else 'red'}]{int((got == want).sum())} of {want.numel()}[/]"
    rate = f"{batch * (steps - 2) / seconds:.0f}"
    table.add_row(
        f"tskernel, {batch} prompts at once, compiled in {compile_seconds:.1f} s", str(got.numel()), rate, same
    )
    console.print(table)
    print_kernels(observer)
    return equal


def print_kernels(observer: Observer) -> None:
    """Print the kernel of each operator that ran, and why it was chosen."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("torch.ops.tokenspeed", "kernel", "why"):
        table.add_column(column, no_wrap=column != "why")
    for name, explanation in observer.explanations.items():
        table.add_row(name, winner(explanation), reason(explanation))
    console.print(table)


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    """Return how long a call took, and its result."""
    start = time.perf_counter()
    result = call()
    return time.perf_counter() - start, result


def progress() -> Progress:
    """Return a progress display for decoding."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]}"))
    return Progress(*columns, console=console, transient=True)


def decode(step: Callable[[], Tensor], tokens: list[Tensor], new_tokens: int, bars: Progress) -> tuple[float, Tensor]:
    """Run the remaining steps; return their time and all tokens ``[batch, new_tokens]``."""
    task = bars.add_task("tskernel", total=new_tokens, completed=len(tokens), rate="")
    start = time.perf_counter()
    for done in range(len(tokens), new_tokens):
        tokens.append(step())
        rate = len(tokens[0]) * (done - 1) / (time.perf_counter() - start)
        bars.update(task, completed=done + 1, rate=f"{rate:.0f} tokens/s")
    return time.perf_counter() - start, torch.stack(tokens, 1)


def plain_tokens(
    config: Config, weights: dict[str, Tensor], prompts: list[Tensor], new_tokens: int, bars: Progress
) -> tuple[float, Tensor]:
    """Run the plain model, one prompt after the other; return the time of the decode steps and all tokens."""
    task = bars.add_task("plain torch", total=new_tokens * len(prompts), rate="")
    rows, seconds, done = [], 0.0, 0
    for prompt in prompts:
        model = PlainDecoder(config, weights)
        row = [model(prompt)]
        while len(row) < new_tokens:
            took, token = timed(functools.partial(model, torch.tensor(row[-1:])))
            row.append(token)
            seconds, done = seconds + took, done + 1
            bars.update(task, completed=done + len(rows) + 1, rate=f"{done / seconds:.0f} tokens/s")
        rows.append(row)
    return seconds, torch.tensor(rows)
