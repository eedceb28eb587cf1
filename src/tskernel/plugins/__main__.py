"""``python -m tskernel.plugins list|info NAME``: see which plugins are installed, and whether one loads."""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Sequence

from tskernel.plugins.discovery import GROUP, PluginInfo, PluginWarning, discover_plugins, list_plugins


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return 0, or 1 when a plugin that was asked for is not loaded."""
    parser = argparse.ArgumentParser(prog="python -m tskernel.plugins", description=f"Plugins of the group {GROUP}.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="installed plugins; loads nothing").add_argument(
        "--load", action="store_true", help="load them first"
    )
    commands.add_parser("info", help="load one plugin and show its kernels or its error").add_argument("name")
    options = parser.parse_args(argv)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PluginWarning)  # the same text is printed below
        if options.command == "list":
            return _show_all(discover_plugins() if options.load else list_plugins())
        return _show_one(discover_plugins(options.name))


def _show_all(infos: Sequence[PluginInfo]) -> int:
    if not infos:
        print(f"no plugins are installed (entry-point group {GROUP})")
    for info in infos:
        print(f"{info.name}  {info.status}  {_origin(info)}" + (f"  ({info.error})" if info.error else ""))
    return int(any(info.status == "failed" for info in infos))


def _show_one(infos: Sequence[PluginInfo]) -> int:
    for info in infos:
        print(f"name     {info.name}")
        print(f"status   {info.status}")
        if info.value:
            print(f"from     {_origin(info)}")
            print(f"calls    {info.value}")
        for kernel in info.kernels:
            print(f"kernel   {kernel}")
        for note in info.notes:
            print(f"warning  {note}")
        if info.error:
            print(f"error    {info.error}")
    return int(any(info.status != "loaded" for info in infos))


def _origin(info: PluginInfo) -> str:
    return f"{info.package} {info.version}".strip() or info.value


if __name__ == "__main__":
    sys.exit(main())
