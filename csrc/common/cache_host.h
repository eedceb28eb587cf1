// Describes rows and paged caches, and what accesses reach them.
#pragma once

#include "../kernels/cache.cuh"
#include "plan.h"

namespace tsk {

// Values without arithmetic: a cache dtype that the rows already have.
struct raw8 {
    uint8_t bits;
};

inline int cache_type(ScalarType type) {
    if (type == ScalarType::Float) return CACHE_FP32;
    if (type == ScalarType::Half) return CACHE_FP16;
    if (type == ScalarType::BFloat16) return CACHE_BF16;
    return format_of(type);
}

// [tokens, heads, channels], or [tokens, heads * channels] with `channels` given.
inline Rows rows_of(const Tensor& t, int64_t channels = -1) {
    Rows r{};
    r.data = t.data_ptr();
    r.token_stride = t.stride(0);
    const int64_t last = t.dim() - 1;
    r.channels = int(t.dim() == 3 ? t.size(2) : channels < 0 ? t.size(1) : channels);
    r.heads = int(t.dim() == 3 ? t.size(1) : r.channels ? t.size(1) / r.channels : 1);
    r.column = r.channels == 1 && t.dim() == 3 ? 1 : t.stride(last);
    r.head_stride = t.dim() == 3 ? t.stride(1) : r.channels * r.column;
    return r;
}

inline bool reaches(const Rows& r, int64_t n, int64_t size) {
    return r.heads == 0 || r.channels == 0 ||
           (r.column == 1 && r.channels % n == 0 && r.token_stride % n == 0 &&
            (r.heads == 1 || r.head_stride % n == 0) && aligned(r.data, n * size));
}

// `first` is the channel of the cache at which these rows begin.
inline Cache cache_of(const Tensor& t, ScalarType rows_type, const std::optional<Tensor>& scale, int64_t first = 0) {
    Cache c{};
    const ScalarType type = t.scalar_type();
    c.type = type == rows_type && !scale ? int(CACHE_RAW) : cache_type(type);
    c.page_size = t.size(1);
    c.slots = t.size(0) * c.page_size;
    c.page_stride = t.stride(0), c.slot_stride = t.stride(1), c.head_stride = t.stride(2), c.column = t.stride(3);
    c.data = static_cast<char*>(t.data_ptr()) + first * c.column * element_size(type);
    if (scale) {
        STD_TORCH_CHECK(scale->scalar_type() == ScalarType::Float, "tskernel_native: scale: expected float32");
        c.scale = static_cast<const float*>(scale->data_ptr());
        c.scale_stride = scale->numel() == 1 ? 0 : scale->stride(0);
    }
    return c;
}

inline bool reaches(const Cache& c, int64_t n, int64_t size, int64_t heads) {
    return c.column == 1 && c.page_stride % n == 0 && (c.page_size == 1 || c.slot_stride % n == 0) &&
           (heads == 1 || c.head_stride % n == 0) && aligned(c.data, n * size);
}

struct TokenShape {
    Launch shape;
    unsigned chunks;
};
inline TokenShape token_shape(int64_t tokens, int64_t items) {
    const int64_t chunks = ceil_div(items, 256);
    STD_TORCH_CHECK(tokens * chunks < (int64_t(1) << 31), "tskernel_native: too many tokens: ", tokens);
    return {{dim3(unsigned(tokens * chunks)), dim3(round_lanes(ceil_div(items, chunks)))}, unsigned(chunks)};
}

}  // namespace tsk
