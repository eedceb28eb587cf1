"""Measured times: keys, files, and what they change in a selection."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor

import tskernel
from tskernel._torch.execute import call_request
from tskernel.dispatch import autotune
from tskernel.dispatch.platform import PlatformInfo, forget_platforms, set_platform
from tskernel.dispatch.policy import SelectionPolicy, set_policy
from tskernel.dispatch.registry import Priority, register_kernel
from tskernel.library import ops
from tskernel.testing import compare

pytestmark = pytest.mark.usefixtures("registry")
X, W = torch.ones(2, 8), torch.ones(8)


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    autotune.database.clear()
    yield
    autotune.database.clear()
    set_policy(SelectionPolicy.HEURISTIC)


def key(x: Tensor = X, w: Tensor = W, form: str = "", eps: float = 1e-6) -> str:
    op = ops["rmsnorm"]
    arguments = [x, w, eps]
    return autotune.tuning_key(call_request(op, arguments, form, None), arguments, form)


def add(name: str, value: float, seconds: float = 0.0, priority: int = Priority.PLUGIN) -> None:
    def kernel(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
        time.sleep(seconds)
        return torch.full_like(x, value)

    register_kernel("norm", "rmsnorm", name=name, priority=priority)(kernel)


def test_tun_02_the_key_holds_what_a_time_depends_on(monkeypatch: pytest.MonkeyPatch) -> None:
    base = key()
    half = torch.bfloat16
    others = {
        "form": key(form="out"),
        "dtype": key(X.to(half), W.to(half)),
        "rows": key(torch.ones(64, 8)),
        "width": key(torch.ones(2, 16), torch.ones(16)),
        "layout": key(torch.ones(8, 2).t()),
        "option": key(eps=1e-5),
    }
    monkeypatch.setattr(autotune, "__version__", "0.0.0")
    others["library"] = key()
    monkeypatch.undo()
    cpu = torch.device("cpu")
    set_platform(cpu, PlatformInfo.make("cpu", "9.9", name="another cpu"))
    others["device"] = key()
    forget_platforms()
    assert len({base, *others.values()}) == len(others) + 1, others
    assert key() == base and key(torch.ones(2, 8)) == base
    assert key(torch.ones(33, 8)) == others["rows"], "sizes are bucketed by powers of two"


def test_tun_02_a_changed_kernel_is_another_kernel(registry: object) -> None:
    spec = tskernel.KernelRegistry.get().get_by_name("reference/rmsnorm")
    assert autotune.label(spec) == f"reference/rmsnorm:{spec.fingerprint()}"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        '{"format": "tskernel-tuning-1", "times": {"k": {"a"',
        "[]",
        "{}",
        '{"format": "other", "times": {}}',
        '{"format": "tskernel-tuning-1", "times": {"k": 3}}',
    ],
)
def test_tun_02_foreign_and_truncated_files_are_ignored_with_a_message(tmp_path: Path, text: str) -> None:
    file = tmp_path / "tuning.json"
    file.write_text(text)
    with pytest.warns(RuntimeWarning, match=r"tuning file .*tuning\.json is ignored"):
        assert autotune.database.load(file) == 0
    assert not len(autotune.database)


def test_tun_02_a_saved_file_is_read_back(tmp_path: Path) -> None:
    autotune.database.record("k", {"a:1": 2.5})
    autotune.database.save(tmp_path / "t.json")
    assert json.loads((tmp_path / "t.json").read_text())["times"] == {"k": {"a:1": 2.5}}
    autotune.database.clear()
    assert autotune.database.load(tmp_path / "t.json") == 1 and autotune.database.times("k") == {"a:1": 2.5}
    assert [p.name for p in tmp_path.iterdir()] == ["t.json"]


def test_a_measured_time_decides_between_equal_priorities_only() -> None:
    add("a_slow", 1.0, seconds=0.004)
    add("b_fast", 2.0)
    assert float(tskernel.rmsnorm(X, W)[0, 0]) == 1.0  # by name
    times = autotune.tune(ops["rmsnorm"], X, W)
    assert times["a_slow"] > times["b_fast"] and "reference/rmsnorm" in times
    assert float(tskernel.rmsnorm(X, W)[0, 0]) == 2.0
    assert float(torch.ops.tokenspeed.rmsnorm(X, W)[0, 0]) == 2.0
    assert float(tskernel.rmsnorm(torch.ones(99, 8), W)[0, 0]) == 1.0  # another kind of call was not measured
    add("c_higher", 3.0, priority=Priority.PLUGIN + 1)
    assert float(tskernel.rmsnorm(X, W)[0, 0]) == 3.0


def test_the_autotune_policy_measures_first_calls_and_takes_the_fastest() -> None:
    add("slow_but_preferred", 1.0, seconds=0.004, priority=Priority.PLUGIN + 1)
    set_policy(SelectionPolicy.AUTOTUNE)
    assert float(tskernel.rmsnorm(X, W)[0, 0]) == pytest.approx(1.0, abs=0.01)
    assert set(autotune.database.times(key())) >= {
        autotune.label(s) for s in [tskernel.KernelRegistry.get().get_by_name("slow_but_preferred")]
    }
    fastest = min(autotune.database.times(key()).items(), key=lambda kv: kv[1])[0]
    assert not fastest.startswith("slow_but_preferred")
    assert float(tskernel.rmsnorm(X, W, override="slow_but_preferred")[0, 0]) == 1.0


def test_tun_01_tuning_an_op_that_writes_changes_its_inputs_once() -> None:
    """First call, second call and an untuned call all do the same; tuning alone writes nothing."""
    x, residual, w = torch.randn(4, 8), torch.randn(4, 8), torch.ones(8)
    want = (x.clone(), residual.clone())
    tskernel.fused_add_rmsnorm(*want, w)
    before = (x.clone(), residual.clone())
    autotune.tune(ops["fused_add_rmsnorm"], x, residual, w)
    compare((x, residual), before, exact=True)
    set_policy(SelectionPolicy.AUTOTUNE)
    for _ in range(2):
        got = (x.clone(), residual.clone())
        tskernel.fused_add_rmsnorm(*got, w)
        compare(got, want)


def test_tun_03_threads_may_tune_at_once() -> None:
    set_policy(SelectionPolicy.AUTOTUNE)
    want = tskernel.rmsnorm(X, W, override="reference")
    with ThreadPoolExecutor(8) as pool:
        for got in pool.map(lambda _: tskernel.rmsnorm(X, W), range(32)):
            compare(got, want)
