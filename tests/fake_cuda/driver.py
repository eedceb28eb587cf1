"""Triton on a CUDA driver that runs nothing: builds it, makes it Triton's, reads what the last launch was given.

Import this in a process of its own, whose LD_LIBRARY_PATH has the folder of the library ``build`` made.
"""

from __future__ import annotations

import ctypes
import re
import subprocess
from pathlib import Path
from typing import Any

BYTES = {"u8": 1, "b8": 1, "u16": 2, "b16": 2, "u32": 4, "b32": 4, "f32": 4, "u64": 8, "b64": 8, "f64": 8}


class Launch(ctypes.Structure):
    """The ``Launch`` of libcuda.c."""

    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_uint64),
        ("attributes", ctypes.c_void_p),
        ("count", ctypes.c_uint),
        ("attribute", ctypes.c_uint64 * 36),
        ("function", ctypes.c_uint64),
        ("parameters", ctypes.c_char * 4096),
        ("bytes", ctypes.c_ulonglong),
        ("launches", ctypes.c_ulonglong),
    ]


def build(folder: Path) -> None:
    """Compile the driver into a folder, with the headers that Triton brings."""
    import triton

    include = Path(triton.__file__).parent / "backends" / "nvidia" / "include"
    source = Path(__file__).parent / "libcuda.c"
    command = ["gcc", "-O1", "-shared", "-fPIC", f"-I{include}", "-Wl,-soname,libcuda.so.1"]
    subprocess.run([*command, "-o", folder / "libcuda.so.1", source], check=True)


class Fake:
    """The made-up device, an sm90."""

    def __init__(self) -> None:
        import torch
        import triton
        from triton.backends.nvidia.driver import CudaDriver

        torch.cuda.get_device_capability = lambda *_: (9, 0)
        self.library = ctypes.CDLL("libcuda.so.1")
        self.library.fake_last.restype = ctypes.POINTER(Launch)
        self.device, self.stream = 0, 77
        driver: Any = CudaDriver()
        driver.get_current_device = lambda: self.device
        driver.get_current_stream = lambda _: self.stream
        driver.get_device_capability = lambda *_: (9, 0)
        triton.runtime.driver.set_active(driver)

    def declare(self, compiled: Any) -> None:
        """Tell the driver the sizes of a kernel's parameters, as its PTX states them."""
        ptx = compiled.asm["ptx"]
        head = ptx[ptx.index(".entry") :]
        found = re.findall(r"\.param (?:\.align \d+ )?\.(\w+).*?(?:\[(\d+)\])?,?\n", head[: head.index("{")])
        sizes = [BYTES[kind] * int(count or 1) for kind, count in found]
        array = (ctypes.c_size_t * len(sizes))(*sizes)
        self.library.fake_declare(ctypes.c_void_p(compiled.function), len(sizes), array)

    @property
    def launches(self) -> int:
        """How many there were."""
        return self.library.fake_last().contents.launches

    def last(self) -> tuple[Any, ...]:
        """Return all that the last launch was given: geometry, stream, attributes, function, bytes of parameters."""
        x = self.library.fake_last().contents
        at = ctypes.addressof(x)
        words = (ctypes.c_int * (18 * x.count)).from_address(at + Launch.attribute.offset)
        attributes = tuple((words[i], words[i + 2]) for i in range(0, 18 * x.count, 18))  # the rest may be unset
        parameters = ctypes.string_at(at + Launch.parameters.offset, x.bytes)
        return (tuple(x.grid), tuple(x.block), x.shared, x.stream, attributes, x.function, parameters)
