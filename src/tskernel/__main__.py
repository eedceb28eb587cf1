"""``python -m tskernel``: the command line, which needs the ``cli`` extra."""

from __future__ import annotations

import sys


def main() -> int:
    """Run the command line, or say which extra is missing."""
    try:
        import rich
        import typer
    except ImportError as error:
        sys.stderr.write(f"python -m tskernel needs {error.name}; install it with: pip install 'tskernel[cli]'\n")
        return 2
    del rich, typer
    from tskernel.cli import app

    app(prog_name="python -m tskernel")
    return 0


if __name__ == "__main__":
    sys.exit(main())
