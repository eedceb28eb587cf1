"""A hash of the files a kernel is made of: it changes when what the kernel computes may."""

from __future__ import annotations

import functools
import hashlib
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

_IMPORT = re.compile(
    r"^[ \t]*(?:from[ \t]+([.\w]+)[ \t]+import[ \t]+(\([^)]*\)|[^\n#]*)|import[ \t]+([.\w]+))", re.MULTILINE
)


@functools.cache
def source_fingerprint(function: Callable[..., Any]) -> str:
    """Return 12 hex digits over the function's file and all that it imports, even indirectly, of its package and ours.

    Text is read and nothing is imported, so the answer does not depend on what has run. A function without a file is
    hashed by its name.
    """
    name = function.__module__
    path = getattr(sys.modules.get(name), "__file__", None)
    digest = hashlib.sha256(f"{name}.{function.__qualname__}".encode())
    for file in sorted(_closure(name, path)) if path else ():
        digest.update(_hash(file))
    return digest.hexdigest()[:12]


def _closure(name: str, path: str) -> set[str]:
    """Return the paths of a module and of all that it imports, directly or not, from its package and ours."""
    own = name.partition(".")[0]
    found, todo = {path}, [(name, path)]
    while todo:
        for other, file in _dependencies(own, *todo.pop()):
            if file not in found:
                found.add(file)
                todo.append((other, file))
    return found


@functools.cache
def _dependencies(own: str, name: str, path: str) -> tuple[tuple[str, str], ...]:
    """Return (module, path) of what one file imports from the two packages."""
    roots = {r: f for r in (own, __name__.partition(".")[0]) if (f := _package_folder(r)) is not None}
    pairs = ((other, _module_file(roots, other)) for other in dict.fromkeys(_names(name, path)))
    return tuple((other, file) for other, file in pairs if file is not None)


def _package_folder(root: str) -> Path | None:
    file = getattr(sys.modules.get(root), "__file__", None)
    return Path(file).parent if file and Path(file).name == "__init__.py" else None


def _module_file(roots: dict[str, Path], name: str) -> str | None:
    root, _, rest = name.partition(".")
    if root not in roots or not rest:
        return None
    base = roots[root].joinpath(*rest.split("."))
    candidates = (base.with_suffix(".py"), base / "__init__.py")
    return next((str(c) for c in candidates if c.is_file()), None)


def _names(name: str, path: str) -> Iterator[str]:
    """Yield every module name that a file's import lines may mean."""
    package = name if path.endswith("__init__.py") else name.rpartition(".")[0]
    for source, names, plain in _IMPORT.findall(_contents(path).decode(errors="replace")):
        if plain:
            yield plain
            continue
        dots = len(source) - len(source.lstrip("."))
        parents = package.split(".")
        base = ".".join([*parents[: len(parents) - dots + 1], source[dots:]]).rstrip(".") if dots else source
        yield base
        yield from (f"{base}.{n.split()[0]}" for n in names.strip("() \n").split(",") if n.strip())


@functools.cache
def _hash(path: str) -> bytes:
    return hashlib.sha256(_contents(path)).digest()


@functools.cache
def _contents(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError:  # a module from an archive
        return path.encode()
