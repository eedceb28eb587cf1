"""The registry and the selector, on made-up platforms: no GPU is needed to test what a GPU would get."""

from __future__ import annotations

import asyncio
import contextvars
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import tskernel
from tskernel.dispatch import platform as platforms
from tskernel.dispatch.errors import (
    KernelRefusedError,
    KernelUnavailableError,
    NoKernelFoundError,
    OverrideError,
    RegistrationError,
)
from tskernel.dispatch.platform import Arch, CapabilityRequirement, PlatformInfo, platform_of
from tskernel.dispatch.registry import KernelRegistry, Priority, register_kernel
from tskernel.dispatch.selection import explain_selection, kernel_override, register_oracle, select_kernel
from tskernel.dispatch.signature import FormatSignature, ScaleFormat, TensorFormat, formats
from tskernel.library import ops

BF16 = FormatSignature.of(x=torch.bfloat16)
pytestmark = pytest.mark.usefixtures("registry")


def add(name: str, value: float = 0.0, *, error: BaseException | None = None, **options: Any) -> Callable[..., Any]:
    """Register a kernel for norm.rmsnorm that fills its result with a value, or raises."""

    def kernel(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
        if error is not None:
            raise error
        return torch.full_like(x, value)

    options.setdefault("solution", name)
    return register_kernel("norm", "rmsnorm", name=name, **options)(kernel)


def run(**options: Any) -> float:
    """Call rmsnorm and return the value that the serving kernel fills in."""
    return float(tskernel.rmsnorm(torch.ones(2, 8), torch.ones(8), **options)[0, 0])


# -- platforms --


@pytest.mark.parametrize(
    ("name", "vendor", "version"),
    [
        ("sm75", "nvidia", (7, 5)),
        ("sm_90a", "nvidia", (9, 0)),
        ("sm121", "nvidia", (12, 1)),
        ("nvidia:12.0", "nvidia", (12, 0)),
        ("gfx90a", "amd", (9, 0, 10)),
        ("gfx950", "amd", (9, 5, 0)),
        ("gfx942:sramecc+:xnack-", "amd", (9, 4, 2)),
        ("gfx1250", "amd", (12, 5, 0)),
        ("ascend910b", "ascend", (910, 2)),
        ("ascend950", "ascend", (950, 0)),
    ],
)
def test_sel_02_architecture_names(name: str, vendor: str, version: tuple[int, ...]) -> None:
    found = PlatformInfo.named(name)
    assert (found.vendor, found.arch) == (vendor, Arch(version))


def test_sel_02_exactly_at_least_and_family_are_distinct() -> None:
    parts = ["7.5", "8.0", "8.6", "8.9", "9.0", "10.0", "10.3", "12.0", "12.1"]

    def fit(**need: Any) -> list[str]:
        need = {"vendor": "nvidia", **need}
        return [p for p in parts if CapabilityRequirement(**need).reason(PlatformInfo.make("nvidia", p)) is None]

    assert fit(at_least="sm90") == ["9.0", "10.0", "10.3", "12.0", "12.1"]  # as text, "12.0" < "9.0"
    assert fit(exactly=("sm100",)) == ["10.0"]
    assert fit(family="sm100") == ["10.0", "10.3"]
    assert fit(at_least="8.0", at_most="8.9") == ["8.0", "8.6", "8.9"]
    assert CapabilityRequirement(vendor="amd", family="gfx942").reason(PlatformInfo.named("gfx940")) is None
    assert CapabilityRequirement(vendor="amd", family="gfx942").reason(PlatformInfo.named("gfx950")) is not None
    assert (
        CapabilityRequirement(vendor="nvidia", at_least="sm90").reason(PlatformInfo.named("gfx950"))
        == "needs nvidia, gfx950 is amd"
    )


@pytest.mark.parametrize("text", ["sm", "gfx9", "90", "", "h100"])
def test_sel_02_a_name_that_is_no_platform_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"expected|names no"):
        PlatformInfo.named(text)


def test_an_architecture_needs_its_vendor() -> None:
    with pytest.raises(ValueError, match="expected vendor="):
        CapabilityRequirement(at_least="9.0")


