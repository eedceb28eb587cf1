"""The contract of every op with torch: schema, fake, opcheck, fresh outputs, refusals."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from helpers import distinct_options, each_op, form_samples, primary_samples, tensors_in
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from tskernel._torch import execute
from tskernel.library import Op, ops
from tskernel.testing import clone_arguments, compare, samples_of

OPCHECKS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


def call_form(op: Op, form: str, arguments: dict[str, Any]) -> Any:
    """Call the torch operator of a form, allocating ``out``."""
    extra = {}
    if form == "out":
        extra["out"] = op.allocate(op.fill(arguments))
    return op.torch_op(form)(**arguments, **extra), extra.get("out")


@each_op()
def test_docstring_says_what_a_user_must_know(op: Op) -> None:
    for section in ("Shapes:", "Dtypes:", "Raises:"):
        assert section in op.doc, f"{op.name}: the docstring has no {section}"


@each_op()
@pytest.mark.slow
def test_opcheck(op: Op, record_property: Any) -> None:
    count = 0
    for form, dtype, sample in form_samples(op, samples_of(op)):
        arguments = clone_arguments(sample.arguments)
        if form == "out":
            arguments["out"] = op.allocate(op.fill(sample.arguments)).zero_()
        # torch's schema test compares by arithmetic that fp8 has not; test_read_only_arguments_stay_untouched compares
        # bytes instead.
        fp8 = any(
            isinstance(v, torch.Tensor) and v.dtype.is_floating_point and v.itemsize == 1 for v in arguments.values()
        )
        tests = [t for t in OPCHECKS if not (fp8 and t == "test_schema")]
        if dtype != op.dtypes[-1]:
            tests.remove(
                "test_aot_dispatch_dynamic"
            )  # what is traced does not change with the dtype, and it takes a second
        result = torch.library.opcheck(op.torch_op(form), (), arguments, test_utils=tests, raise_exception=False)
        failed = {k: v for k, v in result.items() if v != "SUCCESS"}
        assert not failed, f"{op.name} {form or 'base'} {sample.name}: {failed}"
        count += 1
    record_property("op x sample x form passed by opcheck", count)
    assert count


@each_op()
def test_lib_01_fake_and_real_agree(op: Op) -> None:
    for form, dtype, sample in form_samples(op, samples_of(op)):
        real, _ = call_form(op, form, clone_arguments(sample.arguments))
        mode = FakeTensorMode()
        fakes = {k: mode.from_tensor(v) if isinstance(v, torch.Tensor) else v for k, v in sample.arguments.items()}
        with mode:
            fake, _ = call_form(op, form, fakes)
        pairs = list(zip(tensors_in(real), tensors_in(fake), strict=True))
        assert len(pairs) == (0 if form == "out" else 2 if form == "lse" else op.signature.num_returns)
        for r, f in pairs:
            got = (tuple(r.shape), r.stride(), r.dtype, r.device)
            want = (tuple(f.shape), f.stride(), f.dtype, f.device)
            assert got == want, f"{op.name} {form} {dtype} {sample.name}: real {got}, fake {want}"


def symbolic(mode: FakeTensorMode, value: Any) -> Any:
    """Return a fake with every dimension of at least 2 symbolic."""
    if not isinstance(value, torch.Tensor):
        return value
    sizes = [DimDynamic.DYNAMIC if s > 1 else DimDynamic.STATIC for s in value.shape]
    context = StatelessSymbolicContext(dynamic_sizes=sizes)
    return mode.from_tensor(value, symbolic_context=context)


@each_op()
def test_lib_02_fakes_keep_symbolic_sizes(op: Op) -> None:
    """Every size stays a symbol.

    Nothing is converted or pinned to the example's number, unless an int argument states it.
    """
    samples = distinct_options(primary_samples(op))
    assert samples, f"{op.name} has no sample without a size of 0"
    for form, _, sample in form_samples(op, samples):
        # A size of 1 is a constant to the tracer; what must equal it, or be one longer (cu_seqlens), becomes one too.
        stated = {1, 2, *[v for v in sample.arguments.values() if type(v) is int]}
        env = ShapeEnv()
        mode = FakeTensorMode(shape_env=env)
        fakes = {k: symbolic(mode, v) for k, v in sample.arguments.items()}
        with mode:
            call_form(op, form, fakes)
        pinned = {s: v for s, v in env.replacements.items() if v.is_number and int(v) not in stated}
        assert not pinned, f"{op.name} {form or 'base'} {sample.name}: the fake pins {pinned}"


@each_op()
def test_lib_03_functional_ops_return_fresh_storage(op: Op) -> None:
    for _, sample in samples_of(op, dtypes=op.dtypes[-1:]):
        arguments = clone_arguments(sample.arguments)
        for result in (op.front(**arguments), op.torch_op()(**arguments)) if not op.mutates else ():
            outs = tensors_in(result)
            owners = [t.untyped_storage()._cdata for t in (*arguments.values(), *outs) if isinstance(t, torch.Tensor)]
            for t in outs:
                assert owners.count(t.untyped_storage()._cdata) == 1, (
                    f"{op.name} {sample.name}: an output shares storage"
                )


@each_op()
def test_lib_04_schema_marks_exactly_what_is_written(op: Op) -> None:
    for form in op.forms:
        written = [
            a.name for a in op.torch_op(form)._schema.arguments if a.alias_info is not None and a.alias_info.is_write
        ]
        assert written == ([*op.mutates] if form != "out" else ["out"])
        assert all(r.alias_info is None for r in op.torch_op(form)._schema.returns)


@each_op()
def test_lib_06_empty_calls_launch_nothing(op: Op, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call with a size of 0 gives results of the right kind.

    Where all of them are empty, no kernel is called at all.
    """

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("a kernel ran for empty outputs")

    checked = 0
    for _, sample in samples_of(op):
        if all(v.numel() for v in sample.arguments.values() if isinstance(v, torch.Tensor)):
            continue
        checked += 1
        arguments = op.fill(sample.arguments)
        outputs = [] if op.mutates else tensors_in(op.allocate(arguments))
        written = [sample.arguments[n] for n in op.mutates] or outputs
        with monkeypatch.context() as patch:
            if all(t.numel() == 0 for t in written):
                patch.setattr(execute, "make_runner", lambda *a, **k: refuse)
            result = op.front(**clone_arguments(sample.arguments))
        assert [(t.shape, t.dtype) for t in tensors_in(result)] == [(t.shape, t.dtype) for t in outputs]
    assert checked, f"{op.name} has no sample with a size of 0"


