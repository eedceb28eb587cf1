// Rows in memory: where they begin, and how a thread reads and writes up to 16 bytes (or more) at once.
#pragma once

#include "types.h"

namespace tsk {

// Turns a row number into an offset in elements: up to MAX_DIMS leading dimensions of any strides.
struct RowMap {
    static constexpr int MAX_DIMS = 5;
    int dims;
    int64_t size[MAX_DIMS];
    int64_t stride[MAX_DIMS];

    TSK_DEVICE int64_t offset(int64_t row) const {
        if (dims == 1) return row * stride[0];
        int64_t sum = 0;
        for (int i = dims - 1; i > 0; --i) {
            const int64_t up = row / size[i];
            sum += (row - up * size[i]) * stride[i];
            row = up;
        }
        return sum + row * stride[0];
    }
};

template <int BYTES>
struct Words {
    uint32_t w[BYTES / 4];
};
template <>
struct Words<2> {
    uint16_t w;
};
template <>
struct Words<1> {
    uint8_t w;
};

template <int BYTES>
TSK_DEVICE Words<BYTES> load_words(const void* p) {
    Words<BYTES> r;
    if constexpr (BYTES >= 16) {
#pragma unroll
        for (int i = 0; i < BYTES / 16; ++i) {
            const uint4 q = static_cast<const uint4*>(p)[i];
            r.w[4 * i] = q.x, r.w[4 * i + 1] = q.y, r.w[4 * i + 2] = q.z, r.w[4 * i + 3] = q.w;
        }
    } else if constexpr (BYTES == 8) {
        const uint2 q = *static_cast<const uint2*>(p);
        r.w[0] = q.x, r.w[1] = q.y;
    } else if constexpr (BYTES == 4) {
        r.w[0] = *static_cast<const uint32_t*>(p);
    } else if constexpr (BYTES == 2) {
        r.w = *static_cast<const uint16_t*>(p);
    } else {
        r.w = *static_cast<const uint8_t*>(p);
    }
    return r;
}

template <int BYTES>
TSK_DEVICE void store_words(void* p, const Words<BYTES>& r) {
    if constexpr (BYTES >= 16) {
#pragma unroll
        for (int i = 0; i < BYTES / 16; ++i)
            static_cast<uint4*>(p)[i] = uint4{r.w[4 * i], r.w[4 * i + 1], r.w[4 * i + 2], r.w[4 * i + 3]};
    } else if constexpr (BYTES == 8) {
        *static_cast<uint2*>(p) = uint2{r.w[0], r.w[1]};
    } else if constexpr (BYTES == 4) {
        *static_cast<uint32_t*>(p) = r.w[0];
    } else if constexpr (BYTES == 2) {
        *static_cast<uint16_t*>(p) = r.w;
    } else {
        *static_cast<uint8_t*>(p) = r.w;
    }
}

// N values as they are stored.
template <typename T, int N>
struct Packed : Words<N* int(sizeof(T))> {};

template <typename T, int N>
TSK_DEVICE Packed<T, N> load(const T* p) {
    return {load_words<N* int(sizeof(T))>(p)};
}

template <typename T, int N>
TSK_DEVICE void store(T* p, const Packed<T, N>& v) {
    store_words<N* int(sizeof(T))>(p, v);
}

template <typename T, int N>
TSK_DEVICE void unpack(const Packed<T, N>& v, float (&f)[N]) {
    if constexpr (sizeof(T) == 4) {
#pragma unroll
        for (int i = 0; i < N; ++i) f[i] = bits_float(v.w[i]);
    } else if constexpr (N == 1) {
        f[0] = to_float(T{v.w});
    } else {
#pragma unroll
        for (int i = 0; i < N / 2; ++i) {
            f[2 * i] = to_float(T{uint16_t(v.w[i] & 0xffffu)});
            f[2 * i + 1] = to_float(T{uint16_t(v.w[i] >> 16)});
        }
    }
}

template <typename T, int N>
TSK_DEVICE Packed<T, N> pack(const float (&f)[N]) {
    Packed<T, N> v;
    if constexpr (sizeof(T) == 4) {
#pragma unroll
        for (int i = 0; i < N; ++i) v.w[i] = float_bits(f[i]);
    } else if constexpr (N == 1) {
        T y;
        assign(y, f[0]);
        v.w = y.bits;
    } else {
#pragma unroll
        for (int i = 0; i < N / 2; ++i) v.w[i] = pack_two<T>(f[2 * i], f[2 * i + 1]);
    }
    return v;
}

// Threads that a team may have when each holds K accesses: more would leave too few registers.
constexpr int most_threads(int k) { return k <= 2 ? 1024 : 512; }

// The number of values in 16 bytes.
template <typename T>
constexpr int FULL = 16 / int(sizeof(T));

}  // namespace tsk
