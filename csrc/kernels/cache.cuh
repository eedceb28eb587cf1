// Writing rows into a paged cache: where a slot lies, and the conversion to the dtype of the cache.
#pragma once

#include "../common/vector.h"

namespace tsk {

// Dtypes of a cache; the fp8 ones are Format numbers. RAW: the bytes as they are.
enum CacheType : int { CACHE_RAW = 8, CACHE_FP32 = 9, CACHE_FP16 = 10, CACHE_BF16 = 11 };

// [pages, page_size, heads, channels] with any strides, in elements.
struct Cache {
    void* data;
    int type;
    int64_t slots;
    int64_t page_size;
    int64_t page_stride, slot_stride, head_stride, column;
    const float* scale;  // null: 1
    int64_t scale_stride;

    TSK_DEVICE int64_t offset(int64_t slot, int64_t head) const {
        const int64_t page = slot / page_size;
        return page * page_stride + (slot - page * page_size) * slot_stride + head * head_stride;
    }
};

template <int N, int FORMAT>
TSK_DEVICE void store_fp8(uint8_t* p, const float (&y)[N]) {
    if constexpr (N == 1) {
        *p = fp8_bits<FORMAT>(y[0]);
    } else {
        Words<N> r;
#pragma unroll
        for (int i = 0; i < N / 4; ++i)
            r.w[i] = fp8_two<FORMAT>(y[4 * i], y[4 * i + 1]) | fp8_two<FORMAT>(y[4 * i + 2], y[4 * i + 3]) << 16;
        store_words<N>(p, r);
    }
}

// N neighbours (of column stride 1 when N > 1) at `at`, in elements of the cache.
template <int N>
TSK_DEVICE void store_converted(const Cache& cache, int64_t at, const float (&y)[N]) {
    switch (cache.type) {
        case CACHE_FP32:
            return store<float, N>(static_cast<float*>(cache.data) + at, pack<float, N>(y));
        case CACHE_FP16:
            return store<fp16, N>(static_cast<fp16*>(cache.data) + at, pack<fp16, N>(y));
        case CACHE_BF16:
            return store<bf16, N>(static_cast<bf16*>(cache.data) + at, pack<bf16, N>(y));
        case E4M3FN:
            return store_fp8<N, E4M3FN>(static_cast<uint8_t*>(cache.data) + at, y);
        case E4M3FNUZ:
            return store_fp8<N, E4M3FNUZ>(static_cast<uint8_t*>(cache.data) + at, y);
        case E5M2:
            return store_fp8<N, E5M2>(static_cast<uint8_t*>(cache.data) + at, y);
        default:
            return store_fp8<N, E5M2FNUZ>(static_cast<uint8_t*>(cache.data) + at, y);
    }
}

// Values of T on their way into a cache: bits untouched where the dtypes agree and no scale is given.
template <typename T, int N>
TSK_DEVICE void write_cache(const Cache& cache, int64_t slot, int64_t head, int64_t channel, const Packed<T, N>& v) {
    const int64_t at = cache.offset(slot, head) + channel * (N == 1 ? cache.column : 1);
    if (cache.type == CACHE_RAW) {
        store<T, N>(static_cast<T*>(cache.data) + at, v);
        return;
    }
    if constexpr (sizeof(T) > 1) {
        float y[N];
        unpack<T, N>(v, y);
        if (cache.scale) {
            const float scale = cache.scale[head * cache.scale_stride];
#pragma unroll
            for (int i = 0; i < N; ++i) y[i] = y[i] / scale;
        }
        store_converted<N>(cache, at, y);
    }
}

// Rows [tokens, heads, channels] with any strides.
struct Rows {
    const void* data;
    int heads;
    int channels;
    int64_t token_stride, head_stride, column;
};

struct StoreArgs {
    Rows rows[2];  // keys and values, or the latent and the rope key of MLA
    Cache cache[2];
    const int64_t* slots;
    int64_t tokens;
};

// A block serves one token, or a part of it: `chunks` blocks of blockDim.x accesses each.
template <typename T, int N>
__global__ void __launch_bounds__(256) store_kernel(TSK_ARGS StoreArgs args, unsigned chunks) {
    start();
    const int64_t token = blockIdx.x / chunks;
    const int64_t slot = args.slots[token];
    if (slot < 0 || slot >= args.cache[0].slots) return;
    const int first = args.rows[0].heads * (args.rows[0].channels / N);
    int item = int(blockIdx.x % chunks) * int(blockDim.x) + int(threadIdx.x);
    const int which = item >= first ? 1 : 0;
    item -= which ? first : 0;
    const Rows& rows = args.rows[which];
    const int per_head = rows.channels / N;
    if (per_head == 0 || item >= rows.heads * per_head) return;
    const int head = item / per_head, channel = (item - head * per_head) * N;
    const T* from = static_cast<const T*>(rows.data) + token * rows.token_stride + head * rows.head_stride +
                    channel * (N == 1 ? rows.column : 1);
    write_cache<T, N>(args.cache[which], slot, head, channel, load<T, N>(from));
}

}  // namespace tsk
