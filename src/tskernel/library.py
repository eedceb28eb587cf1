"""Declares an op.

One file with an annotated reference body and its hooks becomes a torch operator and a public function.

See docs/add-an-op.md. The work is split: ``_torch/schema.py`` reads the signature, ``_torch/define.py`` registers with
torch, ``_torch/front.py`` writes the public function and ``_torch/execute.py`` runs a call.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from tskernel._torch.schema import Signature, operator_schema, parse_signature
from tskernel.checks import (
    FLOATS,
    FP8,
    HALVES,
    checking,
    empty,
    expect,
    expect_choice,
    expect_dim,
    expect_dtype,
    expect_last_contiguous,
    expect_shape,
    nbytes,
    wide,
)
from tskernel.dispatch.registry import KernelRegistry, KernelSpec, Priority, argument_names
from tskernel.dispatch.signature import FormatSignature, TensorFormat

__all__ = [
    "FLOATS",
    "FP8",
    "HALVES",
    "Cost",
    "Make",
    "Op",
    "Sample",
    "empty",
    "expect",
    "expect_choice",
    "expect_dim",
    "expect_dtype",
    "expect_last_contiguous",
    "expect_shape",
    "load_ops",
    "nbytes",
    "op",
    "ops",
    "wide",
]

Hook = Callable[..., Any]

ops: dict[str, Op] = {}


class Cost(NamedTuple):
    """What a call must at least do.

    Bytes moved to and from memory, floating-point operations (a multiply-add is two).
    """

    bytes: int
    flops: int


class Sample:
    """One call of an op: a name for the report and the arguments by name."""

    def __init__(self, name: str, /, **arguments: Any) -> None:
        """Name the sample; arguments that are left out take their defaults."""
        self.name = name
        self.arguments = arguments

    def __repr__(self) -> str:
        return f"Sample({self.name!r})"


class Make(Protocol):
    """Makes the tensors of samples on one device from one seed; ``tskernel.testing.SampleMaker`` is it."""

    device: torch.device

    def randn(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return standard normal values, rounded to ``dtype`` (saturated for fp8)."""
        ...

    def rand(self, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
        """Return uniform values in [0, 1)."""
        ...

    def randint(self, low: int, high: int, shape: Sequence[int], dtype: torch.dtype = torch.int32) -> Tensor:
        """Return integers in [low, high)."""
        ...

    def tensor(self, values: Any, dtype: torch.dtype) -> Tensor:
        """Return a tensor of given values."""
        ...

    def permutation(self, n: int, dtype: torch.dtype = torch.int32) -> Tensor:
        """Return 0..n-1 in random order."""
        ...

    def full(self, shape: Sequence[int], value: float, dtype: torch.dtype) -> Tensor:
        """Return a constant tensor."""
        ...


def _binder(op_name: str, hook: Hook, available: Sequence[str]) -> Callable[[Sequence[Any]], Any]:
    """Return a caller that hands a hook just the arguments it names."""
    wanted = argument_names(hook)
    unknown = [n for n in wanted if n not in available]
    if unknown:
        raise TypeError(f"{op_name}: a hook names {unknown[0]!r}: expected some of {', '.join(available)}")
    indices = [available.index(n) for n in wanted]
    return lambda arguments: hook(*[arguments[i] for i in indices])


class Op:
    """A declared op. Calling it is calling the public function; its hooks are decorators of the op file."""

    def __init__(
        self,
        body: Callable[..., Any],
        *,
        out: bool = False,
        lse: bool = False,
        mutates: tuple[str, ...] = (),
        roles: Sequence[str] | Mapping[str, str] = (),
        traits: Mapping[str, object] | None = None,
        dynamic: tuple[str, ...] = (),
        shard: Mapping[str, Mapping[str, Any]] | None = None,
        vmap: tuple[str, ...] = (),
        autocast: tuple[str, ...] = (),
        dtypes: tuple[torch.dtype, ...] = FLOATS,
    ) -> None:
        """Read the declaration; ``load_ops`` or the last hook registers it. See docs/add-an-op.md for the options."""
        self.body = body
        self.name = body.__name__
        self.module = body.__module__
        self.family = self.module.rsplit(".", 2)[-2]
        self.doc = body.__doc__ or ""
        self.signature: Signature = parse_signature(body, lse=lse)
        self.arguments = self.signature.names
        self.out, self.lse, self.mutates, self.dynamic = out, lse, mutates, dynamic
        self.shard, self.vmap, self.autocast, self.dtypes = dict(shard or {}), vmap, autocast, dtypes
        self.roles: dict[str, str] = dict(roles) if isinstance(roles, Mapping) else {r: r for r in roles}
        self.trait_defaults: Mapping[str, object] = {**(traits or {}), **({"return_lse": False} if lse else {})}
        self.forms = ("", *(("out",) if out else ()), *(("lse",) if lse else ()))
        self.schemas = {f: operator_schema(self.name, self.signature, mutates, form=f) for f in self.forms}
        self._hooks: dict[str, Any] = {}
        self._raw_hooks: dict[str, Hook] = {}
        self._check_names()

    def _check_names(self) -> None:
        named = {
            "mutates": self.mutates,
            "roles": self.roles.values(),
            "dynamic": self.dynamic,
            "vmap": self.vmap,
            "autocast": self.autocast,
        }
        for option, values in named.items():
            for value in values:
                if value not in self.arguments:
                    raise TypeError(
                        f"{self.name}: @op({option}=...) names {value!r}: expected some of {', '.join(self.arguments)}"
                    )
        if self.mutates and (self.signature.num_returns or self.out):
            raise TypeError(f"{self.name}: an op that writes into its arguments returns None and has no out form")

    @functools.cached_property
    def front(self) -> Callable[..., Any]:
        """The public function, written at first use."""
        from tskernel._torch.front import build_front

        return build_front(self)

    def _hook(self, kind: str, hook: Hook, *extra: str) -> Hook:
        self._raw_hooks[kind] = hook
        self._hooks[kind] = _binder(self.name, hook, (*self.arguments, *extra))
        return hook

    def check(self, hook: Hook) -> Hook:
        """Decorate the argument check: reads metadata, raises ValueError through ``expect``."""
        reads = set(argument_names(hook)) & set(self.dynamic)
        if reads:
            raise TypeError(
                f"{self.name}: check reads {min(reads)!r}, which is dynamic: calls that differ in it are checked once"
            )
        return self._hook("check", hook)

    def fake(self, hook: Hook) -> Hook:
        """Decorate the fake, which is also the allocator of outputs."""
        return self._hook("fake", hook, "return_lse")

    def trait_values(self, hook: Hook) -> Hook:
        """Decorate the function that states every declared trait of a call."""
        return self._hook("traits", hook)

    def format_signature(self, hook: Hook) -> Hook:
        """Decorate the function that gives role -> TensorFormat, where formats are more than ``roles``' dtypes."""
        return self._hook("formats", hook)

    def cost(self, hook: Hook) -> Hook:
        """Decorate the cost of a call."""
        return self._hook("cost", hook)

    def samples(
        self, hook: Callable[[Make, torch.dtype], Iterator[Sample]]
    ) -> Callable[[Make, torch.dtype], Iterator[Sample]]:
        """Decorate the sample generator."""
        self._hooks["samples"] = hook
        return hook

    # What the rest of the library asks an op. ``arguments`` are all of them, in order, defaults filled in.

    def run_check(self, arguments: Sequence[Any]) -> None:
        """Run the op's own check."""
        if "check" in self._hooks:
            self._hooks["check"](arguments)

    def allocate(self, arguments: Sequence[Any], *, return_lse: bool = False) -> Any:
        """Return uninitialised outputs (fakes for fake inputs)."""
        return self._hooks["fake"]((*arguments, return_lse)) if "fake" in self._hooks else None

    @functools.cached_property
    def sized_by_look(self) -> bool:
        """Whether outputs follow from the tensors' looks and the options, and so need not be asked for again."""
        fake = self._raw_hooks.get("fake")
        return fake is not None and not set(argument_names(fake)) & set(self.dynamic)

    def traits_of(self, arguments: Sequence[Any], *, return_lse: bool = False) -> dict[str, object]:
        """Return every trait of a call."""
        values = dict(self._hooks["traits"](arguments)) if "traits" in self._hooks else {}
        if self.lse:
            values["return_lse"] = return_lse
        if values.keys() != self.trait_defaults.keys():
            raise TypeError(
                f"{self.name}: the call states traits {sorted(values)}, the op declares {sorted(self.trait_defaults)}"
            )
        return values

    def formats_of(self, arguments: Sequence[Any]) -> FormatSignature:
        """Return the formats of a call."""
        if "formats" in self._hooks:
            return FormatSignature.of(self._hooks["formats"](arguments))
        index = self.signature.index
        pairs = ((role, arguments[index(name)]) for role, name in self.roles.items())
        return FormatSignature(frozenset((role, TensorFormat(t.dtype)) for role, t in pairs if t is not None))

    def cost_of(self, arguments: Sequence[Any]) -> Cost | None:
        """Return the cost of a call, or None where the op does not say."""
        return self._hooks["cost"](arguments) if "cost" in self._hooks else None

    def sample_calls(self, make: Make, dtype: torch.dtype) -> list[Sample]:
        """Return the op's samples for one dtype."""
        return list(self._hooks["samples"](make, dtype)) if "samples" in self._hooks else []

    def fill(self, arguments: Mapping[str, Any]) -> list[Any]:
        """Return all arguments in order, with defaults. Raises: TypeError for a missing or unknown one."""
        unknown = [n for n in arguments if n not in self.arguments]
        missing = [p.name for p in self.signature.params if p.name not in arguments and not _has_default(p)]
        if unknown or missing:
            raise TypeError(f"{self.name}: missing {missing}, unknown {unknown}")
        return [arguments.get(p.name, p.default) for p in self.signature.params]

    def compare_signature(self, kernel: Callable[..., Any]) -> str | None:
        """Return how a kernel's signature differs from the op's, or None.

        ``out``, ``lse`` and ``return_lse`` are extra.
        """
        extra = {"out", "lse", "return_lse"} - set(self.arguments)
        have = [(n, kernel.__annotations__.get(n)) for n in argument_names(kernel) if n not in extra]
        want = [(p.name, p.annotation) for p in self.signature.params]
        if have != want:
            return f"signature: expected {_signature_text(want)}, got {_signature_text(have)}"
        wrong = [
            n
            for n in argument_names(kernel)
            if n in extra and not {"out": self.out, "lse": self.lse, "return_lse": self.lse}[n]
        ]
        if wrong:
            return f"argument {wrong[0]!r}: {self.family}.{self.name} has no such form"
        return None

    def torch_op(self, form: str = "") -> Any:
        """Return the torch operator of a form: an OpOverload."""
        return getattr(torch.ops.tokenspeed, f"{self.name}{'_' + form if form else ''}").default

    def explain(self, *args: Any, **kwargs: Any) -> Any:
        """Return the Explanation of a call with these arguments, without running it."""
        from tskernel._torch.execute import explain_call

        return explain_call(self, *args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the public function."""
        return self.front(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<Op tokenspeed::{self.schemas['']}>"


def _has_default(param: Any) -> bool:
    from tskernel._torch.schema import REQUIRED

    return param.default is not REQUIRED


def _signature_text(pairs: Sequence[tuple[str, str | None]]) -> str:
    return "(" + ", ".join(f"{n}: {t}" for n, t in pairs) + ")"


def op(**options: Any) -> Callable[[Callable[..., Any]], Op]:
    """Declare an op; the decorated function is its reference body. See docs/add-an-op.md for the options.

    Raises: RegistrationError when an op of that name exists; the first one stays in use.
    """

    def decorate(body: Callable[..., Any]) -> Op:
        from tskernel._torch.define import define

        declared = Op(body, **options)
        KernelRegistry.get().declare(declared)
        define(declared)
        ops[declared.name] = declared
        KernelRegistry.get().register(_reference_kernel(declared))
        return declared

    return decorate


def _reference_kernel(declared: Op) -> KernelSpec:
    return KernelSpec(
        name=f"reference/{declared.name}",
        family=declared.family,
        mode=declared.name,
        solution="reference",
        backend="reference",
        function=declared.body,
        priority=Priority.REFERENCE,
        traceable=True,
        lse="return" if declared.lse else "",
    )


def load_ops() -> None:
    """Import every op file below ``tskernel.ops``."""
    root = Path(__file__).parent / "ops"
    for family in sorted(f.name for f in os.scandir(root) if f.is_dir() and f.name[0] != "_"):
        for file in sorted(os.listdir(root / family)):
            if file.endswith(".py") and file[0] != "_":
                importlib.import_module(f"tskernel.ops.{family}.{file[:-3]}")


def validate(declared: Op, arguments: Sequence[Any], form: str = "", out: Tensor | None = None) -> None:
    """Refuse bad input before anything runs: argument types, one device, the op's own check, the shape of ``out``.

    Raises: ValueError naming op, argument, expected and got.
    """
    from tskernel._torch.validate import check_arguments, check_out

    with checking(declared.name if not form else f"{declared.name}_{form}"):
        check_arguments(declared, arguments, out)
        declared.run_check(arguments)
        if form == "out":
            check_out(declared, arguments, out)
