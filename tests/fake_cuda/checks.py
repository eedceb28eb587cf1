"""Checks of prepared launches; ``python checks.py`` runs all and prints a JSON object of name to error or ""."""

from __future__ import annotations

import json
import sys
import threading
import traceback
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "src"))

from driver import Fake

from tskernel.backends.lazy_triton import gluon_jit, jit, resolved
from tskernel.backends.triton_launch import Prepared, prepare


@jit
def _kernel(x, y, none, scale, n, m, wide, half: tl.constexpr, BLOCK: tl.constexpr, FLAG: tl.constexpr = True):  # noqa: F821
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)  # noqa: F821
    inside = at < n * m * (wide + 1)
    value = tl.load(x + at, mask=inside).to(tl.float32) * scale  # noqa: F821
    if FLAG and none is None:
        value += half
    tl.store(y + at, value.to(y.dtype.element_ty), mask=inside)  # noqa: F821


@gluon_jit
def _move(source, to, n, BARRIERS: tl.constexpr):  # noqa: F821
    tile = gl.allocate_shared_memory(source.dtype, source.block_shape, source.layout)  # noqa: F821
    bar = gl.allocate_shared_memory(gl.int64, [BARRIERS], hopper.mbarrier.MBarrierLayout())  # noqa: F821
    hopper.mbarrier.init(bar, count=1)  # noqa: F821
    hopper.mbarrier.expect(bar, source.block_type.nbytes)  # noqa: F821
    hopper.tma.async_copy_global_to_shared(source, [n, 0], bar, tile)  # noqa: F821
    hopper.mbarrier.wait(bar, 0)  # noqa: F821
    at = gl.arange(0, 128, gl.BlockedLayout([1], [32], [4], [0]))  # noqa: F821
    gl.store(to + at, at)  # noqa: F821


FAKE = Fake()
FUNCTION: Any = _kernel.resolve()
NUMBERS = (0.5, 48, 7, 1 << 40)
OPTIONS = {"half": 0.25, "BLOCK": 64, "num_warps": 2}
GRID = (3, 2)


