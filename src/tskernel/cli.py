"""The command line: devices and packages (info), kernels, the choice of one and its reasons (explain), and a demo."""

from __future__ import annotations

import json
import platform as host
import sys
from collections import Counter
from difflib import get_close_matches
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

import tskernel.library
from tskernel._version import __version__
from tskernel.dispatch.errors import OverrideError
from tskernel.dispatch.explanation import Explanation
from tskernel.dispatch.platform import PlatformInfo, platform_of, probe_package
from tskernel.dispatch.registry import KernelRegistry, KernelSpec, describe_kernel, load_builtin_kernels
from tskernel.dispatch.selection import explain_selection
from tskernel.dispatch.signature import FormatSignature
from tskernel.library import Op

app = typer.Typer(help="LLM-inference operators as PyTorch operators.", no_args_is_help=True, add_completion=False)
# Into a pipe or a file, a line is a row: nothing is folded at 80 columns.
console = Console(width=None if sys.stdout.isatty() else 240)

_BACKENDS = ("portable", "cuda", "rocm", "npu")
_STYLES = {"selected": "bold green", "fits": "green", "rejected": "dim"}

OpArgument = Annotated[str, typer.Argument(help="An op, as rmsnorm or norm.rmsnorm.")]
PluginsOption = Annotated[bool, typer.Option("--plugins", help="Load the installed plugins first.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command()
def info(plugins: PluginsOption = False) -> None:
    """Show devices, vendor packages (found, or why not) and how many kernels each op has."""
    _load(plugins)
    console.print(f"tskernel {__version__}, torch {torch.__version__}, Python {host.python_version()}")
    table = _table("device", "platform", "architecture", "features")
    for device in _devices():
        found = platform_of(device)
        table.add_row(str(device), str(found), str(found.arch or ""), ", ".join(sorted(found.features)) or "none known")
    console.print(table)
    for part in (_backends_table(), _packages_table(), _counts_table()):
        console.print()
        console.print(part)


@app.command()
def kernels(
    op: Annotated[str | None, typer.Argument(help="An op; all of them if left out.")] = None,
    plugins: PluginsOption = False,
) -> None:
    """List the kernels of one op in full, or of all ops in one table."""
    _load(plugins)
    registry = KernelRegistry.get()
    if op is not None:
        found = _find_op(op)
        for spec in registry.list_kernels(found.family, found.name):
            console.print(Text(describe_kernel(spec.name)), soft_wrap=True)
        return
    table = _table("op", "kernel", "priority", "runs on")
    for spec in registry.list_kernels():
        table.add_row(f"{spec.family}.{spec.mode}", spec.name, str(spec.priority), _vendors(spec))
    console.print(table)


@app.command()
def explain(
    op: OpArgument,
    platform: Annotated[
        list[str] | None,
        typer.Option(help="cpu, sm90, gfx950, ascend910b, VENDOR:ARCH; repeatable. Default: this machine."),
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="Dtype of every role, as bfloat16.")] = None,
    role: Annotated[list[str] | None, typer.Option(help="ROLE=DTYPE for one role; repeatable.")] = None,
    trait: Annotated[
        list[str] | None, typer.Option(help="NAME=VALUE; repeatable; the rest take typical values.")
    ] = None,
    solution: Annotated[str | None, typer.Option(help="Only kernels of this solution.")] = None,
    override: Annotated[str | None, typer.Option(help="A kernel name or solution, as the override argument.")] = None,
    plugins: PluginsOption = False,
    as_json: JsonOption = False,
) -> None:
    """Show which kernel serves an op on a platform, and for each other one the reason. Exit 1 when none can."""
    _load(plugins)
    found = _find_op(op)
    signature = _signature(found, dtype, role or [])
    traits = dict(_trait(found, text) for text in trait or [])
    try:
        results = [
            explain_selection(
                found.family, found.name, signature, traits=traits, platform=where, solution=solution, override=override
            )
            for where in [_platform(name) for name in platform or []] or [None]
        ]
    except OverrideError as error:
        raise typer.BadParameter(str(error)) from None
    if as_json:
        typer.echo(json.dumps([result.to_dict() for result in results], indent=2, default=str))
    else:
        for result in results:
            _print_explanation(result)
    raise typer.Exit(int(not all(result.winner for result in results)))


@app.command()
def demo() -> None:
    """Run real models through torch.ops.tokenspeed on this machine."""
    from tskernel.demo import main

    raise typer.Exit(main() or 0)


def _load(plugins: bool) -> None:
    load_builtin_kernels()
    if plugins:
        from tskernel.plugins.discovery import discover_plugins

        discover_plugins()


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _devices() -> list[torch.device]:
    devices = [torch.device("cpu")]
    if torch.cuda.is_available():
        devices += [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    npu = getattr(torch, "npu", None)
    if npu is not None and npu.is_available():
        devices += [torch.device("npu", index) for index in range(npu.device_count())]
    return devices


def _backends_table() -> Table:
    table = _table("backend", "kernels", "run here", "why not")
    platforms = [platform_of(device) for device in _devices()]
    specs = KernelRegistry.get().list_kernels()
    for backend in dict.fromkeys(["reference", *_BACKENDS, *sorted(spec.backend for spec in specs)]):
        mine = [spec for spec in specs if spec.backend == backend]
        unfit = [spec for spec in mine if all(spec.unfit(platform) for platform in platforms)]
        # The reason on the last device: the accelerator where there is one.
        reasons = Counter(spec.unfit(platforms[-1]) for spec in unfit)
        why = "; ".join(f"{reason} ({count})" for reason, count in reasons.most_common(3))
        table.add_row(backend, str(len(mine)), str(len(mine) - len(unfit)), why or ("" if mine else "no kernel yet"))
    return table


def _packages_table() -> Table:
    table = _table("vendor package", "state", "kernels that use it")
    users: dict[str, int] = {}
    for spec in KernelRegistry.get().list_kernels():
        for package in {package for requirement in spec.capability for package in requirement.packages}:
            users[package] = users.get(package, 0) + 1
    for package, count in sorted(users.items()):
        probe = probe_package(package)
        table.add_row(package, "found" if probe.available else probe.reason, str(count))
    if not users:
        table.add_row("none is used by a registered kernel", "", "")
    return table


def _counts_table() -> Table:
    specs = KernelRegistry.get().list_kernels()
    backends = sorted({spec.backend for spec in specs})
    table = _table("op", *backends)
    for op in _ops_by_family():
        counts = [sum(spec.mode == op.name and spec.backend == backend for spec in specs) for backend in backends]
        table.add_row(f"{op.family}.{op.name}", *[str(count or "") for count in counts])
    return table


def _print_explanation(result: Explanation) -> None:
    head = Text(f"{result.op} on {result.platform}: ")
    if result.winner:
        head.append(result.winner, style="bold green")
    else:
        head.append("no kernel fits", style="bold red")
    console.print(head, soft_wrap=True)
    console.print(Text(f"  formats: {result.formats}"), soft_wrap=True)
    traits = ", ".join(f"{k}={v}" for k, v in result.traits.items())
    console.print(Text(f"  traits: {traits or 'none'}"), soft_wrap=True)
    if result.override:
        console.print(Text(f"  override: {result.override[0]} by {result.override[1]}"), soft_wrap=True)
    table = _table("status", "kernel", "priority", "reason")
    for row in result.candidates:
        style = _STYLES.get(row.status, "")
        table.add_row(Text(row.status, style), Text(row.name), str(row.priority), Text(row.reason))
    console.print(table)


def _vendors(spec: KernelSpec) -> str:
    return ", ".join(dict.fromkeys(requirement.vendor or "any" for requirement in spec.capability))


def _ops_by_family() -> list[Op]:
    return sorted(tskernel.library.ops.values(), key=lambda op: (op.family, op.name))


def _find_op(text: str) -> Op:
    family, dot, name = text.rpartition(".")
    found = tskernel.library.ops.get(name)
    if found is None or (dot and found.family != family):
        names = {f"{op.family}.{op.name}": op.name for op in _ops_by_family()}
        near = [full for full, short in names.items() if short in get_close_matches(name, names.values(), n=3)]
        hint = f"near: {', '.join(near)}" if near else "python -m tskernel kernels lists them"
        raise typer.BadParameter(f"no op {text!r}; {hint}")
    return found


def _platform(name: str) -> PlatformInfo:
    try:
        return PlatformInfo.named(name)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def _signature(op: Op, dtype: str | None, roles: list[str]) -> FormatSignature | None:
    chosen: dict[str, torch.dtype] = dict.fromkeys(op.roles, _dtype(dtype)) if dtype is not None else {}
    for text in roles:
        name, value = _pair(text)
        if name not in op.roles:
            raise typer.BadParameter(f"role {name!r}: expected one of {', '.join(op.roles) or 'none'}")
        chosen[name] = _dtype(value)
    if not chosen:
        return None
    if missing := [name for name in op.roles if name not in chosen]:
        raise typer.BadParameter(f"no dtype for role {', '.join(missing)}; give --dtype or --role")
    return FormatSignature.of(chosen)


def _dtype(text: str) -> torch.dtype:
    found = getattr(torch, text.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise typer.BadParameter(f"no dtype {text!r}; for example float32, bfloat16, float8_e4m3fn")
    return found


def _trait(op: Op, text: str) -> tuple[str, Any]:
    name, value = _pair(text)
    if name not in op.trait_defaults:
        raise typer.BadParameter(f"trait {name!r}: expected one of {', '.join(op.trait_defaults) or 'none'}")
    typical, given = op.trait_defaults[name], _value(value)
    if isinstance(typical, bool) is not isinstance(given, bool) and typical is not None:
        expected = "true or false" if isinstance(typical, bool) else f"a value like {typical!r}"
        raise typer.BadParameter(f"trait {name}: expected {expected}, got {value}")
    return name, given


def _value(text: str) -> object:
    """Read a trait value: true, false, none, an integer, a decimal or a word. True and 1 are different values."""
    words: dict[str, object] = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            continue
    return text


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise typer.BadParameter(f"{text!r}: expected NAME=VALUE")
    return name, value
