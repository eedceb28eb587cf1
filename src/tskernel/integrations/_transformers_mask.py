"""The mask function of the "tskernel" attention: recognises the pattern that a model asks for and makes its plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function, sdpa_mask

from tskernel.integrations._transformers_plan import encode, in_one_run, make_plan, valid_keys

Pattern = tuple[bool, int]  # causal, window (0: none)


class _Index:
    """Stands for an index in a mask function and records which comparisons the function makes.

    A mask function is a closure over its parameters; running it once on such indices tells what it computes, whatever
    its name, and works while a graph is traced. A function that looks values up in a tensor cannot be run like this.
    """

    device = None

    def __init__(self, term: Any, atoms: frozenset[Any] = frozenset()) -> None:
        self.term, self.atoms = term, atoms

    def new_ones(self, *_args: Any, **_kwargs: Any) -> _Index:
        return _Index(True)

    def to(self, *_args: Any) -> _Index:
        return self

    def __sub__(self, other: Any) -> _Index:
        return _Index(("-", self.term, other.term if isinstance(other, _Index) else other))

    def __and__(self, other: _Index) -> _Index:
        return _Index(True, self.atoms | other.atoms)

    def _compare(self, sign: str, other: Any) -> _Index:
        return _Index(True, frozenset({(sign, self.term, other.term if isinstance(other, _Index) else other)}))

    def __le__(self, other: Any) -> _Index:
        return self._compare("<=", other)

    def __gt__(self, other: Any) -> _Index:
        return self._compare(">", other)

    def __ge__(self, other: Any) -> _Index:
        return self._compare(">=", other)


def _recognise(mask_function: Callable[..., Any], window: int) -> Pattern | None:
    """Return the pattern of a mask function, or None if it is not one that the attention ops have."""
    if mask_function is causal_mask_function:
        return True, 0
    if mask_function is bidirectional_mask_function:
        return False, 0
    try:
        found = mask_function(_Index("b"), _Index("h"), _Index("q"), _Index("k"))
    except (TypeError, IndexError, ValueError, AttributeError):
        return None
    atoms = found.atoms if isinstance(found, _Index) else None
    if atoms == frozenset({("<=", "k", "q")}):
        return True, 0
    if window > 0 and atoms == frozenset({("<=", "k", "q"), (">", "k", ("-", "q", window))}):
        return True, window
    return None


def _tracing() -> bool:
    return torch.compiler.is_compiling() or torch.jit.is_tracing()


def _unsupported(what: str) -> ValueError:
    return ValueError(
        f"tskernel attention: mask: {what} is no pattern of the attention ops; expected causal, causal with a sliding "
        'window, or bidirectional, each with a 2-D padding mask. Call enable(model, fallback="sdpa") or '
        'set_attn_implementation("sdpa") for this model'
    )


def tskernel_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> Tensor:
    """Return the plan of a forward pass (see ``_transformers_plan``) in place of a boolean mask.

    Arguments are those of transformers' mask interface. Values are only looked at where transformers itself does so: in
    eager, and not for the decode step of a static cache.
    Raises: ValueError for a pattern that the ops do not have.
    """
    if use_vmap:
        raise _unsupported("a custom or_mask_function or and_mask_function")
    window, restarts = local_size or 0, None
    known = mask_function is causal_mask_function or mask_function is bidirectional_mask_function
    if (
        not (known or allow_is_causal_skip or allow_is_bidirectional_skip)
        and attention_mask is None
        and kv_length == q_length
    ):
        # Without a padding mask and a cache, position_ids may say that a row holds several sequences.
        pattern: Pattern | None = (True, window)
        restarts = _find_restarts(mask_function, batch_size, q_length, window, device)
    else:
        pattern = _recognise(mask_function, window)
    if pattern is None:
        raise _unsupported("this mask function (chunked, blockwise, windowed on both sides, or custom)")
    causal, window = pattern
    sizes = {"queries": q_length, "keys": kv_length, "q_offset": q_offset, "k_offset": kv_offset, "causal": causal}
    valid = None if attention_mask is None else attention_mask.to(torch.bool).expand(batch_size, -1)
    if valid is not None:
        may_look = (allow_is_causal_skip or allow_is_bidirectional_skip) and not _tracing()
        valid = _padding(valid, window, may_look, **sizes)
    plan = make_plan(batch=batch_size, window=window, valid=valid, restarts=restarts, device=device, **sizes)
    return encode(plan)


def _padding(valid: Tensor, window: int, may_look: bool, **sizes: Any) -> Tensor | None:
    """Return the padding mask, or None where it is known to hide nothing; refuse holes under a window.

    The ops count a window in tokens that are there, transformers in positions, so that a hole would shift it.
    """
    seen = valid_keys(valid, **sizes)
    if may_look:
        if bool((seen.sum(1) == _past_end(sizes)).all()):
            return None
        if window and not bool(in_one_run(seen).all()):
            raise ValueError(_HOLES)
    elif window:
        torch._assert_async(in_one_run(seen).all(), _HOLES)
    return valid


_HOLES = (
    "tskernel attention: attention_mask: expected each row of a sliding-window layer to be one run of ones (padding on "
    "the left or on the right), got a row with a hole; pad on the left before generating"
)


def _past_end(sizes: dict[str, Any]) -> Any:
    """Return how many keys a sequence without padding sees: a static cache has free slots behind the last token."""
    if not sizes["causal"]:
        return sizes["keys"]
    return sizes["q_offset"] + (sizes["queries"] - sizes["k_offset"])


def _find_restarts(
    mask_function: Callable[..., Any], batch: int, length: int, window: int, device: torch.device | str
) -> Tensor:
    """Return ``[batch]``: 1 where a row holds several sequences, 2 where the mask shows more than causal order.

    Raises: ValueError in the second case where values can be looked at.
    """
    got = sdpa_mask(
        batch,
        length,
        length,
        mask_function=mask_function,
        allow_is_causal_skip=False,
        allow_is_bidirectional_skip=False,
        device=device,
    )
    if got is None:
        raise _unsupported("a mask that is left out")
    place = torch.arange(length, device=device)
    back = place.unsqueeze(1) - place
    plain = (back >= 0) & (back < window) if window else back >= 0
    more, less = (got & ~plain).flatten(1).any(1), (plain & ~got).flatten(1).any(1)
    if not _tracing() and bool(more.any()):
        raise _unsupported("a blockwise mask")
    return torch.where(more, 2, less.to(torch.int32))
