"""torch.export, saving and loading, binding to kernels, and packages that run without tskernel."""

from __future__ import annotations

import copy
import io
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from decode_step import DecodeStep, step_inputs
from helpers import distinct_options, each_op, primary_samples, tensors_in
from torch import Tensor, nn

import tskernel
from tskernel import export
from tskernel.dispatch.errors import NoKernelFoundError, OverrideError
from tskernel.dispatch.platform import PlatformInfo
from tskernel.dispatch.registry import KernelRegistry, Priority, register_kernel
from tskernel.library import Op, Sample
from tskernel.testing import clone_arguments, compare

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
OPS_OF_THE_STEP = {
    "apply_rope_",
    "fused_add_rmsnorm",
    "mha_decode_with_kvcache",
    "mm",
    "rmsnorm",
    "silu_and_mul",
    "store_kvcache",
}


def export_step(tokens_per_request: int = 1, *, strict: bool = False) -> torch.export.ExportedProgram:
    batch, columns = torch.export.Dim("batch", min=1, max=4), torch.export.Dim("columns", min=2, max=64)
    tokens = tokens_per_request * batch if tokens_per_request > 1 else batch
    shapes = ({0: tokens},) * 4 + ({0: batch, 1: columns}, {0: batch})
    inputs = step_inputs(2, 0, tokens_per_request)
    return torch.export.export(DecodeStep(tokens_per_request), inputs, dynamic_shapes=shapes, strict=strict)


@pytest.mark.parametrize("tokens_per_request", [1, 2])
@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.slow
def test_paged_decode_step_exports_saves_and_loads(strict: bool, tokens_per_request: int, tmp_path: Path) -> None:
    program = export_step(tokens_per_request, strict=strict)
    assert {n.op for n in export.bindings(program)} == OPS_OF_THE_STEP
    export.save(program, tmp_path / "step.pt2")
    loaded = export.load(tmp_path / "step.pt2").module()
    eager = DecodeStep(tokens_per_request)
    for batch in (1, 3):
        for step in range(0, 6, tokens_per_request):  # crosses a page
            inputs = step_inputs(batch, step, tokens_per_request)
            compare(loaded(*inputs), eager(*inputs))
    for name in ("k_cache", "v_cache"):
        compare(loaded.get_buffer(name), eager.get_buffer(name))
        assert not eager.get_buffer(name)[0].isnan().any()


