// Describes integer ids.
#pragma once

#include "host.h"
#include "ids.h"

namespace tsk {

inline Ids ids_of(const Tensor& t, const char* name) {
    const bool wide = t.scalar_type() == ScalarType::Long;
    STD_TORCH_CHECK(t.dim() == 2 && (wide || t.scalar_type() == ScalarType::Int), "tskernel_native: ", name,
                    ": expected rows of int32 or int64");
    return {t.data_ptr(), t.stride(0), t.stride(1), wide};
}

inline int* int_results(const Tensor& t, int64_t count, const char* name) {
    STD_TORCH_CHECK(t.scalar_type() == ScalarType::Int && t.is_contiguous() && t.numel() == count,
                    "tskernel_native: ", name, ": expected ", count, " contiguous elements of int32");
    return static_cast<int*>(t.data_ptr());
}

}  // namespace tsk
