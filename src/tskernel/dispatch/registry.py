"""The kernels: what describes one, where they are kept, and how the built-in ones are found."""

from __future__ import annotations

import importlib
import inspect
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from tskernel.dispatch.errors import RegistrationError
from tskernel.dispatch.platform import ANY, CapabilityRequirement
from tskernel.dispatch.signature import FormatSignature
from tskernel.dispatch.spec import KernelSpec, Operator, Priority, argument_names

__all__ = [
    "KernelRegistry",
    "KernelSpec",
    "Operator",
    "Priority",
    "argument_names",
    "builtin_kernel_modules",
    "describe_kernel",
    "load_builtin_kernels",
    "register_kernel",
]

F = TypeVar("F", bound=Callable[..., Any])


class KernelRegistry:
    """All ops and kernels of the process. Thread-safe.

    ``epoch`` grows when what could be selected changes: kernels, oracles, policy, platforms. ``generation`` grows with
    it and also when an override opens or closes: it dates what a call has remembered.
    """

    _instance: ClassVar[KernelRegistry | None] = None

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.epoch = 0
        self.generation = 0
        self.operators: dict[str, Operator] = {}
        self._kernels: dict[str, KernelSpec] = {}
        self._by_mode: dict[str, tuple[KernelSpec, ...]] = {}
        self._listeners: list[Callable[[], None]] = []
        self._open = threading.local()

    @classmethod
    def get(cls) -> KernelRegistry:
        """Return the registry of this process."""
        if cls._instance is None:
            cls._instance = cls()
        return cls._instance

    def bump(self) -> None:
        """Make every remembered selection unreachable."""
        with self.lock:
            self.epoch += 1
            self.forget_calls()

    def forget_calls(self) -> None:
        """Make every call select anew; what was computed per platform, formats and traits stays valid."""
        with self.lock:
            self.generation += 1
            for listener in self._listeners:
                listener()

    def on_change(self, listener: Callable[[], None]) -> None:
        """Call ``listener`` at every change, under the registry's lock."""
        self._listeners.append(listener)

    def forget_listener(self, listener: Callable[[], None]) -> None:
        """Undo ``on_change``."""
        with self.lock:
            self._listeners.remove(listener)

    def declare(self, operator: Operator) -> None:
        """Add an op. Raises: RegistrationError when the name is taken."""
        with self.lock:
            if operator.name in self.operators:
                raise RegistrationError(
                    f"op {operator.family}.{operator.name} is already declared; the first declaration stays in use"
                )
            self.operators[operator.name] = operator

    def register(self, spec: KernelSpec) -> None:
        """Add a kernel. Raises: RegistrationError when it is declared wrongly; nothing is changed then."""
        with self.lock:
            self._validate(spec)
            self._put(spec)
        self._note(spec, added=True)

    def _put(self, spec: KernelSpec) -> None:
        self._kernels[spec.name] = spec
        self._by_mode[spec.mode] = (*self._by_mode.get(spec.mode, ()), spec)
        self.bump()

    def _drop(self, spec: KernelSpec) -> None:
        if self._kernels.pop(spec.name, None) is not None:
            self._by_mode[spec.mode] = tuple(s for s in self._by_mode[spec.mode] if s.name != spec.name)
            self.bump()

    def _note(self, spec: KernelSpec, *, added: bool) -> None:
        journal = getattr(self._open, "journal", None)
        if journal is not None:
            journal.append((spec, added))

    def _validate(self, spec: KernelSpec) -> None:
        operator = self.operator(spec.family, spec.mode)
        where = f"kernel {spec.name}"
        if (first := self._kernels.get(spec.name)) is not None:
            raise RegistrationError(
                f"{where} is already registered from {first.function.__module__}; "
                "unregister it first, or choose another name"
            )
        for priority in (spec.priority, *(p for _, p in spec.priorities)):
            if priority != int(priority) or not 0 <= priority < Priority.LIMIT:
                raise RegistrationError(
                    f"{where}: priority: expected an integer in [0, {Priority.LIMIT}), got {priority}"
                )
        known = {*operator.trait_defaults}
        for trait in (*spec.traits, *(t for wanted, _ in spec.priorities for t in wanted)):
            if trait not in known:
                raise RegistrationError(
                    f"{where}: trait {trait!r}: expected one of {', '.join(sorted(known)) or 'none'}"
                )
        legal = {*operator.arguments, *(("out",) if operator.out else ())} - {*operator.dynamic}
        for name in spec.rejects_arguments:
            if name not in legal:
                raise RegistrationError(
                    f"{where}: rejects() reads {name!r}: expected some of {', '.join(sorted(legal))}"
                )
        if (difference := operator.compare_signature(spec.function)) is not None:
            raise RegistrationError(f"{where}: {difference}")

    def unregister(self, name: str) -> KernelSpec:
        """Remove a kernel and return it. Raises: KeyError that names near misses."""
        spec = self.get_by_name(name)
        with self.lock:
            self._drop(spec)
        self._note(spec, added=False)
        return spec

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Undo what this thread registers or removes inside when the block raises, whatever it raises."""
        outer = getattr(self._open, "journal", None)
        # A journal of this thread instead of the lock: what runs inside imports modules, and an importing thread that
        # waits for the lock would hold the very module that the importer here waits for.
        journal: list[tuple[KernelSpec, bool]] = []
        self._open.journal = journal
        try:
            yield
        except BaseException:
            with self.lock:
                for spec, added in reversed(journal):
                    (self._drop if added else self._put)(spec)
            journal.clear()
            raise
        finally:
            self._open.journal = outer
            if outer is not None:
                outer.extend(journal)

    def operator(self, family: str, mode: str) -> Operator:
        """Return an op. Raises: RegistrationError that lists the ops of the family."""
        found = self.operators.get(mode)
        if found is None or found.family != family:
            same = sorted(o.name for o in self.operators.values() if o.family == family)
            families = sorted({o.family for o in self.operators.values()})
            options = f"ops of {family}: {', '.join(same)}" if same else f"families: {', '.join(families)}"
            raise RegistrationError(f"no op {family}.{mode}; {options}")
        return found

    def kernels_of(self, mode: str) -> tuple[KernelSpec, ...]:
        """Return the kernels of an op, after finding the built-in ones."""
        load_builtin_kernels(mode)
        return self._by_mode.get(mode, ())

    def list_kernels(self, family: str | None = None, mode: str | None = None) -> list[KernelSpec]:
        """Return kernels by op, highest priority first, then by name."""
        load_builtin_kernels(mode)
        found = [
            s
            for s in list(self._kernels.values())
            if (family is None or s.family == family) and (mode is None or s.mode == mode)
        ]
        return sorted(found, key=lambda s: (s.family, s.mode, -s.priority, s.name))

    def list_operators(self) -> list[tuple[str, str]]:
        """Return all (family, mode) pairs."""
        return sorted((o.family, o.name) for o in self.operators.values())

    def list_solutions(self, family: str | None = None, mode: str | None = None) -> list[str]:
        """Return the solutions that some kernel of the op (or family, or of all) has."""
        return sorted({s.solution for s in self.list_kernels(family, mode)})

    def get_by_name(self, name: str) -> KernelSpec:
        """Return a kernel. Raises: KeyError that names near misses."""
        load_builtin_kernels(_mode_in(name))
        found = self._kernels.get(name)
        if found is None:
            load_builtin_kernels()
            found = self._kernels.get(name)
        if found is None:
            from difflib import get_close_matches  # here: only an error needs it

            near = get_close_matches(name, self._kernels, n=3)
            raise KeyError(f"no kernel {name!r}" + (f"; near: {', '.join(near)}" if near else ""))
        return found


def _mode_in(name: str) -> str | None:
    parts = name.split("/")
    return parts[1] if len(parts) > 1 else None


_PACKAGE = "tskernel.backends."


def register_kernel(
    family: str,
    mode: str,
    *,
    name: str | None = None,
    solution: str | None = None,
    capability: CapabilityRequirement | Iterable[CapabilityRequirement] = ANY,
    signatures: Iterable[FormatSignature] = (),
    traits: Mapping[str, Any] | None = None,
    priority: int = Priority.PERFORMANT,
    priorities: Iterable[tuple[Mapping[str, Any], int]] = (),
    features: Iterable[str] = (),
    rejects: Callable[..., str | None] | None = None,
    weight_preprocessor: Callable[..., Any] | None = None,
    traceable: bool = False,
    backend: str | None = None,
) -> Callable[[F], F]:
    """Register the decorated function as a kernel of ``family.mode``.

    Built-in kernels take name, backend and solution from their path; out-of-tree ones give ``name`` (and ``solution``,
    by default the name). ``capability`` may list alternatives. Empty ``signatures`` means any. ``traits`` maps a trait
    of the op to a container of accepted values, or to a callable that says whether a value is accepted. ``priorities``
    lists other priorities for calls with certain traits, such as ``[({"head_dim": {256}}, 14)]``: the first that fits
    counts, ``priority`` where none does.
    """

    def decorate(function: F) -> F:
        KernelRegistry.get().register(
            _make_spec(
                function,
                family=family,
                mode=mode,
                identity=_identity(function, mode, name, solution, backend),
                capability=(capability,) if isinstance(capability, CapabilityRequirement) else tuple(capability),
                signatures=frozenset(signatures),
                traits=dict(traits or {}),
                priority=priority,
                priorities=tuple((dict(wanted), p) for wanted, p in priorities),
                features=frozenset(features),
                rejects=rejects,
                weight_preprocessor=weight_preprocessor,
                traceable=traceable,
            )
        )
        return function

    return decorate


def _identity(
    function: Callable[..., Any], mode: str, name: str | None, solution: str | None, backend: str | None
) -> tuple[str, str, str]:
    module = function.__module__
    if name is None and module.startswith(_PACKAGE) and module.count(".") == 4:
        where, op, stem = module.removeprefix(_PACKAGE).split(".")
        if op != mode:
            raise RegistrationError(f"kernel in {where}/{op}/{stem}.py is registered for {mode}: the path says {op}")
        return f"{where}/{op}/{stem}", stem, where
    if name is None:
        raise RegistrationError(
            f"kernel {function.__qualname__} of {module}: name: expected a name for an out-of-tree kernel, got None"
        )
    return name, solution or name, backend or module.split(".")[0]


def _make_spec(
    function: Callable[..., Any],
    *,
    identity: tuple[str, str, str],
    rejects: Callable[..., str | None] | None,
    **fields: Any,
) -> KernelSpec:
    name, solution, backend = identity
    arguments = argument_names(function)
    return KernelSpec(
        name=name,
        solution=solution,
        backend=backend,
        function=function,
        rejects=rejects,
        rejects_arguments=argument_names(rejects) if rejects else (),
        writes_out="out" in arguments,
        lse="return" if "return_lse" in arguments else "write" if "lse" in arguments else "",
        **fields,
    )


_BACKENDS = Path(__file__).parent.parent / "backends"
# Its own lock: the registry's must not be held while a module is imported, or two importing threads can wait for each
# other.
_load_lock = threading.RLock()
_loaded: set[str] = set()


def load_builtin_kernels(mode: str | None = None) -> None:
    """Import ``backends/*/<mode>/*.py`` (of every op without ``mode``). Kernel files import no vendor package."""
    if mode is not None and mode in _loaded:
        return
    with _load_lock:
        for module, op in builtin_kernel_modules(mode):
            if op not in _loaded:
                importlib.import_module(module)
        _loaded.update([mode] if mode is not None else [d.name for d in _BACKENDS.glob("*/*/")])