def first_error(op: Op, arguments: dict[str, Any]) -> str:
    """Return the sentence of the ValueError that the public function and the operator both give."""
    said = []
    for function in (op.front, op.torch_op()):
        with pytest.raises(ValueError) as caught:
            function(**arguments)
        said.append(str(caught.value))
    assert said[0] == said[1]
    return said[0]


@each_op()
def test_dev_01_mixed_devices_are_refused(op: Op) -> None:
    for _, sample in primary_samples(op):
        tensors = [k for k, v in sample.arguments.items() if isinstance(v, torch.Tensor)]
        if len(tensors) < 2:
            continue
        before = clone_arguments(sample.arguments)
        text = first_error(op, {**before, tensors[-1]: before[tensors[-1]].to("meta")})
        assert re.match(rf"tokenspeed::{op.name}: \w+\.device: expected \w+ like \w+, got \w+", text), text
        return


@each_op()
def test_bad_input_is_refused_before_anything_is_written(op: Op) -> None:
    _, sample = next(
        (d, s)
        for d, s in primary_samples(op)
        if all(v.numel() for v in s.arguments.values() if isinstance(v, torch.Tensor))
    )
    names = [k for k, v in sample.arguments.items() if isinstance(v, torch.Tensor)]
    for name in names:
        arguments = clone_arguments(sample.arguments)
        bad = {**arguments, name: torch.zeros(arguments[name].shape, dtype=torch.complex64)}
        text = first_error(op, bad)
        assert text.startswith(f"tokenspeed::{op.name}: ") and "expected" in text and "got" in text, text
        for written in op.mutates:
            if written != name:
                compare(bad[written], sample.arguments[written], exact=True)
    for name in names:
        with pytest.raises(ValueError, match=rf"tokenspeed::{op.name}: {name}: expected"):
            op.front(**{**clone_arguments(sample.arguments), name: "text"})


@each_op()
def test_fake_and_compiled_calls_give_the_eager_sentence(op: Op) -> None:
    _, sample = next(
        (d, s)
        for d, s in primary_samples(op)
        if all(v.numel() for v in s.arguments.values() if isinstance(v, torch.Tensor))
    )
    name = next(k for k, v in sample.arguments.items() if isinstance(v, torch.Tensor))
    bad = {**sample.arguments, name: torch.zeros(sample.arguments[name].shape, dtype=torch.complex64)}
    text = first_error(op, bad)
    mode = FakeTensorMode()
    with mode, pytest.raises(ValueError) as caught:
        op.torch_op()(**{k: mode.from_tensor(v) if isinstance(v, torch.Tensor) else v for k, v in bad.items()})
    assert str(caught.value) == text


@each_op()
def test_a_call_that_would_need_a_gradient_is_refused(op: Op) -> None:
    _, sample = primary_samples(op)[0]
    for name, value in sample.arguments.items():
        if isinstance(value, torch.Tensor) and value.dtype in (torch.float32, torch.bfloat16, torch.float16):
            arguments = {**clone_arguments(sample.arguments), name: value.clone().requires_grad_()}
            for function in (op.front, op.torch_op()):
                with (
                    torch.enable_grad(),
                    pytest.raises(
                        RuntimeError, match=f"tokenspeed::{op.name} is inference-only and {name} requires grad"
                    ),
                ):
                    function(**arguments)
            return


def test_all_ops_of_the_contract_exist() -> None:
    names = [
        "mha_prefill",
        "mha_extend_with_kvcache",
        "mha_decode_with_kvcache",
        "mla_prefill",
        "mla_extend_with_kvcache",
        "mla_decode_with_kvcache",
        "attn_merge_state",
        "rmsnorm",
        "gemma_rmsnorm",
        "layernorm",
        "qk_rmsnorm",
        "fused_add_rmsnorm",
        "add_rmsnorm",
        "silu_and_mul",
        "gelu_and_mul",
        "gelu_tanh_and_mul",
        "swiglu_oai",
        "apply_rope",
        "apply_rope_",
        "apply_rope_store_kvcache_",
        "store_kvcache",
        "store_mla_kvcache",
        "mm",
        "bmm",
        "grouped_mm",
        "moe_topk",
        "moe_fused",
        "moe_dispatch",
        "moe_experts",
        "moe_combine",
        "quantize_fp8",
        "quantize_fp8_dynamic",
        "quantize_mxfp8",
        "quantize_mxfp4",
        "quantize_nvfp4",
        "quantize_int8",
        "dequantize_fp8",
        "dequantize_mxfp8",
        "dequantize_mxfp4",
        "dequantize_nvfp4",
        "dequantize_int8",
        "argmax",
        "top_k_renorm",
        "top_p_renorm",
        "min_p_renorm",
        "top_k_top_p_sample",
        "apply_penalties_",
        "verify_chain_greedy",
    ]
    assert not set(names) - set(ops)
