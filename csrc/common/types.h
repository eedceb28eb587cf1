// Storage formats and their conversions, the same bits on every platform: round to nearest, ties to even.
#pragma once

#include "platform.h"
#if defined(TSK_EMULATE)
#include <immintrin.h>
#endif

namespace tsk {

struct bf16 {
    uint16_t bits;
};
struct fp16 {
    uint16_t bits;
};

// Quantized formats. The numbers are passed as kernel arguments.
enum Format : int { E4M3FN = 0, E4M3FNUZ = 1, E5M2 = 2, E5M2FNUZ = 3, INT8 = 4, FP4 = 5 };

TSK_DEVICE float to_float(float x) { return x; }
TSK_DEVICE float to_float(bf16 x) { return bits_float(uint32_t(x.bits) << 16); }
TSK_DEVICE float to_float(fp16 x) {
#if defined(TSK_CUDA)
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
    return y;
#elif defined(TSK_HIP)
    return float(__builtin_bit_cast(_Float16, x.bits));
#else
    return _cvtsh_ss(x.bits);
#endif
}

TSK_DEVICE uint16_t bf16_bits(float x) {
#if defined(TSK_CUDA) && __CUDA_ARCH__ >= 800
    uint16_t y;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y) : "f"(x));
    return y;
#else
    const uint32_t u = float_bits(x);
    if ((u & 0x7fffffffu) > 0x7f800000u) return uint16_t((u >> 16) | 0x40);  // keep a NaN one when its low bits go
    return uint16_t((u + 0x7fffu + ((u >> 16) & 1)) >> 16);
#endif
}

TSK_DEVICE uint16_t fp16_bits(float x) {
#if defined(TSK_CUDA)
    uint16_t y;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x));
    return y;
#elif defined(TSK_HIP)
    return __builtin_bit_cast(uint16_t, _Float16(x));
#else
    return _cvtss_sh(x, 0);
#endif
}

// Two values in one word, the first one low.
template <typename T>
TSK_DEVICE uint32_t pack_two(float a, float b);
template <>
TSK_DEVICE uint32_t pack_two<bf16>(float a, float b) {
#if defined(TSK_CUDA) && __CUDA_ARCH__ >= 800
    uint32_t y;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(b), "f"(a));
    return y;
#else
    return uint32_t(bf16_bits(a)) | uint32_t(bf16_bits(b)) << 16;
#endif
}
template <>
TSK_DEVICE uint32_t pack_two<fp16>(float a, float b) {
#if defined(TSK_CUDA) && __CUDA_ARCH__ >= 800
    uint32_t y;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(b), "f"(a));
    return y;
#else
    return uint32_t(fp16_bits(a)) | uint32_t(fp16_bits(b)) << 16;
#endif
}

TSK_DEVICE void assign(float& y, float x) { y = x; }
TSK_DEVICE void assign(bf16& y, float x) { y.bits = bf16_bits(x); }
TSK_DEVICE void assign(fp16& y, float x) { y.bits = fp16_bits(x); }

// Mantissa bits, exponent bias and largest value of the fp8 formats; UNSIGNED_ZERO ones keep -0 for their only NaN.
template <int FORMAT>
struct Fp8;
template <>
struct Fp8<E4M3FN> {
    static constexpr int MANTISSA = 3, BIAS = 7;
    static constexpr float MAX = 448.0f;
    static constexpr bool UNSIGNED_ZERO = false;
};
template <>
struct Fp8<E4M3FNUZ> {
    static constexpr int MANTISSA = 3, BIAS = 8;
    static constexpr float MAX = 240.0f;
    static constexpr bool UNSIGNED_ZERO = true;
};
template <>
struct Fp8<E5M2> {
    static constexpr int MANTISSA = 2, BIAS = 15;
    static constexpr float MAX = 57344.0f;
    static constexpr bool UNSIGNED_ZERO = false;
};
template <>
struct Fp8<E5M2FNUZ> {
    static constexpr int MANTISSA = 2, BIAS = 16;
    static constexpr float MAX = 57344.0f;
    static constexpr bool UNSIGNED_ZERO = true;
};

// Saturates; NaN stays NaN.
template <int FORMAT>
TSK_DEVICE uint8_t fp8_bits(float x) {
    using F = Fp8<FORMAT>;
    constexpr int drop = 23 - F::MANTISSA;
    uint32_t u = float_bits(x);
    uint32_t sign = (u >> 24) & 0x80u;
    u &= 0x7fffffffu;
    if (u > 0x7f800000u) return F::UNSIGNED_ZERO ? 0x80 : uint8_t(sign | 0x7f);
    const float a = bits_float(u) < F::MAX ? bits_float(u) : F::MAX;
    uint32_t code;
    if (a >= bits_float(uint32_t(128 - F::BIAS) << 23)) {
        u = float_bits(a);
        u += (1u << (drop - 1)) - 1 + ((u >> drop) & 1);
        code = (u >> drop) - (uint32_t(127 - F::BIAS) << F::MANTISSA);
    } else {
        // Below the smallest normal value all steps are equal: adding 2^23 of them makes the adder round to one.
        const float magic = bits_float(uint32_t(128 - F::BIAS - F::MANTISSA + 23) << 23);
        code = float_bits(a + magic) - float_bits(magic);
    }
    if (F::UNSIGNED_ZERO && code == 0) sign = 0;
    return uint8_t(sign | code);
}

#if defined(TSK_CUDA) && (__CUDA_ARCH__ >= 890)
#define TSK_FP8_INSTRUCTION 1
#endif

// Two fp8 values, the first one in the low byte.
template <int FORMAT>
TSK_DEVICE uint32_t fp8_two(float a, float b) {
#if defined(TSK_FP8_INSTRUCTION)
    uint16_t y;
    if constexpr (FORMAT == E4M3FN) {
        asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(y) : "f"(b), "f"(a));
        return y;
    } else if constexpr (FORMAT == E5M2) {
        asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(y) : "f"(b), "f"(a));
        return y;
    }
#endif
    return uint32_t(fp8_bits<FORMAT>(a)) | uint32_t(fp8_bits<FORMAT>(b)) << 8;
}

// NaN gives 0; -128 is not used.
TSK_DEVICE uint8_t int8_bits(float x) {
    float y = rintf(x);
    y = y > 127.0f ? 127.0f : y < -127.0f ? -127.0f : y;
    return y == y ? uint8_t(int8_t(int(y))) : 0;
}

// e2m1: 0, 0.5, 1, 1.5, 2, 3, 4, 6; a midpoint belongs to the even code.
TSK_DEVICE uint32_t fp4_bits(float x) {
    const uint32_t u = float_bits(x);
    const float a = bits_float(u & 0x7fffffffu);
    const uint32_t code = uint32_t(a > 0.25f) + uint32_t(a >= 0.75f) + uint32_t(a > 1.25f) + uint32_t(a >= 1.75f) +
                          uint32_t(a > 2.5f) + uint32_t(a >= 3.5f) + uint32_t(a > 5.0f);
    return code | ((u >> 28) & 8u);
}

}  // namespace tsk
