// How many threads hold a row in registers.
#pragma once

#include "host.h"

namespace tsk {

struct RowPlan {
    unsigned team;
    int accesses;  // per thread: 1, 2, 4 or 8; 0: the row does not fit
};

// With few rows a row gets all the threads it can use; with many, four accesses per thread keep enough bytes on their
// way. `wanted` overrides that.
inline RowPlan plan_row(int64_t rows, int64_t accesses, int64_t wanted = 0) {
    for (int64_t k = wanted > 0 ? wanted : rows <= MANY_BLOCKS ? 1 : 4; k <= 8; k *= 2) {
        const unsigned team = round_lanes(ceil_div(accesses, k));
        if (int(team) <= most_threads(int(k))) return {team, int(k)};
    }
    return {512, 0};
}

// Calls `f(std::integral_constant<int, k>{})`.
template <typename F>
void for_accesses(int k, F f) {
    switch (k) {
        case 1:
            return f(std::integral_constant<int, 1>{});
        case 2:
            return f(std::integral_constant<int, 2>{});
        case 4:
            return f(std::integral_constant<int, 4>{});
        default:
            return f(std::integral_constant<int, 8>{});
    }
}

}  // namespace tsk
