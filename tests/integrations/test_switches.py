"""The switches of the plugins, without the servers that they plug into."""

from __future__ import annotations

import subprocess
import sys
from types import ModuleType

import pytest

from tskernel.integrations import sglang, vllm

PLUGINS = (sglang, vllm)


@pytest.fixture(params=PLUGINS, ids=lambda plugin: plugin.SWITCH)
def plugin(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr(request.param, "_installed", {})
    return request.param


@pytest.mark.parametrize("word", (None, "", "0", "off", "False"))
def test_nothing_is_done_unless_asked(plugin: ModuleType, word: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(plugin.SWITCH, raising=False)
    if word is not None:
        monkeypatch.setenv(plugin.SWITCH, word)
    assert plugin.wanted() == ()
    plugin.register()
    getattr(plugin, "load", plugin.register)()


@pytest.mark.parametrize("word", ("1", "true", "ON", "all"))
def test_everything(plugin: ModuleType, word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(plugin.SWITCH, word)
    assert plugin.wanted() == plugin.PARTS


def test_parts_in_the_order_asked_for(plugin: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(plugin.SWITCH, "Rope, norm,")
    assert plugin.wanted() == ("rope", "norm")


def test_a_wrong_word_is_named(plugin: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(plugin.SWITCH, "norm,ropes")
    with pytest.raises(ValueError, match=f"{plugin.SWITCH}: expected 1, 0 or some of attention, .*, got 'ropes'"):
        plugin.register()


def test_a_mistake_ends_sglang_which_would_serve_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(sglang.SWITCH, "ropes")
    with pytest.raises(SystemExit, match="tskernel: TSKERNEL_SGLANG: expected"):
        sglang.load()


def test_importing_a_plugin_imports_no_server() -> None:
    code = (
        "import sys, tskernel.integrations.sglang, tskernel.integrations.vllm; "
        "sys.exit(bool({'sglang', 'vllm'} & sys.modules.keys()))"
    )
    assert subprocess.run((sys.executable, "-c", code), check=False).returncode == 0
