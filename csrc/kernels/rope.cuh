// Rotary position embedding, into fresh tensors or in place, and with keys and values stored into the paged cache.
#pragma once

#include "cache.cuh"

namespace tsk {

enum AngleType : int { ANGLE_FP32 = 0, ANGLE_FP16 = 1, ANGLE_BF16 = 2 };

struct RopeArgs {
    Rows in[3];  // queries, keys, and values, which are only stored
    Rows out[2];
    Cache cache[2];        // of keys and values
    const int64_t* slots;  // null: nothing is stored
    const void* positions;
    bool positions64;
    const void* angles;  // [max_position, cosines then sines]
    int angle_type;
    int64_t angle_stride, angle_column;
    int64_t max_position;
    int64_t tokens;
    int half;       // pairs of channels that turn
    bool in_place;  // what does not turn need not be written
};

template <typename A, int N>
TSK_DEVICE void read_angles_as(const RopeArgs& args, int64_t position, int i, float (&y)[N]) {
    const A* p = static_cast<const A*>(args.angles) + position * args.angle_stride;
    unpack<A, N>(load<A, N>(p + (N == 1 ? i * args.angle_column : int64_t(i))), y);
}

template <int N>
TSK_DEVICE void read_angles(const RopeArgs& args, int64_t position, int i, float (&y)[N]) {
    if (args.angle_type == ANGLE_FP32)
        read_angles_as<float, N>(args, position, i, y);
    else if (args.angle_type == ANGLE_FP16)
        read_angles_as<fp16, N>(args, position, i, y);
    else
        read_angles_as<bf16, N>(args, position, i, y);
}

template <typename T, int N>
TSK_DEVICE T* at(const Rows& rows, int64_t token, int head, int channel) {
    return static_cast<T*>(const_cast<void*>(rows.data)) + token * rows.token_stride + head * rows.head_stride +
           channel * (N == 1 ? rows.column : 1);
}

// N channels at `channel`, as they leave: to the result, and to the cache if it is a key with a slot.
template <typename T, int N>
TSK_DEVICE void emit(const RopeArgs& args, int which, int64_t token, int64_t slot, int head, int channel,
                     const Packed<T, N>& v, bool write) {
    if (write && which < 2) store<T, N>(at<T, N>(args.out[which], token, head, channel), v);
    if (slot >= 0 && which > 0) write_cache<T, N>(args.cache[which - 1], slot, head, channel, v);
}

// Half split: channel i turns with channel i + half. A thread has N such pairs.
template <typename T, int N>
TSK_DEVICE void turn_halves(const RopeArgs& args, int which, int64_t token, int64_t slot, int head, int i,
                            int64_t position, bool known) {
    const Packed<T, N> first = load<T, N>(at<T, N>(args.in[which], token, head, i));
    const Packed<T, N> second = load<T, N>(at<T, N>(args.in[which], token, head, i + args.half));
    if (!known) {
        emit<T, N>(args, which, token, slot, head, i, first, !args.in_place);
        emit<T, N>(args, which, token, slot, head, i + args.half, second, !args.in_place);
        return;
    }
    float a[N], b[N], c[N], s[N], x[N], y[N];
    read_angles<N>(args, position, i, c);
    read_angles<N>(args, position, i + args.half, s);
    unpack<T, N>(first, a);
    unpack<T, N>(second, b);
#pragma unroll
    for (int j = 0; j < N; ++j) {
        x[j] = a[j] * c[j] - b[j] * s[j];
        y[j] = b[j] * c[j] + a[j] * s[j];
    }
    emit<T, N>(args, which, token, slot, head, i, pack<T, N>(x), true);
    emit<T, N>(args, which, token, slot, head, i + args.half, pack<T, N>(y), true);
}

// Interleaved: channel 2i turns with channel 2i + 1. A thread has the N pairs from `i` on.
template <typename T, int N>
TSK_DEVICE void turn_neighbours(const RopeArgs& args, int which, int64_t token, int64_t slot, int head, int i,
                                int64_t position, bool known) {
    const int channel = 2 * i;
    const Packed<T, N> first = load<T, N>(at<T, N>(args.in[which], token, head, channel));
    const Packed<T, N> second = load<T, N>(at<T, N>(args.in[which], token, head, channel + N));
    if (!known) {
        emit<T, N>(args, which, token, slot, head, channel, first, !args.in_place);
        emit<T, N>(args, which, token, slot, head, channel + N, second, !args.in_place);
        return;
    }
    float v[2 * N], c[N], s[N], a[N], b[N];
    read_angles<N>(args, position, i, c);
    read_angles<N>(args, position, i + args.half, s);
    unpack<T, N>(first, a);
    unpack<T, N>(second, b);
#pragma unroll
    for (int j = 0; j < N; ++j) v[j] = a[j], v[N + j] = b[j];
#pragma unroll
    for (int j = 0; j < N; ++j) {
        const float even = v[2 * j], odd = v[2 * j + 1];
        v[2 * j] = even * c[j] - odd * s[j];
        v[2 * j + 1] = odd * c[j] + even * s[j];
    }
#pragma unroll
    for (int j = 0; j < N; ++j) a[j] = v[j], b[j] = v[N + j];
    emit<T, N>(args, which, token, slot, head, channel, pack<T, N>(a), true);
    emit<T, N>(args, which, token, slot, head, channel + N, pack<T, N>(b), true);
}

// Items of a token: for each head of queries and keys the pairs, then the channels that do not turn; then values.
template <typename T, int N, bool NEOX>
__global__ void __launch_bounds__(256) rope_kernel(TSK_ARGS RopeArgs args, unsigned chunks) {
    start();
    const int64_t token = blockIdx.x / chunks;
    int item = int(blockIdx.x % chunks) * int(blockDim.x) + int(threadIdx.x);
    int64_t slot = -1;
    if (args.slots) {
        slot = args.slots[token];
        if (slot >= args.cache[0].slots) slot = -1;
    }
    const int turning = args.half / N;
    const int per_head = turning + (args.in[0].channels - 2 * args.half) / N;
    const int queries = args.in[0].heads * per_head, keys = args.in[1].heads * per_head;
    if (item >= queries + keys) {
        item -= queries + keys;
        const int per_value = args.in[2].channels / N;
        if (slot < 0 || per_value == 0 || item >= args.in[2].heads * per_value) return;
        const int head = item / per_value, channel = (item - head * per_value) * N;
        emit<T, N>(args, 2, token, slot, head, channel, load<T, N>(at<T, N>(args.in[2], token, head, channel)), false);
        return;
    }
    const int which = item >= queries ? 1 : 0;
    item -= which ? queries : 0;
    const int head = item / per_head, i = item - head * per_head;
    if (i >= turning) {
        if (args.in_place && (which == 0 || slot < 0)) return;
        const int channel = 2 * args.half + (i - turning) * N;
        emit<T, N>(args, which, token, slot, head, channel, load<T, N>(at<T, N>(args.in[which], token, head, channel)),
                   !args.in_place);
        return;
    }
    const int64_t position = args.positions64 ? static_cast<const int64_t*>(args.positions)[token]
                                              : static_cast<const int32_t*>(args.positions)[token];
    const bool known = position >= 0 && position < args.max_position;
    if constexpr (NEOX)
        turn_halves<T, N>(args, which, token, slot, head, i * N, position, known);
    else
        turn_neighbours<T, N>(args, which, token, slot, head, i * N, position, known);
}

}  // namespace tsk
