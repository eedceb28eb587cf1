// rmsnorm and layernorm of rows, with or without a residual added first. A row is read once and held in registers.
#pragma once

#include "../common/reduce.h"
#include "../common/vector.h"

namespace tsk {

enum NormMode : int { NORM_RMS = 0, NORM_ADD = 1, NORM_LAYER = 2 };

// Rows of one tensor with their weight. Strides and offsets are in elements; `*_column` is the stride within a row.
struct NormRows {
    const void* x;
    const void* residual;
    void* sum;  // where x + residual goes
    void* out;
    const void* weight;
    const void* bias;
    RowMap x_map, residual_map, sum_map, out_map;
    int64_t x_column, residual_column, sum_column, out_column;
    int64_t rows;
};

struct NormArgs {
    NormRows part[2];  // the second one is for keys beside queries
    int64_t rows;      // of both
    int width;
    float eps;
    float offset;  // added to the weight
};

template <typename T, int N>
TSK_DEVICE Packed<T, N> load_at(const T* base, int64_t i, int64_t column) {
    return load<T, N>(base + (N == 1 ? i * column : i));
}

template <typename T, int N>
TSK_DEVICE void store_at(T* base, int64_t i, int64_t column, const Packed<T, N>& v) {
    store<T, N>(base + (N == 1 ? i * column : i), v);
}

template <typename Op, int SLOT, bool SMALL>
TSK_DEVICE float reduce_row(float v) {
    if constexpr (SMALL)
        return reduce_lanes<Op>(v, int(blockDim.x));
    else
        return reduce_team<Op, SLOT>(v);
}

// N values per access, K accesses per thread; SMALL: the team is a power of two of at most 32 lanes.
template <typename T, typename W, int N, int K, bool SMALL, int MODE>
__global__ void __launch_bounds__(most_threads(K)) norm_kernel(TSK_ARGS NormArgs args) {
    start();
    const int64_t row = int64_t(blockIdx.x) * blockDim.y + threadIdx.y;
    const bool second = row >= args.part[0].rows && row < args.rows;
    const NormRows& part = args.part[second ? 1 : 0];
    const int64_t local = second ? row - args.part[0].rows : row;
    const int team = int(blockDim.x), lane = int(threadIdx.x);
    const int count = row < args.rows ? (args.width + N - 1) / N : 0;  // the lanes of a missing row still take part

    // The weight is on its way during the reduction, unless eight accesses of it would leave too few registers.
    constexpr int EARLY = K < 8 ? K : 0;
    Packed<T, N> x[K];
    Packed<W, N> w[EARLY ? EARLY : 1];
    const W* pw = static_cast<const W*>(part.weight);
    if (count) {
        const T* px = static_cast<const T*>(part.x) + part.x_map.offset(local);
#pragma unroll
        for (int k = 0; k < K; ++k) {
            const int v = lane + k * team;
            if (v < count) x[k] = load_at<T, N>(px, int64_t(v) * N, part.x_column);
        }
        if constexpr (MODE == NORM_ADD) {
            const T* pr = static_cast<const T*>(part.residual) + part.residual_map.offset(local);
            T* ps = static_cast<T*>(part.sum) + part.sum_map.offset(local);
            Packed<T, N> r[K];
#pragma unroll
            for (int k = 0; k < K; ++k) {
                const int v = lane + k * team;
                if (v < count) r[k] = load_at<T, N>(pr, int64_t(v) * N, part.residual_column);
            }
#pragma unroll
            for (int k = 0; k < EARLY; ++k) {
                const int v = lane + k * team;
                if (v < count) w[k] = load<W, N>(pw + int64_t(v) * N);
            }
#pragma unroll
            for (int k = 0; k < K; ++k) {
                const int v = lane + k * team;
                if (v >= count) continue;
                float a[N], b[N];
                unpack<T, N>(x[k], a);
                unpack<T, N>(r[k], b);
#pragma unroll
                for (int i = 0; i < N; ++i) a[i] += b[i];
                x[k] = pack<T, N>(a);  // the norm is taken of the rounded sum
                store_at<T, N>(ps, int64_t(v) * N, part.sum_column, x[k]);
            }
        } else {
#pragma unroll
            for (int k = 0; k < EARLY; ++k) {
                const int v = lane + k * team;
                if (v < count) w[k] = load<W, N>(pw + int64_t(v) * N);
            }
        }
    }

    const float inverse_width = 1.0f / float(args.width);
    float mean = 0.0f;
    if constexpr (MODE == NORM_LAYER) {
        float sum = 0.0f;
#pragma unroll
        for (int k = 0; k < K; ++k) {
            if (lane + k * team >= count) continue;
            float a[N];
            unpack<T, N>(x[k], a);
#pragma unroll
            for (int i = 0; i < N; ++i) sum += a[i];
        }
        mean = reduce_row<Sum, 0, SMALL>(sum) * inverse_width;
    }
    float squares = 0.0f;
#pragma unroll
    for (int k = 0; k < K; ++k) {
        if (lane + k * team >= count) continue;
        float a[N];
        unpack<T, N>(x[k], a);
#pragma unroll
        for (int i = 0; i < N; ++i) squares += (a[i] - mean) * (a[i] - mean);
    }
    const float scale = inverse_root(reduce_row<Sum, 1, SMALL>(squares) * inverse_width + args.eps);

    if (count == 0) return;
    T* out = static_cast<T*>(part.out) + part.out_map.offset(local);
#pragma unroll
    for (int k = 0; k < K; ++k) {
        const int v = lane + k * team;
        if (v >= count) continue;
        float a[N], b[N];
        unpack<T, N>(x[k], a);
        if constexpr (EARLY)
            unpack<W, N>(w[k], b);
        else
            unpack<W, N>(load<W, N>(pw + int64_t(v) * N), b);
#pragma unroll
        for (int i = 0; i < N; ++i) a[i] = (a[i] - mean) * scale * (b[i] + args.offset);
        if constexpr (MODE == NORM_LAYER) {
            if (part.bias) {
                unpack<W, N>(load<W, N>(static_cast<const W*>(part.bias) + int64_t(v) * N), b);
#pragma unroll
                for (int i = 0; i < N; ++i) a[i] += b[i];
            }
        }
        store_at<T, N>(out, int64_t(v) * N, part.out_column, pack<T, N>(a));
    }
}

// Rows that do not fit into registers: read once per statistic and once more for the result.
template <typename T, typename W, int MODE>
__global__ void __launch_bounds__(1024) norm_long_kernel(TSK_ARGS NormArgs args) {
    start();
    const int64_t row = blockIdx.x;
    const bool second = row >= args.part[0].rows;
    const NormRows& part = args.part[second ? 1 : 0];
    const int64_t local = second ? row - args.part[0].rows : row;
    const T* x = static_cast<const T*>(part.x) + part.x_map.offset(local);
    int64_t column = part.x_column;
    const int team = int(blockDim.x), lane = int(threadIdx.x);
    if constexpr (MODE == NORM_ADD) {
        const T* r = static_cast<const T*>(part.residual) + part.residual_map.offset(local);
        T* sum = static_cast<T*>(part.sum) + part.sum_map.offset(local);
        for (int64_t i = lane; i < args.width; i += team) {
            T y;
            assign(y, to_float(x[i * column]) + to_float(r[i * part.residual_column]));
            sum[i * part.sum_column] = y;
        }
        x = sum;  // each thread reads back only what it wrote itself
        column = part.sum_column;
    }
    const float inverse_width = 1.0f / float(args.width);
    float mean = 0.0f;
    if constexpr (MODE == NORM_LAYER) {
        float sum = 0.0f;
        for (int64_t i = lane; i < args.width; i += team) sum += to_float(x[i * column]);
        mean = reduce_team<Sum, 0>(sum) * inverse_width;
    }
    float squares = 0.0f;
    for (int64_t i = lane; i < args.width; i += team) {
        const float d = to_float(x[i * column]) - mean;
        squares += d * d;
    }
    const float scale = inverse_root(reduce_team<Sum, 1>(squares) * inverse_width + args.eps);
    T* out = static_cast<T*>(part.out) + part.out_map.offset(local);
    for (int64_t i = lane; i < args.width; i += team) {
        float y = (to_float(x[i * column]) - mean) * scale;
        y *= to_float(static_cast<const W*>(part.weight)[i]) + args.offset;
        if (MODE == NORM_LAYER && part.bias) y += to_float(static_cast<const W*>(part.bias)[i]);
        assign(out[i * part.out_column], y);
    }
}

}  // namespace tsk
