"""Every LLM-inference operator as a real PyTorch operator, bound to the fastest kernel for the device at hand.

``import tskernel`` defines ``torch.ops.tokenspeed.<op>``; ``tskernel.<op>`` is the same op as a function with less
overhead in eager.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tskernel._torch.inline import inline as inline
from tskernel._version import __version__ as __version__
from tskernel.api import op_function as __getattr__  # noqa: F401  one function per op, see ops/<family>/<op>.py
from tskernel.api import public_names as __dir__  # noqa: F401
from tskernel.dispatch.errors import NoKernelFoundError as NoKernelFoundError
from tskernel.dispatch.errors import OverrideError as OverrideError
from tskernel.dispatch.platform import CapabilityRequirement as CapabilityRequirement
from tskernel.dispatch.platform import PlatformInfo as PlatformInfo
from tskernel.dispatch.platform import current_platform as current_platform
from tskernel.dispatch.registry import KernelRegistry as KernelRegistry
from tskernel.dispatch.registry import KernelSpec as KernelSpec
from tskernel.dispatch.registry import Priority as Priority
from tskernel.dispatch.registry import describe_kernel as describe_kernel
from tskernel.dispatch.registry import load_builtin_kernels as load_builtin_kernels
from tskernel.dispatch.registry import register_kernel as register_kernel
from tskernel.dispatch.signature import FormatSignature as FormatSignature
from tskernel.dispatch.signature import ScaleFormat as ScaleFormat
from tskernel.dispatch.signature import TensorFormat as TensorFormat

if TYPE_CHECKING:  # found by api.op_function when asked for: selecting is not part of importing
    from tskernel.dispatch.selection import SelectionPolicy as SelectionPolicy
    from tskernel.dispatch.selection import explain_selection as explain_selection
    from tskernel.dispatch.selection import kernel_override as kernel_override
    from tskernel.dispatch.selection import register_oracle as register_oracle
    from tskernel.dispatch.selection import select_kernel as select_kernel
    from tskernel.dispatch.selection import warmup_selection as warmup_selection
    from tskernel.moe import moe_apply as moe_apply
    from tskernel.moe import moe_plan as moe_plan
    from tskernel.moe import moe_process_weights as moe_process_weights
    from tskernel.plugins import discover_plugins as discover_plugins
