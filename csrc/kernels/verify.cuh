// The longest prefix of a draft that agrees with the target.
#pragma once

#include "../common/ids.h"

namespace tsk {

// TEAM, all the lanes of a group, for each row.
template <int TEAM>
__global__ void __launch_bounds__(128)
    verify_kernel(TSK_ARGS Ids draft, TSK_ARGS Ids target, int* accepted, int* tokens, int64_t rows, int drafted) {
    start();
    const int64_t row = int64_t(blockIdx.x) * blockDim.y + threadIdx.y;
    const int lane = int(threadIdx.x), all = row < rows ? drafted : 0;
    Word first = Word(all);
    for (int i = lane; i < all; i += TEAM) {
        const int64_t id = draft.at(row, i);
        if ((id < 0 || id != target.at(row, i)) && Word(i) < first) first = Word(i);
    }
    first = lanes_min(first);
    if (row >= rows) return;
    if (lane == 0) accepted[row] = int(first);
    for (int i = lane; i <= drafted; i += TEAM)
        tokens[row * (drafted + 1) + i] = Word(i) <= first ? int(target.at(row, i)) : -1;
}

}  // namespace tsk
