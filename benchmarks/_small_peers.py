"""What is timed on a row of the small ops: each registered kernel by override, and the peers' own interfaces.

A contender takes a row's arguments and returns a call; what it makes before that is not timed. A call keeps its results
until it is made again, so that no two calls of a graph write to the same memory where they allocate. Packages are
imported when a contender is prepared.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from _side_by_side import Call, Prepare, keeping
from _small_rows import DEVICE, PAGE, Arguments, Row
from torch import Tensor

from tskernel.library import ops
from tskernel.testing import kernel_names

os.environ.setdefault("FLASHINFER_DISABLE_VERSION_CHECK", "1")


def ours(op: str, override: str | None) -> Prepare:
    """Return the public function with a kernel forced, or as selected; results go to a buffer where the op has one."""
    declared = ops[op]

    def prepare(a: Arguments) -> Call:
        options = dict(a)
        if declared.out:
            options["out"] = declared.allocate(declared.fill(a))
        return keeping(declared.front, **options, override=override)

    return prepare


# Inductor: the op's reference, or what a user of torch writes. A sum and its norm go into fresh tensors, as many bytes:
# in place torch 2.13 could not compile them for the CPU.


def _rmsnorm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, 1e-6)


def _layernorm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, (x.shape[-1],), weight, bias, 1e-6)


def _add_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    total = x + residual
    return F.rms_norm(total, (x.shape[-1],), weight, 1e-6), total


def _silu(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


PLAIN: dict[str, Callable[..., Any]] = {
    "rmsnorm": _rmsnorm,
    "layernorm": _layernorm,
    "fused_add_rmsnorm": _add_norm,
    "silu_and_mul": _silu,
}


def inductor(op: str) -> Prepare:
    """Return the op compiled for the sizes of its arguments."""

    def prepare(a: Arguments) -> Call:
        function = PLAIN.get(op, ops[op].body)
        made = torch.compile(function, dynamic=False, fullgraph=True, mode="max-autotune-no-cudagraphs")
        return keeping(made, **a)

    return prepare


def torch_norm(a: Arguments) -> Call:
    """Return torch's own kernel."""
    return keeping(_rmsnorm, **a)


# FlashInfer and quack


def _flashinfer_norm(name: str) -> Prepare:
    def prepare(a: Arguments) -> Call:
        from flashinfer import norm

        function: Callable[..., Any] = getattr(norm, name)
        if name == "fused_add_rmsnorm":
            return keeping(function, a["x"], a["residual"], a["weight"], 1e-6)
        return keeping(function, a["x"], a["weight"], 1e-6, out=torch.empty_like(a["x"]))

    return prepare


def _flashinfer_cuda(name: str) -> Prepare:
    """Return FlashInfer's kernel in CUDA C++, where its own choice is the one in CuTe DSL."""

    def prepare(a: Arguments) -> Call:
        from flashinfer import norm

        if not norm.gen_norm_module().is_compiled and os.environ.get("FLASHINFER_DISABLE_JIT", "") == "1":
            raise NotImplementedError("its module is not built (FLASHINFER_DISABLE_JIT=1)")
        call = _flashinfer_norm(name)(a)

        def switched() -> Any:
            before = norm._USE_CUDA_NORM
            norm._USE_CUDA_NORM = True
            try:
                return call()
            finally:
                norm._USE_CUDA_NORM = before

        return switched

    return prepare


def _flashinfer_gated(name: str) -> Prepare:
    def prepare(a: Arguments) -> Call:
        from flashinfer import activation

        x = a["x"]
        out = torch.empty(x.shape[0], x.shape[1] // 2, dtype=x.dtype, device=x.device)
        return keeping(getattr(activation, name), x, out)

    return prepare


def _flashinfer_rope(a: Arguments) -> Call:
    from flashinfer.rope import apply_rope_with_cos_sin_cache_inplace as function

    q, k = a["q"], a["k"]
    return keeping(function, a["positions"], q.flatten(1), k.flatten(1), q.shape[-1], a["cos_sin_cache"])


def _flashinfer_store(a: Arguments) -> Call:
    """Append to one sequence whose first page is full; FlashInfer finds slots by request and position."""
    from flashinfer.page import append_paged_kv_cache

    if a["k_scale"] is not None:
        raise NotImplementedError("FlashInfer appends values of the cache's dtype")
    t, pages = a["k"].shape[0], a["k_cache"].shape[0]
    int32 = {"dtype": torch.int32, "device": DEVICE}
    used = -(-(t + PAGE) // PAGE)
    return keeping(
        append_paged_kv_cache,
        a["k"],
        a["v"],
        torch.zeros(t, **int32),
        torch.arange(PAGE, PAGE + t, **int32),
        (a["k_cache"], a["v_cache"]),
        torch.arange(min(used, pages), **int32),
        torch.tensor([0, min(used, pages)], **int32),
        torch.tensor([(t - 1) % PAGE + 1], **int32),
    )


def _quack_norm(a: Arguments) -> Call:
    from quack.rmsnorm import rmsnorm_fwd

    return keeping(lambda: rmsnorm_fwd(a["x"], a["weight"], residual=a.get("residual"), eps=1e-6))


PEERS: dict[str, dict[str, Prepare]] = {
    "rmsnorm": {
        "torch": torch_norm,
        "flashinfer": _flashinfer_norm("rmsnorm"),
        "flashinfer CUDA": _flashinfer_cuda("rmsnorm"),
        "quack": _quack_norm,
    },
    "gemma_rmsnorm": {"flashinfer": _flashinfer_norm("gemma_rmsnorm")},
    "fused_add_rmsnorm": {
        "flashinfer": _flashinfer_norm("fused_add_rmsnorm"),
        "flashinfer CUDA": _flashinfer_cuda("fused_add_rmsnorm"),
        "quack": _quack_norm,  # into fresh tensors
    },
    "silu_and_mul": {"flashinfer": _flashinfer_gated("silu_and_mul")},
    "gelu_tanh_and_mul": {"flashinfer": _flashinfer_gated("gelu_tanh_and_mul")},
    "apply_rope_": {"flashinfer": _flashinfer_rope},
    "store_kvcache": {"flashinfer": _flashinfer_store},
}


def contenders(row: Row) -> dict[str, Prepare]:
    """Return everything that may be timed on a row: our kernels (with a slash in the name) and peers."""
    op = row.case.op
    names = [n for n in kernel_names(op, DEVICE) if not n.startswith("reference/")]
    return {**{n: ours(op, n) for n in names}, **PEERS.get(op, {}), "inductor": inductor(op)}


def results(row: Row, arguments: Arguments, returned: Any) -> tuple[Tensor, ...]:
    """Return what a call gave or wrote, with tokens first where it has them, to be compared with another's.

    A peer may return in fresh tensors what the op writes, in the op's order.
    """
    op = ops[row.case.op]
    if op.mutates and returned is None:
        return tuple(written(arguments[n], arguments) for n in op.mutates)
    return tuple(returned) if isinstance(returned, (tuple, list)) else (returned,)


def written(value: Tensor, arguments: Arguments) -> Tensor:
    """Return the slots of a cache that are written, and other tensors as they are."""
    slots = arguments.get("slot_mapping")
    return value if slots is None else value.flatten(0, 1)[slots]
