"""Find and load plugins: packages that register kernels through the entry-point group ``tokenspeed_kernel.plugins``.

The value of an entry point is a callable without arguments that registers kernels. Loading is explicit, alphabetical by
entry-point name, and all or nothing per plugin: one that raises leaves no kernel behind and stops no other.
"""

from __future__ import annotations

import os
import sys
import threading
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field
from importlib import metadata
from typing import Final, Literal

from tskernel.dispatch.registry import KernelRegistry, KernelSpec, load_builtin_kernels

GROUP: Final = "tokenspeed_kernel.plugins"
DISABLE_VARIABLE: Final = "TOKENSPEED_KERNEL_DISABLE_PLUGINS"

Status = Literal["found", "loaded", "failed", "disabled", "missing"]


class PluginWarning(UserWarning):
    """A plugin failed, was not found, or registered something that may surprise."""


class PluginError(RuntimeError):
    """Raised in strict mode; the text names every plugin that failed, with its exception."""


@dataclass(frozen=True)
class PluginInfo:
    """What is known of one plugin.

    ``status`` is "found" (installed, not loaded), "loaded", "failed", "disabled" or "missing" (asked for but not
    installed). ``kernels`` are the names that it registered, ``error`` says why it is not loaded, ``notes`` are its
    warnings.
    """

    name: str
    status: Status
    value: str = ""
    package: str = ""
    version: str = ""
    kernels: tuple[str, ...] = ()
    error: str = ""
    notes: tuple[str, ...] = ()


@dataclass
class _Loaded:
    """What must be undone to unload a plugin."""

    info: PluginInfo
    specs: list[KernelSpec] = field(default_factory=list)
    replaced: list[KernelSpec] = field(default_factory=list)
    modules: list[str] = field(default_factory=list)


_lock = threading.RLock()
_loaded: dict[str, _Loaded] = {}
_failed: dict[str, PluginInfo] = {}
_disabled: set[str] = set()


def discover_plugins(*names: str, force: bool = False, strict: bool = False) -> list[PluginInfo]:
    """Load the installed plugins, or only those named, and return what became of each, sorted by name.

    A loaded plugin is not loaded again unless ``force``; a failed one is tried again at each call. Failures are
    warnings (``PluginWarning``) and stand in ``PluginInfo.error``. ``disable_plugin`` and the environment variable
    ``TOKENSPEED_KERNEL_DISABLE_PLUGINS`` (names with commas between, or "all") keep plugins from loading.

    Raises: PluginError when ``strict`` and a plugin failed, or a named one is missing or disabled; the other plugins
    are loaded first.
    """
    messages: list[str] = []
    with _lock:
        load_builtin_kernels()
        told = [record.info for record in _loaded.values()]
        try:
            found = _entry_points()
        except Exception as error:  # unreadable metadata of any installed package; the next call tries again
            if strict:
                raise PluginError(f"cannot read entry points: {_describe(error)}") from error
            messages.append(f"cannot read entry points, no plugin was loaded: {_describe(error)}")
            found = []
        infos = [_visit(entry, force) for entry in found if not names or entry.name in names]
        infos += [_missing(name, found) for name in sorted(set(names) - {entry.name for entry in found})]
    infos.sort(key=lambda info: info.name)
    troubles = [info for info in infos if info.error and (info.status != "disabled" or names)]
    messages += [note for info in infos if not any(info is old for old in told) for note in info.notes]
    if strict and troubles:
        raise PluginError("; ".join(_sentence(info) for info in troubles))
    # Warned of last: where warnings are errors, the first would otherwise keep later plugins from loading.
    for message in [_sentence(info) for info in troubles] + messages:
        warnings.warn(message, PluginWarning, stacklevel=2)
    return infos


def list_plugins() -> list[PluginInfo]:
    """Return the installed plugins and their state, sorted by name. Loads nothing."""
    with _lock:
        return [_known(entry) or _info(entry, "found") for entry in _entry_points()]


def disable_plugin(name: str) -> None:
    """Keep a plugin from loading in this process; the kernels of a loaded one are removed."""
    with _lock:
        _disabled.add(name)
        _unload(name)


def enable_plugin(name: str) -> None:
    """Undo ``disable_plugin``; the next ``discover_plugins`` loads it. The environment variable stays in force."""
    with _lock:
        _disabled.discard(name)


def reset_plugins() -> None:
    """Remove every plugin's kernels and forget all state, as if nothing had been discovered."""
    with _lock:
        for name in list(_loaded):
            _unload(name)
        _failed.clear()
        _disabled.clear()


def _entry_points() -> list[metadata.EntryPoint]:
    """Return the group's entry points by name; a package that is seen twice on the path counts once."""
    unique = {(entry.name, entry.value): entry for entry in metadata.entry_points(group=GROUP)}
    return [unique[key] for key in sorted(unique)]


