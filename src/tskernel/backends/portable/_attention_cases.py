"""What tests without a GPU compile of the Triton attention programs."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from tskernel.backends.portable import _attention_triton as device
from tskernel.backends.portable._attention_tiles import (
    Chip,
    Config,
    Keys,
    choose_config,
    deal_width,
    pow2,
    program_flags,
    widths,
)


class Case(NamedTuple):
    """What a test without a GPU compiles: a device function, its argument types, constants and launch options."""

    name: str
    function: Any
    signature: dict[str, str]
    constants: dict[str, Any]
    config: Config


def case(
    chip: Chip,
    name: str,
    *,
    rows: int,
    group: int,
    width: int,
    value_width: int | None = None,
    page: int = 0,
    kv: str = "bf16",
    splits: int = 1,
    batch: int = 0,
    ones: bool = False,
    **flags: bool,
) -> Case:
    """Return a bf16 case with ``rows`` query rows per KV head; ``flags`` are those of the device program.

    ``batch``: so many sequences are dealt to programs. ``ones``: every count is 1, which the compiler then sees as a
    constant.
    """
    value_width = width if value_width is None else value_width
    main, tail = widths(width)
    keys = Keys(1 if "fp8" in kv else 2, page, 0 if flags.get("WINDOW") else -1, flags.get("SHARED_V", False))
    c = choose_config(rows, width, value_width, torch.bfloat16, keys, chip)
    given = {
        "RAGGED": page == 0,
        "CAUSAL": True,
        "FUSED": True,
        "LSE": True,
        "SAME": True,
        "DEALT": deal_width(batch) if batch else 0,
        **program_flags(c, keys, width, value_width, chip),
        **flags,
    }
    sizes = {"D": width, "DV": value_width, "D_MAIN": main, "D_TAIL": tail, "D_V": max(16, pow2(value_width))}
    tiles = {"GROUP": group, "BLOCK_M": c.block_m, "BLOCK_N": c.block_n, "SPLIT": splits > 1, "PAGE": page}
    kinds = {"q": "*bf16", "k": f"*{kv}", "v": f"*{kv}", "out": "*bf16", "lse": "*fp32", "sinks": "*fp32"}
    kinds |= dict.fromkeys(("cu_q", "cu_k", "table", "lengths"), "*i32")
    kinds |= dict.fromkeys(("work", "q_scale", "k_scale", "v_scale"), "*fp32")
    kinds |= {"scale": "fp32", "cap": "fp32"}
    for name, columns in (("k_box", main), ("v_box", sizes["D_V"])):
        kinds[name] = f"tensordesc<{kv}[1, {c.block_n}, {columns}]>"
    function = device.DECLARED["attend"]
    code = function.function.__code__
    arguments = code.co_varnames[: code.co_argcount]
    constants = {n: sizes.get(n, tiles.get(n, given.get(n, False))) for n in arguments if n.isupper()}
    constants |= {} if given["AHEAD"] else {"k_box": None, "v_box": None}
    if ones:
        constants |= dict.fromkeys(("rows", "heads", "q_len", "pages", "columns"), 1)
    signature = {n: "constexpr" if n in constants else kinds.get(n, "i32") for n in arguments}
    return Case(name, function, signature, constants, c)


def plain_case(name: str, program: str, constants: dict[str, Any], halves: set[str]) -> Case:
    """Return a case of a function whose pointers are fp32 but for ``halves``, and end before its strides."""
    function = device.DECLARED[program]
    code = function.function.__code__
    arguments = code.co_varnames[: code.co_argcount]
    pointers = {"a", "b", "out", "lse", "lse_a", "lse_b", "work", "sinks"}
    signature = {
        n: "constexpr" if n.isupper() else "i32" if n not in pointers else "*bf16" if n in halves else "*fp32"
        for n in arguments
    }
    return Case(name, function, signature, constants, Config(16, 16, 4, 2))


def join_case(*, dealt: bool = False) -> Case:
    """Return the program that joins parts."""
    flags = {"SINKS": True, "LSE": True, "DEALT": dealt}
    return plain_case("join dealt" if dealt else "join", "join", {"DV": 128, "D_V": 128, "BLOCK": 16, **flags}, {"out"})
