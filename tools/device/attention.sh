#!/usr/bin/env bash
# Issue 3 on the GPU: conformance of every attention kernel, the sanitizer, a package in a C++ program, the benchmark.
# Usage: tools/device/attention.sh check|bench [BENCHMARK_SECONDS]
source tools/device/setup.sh
case $1 in
check)
    step attention_conformance 240 python3 -m pytest -q -m gpu tests/test_gpu.py -n 8 -k "mha or mla or attn" -rs
    step attention_memcheck 200 python3 tools/sanitize.py --kernels mha_ mla_ attn_ --calls 4 --seconds 100
    step attention_package 60 python3 examples/aoti/package.py "$OUT/aoti" cuda
    mapfile -t commands < <(tail -n 2 "$OUT/attention_package.log")
    step attention_program 90 bash -c "${commands[0]} && ${commands[1]}"
    step attention_program_result 60 python3 tools/device/same_results.py "$OUT/aoti"
    rm -rf "$OUT/aoti"
    ;;
bench)
    step attention_warm 200 python3 benchmarks/attention.py warm --processes 13
    LINES_SHOWN=200 step attention_bench 400 \
        python3 benchmarks/attention.py run "$OUT/attention.json" --limit "${2:-165}"
    ;;
esac
