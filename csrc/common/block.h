// Sums, maxima and scans of 64-bit words over a block of BLOCK threads in one dimension.
#pragma once

#include "lanes.h"

namespace tsk {

constexpr int BLOCK = 256;
constexpr int GROUPS = BLOCK / LANES;

TSK_DEVICE Wide block_sum(Wide v) {
    __shared__ Wide parts[GROUPS];
    v = lanes_sum(v);
    __syncthreads();  // the last call's parts have been read
    if (threadIdx.x % LANES == 0) parts[threadIdx.x / LANES] = v;
    __syncthreads();
    Wide sum = 0;
#pragma unroll
    for (int i = 0; i < GROUPS; ++i) sum += parts[i];
    return sum;
}

TSK_DEVICE Wide block_max(Wide v) {
    __shared__ Wide parts[GROUPS];
    v = lanes_max(v);
    __syncthreads();
    if (threadIdx.x % LANES == 0) parts[threadIdx.x / LANES] = v;
    __syncthreads();
    Wide best = 0;
#pragma unroll
    for (int i = 0; i < GROUPS; ++i) best = best > parts[i] ? best : parts[i];
    return best;
}

// The sum over the threads before this one.
TSK_DEVICE Wide block_scan(Wide v) {
    __shared__ Wide parts[GROUPS];
    const int lane = int(threadIdx.x) % LANES, group = int(threadIdx.x) / LANES;
    const Wide upto = lanes_scan(v, lane);
    __syncthreads();
    if (lane == LANES - 1) parts[group] = upto;
    __syncthreads();
    Wide before = upto - v;
    for (int i = 0; i < group; ++i) before += parts[i];
    return before;
}

// Whether this block is the last one of `blocks` to come here; it then sees what all of them wrote.
TSK_DEVICE bool last_to_arrive(Word* arrived, unsigned blocks) {
    __shared__ bool last;
    fence();
    __syncthreads();
    if (threadIdx.x == 0) last = atomic_add(arrived, Word(1)) == blocks - 1;
    __syncthreads();
    fence();
    return last;
}

}  // namespace tsk
