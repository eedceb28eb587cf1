#!/usr/bin/env bash
# Issue 4 on the GPU. `build` makes the wheel with its native library (and leaves it in $OUT, so that a later
# machine may be spared the build: carry it in .whl); `check` is conformance of native and Triton kernels, the
# sanitizer's tools and the C++ program; `bench` times the ops beside their peers.
# Usage: tools/device/small_ops.sh build|check|bench [SECONDS]
source tools/device/setup.sh
words="not mha and not mla and not attn"
case $1 in
build)
    if ! compgen -G ".whl/tskernel-*.whl" >/dev/null; then
        step build 400 bash -c 'time python3 -m pip wheel --no-deps --no-build-isolation -w "$OUT" .'
        mkdir -p .whl && cp "$OUT"/tskernel-*.whl .whl/
    fi
    # The tree's own sources serve below: its libraries must lie beside them.
    step unpack 60 python3 -m zipfile -e .whl/tskernel-*.whl /tmp/tskernel
    cp /tmp/tskernel/tskernel/*.so src/tskernel/ && ls -l src/tskernel/*.so
    ;;
check)
    step gate 120 python3 -m pytest -q tests/test_native_gate.py
    step native_conformance 200 python3 -m pytest -q -m gpu tests/test_gpu.py -n 8 -k "native and $words" -rs
    step triton_conformance 240 python3 -m pytest -q -m gpu tests/test_gpu.py -n 8 -k "triton and $words" -rs
    step native_memcheck 130 python3 tools/sanitize.py --kernels native --calls 10 --seconds 60
    step native_racecheck 130 python3 tools/sanitize.py --kernels native --calls 4 --seconds 60 --tool racecheck
    step native_package 60 python3 examples/aoti_native/package.py "$OUT/aoti"
    step native_build_program 90 bash -c '$(cd examples/aoti && python3 -c "
import pathlib, package; print(*package.build_command(pathlib.Path(\"/tmp\"), \"cuda\"))")'
    step native_program 60 bash -c '/tmp/$(tail -n 1 "$OUT/native_package.log")'
    step native_program_result 60 python3 tools/device/same_results.py "$OUT/aoti"
    rm -rf "$OUT/aoti"
    ;;
bench)
    step small_ops_warm 120 python3 benchmarks/small_ops.py warm
    LINES_SHOWN=150 step small_ops_bench 560 python3 benchmarks/small_ops.py run "$OUT/small_ops.json" --limit "${2:-240}"
    ;;
esac
