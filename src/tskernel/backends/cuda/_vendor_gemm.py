"""What the wrapped matrix products share: where they rank, when they may compile, how scales are laid out."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, Final

import torch
from torch import Tensor

from tskernel.dispatch.errors import KernelRefusedError
from tskernel.dispatch.registry import Priority

# Behind every kernel of ours, whose times are known: until these are measured they run when asked for by name, when
# the autotuner finds them faster, or when nothing else fits.
UNMEASURED: Final = Priority.REFERENCE + 1
_MOST_KINDS: Final = 1 << 16
_called: set[Hashable] = set()


def compiled_call(library: str, kind: Hashable, function: Callable[..., Any], *given: Any, **options: Any) -> Any:
    """Call a library that compiles kernels when it meets a new kind of call.

    Raises: KernelRefusedError for a new kind while a graph is being captured: compiling loads code and takes seconds.
    """
    key = (library, kind)
    if key not in _called and torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise KernelRefusedError(f"{library} has not compiled this kind of call and a graph is being captured")
    result = function(*given, **options)
    if len(_called) >= _MOST_KINDS:
        _called.clear()
    _called.add(key)
    return result


def column_scales(scale: Tensor) -> Tensor:
    """Return scales ``[M, K/128]`` as ``[K/128, M]``, each row in whole 16 bytes, as its matrix load wants them.

    What lies between the rows is left as it is: it scales rows of no result.
    """
    rows, blocks = scale.shape
    laid = torch.empty((blocks, -(-rows // 4) * 4), dtype=torch.float32, device=scale.device)[:, :rows]
    return laid.copy_(scale.t())
