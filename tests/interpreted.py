"""Declares the CPU to be a GPU, so that Triton kernels are listed, chosen and run there, by Triton's interpreter.

Set ``TSKERNEL_TEST_PLATFORM=sm90 TRITON_INTERPRET=1`` for a test run; conftest.py then calls ``declare``.
"""

from __future__ import annotations

from typing import Any

import torch

from tskernel.dispatch.platform import PlatformInfo, set_platform


def declare(platform: str) -> None:
    """Make torch's CPU device the named platform in this process."""
    set_platform(torch.device("cpu"), PlatformInfo.named(platform))
    _multiply_bf16()
    _round_bf16()


def _round_bf16() -> None:
    """Let the interpreter round to the nearest bf16, ties to even, as every device does: it cuts bits off.

    And integers become the bf16 of their value: it keeps bf16 as uint16 and would take the integer for the bits.
    """
    import numpy as np
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    plain = InterpreterBuilder.cast_impl

    def cast_impl(self: Any, src: Any, dst_type: Any) -> Any:
        if src.dtype.scalar.is_int() and dst_type.scalar == tl.bfloat16:
            src = TensorHandle(src.data.astype(np.float32), tl.float32)
        if src.dtype.scalar == tl.float32 and dst_type.scalar == tl.bfloat16:
            bits = np.ascontiguousarray(src.data).view(np.uint32)
            nearest = bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)
            bits = np.where(np.isnan(src.data), bits | np.uint32(0x400000), nearest)
            return TensorHandle((bits >> 16).astype(np.uint16), tl.bfloat16)
        return plain(self, src, dst_type)

    InterpreterBuilder.cast_impl = cast_impl  # pyright: ignore[reportAttributeAccessIssue]


def _multiply_bf16() -> None:
    """Let the interpreter multiply bf16 matrices: it keeps bf16 as uint16 and would multiply those integers."""
    import numpy as np
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    plain = InterpreterBuilder.create_dot

    def widened(x: Any) -> Any:
        if x.dtype.scalar != tl.bfloat16:
            return x
        return TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return plain(self, widened(a), widened(b), *rest)

    InterpreterBuilder.create_dot = create_dot  # pyright: ignore[reportAttributeAccessIssue]
