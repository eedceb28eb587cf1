// Integer ids in memory.
#pragma once

#include "lanes.h"

namespace tsk {

// int32 or int64 ids [rows, columns] with any strides.
struct Ids {
    const void* data;
    int64_t row_stride, column;
    bool wide;

    TSK_DEVICE int64_t at(int64_t row, int64_t i) const {
        const int64_t offset = row * row_stride + i * column;
        return wide ? static_cast<const int64_t*>(data)[offset] : static_cast<const int*>(data)[offset];
    }
};

}  // namespace tsk
