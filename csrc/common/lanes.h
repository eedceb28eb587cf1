// What threads tell each other beyond sums of floats: words of other lanes, votes, scans, atomics.
// A group is 32 lanes on every platform, also where a wave has 64.
#pragma once

#include "platform.h"

namespace tsk {

using Word = uint32_t;
using Wide = unsigned long long;

#if defined(TSK_EMULATE)

namespace emulate {
inline std::vector<Wide> words(1024);

inline Wide exchange(Wide v, size_t lane) {
    const size_t me = running;
    words[me] = v;
    wait(barriers[1 + me / 32]);
    const Wide other = words[me / 32 * 32 + lane];
    wait(barriers[1 + me / 32]);
    return other;
}

inline Word vote(bool yes) {
    const size_t me = running, first = me / 32 * 32;
    words[me] = yes;
    wait(barriers[1 + me / 32]);
    Word mask = 0;
    for (size_t i = 0; i < 32; ++i) mask |= Word(words[first + i] != 0) << i;
    wait(barriers[1 + me / 32]);
    return mask;
}
}  // namespace emulate

inline Word lane_read(Word v, int lane) { return Word(emulate::exchange(v, size_t(lane))); }
inline Wide lane_read(Wide v, int lane) { return emulate::exchange(v, size_t(lane)); }
inline Word lane_xor(Word v, int mask) { return Word(emulate::exchange(v, emulate::running % 32 ^ size_t(mask))); }
inline Wide lane_xor(Wide v, int mask) { return emulate::exchange(v, emulate::running % 32 ^ size_t(mask)); }
inline Word lanes_where(bool yes) { return emulate::vote(yes); }
// Fibers change places at barriers only, so plain sums are whole.
template <typename T>
T atomic_add(T* p, T v) {
    const T old = *p;
    *p = old + v;
    return old;
}
template <typename T>
void atomic_max(T* p, T v) {
    *p = *p < v ? v : *p;
}
inline void fence() {}
inline void lanes_sync() { emulate::wait(emulate::barriers[1 + emulate::running / 32]); }
inline int count_bits(Word v) { return __builtin_popcount(v); }
inline int leading_zeros(Wide v) { return v ? __builtin_clzll(v) : 64; }

#else

#if defined(TSK_CUDA)
TSK_DEVICE Word lane_read(Word v, int lane) { return __shfl_sync(0xffffffffu, v, lane); }
TSK_DEVICE Wide lane_read(Wide v, int lane) { return __shfl_sync(0xffffffffu, v, lane); }
TSK_DEVICE Word lane_xor(Word v, int mask) { return __shfl_xor_sync(0xffffffffu, v, mask); }
TSK_DEVICE Wide lane_xor(Wide v, int mask) { return __shfl_xor_sync(0xffffffffu, v, mask); }
TSK_DEVICE Word lanes_where(bool yes) { return __ballot_sync(0xffffffffu, yes); }
// What a lane wrote to memory before, the others of its group see after.
TSK_DEVICE void lanes_sync() { __syncwarp(); }
#else
TSK_DEVICE Word lane_read(Word v, int lane) { return __shfl(v, lane, LANES); }
TSK_DEVICE Wide lane_read(Wide v, int lane) { return __shfl(v, lane, LANES); }
TSK_DEVICE Word lane_xor(Word v, int mask) { return __shfl_xor(v, mask, LANES); }
TSK_DEVICE Wide lane_xor(Wide v, int mask) { return __shfl_xor(v, mask, LANES); }
TSK_DEVICE Word lanes_where(bool yes) { return Word(__ballot(yes) >> (__lane_id() & 32u)); }
TSK_DEVICE void lanes_sync() {
    __builtin_amdgcn_fence(__ATOMIC_ACQ_REL, "workgroup");
    __builtin_amdgcn_wave_barrier();
}
#endif
TSK_DEVICE Word atomic_add(Word* p, Word v) { return atomicAdd(p, v); }
TSK_DEVICE Wide atomic_add(Wide* p, Wide v) { return atomicAdd(p, v); }
TSK_DEVICE void atomic_max(Word* p, Word v) { atomicMax(p, v); }
TSK_DEVICE void atomic_max(Wide* p, Wide v) { atomicMax(p, v); }
TSK_DEVICE void fence() { __threadfence(); }
TSK_DEVICE int count_bits(Word v) { return __popc(v); }
TSK_DEVICE int leading_zeros(Wide v) { return __clzll(static_cast<long long>(v)); }

#endif

// The largest word of a group, at every lane.
TSK_DEVICE Word lanes_max(Word v) {
#if defined(TSK_CUDA) && __CUDA_ARCH__ >= 800
    return __reduce_max_sync(0xffffffffu, v);
#else
#pragma unroll
    for (int mask = LANES / 2; mask > 0; mask >>= 1) {
        const Word other = lane_xor(v, mask);
        v = v > other ? v : other;
    }
    return v;
#endif
}

TSK_DEVICE Word lanes_min(Word v) { return ~lanes_max(~v); }

TSK_DEVICE Wide lanes_max(Wide v) {
#pragma unroll
    for (int mask = LANES / 2; mask > 0; mask >>= 1) {
        const Wide other = lane_xor(v, mask);
        v = v > other ? v : other;
    }
    return v;
}

TSK_DEVICE Word lanes_sum(Word v) {
#if defined(TSK_CUDA) && __CUDA_ARCH__ >= 800
    return __reduce_add_sync(0xffffffffu, v);
#else
#pragma unroll
    for (int mask = LANES / 2; mask > 0; mask >>= 1) v += lane_xor(v, mask);
    return v;
#endif
}

TSK_DEVICE Wide lanes_sum(Wide v) {
#pragma unroll
    for (int mask = LANES / 2; mask > 0; mask >>= 1) v += lane_xor(v, mask);
    return v;
}

// The sum over this lane and those below it.
TSK_DEVICE Wide lanes_scan(Wide v, int lane) {
#pragma unroll
    for (int step = 1; step < LANES; step *= 2) {
        const Wide other = lane_read(v, lane >= step ? lane - step : lane);
        v += lane >= step ? other : 0;
    }
    return v;
}

// The lanes of a group that hold the same value below 2^BITS.
template <int BITS>
TSK_DEVICE Word lanes_equal(Word v) {
#if defined(TSK_CUDA)
    return __match_any_sync(0xffffffffu, v);
#else
    Word same = ~Word(0);
    for (int b = 0; b < BITS; ++b) {
        const bool one = (v >> b) & 1;
        const Word ones = lanes_where(one);
        same &= one ? ones : ~ones;
    }
    return same;
#endif
}

// A value that other blocks have written during this launch: never from a cache of this block's own.
template <typename T>
TSK_DEVICE T peek(const T* p) {
    return *const_cast<const volatile T*>(p);
}

// Words that order like the floats, -0 and +0 being equal; of NaN nothing is said.
TSK_DEVICE Word ordered(float x) {
    const Word u = float_bits(x + 0.0f);
    return u & 0x80000000u ? ~u : u | 0x80000000u;
}
TSK_DEVICE float unordered(Word key) { return bits_float(key & 0x80000000u ? key & 0x7fffffffu : ~key); }

// Larger is better: by value, then by the lower index. Never 0.
TSK_DEVICE Wide ranked(float x, Word index) { return Wide(ordered(x)) << 32 | Word(~index); }
TSK_DEVICE float value_of(Wide rank) { return unordered(Word(rank >> 32)); }
TSK_DEVICE Word index_of(Wide rank) { return ~Word(rank); }

}  // namespace tsk
