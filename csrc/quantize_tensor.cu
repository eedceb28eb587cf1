// Quantization by one measured scale: maxima of parts, which every block of the second launch joins for itself.
#include "common/source_host.h"

namespace tsk {

void quantize_tensor(Tensor x, Tensor data, Tensor scale, Tensor partials, bool power_of_two) {
    SourceView view(x, {});
    view.flatten();
    const Source& s = view.source;
    const Target target = target_of(data, scale, power_of_two);
    STD_TORCH_CHECK(partials.scalar_type() == ScalarType::Float && partials.is_contiguous() && partials.numel() > 0,
                    "tskernel_native: partials: expected float32");
    if (s.rows == 0 || s.width == 0) return;
    float* maxima = static_cast<float*>(partials.data_ptr());
    for_float(view.type, [&](auto t) {
        using T = decltype(t);
        auto go = [&](auto n) {
            const Tiling tiles = tiling(s.rows, ceil_div(s.width, n));
            const unsigned blocks = unsigned(std::min<int64_t>(tiles.tiles, partials.numel()));
            launch(x, {dim3(blocks), tiles.shape.block}, amax_kernel<T, n>, s, maxima, tiles.chunks, tiles.tiles);
            const Scales scales{maxima, 0, int(blocks)};
            launch(x, tiles.shape, scaled_kernel<T, n, PLAIN>, s, target, scales, tiles.chunks);
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
        "quantize_tensor(Tensor x, Tensor(a!) data, Tensor(b!) scale, Tensor(c!) partials, bool power_of_two=False) "
        "-> ()");
}

TSK_IMPL(m) { m.impl("quantize_tensor", TORCH_BOX(&tsk::quantize_tensor)); }
