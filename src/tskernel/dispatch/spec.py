"""What describes a kernel, and what the registry must know of an op."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from tskernel.dispatch.platform import ANY, CapabilityRequirement, PlatformInfo
from tskernel.dispatch.signature import FormatSignature


class Priority:
    """Priority bands, all in [0, 20). A higher one wins; inside a band the number orders kernels of one kind."""

    REFERENCE: Final = 0
    PORTABLE: Final = 4  # 4-7: runs anywhere
    PERFORMANT: Final = 8  # 8-11: fast on the parts it names
    SPECIALIZED: Final = 12  # 12-15: made for one part or one shape class
    PLUGIN: Final = 16  # 16-19: out of tree; wins over everything built in
    LIMIT: Final = 20


class Operator(Protocol):
    """What the registry must know of an op; ``tskernel.library.Op`` provides it."""

    name: str
    family: str
    arguments: tuple[str, ...]
    dynamic: tuple[str, ...]
    mutates: tuple[str, ...]
    out: bool
    lse: bool

    @property
    def trait_defaults(self) -> Mapping[str, object]:
        """Every trait of the op with a typical value."""
        ...

    def compare_signature(self, kernel: Callable[..., Any]) -> str | None:
        """Return how the kernel's signature differs from the op's, or None."""
        ...


@dataclass(frozen=True, eq=False)
class KernelSpec:
    """One way to do an op on some hardware.

    ``writes_out`` and ``lse`` say how the function gives its results: into an ``out`` keyword or by return; "return" (a
    ``return_lse`` keyword), "write" (an ``lse`` keyword) or "" for no LSE at all. ``priorities`` gives other priorities
    for calls with certain traits: the first entry whose traits all fit counts, ``priority`` where none does.
    """

    name: str
    family: str
    mode: str
    solution: str
    backend: str
    function: Callable[..., Any]
    capability: tuple[CapabilityRequirement, ...] = (ANY,)
    signatures: frozenset[FormatSignature] = frozenset()
    traits: Mapping[str, Any] = field(default_factory=dict)
    priority: int = Priority.PERFORMANT
    priorities: tuple[tuple[Mapping[str, Any], int], ...] = ()
    features: frozenset[str] = frozenset()
    rejects: Callable[..., str | None] | None = None
    rejects_arguments: tuple[str, ...] = ()
    weight_preprocessor: Callable[..., Any] | None = None
    traceable: bool = False
    writes_out: bool = False
    lse: str = ""

    def unfit(self, platform: PlatformInfo) -> str | None:
        """Return why the platform cannot run this kernel, or None; any one of its capabilities is enough."""
        reasons: list[str] = []
        for requirement in self.capability:
            why = requirement.reason(platform)
            if why is None:
                return None
            reasons.append(why)
        return "; or ".join(dict.fromkeys(reasons))

    def priority_of(self, traits: Mapping[str, object]) -> int:
        """Return the priority for a call with these traits."""
        for wanted, priority in self.priorities:
            if all(trait_accepts(accepted, traits[name]) for name, accepted in wanted.items()):
                return priority
        return self.priority

    def fingerprint(self) -> str:
        """Return a hash of the source files that the kernel is made of: it changes when what it computes may."""
        from tskernel.dispatch.sources import source_fingerprint

        return source_fingerprint(self.function)


def trait_accepts(accepted: Any, value: object) -> bool:
    """Whether a trait value is accepted by a container or predicate; True and 1 are different values."""
    if callable(accepted):
        return bool(accepted(value))
    if isinstance(accepted, range):
        return type(value) is int and value in accepted
    return any(type(a) is type(value) and a == value for a in accepted)


def argument_names(function: Callable[..., Any]) -> tuple[str, ...]:
    """Return a function's argument names; cheaper than inspect.signature, which import time notices."""
    code = function.__code__
    return code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