@pytest.mark.parametrize(
    ("name", "has", "lacks"),
    [
        ("sm80", {"memory:async_copy", "tensor_core:f16"}, {"tensor_core:f8", "memory:tma"}),
        ("sm90", {"memory:tma", "compute:cluster", "tensor_core:f8"}, {"tensor_core:f4"}),
        ("sm100", {"tensor_core:f4"}, set()),
        ("gfx942", {"tensor_core:f8"}, {"tensor_core:f4", "memory:tma"}),
        ("gfx950", {"tensor_core:f4"}, {"memory:tma"}),
        ("gfx1201", {"tensor_core:f8"}, {"tensor_core:f4"}),
        ("cpu", set(), {"runtime:cuda_graph", "tensor_core:f16"}),
    ],
)
def test_features_follow_from_the_architecture(name: str, has: set[str], lacks: set[str]) -> None:
    features = PlatformInfo.named(name).features
    assert has <= features and not lacks & features


@pytest.fixture
def two_devices(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make cuda:0 an sm120 and cuda:1 an sm86; forget both afterwards."""
    parts = {0: PlatformInfo.make("nvidia", (12, 0)), 1: PlatformInfo.make("nvidia", (8, 6))}
    detect = platforms._detect
    monkeypatch.setattr(platforms, "_detect", lambda d: parts[d.index] if d.type == "cuda" else detect(d))
    platforms.forget_platforms()
    yield
    monkeypatch.undo()
    platforms.forget_platforms()


@pytest.mark.usefixtures("two_devices")
def test_sel_01_capability_is_looked_up_per_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fake tensors on two different cards and a CPU tensor, in one process, each get their own kernel."""
    monkeypatch.setattr(fake_tensor, "init_gpu_context", lambda device: None)  # the second card need not exist
    add("new", capability=CapabilityRequirement(vendor="nvidia", at_least="sm100"), priority=Priority.PLUGIN)
    add("old", capability=CapabilityRequirement(vendor="nvidia", at_most="sm90"), priority=Priority.PLUGIN)
    mode = FakeTensorMode(allow_non_fake_inputs=True)

    def winner(device: str) -> str | None:
        # Made from meta tensors, so that no such device need exist.
        x, w = (FakeTensor(mode, torch.empty(s, device="meta"), torch.device(device)) for s in ((2, 8), (8,)))
        return ops["rmsnorm"].explain(x, w).winner

    seen = [winner(d) for d in ("cuda:0", "cuda:1", "cuda:0", "cpu")]
    assert seen[:3] == ["new", "old", "new"]
    assert seen[3] not in ("new", "old", None)


def test_dev_01_a_call_launches_on_its_tensors_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """With two GPUs the runner makes the tensors' device current for the launch and puts the old one back."""
    from tskernel._torch.runners import on_device

    current = [0]

    class Guard:
        def __init__(self, device: torch.device) -> None:
            self.index = device.index

        def __enter__(self) -> None:
            self.before, current[0] = current[0], self.index

        def __exit__(self, *_: object) -> None:
            current[0] = self.before

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "device", Guard)
    assert on_device(lambda: current[0], torch.device("cuda", 1))() == 1
    assert current == [0]
    plain = on_device(add, torch.device("cpu"))
    assert plain is add


# -- registration --


def test_a_duplicate_name_is_refused_and_the_first_stays() -> None:
    add("twin", 1.0, priority=Priority.PLUGIN)
    with pytest.raises(RegistrationError, match="twin is already registered from test_dispatch"):
        add("twin", 2.0)
    assert run() == 1.0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"traits": {"hiden": {64}}}, "trait 'hiden': expected one of"),
        ({"priority": 20}, r"priority: expected an integer in \[0, 20\), got 20"),
        ({"priority": 4.5}, "priority: expected an integer"),
        ({"priorities": [({"hidden": {1}}, 20)]}, "priority: expected an integer"),
        ({"priorities": [({"colour": {1}}, 5)]}, "trait 'colour': expected one of"),
        ({"rejects": lambda y: None}, r"rejects\(\) reads 'y': expected some of"),
    ],
)
def test_wrong_declarations_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(RegistrationError, match=words):
        add("wrong", **options)
    assert "wrong" not in [s.name for s in KernelRegistry.get().list_kernels()]


def test_a_kernel_with_another_signature_is_refused() -> None:
    def kernel(x: Tensor, w: Tensor, eps: float = 1e-6) -> Tensor:
        return x

    with pytest.raises(
        RegistrationError,
        match=r"signature: expected \(x: Tensor, weight: Tensor, eps: float\), got \(x: Tensor, w: Tensor",
    ):
        register_kernel("norm", "rmsnorm", name="other")(kernel)


