// Quantization, of an activation too, by a measured scale per row, per group of columns, or per block of both.
#include "common/source_host.h"

namespace tsk {

template <typename T, int ACTIVATION>
void launch_any(const Tensor& x, const Source& s, const Target& target, int64_t group, int64_t height, int64_t matrix) {
    const int64_t across = ceil_div(s.width, group), down = ceil_div(matrix, height);
    const int64_t units = s.rows / matrix * down * across;
    const unsigned team = std::min(group, s.width) * height > 512 ? 256 : LANES;
    const unsigned teams = team == LANES && units > MANY_BLOCKS ? 4 : 1;
    const Launch shape{dim3(unsigned(ceil_div(units, teams))), dim3(team, teams)};
    launch(x, shape, any_group_kernel<T, ACTIVATION>, s, target, group, height, matrix, units);
}

template <typename T, int ACTIVATION>
void launch_rows(const Tensor& x, const Source& s, const Target& target) {
    constexpr int N = FULL<T>;
    const RowPlan plan = plan_row(s.rows, s.width / N);
    if (plan.accesses == 0) return launch_any<T, ACTIVATION>(x, s, target, s.width, 1, 1);
    const unsigned teams = plan.team == LANES && s.rows > MANY_BLOCKS ? 4 : 1;
    const Launch shape{dim3(unsigned(ceil_div(s.rows, teams))), dim3(plan.team, teams)};
    for_accesses(plan.accesses, [&](auto k) { launch(x, shape, token_kernel<T, N, k, ACTIVATION>, s, target); });
}

template <typename T, int ACTIVATION>
void launch_groups(const Tensor& x, const SourceView& view, const Target& target, int64_t group, int64_t height,
                   int64_t matrix) {
    constexpr int N = FULL<T>;
    const Source& s = view.source;
    const int64_t lanes = group / N;
    if (!view.wide || height > 1 || target.format == INT8)
        return launch_any<T, ACTIVATION>(x, s, target, group, height, matrix);
    if (group == s.width && target.format != FP4 && !target.scale_bytes)
        return launch_rows<T, ACTIVATION>(x, s, target);
    if (group % N || lanes > LANES || (lanes & (lanes - 1)))
        return launch_any<T, ACTIVATION>(x, s, target, group, height, matrix);
    const Tiling t = tiling(s.rows, s.width / N, lanes);
    launch(x, t.shape, group_kernel<T, N, ACTIVATION>, s, target, int(lanes), t.chunks);
}

// `group` columns by `height` rows share a scale. Rows are counted within the last but one dim of x.
void quantize_groups(Tensor x, Tensor data, Tensor scale, int64_t group, int64_t height, bool power_of_two,
                     int64_t activation, bool interleaved, double alpha, double limit) {
    const SourceView view(x, {activation, interleaved, alpha, limit});
    const Target target = target_of(data, scale, power_of_two);
    const int64_t matrix = height > 1 ? x.size(x.dim() - 2) : 1;
    STD_TORCH_CHECK(group > 0 && height > 0, "tskernel_native: expected groups of at least 1");
    STD_TORCH_CHECK(target.format != FP4 || group % 2 == 0, "tskernel_native: expected an even group for fp4");
    if (view.source.rows == 0) return;
    for_source(view, [&](auto t, auto kind) {
        using T = decltype(t);
        launch_groups<T, kind>(x, view, target, group, height, matrix);
    });
}

// One scale per row.
void quantize_rows(Tensor x, Tensor data, Tensor scale, bool power_of_two, int64_t activation, bool interleaved,
                   double alpha, double limit) {
    const SourceView view(x, {activation, interleaved, alpha, limit});
    const Target target = target_of(data, scale, power_of_two);
    const Source& s = view.source;
    if (s.rows == 0) return;
    for_source(view, [&](auto t, auto kind) {
        using T = decltype(t);
        if (view.wide)
            launch_rows<T, kind>(x, s, target);
        else
            launch_any<T, kind>(x, s, target, s.width, 1, 1);
    });
}

}  // namespace tsk

TSK_OPS(m) {
    m.def(
        "quantize_groups(Tensor x, Tensor(a!) data, Tensor(b!) scale, int group, int height=1, "
        "bool power_of_two=False, int activation=0, bool interleaved=False, float alpha=0.0, float limit=0.0) -> ()");
    m.def(
        "quantize_rows(Tensor x, Tensor(a!) data, Tensor(b!) scale, bool power_of_two=False, int activation=0, "
        "bool interleaved=False, float alpha=0.0, float limit=0.0) -> ()");
}

TSK_IMPL(m) {
    m.impl("quantize_groups", TORCH_BOX(&tsk::quantize_groups));
    m.impl("quantize_rows", TORCH_BOX(&tsk::quantize_rows));
}
