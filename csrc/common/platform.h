// What differs between CUDA, HIP and the emulation on a CPU: launches, lane exchange, fast arithmetic.
// Lanes are dealt with in groups of 32, which a wave of 64 holds two of: the same code is right for both sizes.
#pragma once

#include <cstdint>

#if defined(TSK_EMULATE)
#include "emulate.h"
#elif defined(__HIP__) || defined(__HIP_PLATFORM_AMD__)
#if !defined(TSK_NO_RUNTIME)
#include <hip/hip_runtime.h>
#endif
#define TSK_HIP 1
#else
#include <cuda_runtime.h>
#define TSK_CUDA 1
#endif

#if defined(TSK_CUDA)
#define TSK_ARGS const __grid_constant__
#else
#define TSK_ARGS const
#endif

#define TSK_DEVICE __device__ __forceinline__

namespace tsk {

constexpr int LANES = 32;

#if defined(TSK_CUDA)
TSK_DEVICE float lane_xor(float v, int mask) { return __shfl_xor_sync(0xffffffffu, v, mask); }
#elif defined(TSK_HIP)
TSK_DEVICE float lane_xor(float v, int mask) { return __shfl_xor(v, mask, LANES); }
#endif

// Set in the first file that needs them; all of these may be off by a few units in the last place.
#if defined(TSK_EMULATE)
inline float fast_exp(float x) { return std::exp(x); }
inline float fast_divide(float a, float b) { return a / b; }
inline float inverse_root(float x) { return 1.0f / std::sqrt(x); }
#else
TSK_DEVICE float fast_exp(float x) { return __expf(x); }
TSK_DEVICE float fast_divide(float a, float b) { return __fdividef(a, b); }
TSK_DEVICE float inverse_root(float x) { return rsqrtf(x); }
#endif

// First in every kernel, before any access to memory. On Hopper and later a kernel is launched while the one before it
// in the stream still runs (programmatic dependent launch), and has to wait for the results of that here; it lets its
// own successor be launched at once, which then waits for it in the same way.
TSK_DEVICE void start() {
#if defined(TSK_CUDA) && defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

TSK_DEVICE uint32_t float_bits(float x) {
#if defined(TSK_EMULATE)
    uint32_t u;
    std::memcpy(&u, &x, 4);
    return u;
#else
    return __float_as_uint(x);
#endif
}

TSK_DEVICE float bits_float(uint32_t u) {
#if defined(TSK_EMULATE)
    float x;
    std::memcpy(&x, &u, 4);
    return x;
#else
    return __uint_as_float(u);
#endif
}

}  // namespace tsk