def test_a_kernel_cannot_look_at_a_dynamic_argument() -> None:
    spec = KernelRegistry.get().get_by_name("reference/mha_prefill")
    with pytest.raises(RegistrationError, match="reads 'max_seqlen'"):
        register_kernel("attention", "mha_prefill", name="peek", rejects=lambda max_seqlen: None)(spec.function)


def test_unknown_ops_list_the_family() -> None:
    with pytest.raises(RegistrationError, match=r"no op norm\.rmsnrm; ops of norm: .*rmsnorm"):
        register_kernel("norm", "rmsnrm", name="x")(lambda: None)
    with pytest.raises(RegistrationError, match="families: activation, attention"):
        select_kernel("nrom", "rmsnorm")


def test_a_transaction_leaves_nothing_half_registered(registry: KernelRegistry) -> None:
    before = registry.list_kernels()
    with pytest.raises(SystemExit), registry.transaction():
        add("half", priority=Priority.PLUGIN)
        raise SystemExit(3)
    assert registry.list_kernels() == before and run() == pytest.approx(1.0, abs=1e-3)


def test_lists_and_descriptions(registry: KernelRegistry) -> None:
    assert ("norm", "rmsnorm") in registry.list_operators()
    assert "reference" in registry.list_solutions("norm", "rmsnorm")
    assert {s.family for s in registry.list_kernels("norm")} == {"norm"}
    assert "runs on: any device" in tskernel.describe_kernel("reference/rmsnorm")
    with pytest.raises(KeyError, match=r"near: .*reference/rmsnorm"):
        registry.get_by_name("reference/rmsnorn")


# -- traits, formats, features --


def test_traits_are_two_sided_and_typed() -> None:
    add("picky", 5.0, traits={"hidden": {8}, "contiguous": {True}}, priority=Priority.PLUGIN)
    assert run() == 5.0
    assert float(tskernel.rmsnorm(torch.ones(2, 16), torch.ones(16))[0, 0]) != 5.0
    assert select_kernel("norm", "rmsnorm", traits={"hidden": 8}, platform="cpu").name == "picky"
    for wrong in (8.0, True, 9):
        assert select_kernel("norm", "rmsnorm", traits={"hidden": wrong}, platform="cpu").name != "picky"
    assert select_kernel("norm", "rmsnorm", traits={"hidden": 8, "contiguous": 1}, platform="cpu").name != "picky"
    with pytest.raises(ValueError, match="trait 'hiden': expected one of contiguous, hidden"):
        select_kernel("norm", "rmsnorm", traits={"hiden": 8})


def test_ranges_and_predicates_are_trait_sets() -> None:
    add("ranged", traits={"hidden": range(8, 65, 8)}, priority=Priority.PLUGIN)
    add("even", traits={"hidden": lambda v: v % 2 == 0}, priority=Priority.PLUGIN)
    name = lambda h: select_kernel("norm", "rmsnorm", traits={"hidden": h}, platform="cpu").name  # noqa: E731
    assert [name(64), name(66)] == ["even", "even"]
    KernelRegistry.get().unregister("even")
    assert name(64) == "ranged" and name(66) != "ranged"


def test_formats_match_exactly() -> None:
    scaled = TensorFormat(torch.float8_e4m3fn, scale=ScaleFormat(torch.float32, "token"))
    add("scaled", signatures=formats(x=scaled), priority=Priority.PLUGIN)
    pick = lambda f: select_kernel("norm", "rmsnorm", FormatSignature.of(x=f), platform="cpu").name  # noqa: E731
    assert pick(scaled) == "scaled"
    assert pick(torch.float8_e4m3fn) != "scaled"
    assert FormatSignature.of(a=scaled, b=torch.int8) == FormatSignature.of({"b": torch.int8}, a=scaled)


def test_features_and_solution_restrict() -> None:
    add("graph", features={"prefetch"}, solution="mine", priority=Priority.REFERENCE)
    assert select_kernel("norm", "rmsnorm", features={"prefetch"}, platform="cpu").name == "graph"
    assert select_kernel("norm", "rmsnorm", solution="mine", platform="cpu").name == "graph"
    with pytest.raises(NoKernelFoundError, match=r"reference/rmsnorm: does not offer telepathy"):
        select_kernel("norm", "rmsnorm", features={"telepathy"}, platform="cpu")


