"""Kernels from other packages: found through entry points, loaded only when asked."""

from __future__ import annotations

from tskernel.plugins.discovery import (
    PluginError,
    PluginInfo,
    PluginWarning,
    disable_plugin,
    discover_plugins,
    enable_plugin,
    list_plugins,
    reset_plugins,
)

__all__ = [
    "PluginError",
    "PluginInfo",
    "PluginWarning",
    "disable_plugin",
    "discover_plugins",
    "enable_plugin",
    "list_plugins",
    "reset_plugins",
]