class ExtendStep(nn.Module):
    """Attention of new tokens over a paged cache that they are first written to; any number per request."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("k_cache", "v_cache"):
            self.register_buffer(name, torch.full((8, 4, 2, 16), float("nan")))

    def forward(self, qkv: Tensor, cu: Tensor, slots: Tensor, table: Tensor, lens: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = qkv.unflatten(-1, (-1, 16)).split([4, 2, 2], 1)
        tskernel.store_kvcache(k, v, self.k_cache, self.v_cache, slots)
        longest = table.shape[1] * 4
        return tskernel.mha_extend_with_kvcache(
            q, cu, self.k_cache, self.v_cache, table, lens, qkv.shape[0], longest, window_left=5, return_lse=True
        )


def extend_inputs(*new: int) -> tuple[Tensor, ...]:
    counts, table = torch.tensor(new), torch.arange(2 * len(new), dtype=torch.int32).view(-1, 2)
    cu = torch.cat([torch.zeros(1, dtype=torch.long), counts.cumsum(0)])
    slots = torch.cat([8 * b + torch.arange(n) for b, n in enumerate(new)])
    return torch.randn(sum(new), 128), cu.to(torch.int32), slots, table, counts.to(torch.int32)


@pytest.mark.parametrize("strict", [True, False])
def test_tokens_and_batch_are_independent_dynamic_sizes(strict: bool, tmp_path: Path) -> None:
    tokens, batch = (torch.export.Dim(n, min=2, max=64) for n in ("tokens", "batch"))
    shapes = ({0: tokens}, {0: batch + 1}, {0: tokens}, {0: batch}, {0: batch})
    program = torch.export.export(ExtendStep(), extend_inputs(3, 4), dynamic_shapes=shapes, strict=strict)
    export.save(export.bind(program), tmp_path / "extend.pt2")
    loaded, eager = export.load(tmp_path / "extend.pt2").module(), ExtendStep()
    for new in ((1, 1, 1), (7, 2), (5, 0, 3, 8)):
        inputs = extend_inputs(*new)
        compare(loaded(*inputs), eager(*inputs))


def test_bind_names_a_kernel_in_every_node_and_leaves_the_program_alone() -> None:
    program = export_step()
    before = str(program.graph_module.code)
    bound = export.bind(program)
    assert str(program.graph_module.code) == before and all(b.kernel is None for b in export.bindings(program))
    found = export.bindings(bound)
    assert {b.op for b in found} == OPS_OF_THE_STEP and all(b.inlined and not b.note for b in found)
    assert str(found).splitlines()[0].split() == ["node", "op", "kernel", "as", "note"]
    assert str(found).count("\n") == len(found)
    inputs = step_inputs(3, 0)
    compare(bound.module()(*inputs), DecodeStep()(*inputs))
    again = export.bind(bound, overrides={"mm": "reference"})
    assert {b.kernel for b in export.bindings(again) if b.op == "mm"} == {"reference/mm"}


def test_bound_bodies_replace_the_nodes_when_the_program_is_decomposed() -> None:
    program = export_step()
    bound = export.bind(program).run_decompositions({}, decompose_custom_triton_ops=True)
    assert not [n for n in bound.graph.nodes if "tokenspeed" in str((n.target, n.args))]
    unbound = program.run_decompositions({}, decompose_custom_triton_ops=True)
    assert "tokenspeed.mm" in str(unbound.graph)
    late = export.bindings(unbound)
    assert {b.op for b in late if "before run_decompositions" in b.note} >= {"store_kvcache", "fused_add_rmsnorm"}


class Norm(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options

    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        return tskernel.rmsnorm(x * 2, w, **self.options)


def export_norm(**options: Any) -> torch.export.ExportedProgram:
    inputs = (torch.randn(4, 32), torch.rand(32))
    return torch.export.export(Norm(**options), inputs, dynamic_shapes=({0: torch.export.Dim("tokens")}, None))


def kernel_of(program: torch.export.ExportedProgram) -> str | None:
    return export.bindings(program)[0].kernel


def test_bind_keeps_the_override_of_the_code_and_takes_others_in_order() -> None:
    forced = export_norm(override="reference")
    assert kernel_of(export.bind(forced, overrides={"rmsnorm": "portable/rmsnorm/torch"})) == "reference/rmsnorm"
    plain = export_norm()
    assert kernel_of(export.bind(plain)) == "portable/rmsnorm/torch"
    with tskernel.kernel_override("norm", "rmsnorm", "reference"):
        assert kernel_of(export.bind(plain)) == "reference/rmsnorm"
        assert kernel_of(export.bind(plain, overrides={"rmsnorm": "torch"})) == "portable/rmsnorm/torch"
    with pytest.raises(OverrideError, match=r"node rmsnorm: .*no kernel or solution 'fast'.*reference/rmsnorm"):
        export.bind(plain, overrides={"rmsnorm": "fast"})
    with pytest.raises(ValueError, match="the program has no op 'mm'; it has rmsnorm"):
        export.bind(plain, overrides={"mm": "reference"})


def add_norm_kernel(name: str, **options: Any) -> None:
    @register_kernel("norm", "rmsnorm", name=name, solution=name, priority=Priority.PLUGIN, **options)
    def rmsnorm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
        return torch.full_like(x, 7.0)


@pytest.mark.usefixtures("registry")
def test_bind_selects_for_the_platform_it_is_given() -> None:
    add_norm_kernel(
        "made_up", capability=tskernel.CapabilityRequirement(vendor="nvidia", at_least="sm90"), traceable=True
    )
    program = export_norm()
    assert kernel_of(export.bind(program, "sm90")) == "made_up"
    assert kernel_of(export.bind(program, PlatformInfo.named("sm80"))) == "portable/rmsnorm/triton"
    assert kernel_of(export.bind(program)) == "portable/rmsnorm/torch"
    with pytest.raises(OverrideError, match="needs nvidia"):
        export.bind(program, "gfx950", overrides={"rmsnorm": "made_up"})


@pytest.mark.usefixtures("registry")
def test_bind_leaves_a_kernel_that_cannot_be_traced_as_an_operator_and_says_so() -> None:
    add_norm_kernel("opaque")
    bound = export.bind(export_norm())
    (found,) = export.bindings(bound)
    assert found.kernel == "opaque" and not found.inlined and "cannot be traced" in found.note
    compare(bound.module()(torch.randn(5, 32), torch.ones(32)), torch.full((5, 32), 7.0), exact=True)
    assert "tokenspeed.rmsnorm" in str(bound.run_decompositions({}, decompose_custom_triton_ops=True).graph)


@pytest.mark.usefixtures("registry")
def test_bind_passes_over_a_kernel_that_asks_for_a_dynamic_size() -> None:
    def few_rows(x: Tensor) -> str | None:
        return None if x.shape[0] < 16 else "more than 15 rows"

    def some_columns(x: Tensor) -> str | None:
        return None if x.shape[-1] == 32 else "not 32 columns"

    add_norm_kernel("few_rows", rejects=few_rows, traceable=True)
    program = export_norm()
    constraints = str(program.range_constraints)
    bound = export.bind(program)
    assert kernel_of(bound) == "portable/rmsnorm/torch" and str(bound.range_constraints) == constraints
    with pytest.raises(OverrideError, match="few_rows: its answer depends on a dynamic size"):
        export.bind(program, overrides={"rmsnorm": "few_rows"})
    add_norm_kernel("some_columns", rejects=some_columns, traceable=True)
    assert kernel_of(export.bind(program)) == "some_columns"


@pytest.mark.usefixtures("registry")
def test_bind_says_which_node_no_kernel_serves() -> None:
    registry = KernelRegistry.get()
    for name in ("reference/rmsnorm", "portable/rmsnorm/torch"):
        registry.unregister(name)
    with pytest.raises(NoKernelFoundError, match=r"node rmsnorm: norm\.rmsnorm on cpu"):
        export.bind(export_norm())


@pytest.mark.usefixtures("registry")
def test_a_binding_to_another_version_of_a_kernel_stays_an_operator() -> None:
    bound = export.bind(export_norm())
    for node in bound.graph.nodes:
        if "override" in node.kwargs:
            node.kwargs = {**node.kwargs, "override": f"{kernel_of(bound)}:0123456789ab"}
    assert "bind again" in export.bindings(bound)[0].note
    with pytest.warns(RuntimeWarning, match="bound with another version"):
        decomposed = bound.run_decompositions({}, decompose_custom_triton_ops=True)
    assert "tokenspeed.rmsnorm" in str(decomposed.graph)


def test_load_explains_what_it_cannot_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "norm.pt2"
    export.save(export_norm(), path)

    def fails(*_: Any, **__: Any) -> Any:
        raise RuntimeError("We ran into an error when deserializing")

    monkeypatch.setattr(torch.export, "load", fails)
    with pytest.raises(
        RuntimeError, match=rf"tskernel {tskernel.__version__} cannot load .*saved by tskernel .* none;"
    ):
        export.load(path)
    monkeypatch.setattr("tskernel._torch.graphs.forms_by_name", dict)
    with pytest.raises(RuntimeError, match=r"differ: rmsnorm: saved tokenspeed::rmsnorm\(.*now not defined"):
        export.load(path)
    (tmp_path / "bad.pt2").write_bytes(b"no archive")
    with pytest.raises(RuntimeError, match=r"not saved by tskernel.export.save"):
        export.load(tmp_path / "bad.pt2")


WITHOUT_TSKERNEL = """
import sys, torch
step = torch._inductor.aoti_load_package(sys.argv[1] + "/step.pt2")
calls = torch.load(sys.argv[1] + "/calls.pt")
torch.save([step(*inputs) for inputs in calls], sys.argv[1] + "/results.pt")
assert not [m for m in sys.modules if m.startswith("tskernel")], "tskernel was imported"
print("ran without tskernel")
"""


@pytest.mark.slow
def test_bound_package_runs_in_a_process_without_tskernel(tmp_path: Path) -> None:
    """Three steps at two batch sizes: the package keeps its own cache, and the last step reads what the first wrote."""
    program = export.bind(export_step())
    options = {"aot_inductor.compile_wrapper_opt_level": "O0"}  # half the compile time, same kernels
    package = str(tmp_path / "step.pt2")
    torch._inductor.aoti_compile_and_package(program, package_path=package, inductor_configs=options)
    calls = [step_inputs(batch, step) for batch, step in ((3, 0), (3, 1), (1, 2))]
    torch.save(calls, tmp_path / "calls.pt")
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    command = [sys.executable, "-I", "-c", textwrap.dedent(WITHOUT_TSKERNEL), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.stdout == "ran without tskernel\n", done.stderr
    eager = DecodeStep()
    for got, inputs in zip(torch.load(tmp_path / "results.pt"), calls, strict=True):
        compare(got, eager(*inputs))


@pytest.mark.slow
def test_a_cpp_program_runs_the_package_of_the_example(tmp_path: Path) -> None:
    """``examples/aoti``: neither Python nor tskernel is in the process that runs the model."""
    example = Path(__file__).parent.parent / "examples" / "aoti" / "package.py"
    source = Path(tskernel.__file__).parent.parent
    environment = {**os.environ, "PYTHONPATH": str(source)}
    done = subprocess.run([sys.executable, example, tmp_path], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    *table, build, run = done.stdout.splitlines()
    assert [row.split()[3] for row in table] == ["as", "inlined", "inlined", "inlined"]
    subprocess.run(build.split(), check=True)
    assert subprocess.run(run.split(), capture_output=True, text=True, check=True).stdout == "3 results\n"
    got, want = (torch.load(tmp_path / f"{n}.pt", weights_only=False) for n in ("results", "expected"))
    for g, w in zip(got, want, strict=True):
        compare(g, w)


class Call(nn.Module):
    """One form of an op as a module; the tensors are its inputs, the rest is part of it."""

    def __init__(self, op: Op, form: str, arguments: dict[str, Any]) -> None:
        super().__init__()
        self.op, self.form = op, form
        self.options = {k: v for k, v in arguments.items() if not isinstance(v, Tensor)}

    def forward(self, tensors: dict[str, Tensor]) -> Any:
        given = {**tensors, **self.options}
        if self.form == "lse":
            return self.op.front(**given, return_lse=True)
        if self.form == "out":
            out = self.op.allocate(self.op.fill(given))
            return self.op.front(**given, out=out)
        self.op.front(**given) if self.op.mutates else None
        return {n: given[n] for n in self.op.mutates} if self.op.mutates else self.op.front(**given)


def optional_names(op: Op) -> set[str]:
    return {p.name for p in op.signature.params if p.type.endswith("?")}


def covering_samples(op: Op) -> list[Sample]:
    """Return few samples that between them give each optional argument, and leave out each."""
    left = {(n, given) for n in optional_names(op) for given in (True, False)}
    chosen: list[Sample] = []
    candidates = [s for _, s in distinct_options(primary_samples(op))]
    while candidates:
        best = max(candidates, key=lambda s: len(left & states(op, s)))
        if chosen and not left & states(op, best):
            break
        left -= states(op, best)
        chosen.append(best)
        candidates.remove(best)
    missing = sorted(n for n, given in left if given)
    assert not missing, f"{op.name}: no sample gives {missing}"
    return chosen


def states(op: Op, sample: Sample) -> set[tuple[str, bool]]:
    return {(n, sample.arguments.get(n) is not None) for n in optional_names(op)}


def split(arguments: dict[str, Any]) -> dict[str, Tensor]:
    return {k: v for k, v in arguments.items() if isinstance(v, Tensor)}


@each_op()
@pytest.mark.slow
def test_lib_08_exports_with_and_without_options_and_reloads(op: Op) -> None:
    for sample in covering_samples(op):
        for form in op.forms:
            call = Call(op, form, sample.arguments)
            traced, used, wanted = (split(clone_arguments(sample.arguments)) for _ in range(3))
            program = torch.export.export(call, (traced,), strict=False)
            assert f"tokenspeed.{op.name}{'_' + form if form else ''}.default" in str(program.graph)
            file = io.BytesIO()
            torch.export.save(program, file)
            file.seek(0)
            got, want = torch.export.load(file).module()(used), call(wanted)
            compare(tensors_in(got), tensors_in(want), exact=True)


@each_op()
@pytest.mark.slow
def test_lib_08_compiles_in_inference_mode_with_views_and_writes(op: Op) -> None:
    """The tensors are views made inside the compiled function, of inputs that it writes through."""
    sample = covering_samples(op)[0]
    call = Call(op, "", sample.arguments)

    def through_views(bases: dict[str, Tensor]) -> Any:
        return call({k: base[1] for k, base in bases.items()})

    with torch.inference_mode():
        bases = {k: torch.stack([v, v, v]) for k, v in split(sample.arguments).items()}
        want_bases, got_bases = copy.deepcopy(bases), copy.deepcopy(bases)
        want = through_views(want_bases)
        got = torch.compile(through_views, fullgraph=True, backend="aot_eager")(got_bases)
        compare(
            tensors_in(list(got.values()) if isinstance(got, dict) else got),
            tensors_in(list(want.values()) if isinstance(want, dict) else want),
            exact=True,
        )
        for name, base in got_bases.items():
            compare(base, want_bases[name], exact=True)
    torch._dynamo.reset()