# -- ranking --


def test_priority_then_name_never_registration_order() -> None:
    for name in ("b", "a", "c"):
        add(name, priority=Priority.PLUGIN)
    assert select_kernel("norm", "rmsnorm", platform="cpu").name == "a"
    add("z", priority=Priority.PLUGIN + 1)
    assert select_kernel("norm", "rmsnorm", platform="cpu").name == "z"


def test_priorities_of_calls_with_certain_traits() -> None:
    add("broad", priority=Priority.PLUGIN + 1)
    add("wide", priority=Priority.PLUGIN, priorities=[({"hidden": range(128, 4096)}, Priority.PLUGIN + 2)])
    for hidden, name, priority in ((64, "broad", Priority.PLUGIN + 1), (256, "wide", Priority.PLUGIN + 2)):
        explanation = explain_selection("norm", "rmsnorm", traits={"hidden": hidden}, platform="cpu")
        assert explanation.candidates[0].name == name
        assert explanation.candidates[0].priority == priority
    assert "hidden" in tskernel.describe_kernel("wide")


def test_an_oracle_ranks_before_priority() -> None:
    class Oracle:
        def adjust(self, spec: Any, platform: PlatformInfo, traits: Any) -> int:
            return 15 if spec.name == "reference/rmsnorm" and traits["hidden"] == 8 else 10

    add("fast", priority=Priority.PLUGIN)
    register_oracle("norm", Oracle())
    assert select_kernel("norm", "rmsnorm", traits={"hidden": 8}, platform="cpu").name == "reference/rmsnorm"
    assert select_kernel("norm", "rmsnorm", traits={"hidden": 16}, platform="cpu").name == "fast"
    register_oracle("norm", None)
    assert select_kernel("norm", "rmsnorm", traits={"hidden": 8}, platform="cpu").name == "fast"


def test_a_new_kernel_serves_the_next_call_of_both_routes() -> None:
    x, w = torch.ones(2, 8), torch.ones(8)
    for _ in range(2):
        run(), torch.ops.tokenspeed.rmsnorm(x, w)
    add("late", 9.0, priority=Priority.PLUGIN)
    assert run() == 9.0 and float(torch.ops.tokenspeed.rmsnorm(x, w)[0, 0]) == 9.0
    KernelRegistry.get().unregister("late")
    assert run() != 9.0 and float(torch.ops.tokenspeed.rmsnorm(x, w)[0, 0]) != 9.0


# -- overrides --


def test_sel_03_override_precedence(monkeypatch: pytest.MonkeyPatch) -> None:
    for i, name in enumerate(("arg", "ctx", "inner", "env")):
        add(name, float(i), priority=Priority.REFERENCE)
    add("default", 9.0, priority=Priority.PLUGIN)
    monkeypatch.setenv("TOKENSPEED_KERNEL_OVERRIDE_NORM_RMSNORM", "env")
    KernelRegistry.get().bump()
    assert run() == 3.0
    with kernel_override("norm", "rmsnorm", "ctx"):
        assert run() == 1.0
        with kernel_override("norm", "rmsnorm", "inner"):
            assert run() == 2.0 and run(override="arg") == 0.0
            assert float(torch.ops.tokenspeed.rmsnorm(torch.ones(2, 8), torch.ones(8))[0, 0]) == 2.0
        assert run() == 1.0
    assert run() == 3.0
    monkeypatch.setenv("TOKENSPEED_KERNEL_OVERRIDE_NORM_RMSNORM", "")  # empty is unset
    KernelRegistry.get().bump()
    assert run() == 9.0


@pytest.mark.parametrize("choice", ["no_such", "Reference", "REFERENCE/rmsnorm", "reference/layernorm"])
def test_sel_03_an_unknown_choice_lists_the_valid_ones(choice: str, monkeypatch: pytest.MonkeyPatch) -> None:
    words = rf"norm\.rmsnorm: .*: no kernel or solution '{choice}'; expected one of .*reference/rmsnorm"
    with pytest.raises(OverrideError, match=words):
        run(override=choice)
    with pytest.raises(OverrideError, match=words), kernel_override("norm", "rmsnorm", choice):
        raise AssertionError("the block must not run")
    with pytest.raises(OverrideError, match=words):
        select_kernel("norm", "rmsnorm", override=choice)
    monkeypatch.setenv("TOKENSPEED_KERNEL_OVERRIDE_NORM_RMSNORM", choice)
    KernelRegistry.get().bump()
    with pytest.raises(OverrideError, match=words):
        run()


