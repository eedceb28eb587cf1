"""What tests without a GPU compile of a kernel: a device function with the types of its arguments.

A kernel file that has ``compile_cases(chip) -> list`` is compiled for every part, or for those that its
``COMPILE_PARTS: tuple[str, ...]`` names, such as ``("sm90",)``. Gluon needs that: its layouts belong to a part.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple


class CompileCase(NamedTuple):
    """A device function, the types of its arguments, its constants, and options of the launch.

    Attributes:
        name: of the case, in the name of the test.
        function: declared by ``lazy_triton.jit`` or ``gluon_jit``, resolved or not.
        signature: type of every argument, in order: ``"*bf16"``, ``"i32"``, ``"fp32"``, ``"constexpr"``, or what
            ``descriptor`` returns.
        constants: argument to value, for every ``"constexpr"``.
        options: such as ``num_warps``, ``num_stages``, ``maxnreg``.
        aligned: integer arguments that are multiples of 16; pointers are taken as aligned anyway.
    """

    name: str
    function: Any
    signature: dict[str, str]
    constants: dict[str, Any]
    options: dict[str, int]
    aligned: Collection[str] = ()


def descriptor(kind: str, block: Sequence[int], layout: Any = None) -> str:
    """Return the type of a ``TensorDescriptor`` argument: Triton's, or Gluon's where a shared-memory layout is given.

    ``kind`` is Triton's short name of the dtype (``"bf16"``, ``"fp8e4nv"``).
    """
    return f"tensordesc<{kind}{list(block)}{'' if layout is None else f',{layout!r}'}>"
