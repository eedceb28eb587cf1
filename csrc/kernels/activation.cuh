// Gated activations of rows [gate | up], and where their operands lie.
#pragma once

#include "../common/vector.h"

namespace tsk {

enum Activation : int { PLAIN = 0, SILU = 1, GELU = 2, GELU_TANH = 3, SWIGLU_OAI = 4, ANY_ACTIVATION = -1 };

// What a kernel reads: rows of `width` results. PLAIN reads the values themselves, the others a gate and an up each.
struct Source {
    const void* x;
    RowMap map;
    int64_t rows;
    int64_t width;   // results per row
    int64_t column;  // stride from one element to the next
    int activation;
    bool interleaved;  // gate and up alternate; otherwise all gates come first
    float alpha, limit;
};

TSK_DEVICE float sigmoid_times(float x, float by) { return fast_divide(by, 1.0f + fast_exp(-x)); }

// `kind` is a constant in kernels of one activation. Comparisons are so that a NaN stays one.
TSK_DEVICE float activate(int kind, float gate, float up, float alpha, float limit) {
    switch (kind) {
        case SILU:
            return sigmoid_times(gate, gate) * up;
        case GELU:
            return 0.5f * gate * (1.0f + erff(gate * 0.70710678118654752f)) * up;
        case GELU_TANH: {
            // (1 + tanh(z)) / 2 = sigmoid(2z)
            const float z2 = 1.5957691216057308f * (gate + 0.044715f * gate * gate * gate);
            return sigmoid_times(z2, gate) * up;
        }
        default: {
            const float g = gate > limit ? limit : gate;
            const float u = up > limit ? limit : up < -limit ? -limit : up;
            return sigmoid_times(alpha * g, g) * (u + 1.0f);
        }
    }
}

template <typename T>
TSK_DEVICE const T* source_row(const Source& s, int64_t row) {
    return static_cast<const T*>(s.x) + s.map.offset(row);
}

// Results i .. i + N - 1 of a row. Accesses of more than one value need a column stride of 1.
template <typename T, int N, int ACTIVATION>
TSK_DEVICE void read_source(const Source& s, const T* row, int64_t i, float (&y)[N]) {
    if constexpr (ACTIVATION == PLAIN) {
        unpack<T, N>(load<T, N>(row + (N == 1 ? i * s.column : i)), y);
        return;
    } else {
        const int kind = ACTIVATION == ANY_ACTIVATION ? s.activation : ACTIVATION;
        float gate[N], up[N];
        if (s.interleaved) {
            if constexpr (N == 1) {
                gate[0] = to_float(row[2 * i * s.column]);
                up[0] = to_float(row[(2 * i + 1) * s.column]);
            } else {
                const Packed<T, N> first = load<T, N>(row + 2 * i), last = load<T, N>(row + 2 * i + N);
                float a[N], b[N];
                unpack<T, N>(first, a);
                unpack<T, N>(last, b);
#pragma unroll
                for (int j = 0; j < N / 2; ++j) {
                    gate[j] = a[2 * j], up[j] = a[2 * j + 1];
                    gate[j + N / 2] = b[2 * j], up[j + N / 2] = b[2 * j + 1];
                }
            }
        } else {
            const int64_t step = N == 1 ? s.column : 1;
            const Packed<T, N> g = load<T, N>(row + i * step), u = load<T, N>(row + (i + s.width) * step);
            unpack<T, N>(g, gate);
            unpack<T, N>(u, up);
        }
#pragma unroll
        for (int j = 0; j < N; ++j) y[j] = activate(kind, gate[j], up[j], s.alpha, s.limit);
    }
}

// A block covers blockDim.y rows and blockDim.x accesses of each; a row takes `chunks` blocks.
struct Tile {
    int64_t row;
    int64_t access;
};
TSK_DEVICE Tile tile_of(unsigned block, unsigned chunks) {
    if (chunks == 1) return {int64_t(block) * blockDim.y + threadIdx.y, int64_t(threadIdx.x)};
    const unsigned rows = block / chunks;
    return {int64_t(rows) * blockDim.y + threadIdx.y, int64_t(block - rows * chunks) * blockDim.x + threadIdx.x};
}

// Where results go, with any strides.
struct Result {
    void* data;
    RowMap map;
    int64_t column;
};

template <typename T, int N, int ACTIVATION>
__global__ void __launch_bounds__(256) gated_kernel(TSK_ARGS Source source, TSK_ARGS Result result, unsigned chunks) {
    start();
    const Tile tile = tile_of(blockIdx.x, chunks);
    const int64_t i = tile.access * N;
    if (tile.row >= source.rows || i >= source.width) return;
    float y[N];
    read_source<T, N, ACTIVATION>(source, source_row<T>(source, tile.row), i, y);
    T* out = static_cast<T*>(result.data) + result.map.offset(tile.row);
    store<T, N>(out + (N == 1 ? i * result.column : i), pack<T, N>(y));
}

}  // namespace tsk
