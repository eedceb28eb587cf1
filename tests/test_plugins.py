"""Plugins are all or nothing, stop nobody else, and say what went wrong."""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
import textwrap
import threading
import warnings
from importlib import metadata
from pathlib import Path

import pytest
import torch

import tskernel
from tskernel import plugins
from tskernel.dispatch.platform import PlatformInfo, probe_package
from tskernel.dispatch.registry import KernelRegistry
from tskernel.dispatch.selection import explain_selection, select_kernel
from tskernel.dispatch.signature import FormatSignature
from tskernel.library import ops
from tskernel.plugins import PluginError, PluginWarning, discover_plugins, list_plugins
from tskernel.plugins.__main__ import main
from tskernel.plugins.discovery import DISABLE_VARIABLE, GROUP

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "plugin_example"

KERNEL = """
    from tskernel.dispatch.platform import CapabilityRequirement
    from tskernel.dispatch.registry import KernelRegistry, Priority, register_kernel

    def body(x, weight, eps=1e-6):
        return x

    body.__annotations__ = {"x": "Tensor", "weight": "Tensor", "eps": "float", "return": "Tensor"}

    def add(name, vendor="acme", priority=Priority.PLUGIN):
        needs = CapabilityRequirement(vendor=vendor)
        register_kernel("norm", "rmsnorm", name=name, capability=needs, priority=priority)(body)
"""
GOOD = KERNEL + "\n    def register():\n        add('NAME')\n"


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    monkeypatch.delenv(DISABLE_VARIABLE, raising=False)
    before = {spec.name: spec for spec in KernelRegistry.get().list_kernels()}
    yield
    plugins.reset_plugins()
    after = {spec.name: spec for spec in KernelRegistry.get().list_kernels()}
    assert after == before


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Write a package with an entry point into a folder on sys.path, as pip would."""
    monkeypatch.syspath_prepend(str(tmp_path))
    modules: list[str] = []

    def write(name: str, source: str, attribute: str = "register") -> None:
        module = f"plugin_module_{name}"
        modules.append(module)
        (tmp_path / f"{module}.py").write_text(textwrap.dedent(source).replace("NAME", f"{name}/rmsnorm/x"))
        info = tmp_path / f"dist_{name}-1.2.dist-info"
        info.mkdir(exist_ok=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: dist-{name}\nVersion: 1.2\n")
        (info / "entry_points.txt").write_text(f"[{GROUP}]\n{name} = {module}:{attribute}\n")
        importlib.invalidate_caches()
        sys.modules.pop(module, None)

    yield write
    for module in modules:
        sys.modules.pop(module, None)


def kernel_set() -> set[str]:
    return {spec.name for spec in KernelRegistry.get().list_kernels()}


def discover(*names: str, **options: bool):
    """Discover, with the warnings' texts."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        infos = discover_plugins(*names, **options)
    assert {w.category for w in caught} <= {PluginWarning}
    return {info.name: info for info in infos}, [str(w.message) for w in caught]


RAISES = {
    "at_import": GOOD + "\n    add('half/rmsnorm/a')\n    raise ValueError('broken here')\n",
    "in_callable": GOOD.replace("add('NAME')", "add('half/rmsnorm/a'); raise ValueError('broken here')"),
    "system_exit": GOOD.replace("add('NAME')", "add('half/rmsnorm/a'); raise SystemExit(3)"),
    "base_exception": KERNEL
    + """
    class Odd(BaseException):
        pass

    def register():
        add('half/rmsnorm/a')
        raise Odd('broken here')
    """,
    "import_error": "import no_such_module_anywhere\n",
    "no_attribute": "x = 1\n",
    "not_callable": "register = 3\n",
    "bad_kernel": GOOD.replace("add('NAME')", "add('half/rmsnorm/a'); add('NAME', priority=99)"),
    "unregisters": GOOD.replace(
        "add('NAME')", "KernelRegistry.get().unregister('reference/rmsnorm'); raise ValueError('broken here')"
    ),
}


