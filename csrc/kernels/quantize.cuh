// Quantization of rows, plain or activated: by given scales, or by one measured per tensor, row, group or block.
#pragma once

#include "../common/reduce.h"
#include "activation.cuh"

namespace tsk {

struct Target {
    void* data;  // contiguous rows
    void* scale;
    int format;
    bool power_of_two;
    bool scale_bytes;  // biased exponents instead of fp32
    float largest;     // of the format
};

constexpr float SMALLEST_SCALE = 1.1754943508222875e-38f;  // 2^-126: devices that flush subnormals must not divide by 0

TSK_DEVICE float make_scale(float amax, float largest, bool power_of_two) {
    amax = amax > 3.4028234663852886e38f ? 3.4028234663852886e38f : amax;
    float scale = amax / largest;
    scale = scale > SMALLEST_SCALE ? scale : SMALLEST_SCALE;
    if (!power_of_two) return scale;
    uint32_t exponent = (float_bits(scale) + 0x7fffffu) >> 23;
    exponent = exponent > 254 ? 254 : exponent;
    return bits_float(exponent << 23);
}

TSK_DEVICE void write_scale(const Target& t, int64_t i, float scale, bool poisoned = false) {
    if (t.scale_bytes)
        static_cast<uint8_t*>(t.scale)[i] = poisoned ? 255 : uint8_t(float_bits(scale) >> 23);
    else
        static_cast<float*>(t.scale)[i] = scale;
}

template <int N, int FORMAT>
TSK_DEVICE void write_fp8(uint8_t* p, const float (&q)[N]) {
    if constexpr (N == 1) {
        *p = fp8_bits<FORMAT>(q[0]);
    } else {
        Words<N> r;
#pragma unroll
        for (int i = 0; i < N / 4; ++i)
            r.w[i] = fp8_two<FORMAT>(q[4 * i], q[4 * i + 1]) | fp8_two<FORMAT>(q[4 * i + 2], q[4 * i + 3]) << 16;
        store_words<N>(p, r);
    }
}

// Quotients i .. i + N - 1, counted from the start of the tensor. N is 1 or a multiple of 4; FP4 needs the latter.
template <int N>
TSK_DEVICE void write_data(const Target& t, int64_t i, const float (&q)[N]) {
    uint8_t* p = static_cast<uint8_t*>(t.data);
    switch (t.format) {
        case E4M3FN:
            return write_fp8<N, E4M3FN>(p + i, q);
        case E4M3FNUZ:
            return write_fp8<N, E4M3FNUZ>(p + i, q);
        case E5M2:
            return write_fp8<N, E5M2>(p + i, q);
        case E5M2FNUZ:
            return write_fp8<N, E5M2FNUZ>(p + i, q);
        case INT8:
            if constexpr (N == 1) {
                p[i] = int8_bits(q[0]);
            } else {
                Words<N> r;
#pragma unroll
                for (int j = 0; j < N / 4; ++j)
                    r.w[j] = uint32_t(int8_bits(q[4 * j])) | uint32_t(int8_bits(q[4 * j + 1])) << 8 |
                             uint32_t(int8_bits(q[4 * j + 2])) << 16 | uint32_t(int8_bits(q[4 * j + 3])) << 24;
                store_words<N>(p + i, r);
            }
            return;
        default:
            if constexpr (N > 1) {
                uint32_t word = 0;
#pragma unroll
                for (int j = 0; j < N; ++j) word |= fp4_bits(q[j]) << (4 * j);
                Words<N / 2> r;
                if constexpr (N == 8)
                    r.w[0] = word;
                else
                    r.w = uint16_t(word);
                store_words<N / 2>(p + i / 2, r);
            }
    }
}

template <int N>
TSK_DEVICE float largest_of(const float (&y)[N]) {
    float m = 0.0f;
#pragma unroll
    for (int i = 0; i < N; ++i) m = fmaxf(m, fabsf(y[i]));
    return m;
}

// Given scales: one for all, one per row, or the maximum of `partials` measured maxima.
struct Scales {
    const float* given;
    int64_t row_stride;  // 0: one for all
    int partials;        // more than 0: `given` are maxima
};

template <typename T, int N, int ACTIVATION>
__global__ void __launch_bounds__(256)
    scaled_kernel(TSK_ARGS Source source, TSK_ARGS Target target, TSK_ARGS Scales scales, unsigned chunks) {
    start();
    const Tile tile = tile_of(blockIdx.x, chunks);
    const int64_t i = tile.access * N;
    const bool live = tile.row < source.rows && i < source.width;
    float y[N];
    if (live) read_source<T, N, ACTIVATION>(source, source_row<T>(source, tile.row), i, y);
    float scale;
    if (scales.partials) {
        // Every lane group reduces all maxima for itself: no barrier, whatever the shape of the block.
        const int lane = int(threadIdx.y * blockDim.x + threadIdx.x) % LANES;
        float m = 0.0f;
        for (int p = lane; p < scales.partials; p += LANES) m = fmaxf(m, scales.given[p]);
        scale = make_scale(reduce_lanes<Max>(m), target.largest, target.power_of_two);
    } else {
        scale = live ? scales.given[tile.row * scales.row_stride] : 1.0f;
    }
    if (!live) return;
    if (i == 0 && (scales.row_stride != 0 || tile.row == 0)) write_scale(target, tile.row, scale);
    scale = scale > SMALLEST_SCALE ? scale : SMALLEST_SCALE;
#pragma unroll
    for (int j = 0; j < N; ++j) y[j] = y[j] / scale;
    write_data<N>(target, tile.row * source.width + i, y);
}

// The absolute maximum of what each block reads.
template <typename T, int N>
__global__ void __launch_bounds__(256)
    amax_kernel(TSK_ARGS Source source, float* partials, unsigned chunks, unsigned tiles) {
    start();
    __shared__ float parts[8];
    float m = 0.0f;
    for (unsigned t = blockIdx.x; t < tiles; t += gridDim.x) {
        const Tile tile = tile_of(t, chunks);
        const int64_t i = tile.access * N;
        if (tile.row >= source.rows || i >= source.width) continue;
        float y[N];
        read_source<T, N, PLAIN>(source, source_row<T>(source, tile.row), i, y);
        m = fmaxf(m, largest_of<N>(y));
    }
    m = reduce_lanes<Max>(m);
    const int thread = int(threadIdx.y * blockDim.x + threadIdx.x);
    if (thread % LANES == 0) parts[thread / LANES] = m;
    __syncthreads();
    if (thread == 0) {
        for (int p = 1; p < int(blockDim.x * blockDim.y) / LANES; ++p) m = fmaxf(m, parts[p]);
        partials[blockIdx.x] = m;
    }
}

// One scale per row; the row is held in registers. A team of 32 may share its block with others.
template <typename T, int N, int K, int ACTIVATION>
__global__ void __launch_bounds__(most_threads(K)) token_kernel(TSK_ARGS Source source, TSK_ARGS Target target) {
    start();
    const int64_t row = int64_t(blockIdx.x) * blockDim.y + threadIdx.y;
    const int team = int(blockDim.x), lane = int(threadIdx.x);
    const int count = row < source.rows ? int(source.width / N) : 0;
    float y[K][N];
    float m = 0.0f;
    if (count) {
        const T* from = source_row<T>(source, row);
#pragma unroll
        for (int k = 0; k < K; ++k)
            if (lane + k * team < count)
                read_source<T, N, ACTIVATION>(source, from, int64_t(lane + k * team) * N, y[k]);
#pragma unroll
        for (int k = 0; k < K; ++k)
            if (lane + k * team < count) m = fmaxf(m, largest_of<N>(y[k]));
    }
    const float scale = make_scale(reduce_team<Max>(m), target.largest, target.power_of_two);
    if (count == 0) return;
    if (lane == 0) write_scale(target, row, scale);
#pragma unroll
    for (int k = 0; k < K; ++k) {
        if (lane + k * team >= count) continue;
#pragma unroll
        for (int j = 0; j < N; ++j) y[k][j] = y[k][j] / scale;
        write_data<N>(target, row * source.width + int64_t(lane + k * team) * N, y[k]);
    }
}

// One scale per `lanes` accesses, a power of two within 32.
template <typename T, int N, int ACTIVATION>
__global__ void __launch_bounds__(256)
    group_kernel(TSK_ARGS Source source, TSK_ARGS Target target, int lanes, unsigned chunks) {
    start();
    const Tile tile = tile_of(blockIdx.x, chunks);
    const int64_t i = tile.access * N;
    const bool live = tile.row < source.rows && i < source.width;
    float y[N];
    float m = 0.0f;
    if (live) {
        read_source<T, N, ACTIVATION>(source, source_row<T>(source, tile.row), i, y);
        m = largest_of<N>(y);
    }
    bool poisoned = false;
    if (target.format == FP4) {
        // e2m1 has no NaN: the scale must carry it.
        float bad = 0.0f;
        if (live)
#pragma unroll
            for (int j = 0; j < N; ++j) bad = y[j] == y[j] ? bad : 1.0f;
        poisoned = reduce_lanes<Max>(bad, lanes) > 0.0f;
    }
    const float scale = make_scale(reduce_lanes<Max>(m, lanes), target.largest, target.power_of_two);
    if (!live) return;
    if (tile.access % lanes == 0) {
        const int64_t groups = (source.width + int64_t(lanes) * N - 1) / (int64_t(lanes) * N);
        write_scale(target, tile.row * groups + tile.access / lanes, scale, poisoned);
    }
    if (target.power_of_two) {
        const float inverse = 1.0f / scale;  // exact
#pragma unroll
        for (int j = 0; j < N; ++j) y[j] *= inverse;
    } else {
#pragma unroll
        for (int j = 0; j < N; ++j) y[j] = y[j] / scale;
    }
    write_data<N>(target, tile.row * source.width + i, y);
}

// Any group, any width, any strides: the team reads its group twice. A group is `height` rows by `group` columns;
// rows are counted within matrices of `matrix` rows.
template <typename T, int ACTIVATION>
__global__ void __launch_bounds__(256) any_group_kernel(TSK_ARGS Source source, TSK_ARGS Target target, int64_t group,
                                                        int64_t height, int64_t matrix, int64_t units) {
    start();
    const int64_t unit = int64_t(blockIdx.x) * blockDim.y + threadIdx.y;
    const int team = int(blockDim.x), lane = int(threadIdx.x);
    const int64_t across = (source.width + group - 1) / group, down = (matrix + height - 1) / height;
    const int64_t band = unit / across;
    const int64_t first_column = (unit - band * across) * group;
    const int64_t first_row = band / down * matrix + band % down * height;
    const int64_t wide = source.width - first_column < group ? source.width - first_column : group;
    const int64_t rows_left = matrix - band % down * height;
    const int64_t tall = rows_left < height ? rows_left : height;
    const int step = target.format == FP4 ? 2 : 1;
    const int64_t count = unit < units ? wide * tall : 0;

    float m = 0.0f, bad = 0.0f, y[1];
    for (int64_t e = lane; e < count; e += team) {
        const int64_t r = tall == 1 ? 0 : e / wide;
        read_source<T, 1, ACTIVATION>(source, source_row<T>(source, first_row + r), first_column + e - r * wide, y);
        m = fmaxf(m, fabsf(y[0]));
        bad = y[0] == y[0] ? bad : 1.0f;
    }
    const float scale = make_scale(reduce_team<Max, 0>(m), target.largest, target.power_of_two);
    const bool poisoned = reduce_team<Max, 1>(bad) > 0.0f && target.format == FP4;
    if (count == 0) return;
    if (lane == 0) write_scale(target, unit, scale, poisoned);
    for (int64_t e = int64_t(lane) * step; e < count; e += int64_t(team) * step) {
        const int64_t r = tall == 1 ? 0 : e / wide;
        const T* row = source_row<T>(source, first_row + r);
        const int64_t column = first_column + e - r * wide;
        const int64_t to = (first_row + r) * source.width + column;
        read_source<T, 1, ACTIVATION>(source, row, column, y);
        y[0] = y[0] / scale;
        if (step == 1) {
            write_data<1>(target, to, y);
            continue;
        }
        const uint32_t low = fp4_bits(y[0]);
        read_source<T, 1, ACTIVATION>(source, row, column + 1, y);
        static_cast<uint8_t*>(target.data)[to / 2] = uint8_t(low | fp4_bits(y[0] / scale) << 4);
    }
}

}  // namespace tsk
