// The best value of rows over a vocabulary.
#pragma once

#include "vocab.cuh"

namespace tsk {

// Of every chunk, its best rank; a row that is one chunk is finished.
template <typename T, int N>
__global__ void __launch_bounds__(BLOCK) argmax_kernel(TSK_ARGS Vocab v, Wide* partial, int* out) {
    start();
    const Place here(v);
    float best = minus_infinity();
    int at = here.first + int(threadIdx.x) * N;
    const bool any = at < here.last;
    for_elements<T, N>(v, here.row, here.first, here.last, [&](int index, const float (&x)[N]) {
#pragma unroll
        for (int i = 0; i < N; ++i)
            if (x[i] > best) best = x[i], at = index + i;  // never a NaN, and the first of equals
    });
    const Wide most = block_max(any ? ranked(best, Word(at)) : 0);
    if (threadIdx.x) return;
    if (v.chunks == 1)
        out[here.row] = int(index_of(most));
    else
        partial[here.row * MOST_CHUNKS + here.chunk] = most;
}

// A group of lanes for each row; STRIDE words of partial results.
template <int STRIDE>
__global__ void __launch_bounds__(BLOCK)
    join_argmax_kernel(const Wide* partial, int* out, int64_t rows, unsigned chunks) {
    start();
    const int64_t row = int64_t(blockIdx.x) * GROUPS + threadIdx.x / LANES;
    Wide best = 0;
    for (unsigned i = threadIdx.x % LANES; row < rows && i < chunks; i += LANES) {
        const Wide r = partial[row * STRIDE + i];
        best = best > r ? best : r;
    }
    best = lanes_max(best);
    if (row < rows && threadIdx.x % LANES == 0) out[row] = int(index_of(best));
}

}  // namespace tsk