@pytest.mark.parametrize("how", RAISES)
def test_plg_01_raising_plugin_leaves_nothing_and_stops_no_other(install, how):
    install("a_good", GOOD)
    install("bad", RAISES[how])
    install("z_good", GOOD)
    before = kernel_set()
    infos, messages = discover()
    assert kernel_set() - before == {"a_good/rmsnorm/x", "z_good/rmsnorm/x"}
    assert before <= kernel_set()
    assert (infos["a_good"].status, infos["bad"].status, infos["z_good"].status) == ("loaded", "failed", "loaded")
    exception = {
        "system_exit": "SystemExit: 3",
        "base_exception": "Odd: broken here",
        "import_error": "ModuleNotFoundError: ",
        "no_attribute": "AttributeError: ",
        "not_callable": "TypeError: plugin_module_bad:register: expected a callable, got int",
        "bad_kernel": "RegistrationError: ",
    }.get(how, "ValueError: broken here")
    assert infos["bad"].error.startswith(exception)
    assert infos["bad"].kernels == ()
    assert any(m.startswith(f"plugin 'bad' failed: {exception}") for m in messages)


def test_plg_01_strict_raises_after_loading_the_others(install):
    install("a_bad", "raise OSError('no toolkit')\n")
    install("b_bad", "raise SystemExit(2)\n")
    install("good", GOOD)
    with pytest.raises(PluginError, match=r"'a_bad' failed: OSError: no toolkit.*'b_bad' failed: SystemExit: 2"):
        discover_plugins(strict=True)
    assert "good/rmsnorm/x" in kernel_set()


def test_plg_01_requested_plugin_that_is_missing_is_reported(install):
    install("good", GOOD)
    install("other", GOOD)
    infos, messages = discover("nobody", "good")
    assert (infos["nobody"].status, infos["good"].status) == ("missing", "loaded")
    assert "other" not in infos
    assert "installed: good, other" in infos["nobody"].error
    assert any("plugin 'nobody' is missing" in m for m in messages)
    with pytest.raises(PluginError, match="nobody"):
        discover_plugins("nobody", strict=True)


def test_plg_01_keyboard_interrupt_propagates_and_rolls_back(install):
    install("stopped", GOOD.replace("add('NAME')", "add('half/rmsnorm/a'); raise KeyboardInterrupt"))
    before = kernel_set()
    with pytest.raises(KeyboardInterrupt):
        discover_plugins()
    assert kernel_set() == before


def test_plg_01_warnings_as_errors_still_load_every_plugin(install):
    install("a_bad", "raise ValueError\n")
    install("good", GOOD)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(PluginWarning, match="a_bad"):
            discover_plugins()
    assert "good/rmsnorm/x" in kernel_set()


def test_plg_02_package_that_does_not_load_is_unavailable_with_a_message(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    for name, line in {
        "plg02_error": "raise OSError('libfoo.so.1 is missing')",
        "plg02_exit": "raise SystemExit(1)",
    }.items():
        (tmp_path / f"{name}.py").write_text(line + "\n")
        importlib.invalidate_caches()
        with pytest.warns(RuntimeWarning, match=f"package {name} is installed but does not load"):
            probe = probe_package(name)
        assert not probe.available
        assert "installed but does not load" in probe.reason
    assert "libfoo.so.1 is missing" in probe_package("plg02_error").reason


def test_plg_02_missing_package_is_quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        probe = probe_package("plg02_not_there")
    assert not probe.available
    assert probe.reason == "package plg02_not_there is not installed"


def test_loading_is_explicit_alphabetical_and_once(install, capsys):
    for name in ("c", "a", "b"):
        install(name, GOOD.replace("def register():", "def register():\n        print('NAME')"))
    assert [(i.name, i.status) for i in list_plugins()] == [("a", "found"), ("b", "found"), ("c", "found")]
    assert not [k for k in kernel_set() if k.endswith("/rmsnorm/x")]
    infos = list(discover()[0].values())
    assert [(i.name, i.kernels, i.package, i.version) for i in infos] == [
        (n, (f"{n}/rmsnorm/x",), f"dist-{n}", "1.2") for n in "abc"
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # what was told of a loaded plugin is not told again
        assert discover_plugins() == infos == list_plugins()
    assert capsys.readouterr().out.split() == [f"{n}/rmsnorm/x" for n in "abc"]
    discover(force=True)
    assert capsys.readouterr().out.split() == [f"{n}/rmsnorm/x" for n in "abc"]


def test_import_time_registration_is_complete_after_a_retry(install, tmp_path):
    """The first try imports a module that registers and then fails; the second must not find it imported already."""
    package = tmp_path / "retried"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "a.py").write_text(textwrap.dedent(KERNEL) + "\nadd('retried/rmsnorm/a')\n")
    (package / "b.py").write_text(
        "import os, retried.a\nif not os.path.exists(__file__ + '.ready'): raise OSError('not ready')\n"
        "retried.a.add('retried/rmsnorm/b')\ndef register(): pass\n"
    )
    info = tmp_path / "retried-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: retried\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[{GROUP}]\nretried = retried.b:register\n")
    importlib.invalidate_caches()
    infos, _ = discover()
    assert infos["retried"].error == "OSError: not ready"
    assert [i.status for i in list_plugins()] == ["failed"]
    (package / "b.py.ready").write_text("")
    infos, messages = discover()
    assert infos["retried"].kernels == ("retried/rmsnorm/a", "retried/rmsnorm/b")
    assert messages == []


