// apply_rope, apply_rope_ and apply_rope_store_kvcache_. Su et al. 2021, https://arxiv.org/abs/2104.09864.
#include "common/cache_host.h"
#include "kernels/rope.cuh"

namespace tsk {

template <typename T, int N>
void launch_rope(const Tensor& like, const RopeArgs& args, bool neox) {
    const int64_t per_head = args.half / N + (args.in[0].channels - 2 * args.half) / N;
    int64_t items = (args.in[0].heads + args.in[1].heads) * per_head;
    if (args.slots) items += int64_t(args.in[2].heads) * (args.in[2].channels / N);
    if (items == 0) return;
    const TokenShape t = token_shape(args.tokens, items);
    if (neox)
        launch(like, t.shape, rope_kernel<T, N, true>, args, t.chunks);
    else
        launch(like, t.shape, rope_kernel<T, N, false>, args, t.chunks);
}

// Whether everything can be reached in accesses of `n` elements of q's dtype.
inline bool rope_wide(const RopeArgs& a, int64_t n, int64_t size, int64_t angle_size, int64_t cache_size) {
    bool ok = a.half % n == 0 && (a.in[0].channels - 2 * a.half) % n == 0 && a.angle_column == 1 &&
              a.angle_stride % n == 0 && aligned(a.angles, std::min<int64_t>(16, n * angle_size));
    for (int i = 0; i < 2; ++i) ok = ok && reaches(a.in[i], n, size) && reaches(a.out[i], n, size);
    if (a.slots) {
        ok = ok && reaches(a.in[2], n, size);
        for (int i = 0; i < 2; ++i)
            ok = ok && (a.in[i + 1].heads == 0 || reaches(a.cache[i], n, cache_size, a.in[i + 1].heads));
    }
    return ok;
}

inline RopeArgs rope_args(const Tensor& positions, const Tensor& q, const Tensor& k, const Tensor& angles,
                          int64_t head_size) {
    RopeArgs args{};
    args.in[0] = rows_of(q, head_size), args.in[1] = rows_of(k, head_size);
    if (k.dim() == 2) args.in[1].heads = args.in[1].channels ? int(k.size(1) / args.in[1].channels) : 0;
    STD_TORCH_CHECK(q.scalar_type() == k.scalar_type(), "tskernel_native: k: expected the dtype of q");
    STD_TORCH_CHECK(positions.size(0) <= 1 || positions.stride(0) == 1,
                    "tskernel_native: positions: expected contiguous positions");
    args.positions = positions.data_ptr();
    args.positions64 = positions.scalar_type() == ScalarType::Long;
    args.angles = angles.data_ptr();
    const ScalarType type = angles.scalar_type();
    args.angle_type = type == ScalarType::Float ? ANGLE_FP32 : type == ScalarType::Half ? ANGLE_FP16 : ANGLE_BF16;
    args.angle_stride = angles.stride(0);
    args.angle_column = angles.size(1) <= 1 ? 1 : angles.stride(1);
    args.max_position = angles.size(0);
    args.tokens = q.size(0);
    args.half = int(angles.size(1) / 2);
    return args;
}

inline void run_rope(const Tensor& q, const RopeArgs& args, bool neox, int64_t angle_size, int64_t cache_size) {
    if (args.tokens == 0) return;
    for_float(q.scalar_type(), [&](auto t) {
        using T = decltype(t);
        if (rope_wide(args, FULL<T>, sizeof(T), angle_size, cache_size))
            launch_rope<T, FULL<T>>(q, args, neox);
        else
            launch_rope<T, 1>(q, args, neox);
    });
}

void apply_rope(Tensor positions, Tensor q, Tensor k, Tensor angles, Tensor q_out, Tensor k_out, bool neox,
                int64_t head_size) {
    RopeArgs args = rope_args(positions, q, k, angles, head_size);
    args.out[0] = rows_of(q_out, head_size), args.out[1] = rows_of(k_out, head_size);
    run_rope(q, args, neox, element_size(angles.scalar_type()), 0);
}

void apply_rope_(Tensor positions, Tensor q, Tensor k, Tensor angles, bool neox, int64_t head_size) {
    RopeArgs args = rope_args(positions, q, k, angles, head_size);
    args.out[0] = args.in[0], args.out[1] = args.in[1];
    args.in_place = true;
    run_rope(q, args, neox, element_size(angles.scalar_type()), 0);
}

void apply_rope_store_kvcache_(Tensor positions, Tensor q, Tensor k, Tensor v, Tensor angles, Tensor k_cache,
                               Tensor v_cache, Tensor slots, bool neox, std::optional<Tensor> k_scale,
                               std::optional<Tensor> v_scale) {
    RopeArgs args = rope_args(positions, q, k, angles, k_cache.size(3));
    args.out[0] = args.in[0], args.out[1] = args.in[1];
    args.in[2] = rows_of(v, v_cache.size(3));
    args.cache[0] = cache_of(k_cache, k.scalar_type(), k_scale);
    args.cache[1] = cache_of(v_cache, v.scalar_type(), v_scale);
    STD_TORCH_CHECK(slots.scalar_type() == ScalarType::Long && (slots.size(0) <= 1 || slots.stride(0) == 1),
                    "tskernel_native: slot_mapping: expected contiguous int64");
    args.slots = static_cast<const int64_t*>(slots.data_ptr());
    args.in_place = true;
    run_rope(q, args, neox, element_size(angles.scalar_type()), element_size(k_cache.scalar_type()));
}

}  // namespace tsk

TSK_OPS(m) {
    m.def(
        "apply_rope(Tensor positions, Tensor q, Tensor k, Tensor angles, Tensor(a!) q_out, Tensor(b!) k_out, "
        "bool neox, int head_size) -> ()");
    m.def("apply_rope_(Tensor positions, Tensor(a!) q, Tensor(b!) k, Tensor angles, bool neox, int head_size) -> ()");
    m.def(
        "apply_rope_store_kvcache_(Tensor positions, Tensor(a!) q, Tensor(b!) k, Tensor v, Tensor angles, "
        "Tensor(c!) k_cache, Tensor(d!) v_cache, Tensor slots, bool neox, Tensor? k_scale, Tensor? v_scale) -> ()");
}

TSK_IMPL(m) {
    m.impl("apply_rope", TORCH_BOX(&tsk::apply_rope));
    m.impl("apply_rope_", TORCH_BOX(&tsk::apply_rope_));
    m.impl("apply_rope_store_kvcache_", TORCH_BOX(&tsk::apply_rope_store_kvcache_));
}