def _visit(entry: metadata.EntryPoint, force: bool) -> PluginInfo:
    if why := _disabled_reason(entry.name):
        _unload(entry.name)
        return _info(entry, "disabled", error=why)
    if record := _loaded.get(entry.name):
        if record.info.value != entry.value:
            return _info(entry, "failed", error=f"the name is taken by {record.info.value} ({record.info.package})")
        if not force:
            return record.info
        _unload(entry.name)
    info = _load(entry)
    if info.status == "failed":
        _failed[entry.name] = info
    else:
        _failed.pop(entry.name, None)
    return info


def _load(entry: metadata.EntryPoint) -> PluginInfo:
    registry = KernelRegistry.get()
    before = {spec.name: spec for spec in registry.list_kernels()}
    modules = set(sys.modules)
    try:
        with registry.transaction():
            register = entry.load()
            if not callable(register):
                raise TypeError(f"{entry.value}: expected a callable, got {type(register).__name__}")
            register()
    except BaseException as error:
        # Forgotten, so that a later try runs their registrations again instead of finding them imported already.
        _forget(_own_modules(entry, modules))
        if isinstance(error, KeyboardInterrupt):
            raise
        return _info(entry, "failed", error=_describe(error))
    after = {spec.name: spec for spec in registry.list_kernels()}
    specs = [spec for name, spec in sorted(after.items()) if before.get(name) is not spec]
    replaced = [before[spec.name] for spec in specs if spec.name in before]
    notes = (*_replaced_notes(entry.name, replaced), *_tie_notes(entry.name, specs, after.values()))
    info = _info(entry, "loaded", kernels=tuple(spec.name for spec in specs), notes=notes)
    _loaded[entry.name] = _Loaded(info, specs, replaced, _own_modules(entry, modules))
    return info


def _unload(name: str) -> None:
    record = _loaded.pop(name, None)
    _failed.pop(name, None)
    if record is None:
        return
    registry = KernelRegistry.get()
    present = {spec.name: spec for spec in registry.list_kernels()}
    for spec in record.specs:
        if present.get(spec.name) is spec:
            registry.unregister(spec.name)
    for spec in record.replaced:
        registry.register(spec)
    _forget(record.modules)


def _own_modules(entry: metadata.EntryPoint, before: set[str]) -> list[str]:
    """Return the modules of the plugin's own package that were imported since ``before``."""
    top = entry.value.partition(":")[0].partition(".")[0].strip()
    if top == "tskernel":  # its modules are shared, and its ops cannot be declared twice
        return []
    return [name for name in sys.modules if name not in before and name.partition(".")[0] == top]


def _forget(modules: Iterable[str]) -> None:
    for name in modules:
        sys.modules.pop(name, None)


def _replaced_notes(plugin: str, replaced: Iterable[KernelSpec]) -> list[str]:
    return [f"plugin {plugin!r} replaced kernel {spec.name!r}" for spec in replaced]


def _tie_notes(plugin: str, specs: list[KernelSpec], everything: Iterable[KernelSpec]) -> list[str]:
    """Say which new kernels share op and priority with one that was there: the name alone then decides."""
    names = {spec.name for spec in specs}
    others = [spec for spec in everything if spec.name not in names]
    return [
        f"plugin {plugin!r}: kernel {new.name!r} has priority {new.priority} like {old.name!r}; the name decides"
        for new in specs
        for old in others
        if (new.family, new.mode, new.priority) == (old.family, old.mode, old.priority) and _may_meet(new, old)
    ]


def _may_meet(a: KernelSpec, b: KernelSpec) -> bool:
    """Whether some vendor's device could run both."""
    mine, theirs = ({requirement.vendor for requirement in spec.capability} for spec in (a, b))
    return None in mine | theirs or bool(mine & theirs)


def _disabled_reason(name: str) -> str:
    listed = {part.strip() for part in os.environ.get(DISABLE_VARIABLE, "").split(",")}
    if listed & {name, "all", "*"}:
        return f"disabled by {DISABLE_VARIABLE}"
    return "disabled by disable_plugin()" if name in _disabled else ""


def _known(entry: metadata.EntryPoint) -> PluginInfo | None:
    if why := _disabled_reason(entry.name):
        return _info(entry, "disabled", error=why)
    info = _loaded[entry.name].info if entry.name in _loaded else _failed.get(entry.name)
    return info if info is not None and info.value == entry.value else None


def _missing(name: str, found: list[metadata.EntryPoint]) -> PluginInfo:
    valid = ", ".join(entry.name for entry in found) or "none"
    return PluginInfo(name, "missing", error=f"no entry point of that name in {GROUP}; installed: {valid}")


def _info(
    entry: metadata.EntryPoint,
    status: Status,
    *,
    kernels: tuple[str, ...] = (),
    error: str = "",
    notes: tuple[str, ...] = (),
) -> PluginInfo:
    package, version = (entry.dist.name, entry.dist.version) if entry.dist is not None else ("", "")
    return PluginInfo(entry.name, status, entry.value, package, version, kernels, error, notes)


def _sentence(info: PluginInfo) -> str:
    verb = "failed" if info.status == "failed" else f"is {info.status}"
    return f"plugin {info.name!r} {verb}: {info.error}"


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