def test_unreadable_entry_points_are_reported_and_tried_again(install, monkeypatch):
    install("good", GOOD)
    real = metadata.entry_points

    def fails(**_):
        raise OSError("stale file handle")

    monkeypatch.setattr(metadata, "entry_points", fails)
    infos, messages = discover()
    assert infos == {} and "stale file handle" in messages[0]
    with pytest.raises(PluginError, match="stale file handle"):
        discover_plugins(strict=True)
    monkeypatch.setattr(metadata, "entry_points", real)
    assert discover()[0]["good"].status == "loaded"


@pytest.mark.parametrize("value", ["good", "x, good ,y", "all", "*"])
def test_disabled_by_environment(install, monkeypatch, value):
    install("good", GOOD)
    monkeypatch.setenv(DISABLE_VARIABLE, value)
    infos, messages = discover(strict=True)
    assert infos["good"].status == "disabled" and DISABLE_VARIABLE in infos["good"].error and messages == []
    assert "good/rmsnorm/x" not in kernel_set()
    with pytest.raises(PluginError, match="disabled by"):
        discover_plugins("good", strict=True)
    plugins.enable_plugin("good")
    assert list_plugins()[0].status == "disabled"
    monkeypatch.setenv(DISABLE_VARIABLE, "")
    assert discover()[0]["good"].status == "loaded"


def test_disable_removes_kernels_and_enable_brings_them_back(install):
    install("good", GOOD)
    discover_plugins()
    plugins.disable_plugin("good")
    assert "good/rmsnorm/x" not in kernel_set()
    assert discover()[0]["good"].error == "disabled by disable_plugin()"
    plugins.enable_plugin("good")
    assert discover()[0]["good"].kernels == ("good/rmsnorm/x",)


def test_equal_priority_is_warned_of_where_both_could_run(install):
    install("first", GOOD)
    install("second", GOOD)
    install("third", GOOD.replace("add('NAME')", "add('NAME', vendor='other')"))
    infos, messages = discover()
    assert messages == [
        "plugin 'second': kernel 'second/rmsnorm/x' has priority 16 like 'first/rmsnorm/x'; the name decides"
    ]
    assert infos["second"].notes == tuple(messages)


def test_replaced_kernel_is_warned_of_and_comes_back(install):
    install(
        "takes",
        GOOD.replace("add('NAME')", "KernelRegistry.get().unregister('reference/rmsnorm'); add('reference/rmsnorm')"),
    )
    builtin = KernelRegistry.get().get_by_name("reference/rmsnorm")
    infos, messages = discover()
    assert messages == ["plugin 'takes' replaced kernel 'reference/rmsnorm'"]
    assert infos["takes"].kernels == ("reference/rmsnorm",)
    plugins.disable_plugin("takes")
    assert KernelRegistry.get().get_by_name("reference/rmsnorm") is builtin


def test_one_name_from_two_packages(install, tmp_path):
    install("twice", GOOD)
    other = tmp_path / "other-1.dist-info"
    other.mkdir()
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1\n")
    (other / "entry_points.txt").write_text(f"[{GROUP}]\ntwice = plugin_module_zzz:register\n")
    importlib.invalidate_caches()
    with pytest.warns(PluginWarning, match="the name is taken by plugin_module_twice:register"):
        infos = discover_plugins()
    assert sorted(i.status for i in infos) == ["failed", "loaded"]