def builtin_kernel_modules(mode: str | None = None) -> list[tuple[str, str]]:
    """Return (module, op) of every built-in kernel file."""
    files = sorted(_BACKENDS.glob(f"*/{mode or '*'}/*.py"))
    return [
        (".".join((_PACKAGE[:-1], *f.relative_to(_BACKENDS).with_suffix("").parts)), f.parent.name)
        for f in files
        if f.stem[0] != "_"
    ]


def describe_kernel(name: str) -> str:
    """Return what a kernel is, in a few lines."""
    s = KernelRegistry.get().get_by_name(name)
    lines = [
        f"{s.name}: {s.family}.{s.mode}, solution {s.solution}, backend {s.backend}, priority {s.priority}",
        f"  runs on: {' | '.join(map(_capability_text, s.capability))}",
        f"  formats: {' | '.join(sorted(map(str, s.signatures))) or 'any'}",
        f"  traits: {', '.join(f'{k} in {v}' for k, v in s.traits.items()) or 'any'}",
        f"  defined in: {inspect.getsourcefile(s.function)}",
    ]
    if s.priorities:
        lines.insert(1, f"  priority where: {'; '.join(f'{wanted}: {p}' for wanted, p in s.priorities)}")
    if s.rejects is not None:
        lines.append(f"  rejects calls by: {', '.join(s.rejects_arguments)}")
    return "\n".join(lines)


def _capability_text(c: CapabilityRequirement) -> str:
    arch = [f"exactly {' or '.join(c.exactly)}" if c.exactly else "", f">= {c.at_least}" if c.at_least else ""]
    arch += [
        f"<= {c.at_most}" if c.at_most else "",
        f"family of {c.family}" if c.family else "",
        *c.features,
        *c.packages,
    ]
    return " ".join([c.vendor or "any device", *filter(None, arch)])
