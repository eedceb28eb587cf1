// Runs kernels on a CPU, for tests on machines without an accelerator. Every thread of a block is a fiber; a barrier or
// a lane exchange switches to the next one. Blocks run one after the other. It shows wrong results, not races.
#pragma once

#include <setjmp.h>
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

constexpr size_t STACK = 32 * 1024;

struct Fiber {
    ucontext_t start;
    jmp_buf here;
    bool started, done;
};

// A barrier opens when all threads of its group that are still running have come.
struct Barrier {
    size_t running, waiting, generation;
    void open_if_full() {
        if (waiting == 0 || waiting < running) return;
        waiting = 0;
        ++generation;
    }
};

inline std::vector<char> stacks;
inline std::vector<Fiber> fibers;
inline std::vector<float> slots;
inline std::vector<Barrier> barriers;  // of the block, then of every 32 threads
inline jmp_buf scheduler;
inline std::function<void()> body;
inline size_t running;

// Switching by longjmp costs no system call; ucontext only makes the stacks.
inline void resume(size_t i) {
    running = i;
    threadIdx = dim3(unsigned(i) % blockDim.x, unsigned(i) / blockDim.x);
    if (_setjmp(scheduler)) return;
    if (fibers[i].started) _longjmp(fibers[i].here, 1);
    fibers[i].started = true;
    setcontext(&fibers[i].start);
}

inline void yield() {
    if (!_setjmp(fibers[running].here)) _longjmp(scheduler, 1);
}

inline void wait(Barrier& barrier) {
    const size_t before = barrier.generation;
    ++barrier.waiting;
    barrier.open_if_full();
    while (barrier.generation == before) yield();
}

inline void entry() {
    body();
    const size_t me = running;
    fibers[me].done = true;
    for (Barrier* b : {&barriers[0], &barriers[1 + me / 32]}) {
        --b->running;
        b->open_if_full();
    }
    _longjmp(scheduler, 1);
}

inline void run_block() {
    const size_t n = fibers.size();
    barriers.assign(1 + n / 32, Barrier{32, 0, 0});
    barriers[0].running = n;
    for (size_t i = 0; i < n; ++i) {
        fibers[i].started = fibers[i].done = false;
        getcontext(&fibers[i].start);
        fibers[i].start.uc_stack.ss_sp = stacks.data() + i * STACK;
        fibers[i].start.uc_stack.ss_size = STACK;
        makecontext(&fibers[i].start, entry, 0);
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

inline void __syncthreads() { tsk::emulate::wait(tsk::emulate::barriers[0]); }

namespace tsk {

inline float lane_xor(float v, int mask) {
    using namespace emulate;
    const size_t me = running;
    slots[me] = v;
    wait(barriers[1 + me / 32]);
    const float other = slots[me ^ size_t(mask)];
    wait(barriers[1 + me / 32]);
    return other;
}

}  // namespace tsk
