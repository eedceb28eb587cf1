"""Importing defines the operators and does nothing else: no device, no compiler, no vendor package."""

from __future__ import annotations

import pytest
from processes import run_python

HEAVY = "triton torch._dynamo torch._inductor torch.distributed.tensor torch.testing numpy flashinfer flash_attn aiter"

IMPORT = f"""
import sys, torch

def touched(*_, **__):
    raise AssertionError("importing tskernel initialised a device")

torch.cuda._lazy_init = touched
for name in ("init", "current_device", "device_count", "get_device_properties", "is_available"):
    setattr(torch.cuda, name, touched)
before = set(sys.modules)
import tskernel
added = set(sys.modules) - before
heavy = [m for m in added for h in {HEAVY.split()} if m == h or m.startswith(h + ".")]
assert not heavy, heavy
other = [m for m in added if m.partition(".")[0] not in ("tskernel", *sys.stdlib_module_names)]
assert not other, other
kernels = [m for m in added if m.startswith("tskernel.backends")]
assert not kernels, kernels
assert torch.ops.tokenspeed.rmsnorm.default and "rmsnorm" in dir(tskernel)
print(len(added))
"""


def test_pro_01_import_touches_no_device_and_loads_nothing_heavy() -> None:
    assert int(run_python(IMPORT)) > 50


@pytest.mark.parametrize("visible", ["", "GPU-00000000-0000-0000-0000-000000000000"])
def test_pro_01_works_whatever_devices_are_visible(visible: str) -> None:
    code = """
    import torch, tskernel
    with torch.no_grad():
        print(round(tskernel.rmsnorm(torch.ones(2, 4), torch.ones(4)).sum().item(), 3), tskernel.current_platform())
    """
    assert run_python(code, CUDA_VISIBLE_DEVICES=visible, HIP_VISIBLE_DEVICES=visible).strip() == "8.0 cpu"


def test_pro_01_import_before_fork_works_in_the_child() -> None:
    code = """
    import os, warnings
    warnings.simplefilter("ignore")
    import torch, tskernel
    child = os.fork()
    with torch.no_grad():
        total = tskernel.rmsnorm(torch.ones(2, 4), torch.ones(4)).sum().item()
    if child == 0:
        os._exit(0 if abs(total - 8) < 1e-3 and not torch.cuda.is_initialized() else 1)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    """
    assert run_python(code).strip() == "0"


def test_every_public_name_is_found() -> None:
    code = """
    import tskernel
    from tskernel.library import ops
    names = [n for n in dir(tskernel) if not n.startswith("_")]
    assert all(getattr(tskernel, n) is not None for n in names)
    assert {"select_kernel", "kernel_override", "mha_prefill_with_kvcache", "moe_apply", *ops} <= set(names)
    try:
        tskernel.no_such_op
    except AttributeError as error:
        print(error)
    """
    assert run_python(code).strip() == "module 'tskernel' has no attribute 'no_such_op'"