def test_threads_discover_and_call_at_once(install):
    install("good", GOOD)
    x, weight, errors = torch.randn(3, 8), torch.ones(8), []

    def work(index: int) -> None:
        try:
            for _ in range(5):
                if index % 2:
                    discover_plugins()
                tskernel.rmsnorm(x, weight)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors and not any(t.is_alive() for t in threads)
    assert sum(name == "good/rmsnorm/x" for name in kernel_set()) == 1


# The command line.


def test_cli_lists_and_shows(install, capsys):
    assert main(["list"]) == 0
    assert f"no plugins are installed (entry-point group {GROUP})" in capsys.readouterr().out
    install("bad", "raise ValueError('broken here')\n")
    install("good", GOOD)
    assert main(["list"]) == 0
    assert capsys.readouterr().out == "bad  found  dist-bad 1.2\ngood  found  dist-good 1.2\n"
    assert main(["info", "good"]) == 0
    assert "status   loaded" in (shown := capsys.readouterr().out) and "kernel   good/rmsnorm/x" in shown
    assert main(["info", "bad"]) == 1
    assert "error    ValueError: broken here" in capsys.readouterr().out
    assert main(["info", "nobody"]) == 1
    assert "status   missing" in capsys.readouterr().out
    assert main(["list", "--load"]) == 1


# The example package.


@pytest.fixture
def example(tmp_path, monkeypatch):
    """The example with the entry point that its own pyproject.toml declares."""
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]
    info = tmp_path / "tskernel_acme-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    points = "".join(f"{k} = {v}\n" for k, v in project["entry-points"][GROUP].items())
    (info / "entry_points.txt").write_text(f"[{GROUP}]\n{points}")
    monkeypatch.syspath_prepend(str(EXAMPLE / "src"))
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    yield tmp_path
    for name in [n for n in sys.modules if n.partition(".")[0] == "tskernel_acme"]:
        del sys.modules[name]


def test_example_serves_its_vendor_and_nobody_else(example):
    assert discover_plugins("acme", strict=True)[0].kernels == ("acme/rmsnorm/vector",)
    bf16 = FormatSignature.of(x=torch.bfloat16)
    made = PlatformInfo.make("acme", "2.0")
    for platform in ("acme:1.0", made):
        assert explain_selection("norm", "rmsnorm", bf16, platform=platform).winner == "acme/rmsnorm/vector"
    reasons = {
        "needs acme, sm90 is nvidia": {"platform": "sm90"},
        "needs 1.0 or later": {"platform": "acme:0.9"},
        "hidden=769 is not in range(8, 65537, 8)": {"platform": "acme:1.0", "traits": {"hidden": 769}},
    }
    for reason, request in reasons.items():
        told = explain_selection("norm", "rmsnorm", bf16, **request)
        assert told.winner != "acme/rmsnorm/vector"
        assert [c.reason for c in told.candidates if c.name == "acme/rmsnorm/vector"] == [reason]


def test_example_kernel_is_right(example):
    from tskernel.testing import compare, oracle

    discover_plugins(strict=True)
    kernel = select_kernel("norm", "rmsnorm", FormatSignature.of(x=torch.bfloat16), platform="acme:1.0")
    x, weight = torch.randn(5, 64, dtype=torch.bfloat16), torch.randn(64, dtype=torch.bfloat16)
    compare(kernel(x, weight), oracle("rmsnorm", x, weight))
    assert ops["rmsnorm"].compare_signature(kernel.spec.function) is None


@pytest.mark.slow
def test_example_installs_with_pip_and_shows_on_the_command_line(tmp_path):
    pytest.importorskip("setuptools")
    pytest.importorskip("pip")
    source = shutil.copytree(EXAMPLE, tmp_path / "source")
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*command, "--target", str(tmp_path / "site"), str(source)], check=True)
    paths = [str(tmp_path / "site"), str(Path(tskernel.__file__).parent.parent)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(
        [sys.executable, "-m", "tskernel.plugins", "info", "acme"],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "from     tskernel-acme 0.1.0" in done.stdout and "kernel   acme/rmsnorm/vector" in done.stdout
    pytest.importorskip("typer")
    arguments = ["explain", "norm.rmsnorm", "--platform", "acme:1.0", "--dtype", "float16", "--plugins"]
    done = subprocess.run(
        [sys.executable, "-m", "tskernel", *arguments], env=environment, capture_output=True, text=True, check=True
    )
    assert "norm.rmsnorm on acme:1.0: acme/rmsnorm/vector" in done.stdout