def tensors(shift: int = 0, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two tensors, the second starting ``shift`` elements after a multiple of 16 bytes."""
    return torch.zeros(512, dtype=dtype), torch.zeros(512, dtype=torch.float32)[shift:]


def ordinary(x: Any, y: Any) -> tuple[Any, ...]:
    """Launch as Triton does and return what the driver was given."""
    FAKE.declare(FUNCTION[GRID](x, y, None, *NUMBERS, **OPTIONS))
    FUNCTION[GRID](x, y, None, *NUMBERS, **OPTIONS)
    return FAKE.last()


def prepared() -> Prepared:
    """Return the same launch, prepared."""
    return prepare(_kernel, GRID, *tensors(), None, *NUMBERS, **OPTIONS)


def launched(launch: Any, *given: Any) -> tuple[Any, ...]:
    """Launch once and return what the driver was given."""
    before = FAKE.launches
    launch(*given)
    assert FAKE.launches == before + 1, "not launched exactly once"
    return FAKE.last()


def is_hot(launch: Prepared) -> bool:
    """Whether the generated launch serves."""
    return launch._hot != launch._find


def check_same_bytes_as_triton() -> None:
    launch = prepared()
    for _ in range(3):  # the first goes the ordinary way
        given = tensors()
        assert ordinary(*given) == launched(launch, *given)
    assert is_hot(launch)


def check_misaligned_pointers_get_their_own_program() -> None:
    launch, aligned, odd = prepared(), tensors(), tensors(1)
    assert odd[1].data_ptr() % 16 == 4
    want, want_odd = ordinary(*aligned), ordinary(*odd)
    assert want[5] != want_odd[5], "Triton compiled one program for both"
    for _ in range(3):
        assert launched(launch, *aligned) == want
        assert launched(launch, *odd) == want_odd
    assert len(launch._seen) == 2


def check_misaligned_first() -> None:
    launch, odd = prepared(), tensors(1)
    want = ordinary(*odd)
    assert launched(launch, *odd) == launched(launch, *odd) == want
    assert launched(launch, *tensors())[5] != want[5]


def check_stream_is_the_current_one() -> None:
    launch, given = prepared(), tensors()
    for FAKE.stream in (77, 78, 0):
        assert launched(launch, *given) == ordinary(*given)
        assert FAKE.last()[3] == FAKE.stream
    FAKE.stream = 77


def check_another_device_compiles_anew() -> None:
    launch, given = prepared(), tensors()
    launched(launch, *given)
    launched(launch, *given)
    FAKE.device = 1
    launched(launch, *given)
    launched(launch, *given)
    FAKE.device = 0
    assert len(launch._seen) == 2


def check_hooks_are_told() -> None:
    from triton import knobs

    launch, given, told = prepared(), tensors(), []
    launched(launch, *given)
    launched(launch, *given)
    hook = lambda metadata: told.append(metadata.get()["name"])  # noqa: E731
    for chain in (knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook):
        chain.add(hook)
        want = launched(launch, *given)
        chain.remove(hook)
        assert told == ["_kernel"], told
        told.clear()
        assert launched(launch, *given) == want and not told


def check_replaced_hooks() -> None:
    from triton import knobs

    launch, given, before = prepared(), tensors(), knobs.runtime.launch_enter_hook
    want = launched(launch, *given)
    for chain in (knobs.HookChain(), knobs.HookChain()):
        knobs.runtime.launch_enter_hook = chain
        assert launched(launch, *given) == launched(launch, *given) == want
    knobs.runtime.launch_enter_hook = before


def check_options_that_the_driver_sees() -> None:
    for options in ({"num_warps": 8}, {"num_warps": 4, "num_ctas": 2}, {"launch_cooperative_grid": True},
                    {"launch_pdl": True}):  # fmt: skip
        given, all_options = tensors(), {**OPTIONS, **options}
        launch = prepare(_kernel, GRID, *given, None, *NUMBERS, **all_options)
        FAKE.declare(FUNCTION[GRID](*given, None, *NUMBERS, **all_options))
        FUNCTION[GRID](*given, None, *NUMBERS, **all_options)
        want = FAKE.last()
        assert launched(launch, *given) == launched(launch, *given) == want, options
        assert is_hot(launch)


def check_unknown_internals_go_the_ordinary_way() -> None:
    from triton.backends.nvidia.driver import CudaLauncher

    launch, given, call = prepared(), tensors(), CudaLauncher.__call__
    want = ordinary(*given)
    CudaLauncher.__call__ = lambda self, *args: call(self, *args)
    try:
        assert launched(launch, *given) == launched(launch, *given) == want
        assert not is_hot(launch) and not launch._seen
    finally:
        CudaLauncher.__call__ = call
    assert launched(launch, *given) == launched(launch, *given) == want
    assert is_hot(launch)


def check_scratch_memory_is_allocated_by_triton() -> None:
    from tskernel.backends.triton_launch import _STREAM, _inside

    compiled = FUNCTION[GRID](*tensors(), None, *NUMBERS, **OPTIONS)
    head = (*GRID, 1, _STREAM, compiled.function, compiled.packed_metadata, None, None, None)
    assert _inside(compiled.run, head, 10) is not None
    compiled.run.profile_scratch_size = 16
    try:
        assert _inside(compiled.run, head, 10) is None
    finally:
        compiled.run.profile_scratch_size = 0


def check_the_driver_s_errors_are_raised() -> None:
    launch, given = prepared(), tensors()
    launched(launch, *given)
    FAKE.library.fake_result(201)
    try:
        launch(*given)
    except RuntimeError as error:
        assert "made up" in str(error)
    else:
        raise AssertionError("no error")
    finally:
        FAKE.library.fake_result(0)
    launched(launch, *given)


def check_wrong_number_of_tensors() -> None:
    launch, (x, y) = prepared(), tensors()
    for _ in range(2):
        try:
            launch(x)
        except TypeError as error:
            assert "1" in str(error)
        else:
            raise AssertionError("no error")
        launched(launch, x, y)


def check_tensor_by_keyword_is_refused() -> None:
    x, y = tensors()
    try:
        prepare(_kernel, GRID, x, y=y)
    except ValueError as error:
        assert "y: expected a number" in str(error)
    else:
        raise AssertionError("no error")


def check_gluon_with_a_descriptor() -> None:
    from triton.experimental.gluon import language
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    def given() -> tuple[Any, torch.Tensor]:
        source = torch.zeros(128, 256, dtype=torch.bfloat16)
        return TensorDescriptor.from_tensor(source, [64, 64], layout), torch.zeros(128, dtype=torch.int32)

    layout = language.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    launch, kernel = prepare(_move, (5,), *given(), 3, BARRIERS=1), resolved(_move)
    for _ in range(3):
        now = given()
        FAKE.declare(kernel[(5,)](*now, 3, BARRIERS=1))
        kernel[(5,)](*now, 3, BARRIERS=1)
        want = FAKE.last()
        assert now[0].base.data_ptr().to_bytes(8, "little") in want[-1]
        assert launched(launch, *now) == want
    assert is_hot(launch)


def check_no_tensor_is_kept() -> None:
    import gc
    import weakref

    launch, given = prepared(), tensors()
    kept = [weakref.ref(t) for t in given]
    launch(*given)
    launch(*given)
    del given
    gc.collect()
    assert all(ref() is None for ref in kept)


def check_threads_share_a_launch() -> None:
    launch, errors = prepared(), []
    mine = [tensors(i % 2) for i in range(8)]

    def work(given: Any) -> None:
        try:
            for _ in range(200):
                launch(*given)
        except Exception as error:
            errors.append(error)

    before = FAKE.launches
    threads = [threading.Thread(target=work, args=(given,)) for given in mine]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors
    assert FAKE.launches - before <= 8 * 200  # the made-up driver counts without a lock


def main() -> None:
    results = {}
    for name, check in list(globals().items()):
        if name.startswith("check_"):
            try:
                check()
                results[name] = ""
            except Exception:
                results[name] = traceback.format_exc()
    print(json.dumps(results))  # noqa: T201


if __name__ == "__main__":
    main()
