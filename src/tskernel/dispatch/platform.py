"""What a device is.

Detected lazily, one platform per device, or made by name for planning ("sm90", "gfx950", "ascend910b", "cpu").
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple

import torch

from tskernel.dispatch.packages import probe_package

__all__ = [
    "ANY",
    "Arch",
    "CapabilityRequirement",
    "PlatformInfo",
    "current_platform",
    "forget_platforms",
    "platform_of",
    "probe_package",
    "set_platform",
]


class Arch(NamedTuple):
    """An architecture number, comparable within one vendor.

    (9, 0) is sm90, (9, 5, 0) is gfx950, (910, 2) is ascend910b.
    """

    version: tuple[int, ...]

    @classmethod
    def parse(cls, vendor: str, text: str | tuple[int, ...] | Arch) -> Arch:
        """Read "sm90", "sm_90a", "9.0", "gfx950", "gfx90a:sramecc+", "ascend910b" or a tuple of ints.

        Raises: ValueError for a text that names no architecture of the vendor.
        """
        if isinstance(text, Arch):
            return text
        if not isinstance(text, str):
            return cls(tuple(int(v) for v in text))
        return cls(_parse_arch(vendor, text.strip().lower()))

    def __str__(self) -> str:
        return ".".join(map(str, self.version))


def _parse_arch(vendor: str, text: str) -> tuple[int, ...]:
    if m := re.fullmatch(r"(\d+)\.(\d+)(?:\.(\d+))?", text):
        return tuple(int(v) for v in m.groups() if v is not None)
    if vendor == "nvidia" and (m := re.fullmatch(r"(?:sm_?|compute_)?(\d+)(\d)[af]?", text)):
        return int(m[1]), int(m[2])
    if vendor == "amd" and (m := re.fullmatch(r"(?:gfx)?(\d{1,2})([0-9a-f])([0-9a-f])(?::.*)?", text)):
        return int(m[1]), int(m[2], 16), int(m[3], 16)
    if vendor == "ascend" and (m := re.fullmatch(r"(?:ascend)?(\d+)_?([a-z]?)(\d*)", text)):
        return int(m[1]), (ord(m[2]) - ord("a") + 1 if m[2] else 0)
    raise ValueError(f"{text!r} names no {vendor} architecture; examples: {_EXAMPLES.get(vendor, '9.0')}")


_EXAMPLES: Final = {"nvidia": "sm90, sm_90a, 9.0", "amd": "gfx942, gfx950", "ascend": "ascend910b"}

# How many leading numbers two parts of one family share: sm100 and sm103; gfx940 and gfx942.
_FAMILY_PREFIX: Final = {"nvidia": 1, "amd": 2, "ascend": 1}

# (feature, first architecture); a feature stays in later parts of the listed line.
_NVIDIA: Final = (
    ("tensor_core:f16", (7, 0)),
    ("tensor_core:int8", (7, 5)),
    ("memory:async_copy", (8, 0)),
    ("tensor_core:f8", (8, 9)),
    ("memory:tma", (9, 0)),
    ("compute:cluster", (9, 0)),
    ("tensor_core:f4", (10, 0)),
)
# AMD has two lines with one number space: CDNA (gfx9xx, gfx1250) and RDNA (gfx11xx, gfx12xx).
_AMD_CDNA: Final = (
    ("tensor_core:f16", (9, 0, 8)),
    ("tensor_core:int8", (9, 0, 8)),
    ("tensor_core:f8", (9, 4, 0)),
    ("memory:async_copy", (9, 5, 0)),
    ("tensor_core:f4", (9, 5, 0)),
)
_AMD_RDNA: Final = (("tensor_core:f16", (11, 0, 0)), ("tensor_core:int8", (11, 0, 0)), ("tensor_core:f8", (12, 0, 0)))


def _arch_features(vendor: str, arch: Arch | None) -> frozenset[str]:
    if vendor == "nvidia" and arch:
        return frozenset({f for f, first in _NVIDIA if arch.version >= first} | {"runtime:cuda_graph"})
    if vendor == "amd" and arch:
        cdna = arch.version[0] == 9 or arch.version[:2] == (12, 5)
        table = _AMD_CDNA if cdna else _AMD_RDNA
        return frozenset({f for f, first in table if arch.version >= first} | {"runtime:cuda_graph"})
    if vendor == "ascend":
        return frozenset({"tensor_core:f16", "tensor_core:int8"})
    return frozenset()


_DEVICE_TYPE: Final = {"nvidia": "cuda", "amd": "cuda", "ascend": "npu", "cpu": "cpu"}


@dataclass(frozen=True)
class PlatformInfo:
    """One device: vendor, architecture and features.

    ``local`` is True for a device of this process: only then can vendor packages be probed; a planned platform is
    assumed to have them. ``topology`` is "single", "pcie", "nvlink_pairs", "nvlink_full", "xgmi_pairs", "xgmi_full" or
    "unknown".
    """

    vendor: str
    arch: Arch | None = None
    features: frozenset[str] = frozenset()
    name: str = ""
    device_type: str = "cpu"
    local: bool = False
    topology: str = field(default="unknown", compare=False)
    numa_node: int | None = field(default=None, compare=False)
    memory_bytes: int | None = field(default=None, compare=False)
    multiprocessors: int | None = field(default=None, compare=False)

    @classmethod
    def make(
        cls,
        vendor: str,
        arch: str | tuple[int, ...] | Arch | None = None,
        *,
        features: Iterable[str] = (),
        **fields: Any,
    ) -> PlatformInfo:
        """Make a platform: the features that its architecture implies plus the given ones."""
        number = None if arch is None else Arch.parse(vendor, arch)
        fields.setdefault("name", f"{vendor} {arch}" if arch is not None else vendor)
        fields.setdefault("device_type", _DEVICE_TYPE.get(vendor, vendor))
        return cls(vendor, number, _arch_features(vendor, number) | frozenset(features), **fields)

    @classmethod
    def named(cls, text: str) -> PlatformInfo:
        """Make a platform from a name: "sm90", "gfx950", "ascend910b", "cpu", or "<vendor>:<arch>" for any vendor.

        Raises: ValueError that lists the accepted forms.
        """
        key = text.strip().lower()
        if key == "cpu":
            return cls.make("cpu", name="cpu")
        vendor, colon, arch = key.partition(":")
        if colon and not key.startswith("gfx"):
            return cls.make(vendor, arch or None, name=text)
        for prefix, known in (("sm", "nvidia"), ("gfx", "amd"), ("ascend", "ascend")):
            if key.startswith(prefix):
                return cls.make(known, key, name=key)
        raise ValueError(f"platform {text!r}: expected cpu, sm<N>, gfx<N>, ascend<N> or <vendor>:<arch>")

    def with_features(self, *features: str) -> PlatformInfo:
        """Return the platform with further features."""
        return replace(self, features=self.features | frozenset(features))

    def __str__(self) -> str:
        return self.name or self.vendor


@dataclass(frozen=True)
class CapabilityRequirement:
    """What a kernel needs from a platform. Empty means any.

    ``at_least``, ``at_most``, ``exactly`` and ``family`` are architectures of ``vendor`` and need one: exactly sm90, at
    least sm80 and the family of sm100 (sm100, sm103) are three different things. ``packages`` are importable modules,
    "module" or "module:attribute".
    """

    vendor: str | None = None
    at_least: str | None = None
    at_most: str | None = None
    exactly: tuple[str, ...] = ()
    family: str | None = None
    features: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        given = [a for a in (self.at_least, self.at_most, self.family, *self.exactly) if a is not None]
        if given and self.vendor is None:
            raise ValueError(
                f"CapabilityRequirement: {given[0]!r} is an architecture of one vendor: expected vendor=, got None"
            )
        for arch in given:
            Arch.parse(str(self.vendor), arch)

    def reason(self, platform: PlatformInfo) -> str | None:
        """Return why the platform does not do, or None."""
        if self.vendor is not None and platform.vendor != self.vendor:
            return f"needs {self.vendor}, {platform} is {platform.vendor}"
        if (why := self._arch_reason(platform)) is not None:
            return why
        missing = [f for f in self.features if f not in platform.features]
        if missing:
            return f"needs {', '.join(missing)}, which {platform} does not have"
        if platform.local:
            for package in self.packages:
                probe = probe_package(package)
                if not probe.available:
                    return probe.reason
        return None

    def _arch_reason(self, platform: PlatformInfo) -> str | None:
        if self.vendor is None or not (self.at_least or self.at_most or self.exactly or self.family):
            return None
        if platform.arch is None:
            return f"needs a known {self.vendor} architecture"
        parse, have = lambda a: Arch.parse(str(self.vendor), a), platform.arch
        if self.at_least and have < parse(self.at_least):
            return f"needs {self.at_least} or later"
        if self.at_most and have > parse(self.at_most):
            return f"needs {self.at_most} or earlier"
        if self.exactly and have not in [parse(a) for a in self.exactly]:
            return f"needs exactly {' or '.join(self.exactly)}"
        if self.family:
            width = _FAMILY_PREFIX.get(str(self.vendor), 1)
            if have.version[:width] != parse(self.family).version[:width]:
                return f"needs the family of {self.family}"
        return None


ANY: Final = CapabilityRequirement()

_lock = threading.Lock()
_platforms: dict[tuple[str, int], PlatformInfo] = {}


def platform_of(device: torch.device) -> PlatformInfo:
    """Return the platform of a device.

    Detected once per device, so two different cards in one box are two platforms.
    """
    key = (device.type, device.index if device.index is not None else -1)
    found = _platforms.get(key)
    if found is None:
        found = _detect(device)
        with _lock:
            found = _platforms.setdefault(key, found)
    return found


def current_platform() -> PlatformInfo:
    """Return the platform of the current accelerator, or of the CPU where there is none."""
    if torch.cuda.is_available():
        return platform_of(torch.device("cuda", torch.cuda.current_device()))
    npu = getattr(torch, "npu", None)
    if npu is not None and npu.is_available():
        return platform_of(torch.device("npu", npu.current_device()))
    return platform_of(torch.device("cpu"))


def set_platform(device: torch.device, platform: PlatformInfo) -> None:
    """Declare what a device is, for a device that torch cannot describe or for a test."""
    with _lock:
        _platforms[device.type, device.index if device.index is not None else -1] = platform
    _changed()


def forget_platforms() -> None:
    """Detect every device anew at its next use."""
    with _lock:
        _platforms.clear()
    _changed()


def _changed() -> None:
    from tskernel.dispatch.registry import KernelRegistry

    KernelRegistry.get().bump()


def _detect(device: torch.device) -> PlatformInfo:
    if device.type == "cpu":
        return PlatformInfo.make("cpu", name="cpu", local=True)
    if device.type == "cuda":
        from tskernel.dispatch.topology import describe_gpu

        return describe_gpu(device)
    if device.type == "npu":
        name = str(getattr(getattr(torch, "npu", None), "get_device_name", lambda _: "ascend")(device))
        m = re.search(r"ascend\s*(\d+_?[a-z]?\d*)", name.lower())
        return PlatformInfo.make("ascend", m[1] if m else None, name=name, local=True)
    return PlatformInfo.make(device.type, name=device.type, local=True)
