// Launches the norm kernels: used by each op's file with its mode.
#pragma once

#include "../kernels/norm.cuh"
#include "plan.h"

namespace tsk {

// Describes one tensor of rows; `wide` becomes false where 16-byte accesses cannot reach everything.
struct NormPart {
    NormRows rows{};
    bool wide = true;
    int64_t width = 0;
    ScalarType type, weight_type;

    NormPart(const Tensor& x, const Tensor& weight, const Tensor& out)
        : type(x.scalar_type()), weight_type(weight.scalar_type()) {
        STD_TORCH_CHECK(weight.dim() == 1 && (weight.size(0) == 1 || weight.stride(0) == 1),
                        "tskernel_native: expected a contiguous weight");
        rows.x = x.data_ptr();
        rows.out = out.data_ptr();
        rows.weight = weight.data_ptr();
        describe(x, rows.x, rows.x_map, rows.x_column);
        describe(out, rows.out, rows.out_map, rows.out_column);
        wide = wide && parameter_wide(rows.weight);
    }

    void add(const Tensor& residual, const Tensor& sum) {
        rows.residual = residual.data_ptr();
        rows.sum = sum.data_ptr();
        describe(residual, rows.residual, rows.residual_map, rows.residual_column);
        describe(sum, rows.sum, rows.sum_map, rows.sum_column);
    }

    void shift(const Tensor& bias) {
        STD_TORCH_CHECK(bias.scalar_type() == weight_type && (bias.size(0) == 1 || bias.stride(0) == 1),
                        "tskernel_native: expected a contiguous bias of the dtype of the weight");
        rows.bias = bias.data_ptr();
        wide = wide && parameter_wide(rows.bias);
    }

  private:
    void describe(const Tensor& t, const void* data, RowMap& map, int64_t& column) {
        const RowView view(t);
        STD_TORCH_CHECK(t.scalar_type() == type, "tskernel_native: expected tensors of one dtype");
        STD_TORCH_CHECK(!width || (view.width == width && view.rows == rows.rows),
                        "tskernel_native: expected tensors of one shape");
        width = view.width;
        rows.rows = view.rows;
        map = view.map;
        column = view.column;
        const int64_t size = element_size(type);
        wide = wide && view.wide(data, 16 / size, size);
    }

    bool parameter_wide(const void* p) const { return aligned(p, 16); }
};

template <typename T, typename W, int N, int MODE>
void launch_norm(const Tensor& like, const NormArgs& args, int64_t wanted) {
    const int64_t accesses = ceil_div(args.width, N);
    if (accesses <= LANES) {
        const Tiling t = tiling(args.rows, accesses);
        launch(like, t.shape, norm_kernel<T, W, N, 1, true, MODE>, args);
        return;
    }
    const RowPlan plan = plan_row(args.rows, accesses, wanted);
    const Launch shape{dim3(unsigned(args.rows)), dim3(plan.team)};
    if (plan.accesses == 0) {
        launch(like, shape, norm_long_kernel<T, W, MODE>, args);
    } else if constexpr (N == 1) {
        if (plan.accesses <= 2)
            launch(like, shape, norm_kernel<T, W, N, 2, false, MODE>, args);
        else
            launch(like, shape, norm_kernel<T, W, N, 8, false, MODE>, args);
    } else {
        for_accesses(plan.accesses, [&](auto k) { launch(like, shape, norm_kernel<T, W, N, k, false, MODE>, args); });
    }
}

template <typename T, typename W, int MODE>
void launch_norm_of(const Tensor& like, const NormArgs& args, bool wide, int64_t wanted) {
    if (wide)
        launch_norm<T, W, FULL<T>, MODE>(like, args, wanted);
    else
        launch_norm<T, W, 1, MODE>(like, args, wanted);
}

template <int MODE>
void run_norm(const Tensor& like, const NormPart& first, const NormPart* second, double eps, double offset,
              int64_t wanted) {
    NormArgs args{};
    args.part[0] = first.rows;
    args.rows = first.rows.rows;
    bool wide = first.wide;
    if (second) {
        STD_TORCH_CHECK(second->width == first.width && second->type == first.type,
                        "tskernel_native: expected queries and keys of one head size and dtype");
        STD_TORCH_CHECK(second->weight_type == first.weight_type, "tskernel_native: expected weights of one dtype");
        args.part[1] = second->rows;
        args.rows += second->rows.rows;
        wide = wide && second->wide;
    }
    STD_TORCH_CHECK(first.width < (int64_t(1) << 31) && args.rows < (int64_t(1) << 31),
                    "tskernel_native: too many rows or columns");
    args.width = int(first.width);
    args.eps = float(eps);
    args.offset = float(offset);
    if (args.rows == 0) return;
    for_float(first.type, [&](auto t) {
        using T = decltype(t);
        if (first.weight_type == first.type) {
            launch_norm_of<T, T, MODE>(like, args, wide, wanted);
        } else {
            STD_TORCH_CHECK(first.weight_type == ScalarType::Float, "tskernel_native: weight: expected float32");
            launch_norm_of<T, float, MODE>(like, args, wide, wanted);
        }
    });
}

}  // namespace tsk
