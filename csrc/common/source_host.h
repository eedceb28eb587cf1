// Describes what the activation and quantization kernels read and write.
#pragma once

#include "../kernels/quantize.cuh"
#include "plan.h"

namespace tsk {

// Options of a gated activation, in the order in which every op takes them; PLAIN reads the tensor itself.
struct Gate {
    int64_t activation = PLAIN;
    bool interleaved = false;
    double alpha = 0.0, limit = 0.0;
};

struct SourceView {
    Source source{};
    ScalarType type;
    bool wide, contiguous;

    SourceView(const Tensor& x, const Gate& gate) : type(x.scalar_type()) {
        const RowView view(x);
        source.x = x.data_ptr();
        source.map = view.map;
        source.rows = view.rows;
        source.width = gate.activation == PLAIN ? view.width : view.width / 2;
        source.column = view.column;
        source.activation = int(gate.activation);
        source.interleaved = gate.interleaved;
        source.alpha = float(gate.alpha);
        source.limit = float(gate.limit);
        const int64_t size = element_size(type), n = 16 / size;
        wide = view.wide(source.x, n, size) && source.width % n == 0;
        contiguous = view.contiguous;
        STD_TORCH_CHECK(source.width > 0, "tskernel_native: expected rows with columns");
    }

    // One long row instead of many, where nothing depends on rows.
    void flatten() {
        if (source.activation != PLAIN || !contiguous) return;
        source.width *= source.rows;
        source.rows = 1;
        source.map = {1, {1}, {0}};
        wide = aligned(source.x, 16) && source.width % (16 / element_size(type)) == 0;
    }
};

inline Target target_of(const Tensor& data, const Tensor& scale, bool power_of_two) {
    Target t{};
    t.data = data.data_ptr();
    t.scale = scale.data_ptr();
    t.format = format_of(data.scalar_type());
    t.largest = largest_of_format(t.format);
    t.power_of_two = power_of_two;
    t.scale_bytes = scale.scalar_type() == ScalarType::Byte;
    STD_TORCH_CHECK(data.is_contiguous() && scale.is_contiguous(), "tskernel_native: expected contiguous results");
    return t;
}

// Calls `f(T{}, std::integral_constant<int, PLAIN or ANY_ACTIVATION>{})`.
template <typename F>
void for_source(const SourceView& view, F f) {
    for_float(view.type, [&](auto t) {
        if (view.source.activation == PLAIN)
            f(t, std::integral_constant<int, PLAIN>{});
        else
            f(t, std::integral_constant<int, ANY_ACTIVATION>{});
    });
}

}  // namespace tsk
