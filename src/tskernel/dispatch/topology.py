"""Detection of a GPU: architecture, links and NUMA node.

Indices are torch's, so MIG slices and UUID lists need no parsing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tskernel.dispatch.platform import PlatformInfo


def describe_gpu(device: torch.device) -> PlatformInfo:
    """Return the platform of one CUDA or HIP device."""
    index = device.index if device.index is not None else torch.cuda.current_device()
    props = torch.cuda.get_device_properties(index)
    amd = torch.version.hip is not None
    arch: Any = getattr(props, "gcnArchName", "").split(":")[0] if amd else (props.major, props.minor)
    topology = link_topology(torch.cuda.device_count(), amd)
    features = [f for f in ("comms:nvlink", "comms:nvlink_full") if _has_link(f, topology)]
    if _symmetric_memory():
        features.append("comms:symmetric_memory")
    return PlatformInfo.make(
        "amd" if amd else "nvidia",
        arch,
        features=features,
        name=props.name,
        local=True,
        topology=topology,
        numa_node=numa_node(props),
        memory_bytes=props.total_memory,
        multiprocessors=props.multi_processor_count,
    )


def _has_link(feature: str, topology: str) -> bool:
    return topology == "nvlink_full" or (feature == "comms:nvlink" and topology == "nvlink_pairs")


def _symmetric_memory() -> bool:
    return torch.distributed.is_available() and torch.cuda.device_count() > 1


def link_topology(count: int, amd: bool) -> str:
    """Return how the visible GPUs are linked; "unknown" where the management library is not installed."""
    if count < 2:
        return "single"
    full, pairs = ("xgmi_full", "xgmi_pairs") if amd else ("nvlink_full", "nvlink_pairs")
    linked = [_linked(i, j, amd) for i in range(count) for j in range(i)]
    if None in linked:
        return "unknown"
    if all(linked):
        return full
    return pairs if any(linked) else "pcie"


def _linked(i: int, j: int, amd: bool) -> bool | None:
    if amd:
        return None
    try:
        import pynvml  # pyright: ignore[reportMissingImports]

        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByUUID(_uuid(d)) for d in (i, j)]
        status = pynvml.nvmlDeviceGetP2PStatus(*handles, pynvml.NVML_P2P_CAPS_INDEX_NVLINK)
        return status == pynvml.NVML_P2P_STATUS_OK
    except Exception:  # no library, no permission, MIG: the answer is not known
        return None


def _uuid(index: int) -> str:
    text = str(torch.cuda.get_device_properties(index).uuid)
    return text if text.startswith(("GPU-", "MIG-")) else f"GPU-{text}"


def numa_node(props: Any) -> int | None:
    """Return the NUMA node of a GPU, or None where the system does not say."""
    fields = [getattr(props, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    if None in fields:
        return None
    path = Path(f"/sys/bus/pci/devices/{fields[0]:04x}:{fields[1]:02x}:{fields[2]:02x}.0/numa_node")
    try:
        node = int(path.read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None