def test_sel_03_a_kernel_that_cannot_run_here_is_an_error_with_its_reason() -> None:
    add("hopper", 1.0, capability=CapabilityRequirement(vendor="nvidia", at_least="sm90"))
    add("declining", 1.0, rejects=lambda x: "x is too ordinary")
    add("narrow", 1.0, traits={"hidden": {4}})
    with pytest.raises(OverrideError, match="override= 'hopper' cannot run here: hopper: needs nvidia, cpu is cpu"):
        run(override="hopper")
    with pytest.raises(OverrideError, match="declining: x is too ordinary"):
        run(override="declining")
    with pytest.raises(OverrideError, match="narrow: hidden=8 is not in"):
        run(override="narrow")


def test_an_override_is_seen_only_where_it_was_opened() -> None:
    add("forced", 7.0, priority=Priority.REFERENCE)
    base = run()
    inside, seen = threading.Event(), []

    def other() -> None:
        inside.wait(5)
        seen.append(run())

    thread = threading.Thread(target=other)
    thread.start()
    with kernel_override("norm", "rmsnorm", "forced"):
        inside.set()
        thread.join()
        assert run() == 7.0
        copied = contextvars.copy_context()
    assert seen == [base]
    assert copied.run(run) == base  # a closed override is closed in copies of the context too


def test_an_override_is_local_to_its_task() -> None:
    add("forced", 7.0, priority=Priority.REFERENCE)
    base = run()

    async def forced() -> float:
        with kernel_override("norm", "rmsnorm", "forced"):
            await asyncio.sleep(0.01)
            return run()

    async def plain() -> float:
        await asyncio.sleep(0.005)
        return run()

    async def both() -> list[float]:
        return await asyncio.gather(forced(), plain())

    assert asyncio.run(both()) == [7.0, base]


# -- falling back --


@pytest.mark.parametrize(
    "error", [KernelUnavailableError("needs nvcc"), ImportError("no module acme"), OSError("libacme.so: not found")]
)
def test_sel_04_the_next_kernel_serves_with_one_warning(error: Exception) -> None:
    add("best", error=error, priority=Priority.PLUGIN + 1)
    add("second", 4.0, priority=Priority.PLUGIN)
    with pytest.warns(RuntimeWarning, match="kernel best failed at first use") as caught:
        assert run() == 4.0
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert run() == 4.0 and float(tskernel.rmsnorm(torch.ones(3, 8), torch.ones(8))[0, 0]) == 4.0
    rejected = {
        c.name: c.reason
        for c in explain_selection("norm", "rmsnorm", platform=platform_of(torch.device("cpu"))).candidates
        if c.status == "rejected"
    }
    assert str(error) in rejected["best"]
    with pytest.raises((type(error), OverrideError)):
        run(override="best")


def test_sel_04_a_refused_call_goes_to_the_next_kernel_but_is_asked_again() -> None:
    add("moody", error=KernelRefusedError("not this shape"), priority=Priority.PLUGIN + 1)
    add("second", 4.0, priority=Priority.PLUGIN)
    assert run() == 4.0
    with pytest.raises(KernelRefusedError, match="not this shape"):
        run(override="moody")


def test_sel_04_any_other_exception_is_a_bug_and_propagates() -> None:
    add("buggy", error=ZeroDivisionError("oops"), priority=Priority.PLUGIN)
    with pytest.raises(ZeroDivisionError):
        run()


def test_sel_04_when_nothing_fits_one_error_lists_every_reason(registry: KernelRegistry) -> None:
    for spec in registry.list_kernels("norm", "rmsnorm"):
        registry.unregister(spec.name)
    add("amd_only", capability=CapabilityRequirement(vendor="amd"))
    add("declining", rejects=lambda x: "x is too ordinary")
    with pytest.raises(NoKernelFoundError) as caught:
        run()
    text = str(caught.value)
    assert "amd_only: needs amd, cpu is cpu" in text and "declining: x is too ordinary" in text


