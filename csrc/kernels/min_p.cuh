// min-p: what is at least a share of the best value.
#pragma once

#include "vocab.cuh"

namespace tsk {

// The smallest float not below share * best, the product being exact.
TSK_DEVICE float least_kept(float best, float share) {
    const double least = double(best) * double(share < 1.0f || share != share ? share : 1.0f);
    if (least <= 0.0) return 0.0f;
    const float f = float(least);
    return double(f) < least ? bits_float(float_bits(f) + 1) : f;
}

template <typename T, int N>
__global__ void __launch_bounds__(BLOCK) min_p_mass_kernel(TSK_ARGS Vocab v, const float* min_p, TSK_ARGS Work work) {
    start();
    const Place here(v);
    const auto m = measure<PROBS>(row_maximum(v, work, here.row), 1.0f);
    const float least = least_kept(m.best, min_p[here.row]);
    Wide kept = 0;
    for_elements<T, N>(v, here.row, here.first, here.last, [&](int, const float (&x)[N]) {
#pragma unroll
        for (int i = 0; i < N; ++i) {
            const float y = m.settle(clean<PROBS>(x[i]));
            if (y >= least) kept += m.mass(y);
        }
    });
    kept = block_sum(kept);
    if (threadIdx.x == 0 && kept) atomic_add(&work.state[here.row].kept, kept);
}

template <typename T, int N>
__global__ void __launch_bounds__(BLOCK)
    min_p_kernel(TSK_ARGS Vocab v, const float* min_p, TSK_ARGS Work work, T* out) {
    start();
    const Place here(v);
    const auto m = measure<PROBS>(row_maximum(v, work, here.row), 1.0f);
    const float least = least_kept(m.best, min_p[here.row]);
    const float total = m.total(work.state[here.row].kept);
    T* o = out + here.row * int64_t(v.width);
    for_elements<T, N>(v, here.row, here.first, here.last, [&](int at, const float (&x)[N]) {
        float y[N];
#pragma unroll
        for (int i = 0; i < N; ++i) {
            const float value = m.settle(clean<PROBS>(x[i]));
            y[i] = value >= least ? value / total : 0.0f;
        }
        store<T, N>(o + at, pack<T, N>(y));
    });
}

}  // namespace tsk
