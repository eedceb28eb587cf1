// store_kvcache and store_mla_kvcache. Kwon et al. 2023, https://arxiv.org/abs/2309.06180.
#include "common/cache_host.h"

namespace tsk {

template <typename T, int N>
void launch_store(const Tensor& like, const StoreArgs& args) {
    int64_t items = 0;
    for (const Rows& r : args.rows) items += int64_t(r.heads) * (r.channels / N);
    if (items == 0) return;
    const TokenShape t = token_shape(args.tokens, items);
    launch(like, t.shape, store_kernel<T, N>, args, t.chunks);
}

inline void run_store(const Tensor& like, const StoreArgs& args, int64_t cache_size) {
    if (args.tokens == 0) return;
    const ScalarType type = like.scalar_type();
    auto go = [&](auto t) {
        using T = decltype(t);
        constexpr int N = FULL<T>;
        bool wide = true;
        for (int i = 0; i < 2; ++i)
            wide = wide && reaches(args.rows[i], N, sizeof(T)) &&
                   (args.rows[i].heads * args.rows[i].channels == 0 ||
                    reaches(args.cache[i], N, cache_size, args.rows[i].heads));
        if (wide)
            launch_store<T, N>(like, args);
        else
            launch_store<T, 1>(like, args);
    };
    if (element_size(type) == 1) {
        STD_TORCH_CHECK(args.cache[0].type == CACHE_RAW && args.cache[1].type == CACHE_RAW,
                        "tskernel_native: quantized rows: expected caches of their dtype and no scale");
        go(raw8{});
    } else {
        for_float(type, go);
    }
}

void store_kvcache(Tensor k, Tensor v, Tensor k_cache, Tensor v_cache, Tensor slots, std::optional<Tensor> k_scale,
                   std::optional<Tensor> v_scale) {
    StoreArgs args{};
    args.rows[0] = rows_of(k), args.rows[1] = rows_of(v);
    args.cache[0] = cache_of(k_cache, k.scalar_type(), k_scale);
    args.cache[1] = cache_of(v_cache, v.scalar_type(), v_scale);
    STD_TORCH_CHECK(slots.scalar_type() == ScalarType::Long && (slots.size(0) <= 1 || slots.stride(0) == 1),
                    "tskernel_native: slot_mapping: expected contiguous int64");
    args.slots = static_cast<const int64_t*>(slots.data_ptr());
    args.tokens = k.size(0);
    run_store(k, args, element_size(k_cache.scalar_type()));
}

void store_mla_kvcache(Tensor kv_c, Tensor k_pe, Tensor kv_cache, Tensor slots, std::optional<Tensor> scale) {
    StoreArgs args{};
    args.rows[0] = rows_of(kv_c), args.rows[1] = rows_of(k_pe);
    args.cache[0] = cache_of(kv_cache, kv_c.scalar_type(), scale);
    args.cache[1] = cache_of(kv_cache, k_pe.scalar_type(), scale, kv_c.size(1));
    STD_TORCH_CHECK(slots.scalar_type() == ScalarType::Long && (slots.size(0) <= 1 || slots.stride(0) == 1),
                    "tskernel_native: slot_mapping: expected contiguous int64");
    args.slots = static_cast<const int64_t*>(slots.data_ptr());
    args.tokens = kv_c.size(0);
    run_store(kv_c, args, element_size(kv_cache.scalar_type()));
}

}  // namespace tsk

TSK_OPS(m) {
    m.def(
        "store_kvcache(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slots, Tensor? k_scale, "
        "Tensor? v_scale) -> ()");
    m.def("store_mla_kvcache(Tensor kv_c, Tensor k_pe, Tensor(a!) kv_cache, Tensor slots, Tensor? scale) -> ()");
}

TSK_IMPL(m) {
    m.impl("store_kvcache", TORCH_BOX(&tsk::store_kvcache));
    m.impl("store_mla_kvcache", TORCH_BOX(&tsk::store_mla_kvcache));
}
