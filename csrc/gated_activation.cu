// silu_and_mul, gelu_and_mul, gelu_tanh_and_mul and swiglu_oai. Shazeer 2020, https://arxiv.org/abs/2002.05202; OpenAI
// 2025, https://arxiv.org/abs/2508.10925.
#include "common/source_host.h"

namespace tsk {

template <typename T, int N>
void launch_gated(const Tensor& x, const Source& s, const Result& out) {
    const Tiling t = tiling(s.rows, ceil_div(s.width, N));
    switch (s.activation) {
        case SILU:
            return launch(x, t.shape, gated_kernel<T, N, SILU>, s, out, t.chunks);
        case GELU:
            return launch(x, t.shape, gated_kernel<T, N, GELU>, s, out, t.chunks);
        case GELU_TANH:
            return launch(x, t.shape, gated_kernel<T, N, GELU_TANH>, s, out, t.chunks);
        default:
            return launch(x, t.shape, gated_kernel<T, N, SWIGLU_OAI>, s, out, t.chunks);
    }
}

void gated_activation(Tensor x, Tensor out, int64_t activation, bool interleaved, double alpha, double limit) {
    STD_TORCH_CHECK(activation >= SILU && activation <= SWIGLU_OAI, "tskernel_native: activation: expected 1 to 4");
    STD_TORCH_CHECK(out.scalar_type() == x.scalar_type(), "tskernel_native: out: expected the dtype of x");
    const SourceView view(x, {activation, interleaved, alpha, limit});
    const RowView to(out);
    STD_TORCH_CHECK(to.rows == view.source.rows && to.width == view.source.width,
                    "tskernel_native: out: expected half the columns of x");
    if (view.source.rows == 0) return;
    const Result result{out.data_ptr(), to.map, to.column};
    for_float(view.type, [&](auto t) {
        using T = decltype(t);
        if (view.wide && to.wide(result.data, FULL<T>, sizeof(T)))
            launch_gated<T, FULL<T>>(x, view.source, result);
        else
            launch_gated<T, 1>(x, view.source, result);
    });
}

}  // namespace tsk

TSK_OPS(m) {
    m.def(
        "gated_activation(Tensor x, Tensor(a!) out, int activation, bool interleaved=False, float alpha=0.0, "
        "float limit=0.0) -> ()");
}

TSK_IMPL(m) { m.impl("gated_activation", TORCH_BOX(&tsk::gated_activation)); }
