#!/usr/bin/env bash
# Issue 5 on the GPU: conformance of every matrix product and expert kernel and the sanitizer, or both benchmarks.
# Usage: tools/device/gemm.sh check|bench [SECONDS_OF_GEMM] [SECONDS_OF_MOE]
source tools/device/setup.sh
words="/mm/ or /bmm/ or /grouped_mm/ or moe"
case $1 in
check)
    step gemm_conformance 400 python3 -m pytest -q -m gpu tests/test_gpu.py -n 8 -k "($words or [mm]) and not autotune" -rs
    step gemm_memcheck 200 python3 tools/sanitize.py --kernels /mm/ /bmm/ /grouped_mm/ moe_ --calls 4 --seconds 100
    ;;
bench)
    step gemm_warm 120 python3 benchmarks/gemm.py warm
    LINES_SHOWN=150 step gemm_bench 560 python3 benchmarks/gemm.py run "$OUT/gemm.json" --limit "${2:-150}"
    step moe_warm 150 python3 benchmarks/moe.py warm
    LINES_SHOWN=150 step moe_bench 560 python3 benchmarks/moe.py run "$OUT/moe.json" --limit "${3:-150}"
    ;;
esac
