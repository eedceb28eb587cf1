// Runs kernels on a CPU, for tests on machines without an accelerator. Every thread of a block is a fiber; a barrier or
// a lane exchange switches to the next one. Blocks run one after the other. It shows wrong results, not races.
#pragma once

#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <stdexcept>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __shared__ static
#define __launch_bounds__(...)

struct uint2 {
    uint32_t x, y;
};
struct alignas(16) uint4 {
    uint32_t x, y, z, w;
};
struct dim3 {
    unsigned x = 1, y = 1, z = 1;
    dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};

inline dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace tsk::emulate {

constexpr size_t STACK = 256 * 1024;

struct Fiber {
    ucontext_t context;
    bool done;
};

inline std::vector<char> stacks;
inline std::vector<Fiber> fibers;
inline std::vector<float> slots;
inline ucontext_t scheduler;
inline std::function<void()> body;
inline size_t running;

// A thread waits by counting its barriers: it may go on when all threads that are still running have counted as many.
inline std::vector<int> block_count, lane_count;

inline void resume(size_t i) {
    running = i;
    threadIdx = dim3(unsigned(i) % blockDim.x, unsigned(i) / blockDim.x);
    swapcontext(&scheduler, &fibers[i].context);
}

inline void wait(std::vector<int>& count, size_t begin, size_t end) {
    const size_t me = running;
    const int target = ++count[me];
    for (;;) {
        bool all = true;
        for (size_t i = begin; i < end; ++i) all = all && (fibers[i].done || count[i] >= target);
        if (all) return;
        swapcontext(&fibers[me].context, &scheduler);
    }
}

inline void entry() {
    const size_t me = running;
    body();
    fibers[me].done = true;
}

inline void run_block() {
    const size_t n = fibers.size();
    block_count.assign(n, 0);
    lane_count.assign(n, 0);
    for (size_t i = 0; i < n; ++i) {
        fibers[i].done = false;
        getcontext(&fibers[i].context);
        fibers[i].context.uc_stack.ss_sp = stacks.data() + i * STACK;
        fibers[i].context.uc_stack.ss_size = STACK;
        fibers[i].context.uc_link = &scheduler;
        makecontext(&fibers[i].context, entry, 0);
    }
    for (size_t left = n; left;) {
        left = 0;
        for (size_t i = 0; i < n; ++i)
            if (!fibers[i].done) {
                resume(i);
                left += !fibers[i].done;
            }
    }
}

inline void launch(dim3 grid, dim3 block, std::function<void()> f) {
    const size_t n = size_t(block.x) * block.y;
    if (n == 0 || n > 1024 || n % 32 || grid.x == 0)
        throw std::runtime_error("emulated launch: a block must have a multiple of 32 threads, at most 1024");
    fibers.resize(n);
    slots.resize(n);
    if (stacks.size() < n * STACK) stacks.resize(n * STACK);
    body = std::move(f);
    gridDim = grid;
    blockDim = block;
    for (unsigned b = 0; b < grid.x; ++b) {
        blockIdx = dim3(b, 0, 0);
        run_block();
    }
}

}  // namespace tsk::emulate

inline void __syncthreads() { tsk::emulate::wait(tsk::emulate::block_count, 0, tsk::emulate::fibers.size()); }

namespace tsk {

inline float lane_xor(float v, int mask) {
    using namespace emulate;
    const size_t me = running, begin = me / 32 * 32;
    slots[me] = v;
    wait(lane_count, begin, begin + 32);
    const float other = slots[me ^ size_t(mask)];
    wait(lane_count, begin, begin + 32);
    return other;
}

}  // namespace tsk
