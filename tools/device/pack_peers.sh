#!/usr/bin/env bash
# Pack the peers of the benchmarks for a GPU machine without a network: FOLDER/part1.tar.xz (FlashAttention-3 and -4,
# FlashInfer, quack, cuda-bindings, pytest) and FOLDER/part2.tar.xz (the CuTe DSL). For Python 3.12 on Linux x86-64.
# Usage: tools/device/pack_peers.sh FOLDER [FLASHINFER_MODULES]
# FLASHINFER_MODULES: a folder of modules built ahead by build_flashinfer.py; without it FlashInfer compiles them there.
set -euo pipefail
to=$(mkdir -p "$1" && realpath "$1")
modules=${2:-}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

platforms=()
for glibc in 2_39 2_35 2_34 2_31 2_28 2_27 2_24 2_17; do platforms+=(--platform "manylinux_${glibc}_x86_64"); done
get() { # get FOLDER REQUIREMENT...
    python3 -m pip download --quiet --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
        "${platforms[@]}" --platform manylinux2014_x86_64 --platform manylinux1_x86_64 --platform linux_x86_64 \
        -d "$work/$1.wheels" "${@:2}"
    mkdir -p "$work/$1"
    for wheel in "$work/$1.wheels"/*.whl; do unzip -qo "$wheel" -d "$work/$1"; done
}
get part1 tokenspeed-fa3==3.0.0.post20260810 flashinfer-python==0.7.4 flash-attn-4==4.0.0b36 quack-kernels==0.6.5 \
    apache-tvm-ffi==0.1.15.post2 einops torch-c-dlpack-ext cuda-tile nccl4py ninja cuda-bindings \
    pytest==9.2.0 pytest-xdist==3.8.0 execnet pluggy iniconfig hypothesis sortedcontainers expecttest
# These wheels share one top-level folder, which pip would replace wheel by wheel.
get part2 nvidia-cutlass-dsl==4.8.1 nvidia-cutlass-dsl-libs-base==4.8.1 nvidia-cutlass-dsl-libs-core==4.8.1 \
    nvidia-cutlass-dsl-libs-cu13==4.8.1

# Sources of kernels for other parts: half of FlashInfer's size.
sources="$work/part1/flashinfer/data/csrc"
rm -rf "$sources"/cake_* "$sources/kda" "$sources/gdn" "$sources"/fused_moe/cake* "$work"/part1/nccl/*/lib
if [ -n "$modules" ]; then cp -r "$modules" "$work/part1/flashinfer/data/aot"; fi
# A call carries 64 MiB: the branch filter and a dictionary that spans the whole part bring the second below it.
pack() { # pack PART XZ_OPTION...
    tar -cf - -C "$work/$1" . | xz "${@:2}" >"$to/$1.tar.xz"
    ls -l "$to/$1.tar.xz"
}
pack part1 -9 -T2 --block-size=40MiB &
pack part2 --x86 --lzma2=preset=9e,dict=256MiB
wait
