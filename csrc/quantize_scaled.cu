// Quantization, of an activation too, by given scales: one for all, or one per row.
#include "common/source_host.h"

namespace tsk {

void quantize_scaled(Tensor x, Tensor scale, Tensor data, Tensor scale_out, int64_t activation, bool interleaved,
                     double alpha, double limit) {
    SourceView view(x, {activation, interleaved, alpha, limit});
    const bool one = scale.numel() == 1;
    if (one) view.flatten();
    const Source& s = view.source;
    const Target target = target_of(data, scale_out, false);
    STD_TORCH_CHECK(scale.scalar_type() == ScalarType::Float && (one || scale.numel() == s.rows),
                    "tskernel_native: scale: expected float32, one element or one per row");
    STD_TORCH_CHECK(one || scale.is_contiguous(), "tskernel_native: scale: expected contiguous rows");
    if (s.rows == 0 || s.width == 0) return;
    const Scales scales{static_cast<const float*>(scale.data_ptr()), one ? 0 : 1, 0};
    for_source(view, [&](auto t, auto activation_kind) {
        using T = decltype(t);
        auto go = [&](auto n) {
            const Tiling tiles = tiling(s.rows, ceil_div(s.width, n));
            launch(x, tiles.shape, scaled_kernel<T, n, activation_kind>, s, target, scales, tiles.chunks);
        };
        if (view.wide)
            go(std::integral_constant<int, FULL<T>>{});
        else
            go(std::integral_constant<int, 1>{});
    });
}

}  // namespace tsk

TSK_OPS(m) {
    m.def(
        "quantize_scaled(Tensor x, Tensor scale, Tensor(a!) data, Tensor(b!) scale_out, int activation=0, "
        "bool interleaved=False, float alpha=0.0, float limit=0.0) -> ()");
}

TSK_IMPL(m) { m.impl("quantize_scaled", TORCH_BOX(&tsk::quantize_scaled)); }