def test_rejects_sees_the_call_and_its_exceptions_propagate() -> None:
    add("wide", 3.0, rejects=lambda x: None if x.shape[0] >= 4 else f"{x.shape[0]} rows", priority=Priority.PLUGIN)
    assert run() != 3.0
    assert float(tskernel.rmsnorm(torch.ones(4, 8), torch.ones(8))[0, 0]) == 3.0
    KernelRegistry.get().unregister("wide")
    add("broken", rejects=lambda x: 1 / 0, priority=Priority.PLUGIN)
    with pytest.raises(ZeroDivisionError):
        run()


# -- explaining --


def test_explanations_name_every_kernel_and_reason() -> None:
    add(
        "tma",
        capability=CapabilityRequirement(vendor="nvidia", features=("memory:tma",)),
        priority=Priority.SPECIALIZED,
    )
    add("shape", rejects=lambda x: "no", priority=Priority.PERFORMANT + 1)
    plan = explain_selection("norm", "rmsnorm", BF16, platform="sm80")
    status = {c.name: (c.status, c.reason) for c in plan.candidates}
    assert status["tma"] == ("rejected", "needs memory:tma, which sm80 does not have")
    assert status["shape"] == ("selected", "unless it rejects the call by x")
    assert status["reference/rmsnorm"] == ("fits", "ranks lower")
    assert {c.name for c in plan.candidates} == {s.name for s in KernelRegistry.get().list_kernels("norm", "rmsnorm")}
    assert explain_selection("norm", "rmsnorm", BF16, platform="sm90").winner == "tma"
    call = ops["rmsnorm"].explain(torch.ones(2, 8), torch.ones(8))
    assert {c.name: c.reason for c in call.candidates}["shape"] == "no"
    assert str(call).splitlines()[0] == f"norm.rmsnorm on cpu: {call.winner}"
    assert call.to_dict()["winner"] == call.winner


@pytest.mark.parametrize("name", ["sm80", "sm90", "sm100", "gfx942", "gfx950", "gfx1250", "ascend910b", "cpu"])
def test_every_op_can_be_explained_for_every_platform(name: str) -> None:
    for family, mode in KernelRegistry.get().list_operators():
        plan = explain_selection(family, mode, platform=name)
        assert plan.winner is not None, plan
        assert all(c.reason or c.status == "selected" for c in plan.candidates), plan


def test_warmup_selects_and_calls() -> None:
    calls: list[int] = []
    names = tskernel.warmup_selection([("norm", "rmsnorm", BF16, {"hidden": 64})], calls=[lambda: calls.append(1)])
    assert names == [select_kernel("norm", "rmsnorm", BF16, traits={"hidden": 64}).name] and calls == [1]
    assert len(tskernel.warmup_selection()) == len(KernelRegistry.get().list_operators())


# -- threads --


def test_tun_03_eight_threads_race_first_calls_overrides_and_registration() -> None:
    """Results are right throughout, and an override is seen only where it was opened."""
    add("forced", 7.0, priority=Priority.REFERENCE)
    legal = {run()}
    start = threading.Barrier(8)

    def work(i: int) -> list[str]:
        wrong = []
        start.wait()
        for n in range(40):
            if i == 0:
                add(f"racer{n}", run(), priority=Priority.REFERENCE)
            elif i in (1, 2):
                with kernel_override("norm", "rmsnorm", "forced"):
                    if (got := run()) != 7.0:
                        wrong.append(f"forced thread got {got}")
            got = run()
            via_op = float(torch.ops.tokenspeed.rmsnorm(torch.ones(2, 8), torch.ones(8))[0, 0])
            if got not in legal or via_op not in legal:
                wrong.append(f"thread {i} got {got}, {via_op}")
        return wrong

    with ThreadPoolExecutor(8) as pool:
        wrong = [w for found in pool.map(work, range(8)) for w in found]
    assert not wrong, wrong[:5]


def test_an_unplanned_platform_needs_its_packages_and_a_planned_one_is_assumed_to_have_them() -> None:
    add("vendor", capability=CapabilityRequirement(packages=("no_such_package_anywhere",)), priority=Priority.PLUGIN)
    assert run() != 0.0
    here = {
        c.name: c.reason
        for c in explain_selection("norm", "rmsnorm", platform=platform_of(torch.device("cpu"))).candidates
    }
    assert here["vendor"] == "package no_such_package_anywhere is not installed"
    assert select_kernel("norm", "rmsnorm", platform="sm90").name == "vendor"
