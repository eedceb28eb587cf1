"""What ranks kernels beside their priority: the policy, the oracles, and which kernels turned out not to work here."""

from __future__ import annotations

import enum
import warnings
from collections.abc import Mapping
from typing import Protocol

from tskernel.dispatch.platform import PlatformInfo
from tskernel.dispatch.registry import KernelRegistry, KernelSpec


class SelectionPolicy(enum.Enum):
    """How fitting kernels are ranked."""

    HEURISTIC = "heuristic"
    AUTOTUNE = "autotune"


class SelectionOracle(Protocol):
    """Knows better than priorities for a family: what it says ranks first."""

    def adjust(self, spec: KernelSpec, platform: PlatformInfo, traits: Mapping[str, object]) -> int:
        """Return a score in [0, 20); 10 is neutral."""
        ...


class _State:
    def __init__(self) -> None:
        self.policy = SelectionPolicy.HEURISTIC
        self.oracles: dict[str, SelectionOracle] = {}
        self.unavailable: dict[tuple[str, PlatformInfo], str] = {}


_state = _State()
_NEUTRAL = 10


def register_oracle(family: str, oracle: SelectionOracle | None) -> None:
    """Set the oracle of a family; None removes it."""
    with KernelRegistry.get().lock:
        if oracle is None:
            _state.oracles.pop(family, None)
        else:
            _state.oracles[family] = oracle
        KernelRegistry.get().bump()


def set_policy(policy: SelectionPolicy) -> None:
    """Set how fitting kernels are ranked, for the whole process.

    HEURISTIC ranks by oracle and priority, then by a measured time where there is one. AUTOTUNE measures the fitting
    kernels at the first call of a kind (never during graph capture or tracing) and takes the fastest.
    """
    with KernelRegistry.get().lock:
        _state.policy = policy
        KernelRegistry.get().bump()


def current_policy() -> SelectionPolicy:
    """Return the policy in force."""
    return _state.policy


def describe_policy() -> str:
    """Return what decides a selection besides kernels and overrides, as text: policy, oracles, kernels that failed."""
    oracles = sorted(f"{family}={type(oracle).__qualname__}" for family, oracle in _state.oracles.items())
    failed = sorted(f"{name}@{platform}" for name, platform in _state.unavailable)
    return f"{_state.policy.value} {oracles} {failed}"


def oracle_score(spec: KernelSpec, platform: PlatformInfo, traits: Mapping[str, object]) -> int:
    """Return what the family's oracle says of a kernel; 10 without one.

    Raises: ValueError for a score outside [0, 20).
    """
    oracle = _state.oracles.get(spec.family)
    score = _NEUTRAL if oracle is None else oracle.adjust(spec, platform, traits)
    if not 0 <= score < 20:
        raise ValueError(f"oracle of {spec.family} for {spec.name}: expected a score in [0, 20), got {score}")
    return score


def unavailable_reason(spec: KernelSpec, platform: PlatformInfo) -> str | None:
    """Return why a kernel is out of automatic selection on a platform, or None."""
    return _state.unavailable.get((spec.name, platform))


def mark_unavailable(spec: KernelSpec, platform: PlatformInfo, error: BaseException) -> str:
    """Take a kernel out of automatic selection on a platform, warn once, and return the reason."""
    why = f"failed at first use: {type(error).__name__}: {error}"
    with KernelRegistry.get().lock:
        if (spec.name, platform) not in _state.unavailable:
            _state.unavailable[spec.name, platform] = why
            warnings.warn(f"tskernel: kernel {spec.name} {why}; the next one is used", RuntimeWarning, stacklevel=3)
            KernelRegistry.get().bump()
    return why


def forget_unavailable() -> None:
    """Try kernels again that failed at first use."""
    with KernelRegistry.get().lock:
        _state.unavailable.clear()
        KernelRegistry.get().bump()
