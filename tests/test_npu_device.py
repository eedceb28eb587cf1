"""A device of another vendor, through torch's real PrivateUse1 key, without its hardware or any C++.

torch lets Python stand in for a PrivateUse1 backend: tensors on ``npu:0`` whose data lie in CPU tensors. The key can be
claimed once in a process, so the tests run in one of their own.
"""

from __future__ import annotations

import pytest
from processes import run_python

DEVICE = """
from __future__ import annotations
import warnings; warnings.simplefilter("ignore")
import torch, tskernel
from torch import Tensor
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend
from tskernel.dispatch.platform import CapabilityRequirement, PlatformInfo, platform_of, set_platform
from tskernel.dispatch.registry import KernelRegistry, Priority, register_kernel
from tskernel.dispatch.selection import NoKernelFoundError, OverrideError

_setup_privateuseone_for_python_backend("npu")
torch.set_grad_enabled(False)

class NpuTensor(Tensor):
    @staticmethod
    def __new__(cls, data):
        made = torch._C._acc.create_empty_tensor(tuple(data.shape), data.dtype)
        made.__class__ = NpuTensor
        return made

    def __init__(self, data):
        self.data_ = data

def npu(*shape):
    return NpuTensor(torch.randn(*shape))

set_platform(torch.device("npu", 0), PlatformInfo.make("ascend", "910b", local=True))
ran = []

def norm_for(name, **requirement):
    @register_kernel("norm", "rmsnorm", name=name, solution=name, priority=Priority.SPECIALIZED,
                     capability=CapabilityRequirement(**requirement))
    def rmsnorm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
        ran.append(name)
        return NpuTensor(torch.nn.functional.rms_norm(x.data_, x.shape[-1:], weight.data_, eps))

norm_for("ascend", vendor="ascend", at_least="ascend910b")
norm_for("nvidia", vendor="nvidia")
norm_for("amd", vendor="amd", at_least="gfx942")
x, w = npu(3, 8), NpuTensor(torch.ones(8))
want = torch.nn.functional.rms_norm(x.data_, (8,), w.data_, 1e-6)
"""


REACHES = """
assert x.device == torch.device("npu", 0) and "PrivateUse1" in str(torch._C._dispatch_keys(x))
assert "CPU" not in str(torch._C._dispatch_keys(x))
for call in (torch.ops.tokenspeed.rmsnorm, tskernel.rmsnorm):
    for _ in range(3):
        result = call(x, w)
        assert type(result) is NpuTensor and result.device == x.device
        assert torch.equal(result.data_, want)
assert ran == ["ascend"] * 6, ran

# The same call on the CPU, in between, is served there.
assert torch.allclose(tskernel.rmsnorm(x.data_, w.data_), want, atol=1e-5)
assert len(ran) == 6
print("test_the_operator_reaches_the_kernel_of_the_devices_vendor_and_no_other")
"""
EXPLAINED = """
ran.clear()
said = {c.name: (c.status, c.reason) for c in tskernel.library.ops["rmsnorm"].explain(x, w).candidates}
assert said["ascend"][0] == "selected", said
assert said["nvidia"] == ("rejected", "needs nvidia, ascend 910b is ascend"), said
assert said["amd"][0] == "rejected", said
for name in ("nvidia", "amd"):
    try:
        torch.ops.tokenspeed.rmsnorm(x, w, override=name)
    except OverrideError as error:
        assert f"needs {name}" in str(error), error
    else:
        raise AssertionError("a kernel of another vendor ran")
assert not ran

# Another part of the vendor's: the kernel asks for a later one, and nothing else of the vendor is there.
set_platform(torch.device("npu", 0), PlatformInfo.make("ascend", "310p", local=True))
for name in [s.name for s in KernelRegistry.get().list_kernels(mode="rmsnorm")]:
    if name not in ("ascend", "nvidia", "amd"):
        KernelRegistry.get().unregister(name)
try:
    torch.ops.tokenspeed.rmsnorm(x, w)
except NoKernelFoundError as error:
    assert "ascend: needs ascend910b or later" in str(error) and "nvidia: needs nvidia" in str(error), error
else:
    raise AssertionError("no kernel fits, yet one ran")
assert not ran
print("test_a_choice_is_explained_and_refused_for_the_device")
"""
FAKES = """
ran.clear()
from torch._subclasses.fake_tensor import FakeTensorMode
with FakeTensorMode():
    a, b = torch.empty(4, 8, device="npu"), torch.empty(8, device="npu")
    result = tskernel.rmsnorm(a, b)
    assert result.device == torch.device("npu", 0) and result.shape == (4, 8)
try:
    torch.ops.tokenspeed.rmsnorm(x, torch.ones(8))
except ValueError as error:
    assert str(error) == "tokenspeed::rmsnorm: weight.device: expected npu:0 like x, got cpu", error
else:
    raise AssertionError("two devices in one call")
assert not ran
print("test_fakes_and_checks_work_on_the_device")
"""


@pytest.fixture(scope="module")
def passed() -> list[str]:
    """Names of the tests whose code ran to its end; the first one that does not fails them all, with its error."""
    return run_python(DEVICE + REACHES + FAKES + EXPLAINED).split()


def test_the_operator_reaches_the_kernel_of_the_devices_vendor_and_no_other(passed: list[str]) -> None:
    assert "test_the_operator_reaches_the_kernel_of_the_devices_vendor_and_no_other" in passed


def test_a_choice_is_explained_and_refused_for_the_device(passed: list[str]) -> None:
    assert "test_a_choice_is_explained_and_refused_for_the_device" in passed


def test_fakes_and_checks_work_on_the_device(passed: list[str]) -> None:
    assert "test_fakes_and_checks_work_on_the_device" in passed
