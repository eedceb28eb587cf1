// Sums and maxima over a team: a power of two of lanes within 32, or all threads of a row of the block in groups of 32.
#pragma once

#include "platform.h"

namespace tsk {

struct Sum {
    static constexpr float ZERO = 0.0f;
    static TSK_DEVICE float join(float a, float b) { return a + b; }
};

// Of values that are not negative; a NaN does not take part.
struct Max {
    static constexpr float ZERO = 0.0f;
    static TSK_DEVICE float join(float a, float b) { return fmaxf(a, b); }
};

template <typename Op>
TSK_DEVICE float reduce_lanes(float v, int width) {
    for (int mask = width / 2; mask > 0; mask >>= 1) v = Op::join(v, lane_xor(v, mask));
    return v;
}

template <typename Op>
TSK_DEVICE float reduce_lanes(float v) {
#pragma unroll
    for (int mask = LANES / 2; mask > 0; mask >>= 1) v = Op::join(v, lane_xor(v, mask));
    return v;
}

// Over the blockDim.x threads of a team, a multiple of 32; teams of more than 32 must have the block to themselves.
// SLOT tells apart the calls of one kernel, so that none has to wait before it reuses shared memory.
template <typename Op, int SLOT = 0>
TSK_DEVICE float reduce_team(float v) {
    __shared__ float parts[LANES];
    v = reduce_lanes<Op>(v);
    const int groups = int(blockDim.x) / LANES;
    if (groups == 1) return v;
    const int lane = int(threadIdx.x) % LANES;
    if (lane == 0) parts[int(threadIdx.x) / LANES] = v;
    __syncthreads();
    return reduce_lanes<Op>(lane < groups ? parts[lane] : Op::ZERO);
}

}  // namespace tsk
