// Describes rows over a vocabulary, cuts them into chunks, and lays out the workspace of the filters.
#pragma once

#include "../kernels/vocab.cuh"
#include "host.h"

namespace tsk {

constexpr int64_t FEW_VALUES = 1024;  // a chunk with fewer gives no block enough to do
constexpr int64_t MANY_CHUNKS = 792;  // blocks of a launch: two rounds of three for each of an H200's multiprocessors

struct VocabView {
    Vocab vocab{};
    int64_t rows;
    ScalarType type;
    bool wide;

    explicit VocabView(const Tensor& x, bool writes_contiguous = false) : rows(x.size(0)), type(x.scalar_type()) {
        STD_TORCH_CHECK(x.dim() == 2 && x.size(1) > 0 && x.size(1) < (int64_t(1) << 31) - 65536,
                        "tskernel_native: expected rows of a vocabulary");
        vocab.data = x.data_ptr();
        vocab.row_stride = x.stride(0);
        vocab.column = x.size(1) == 1 ? 1 : x.stride(1);
        vocab.width = int(x.size(1));
        const int64_t size = element_size(type), n = 16 / size;
        wide = vocab.column == 1 && vocab.width % n == 0 && (rows <= 1 || vocab.row_stride % n == 0) &&
               aligned(vocab.data, 16);
        cut_up(n);
    }

    Launch shape() const { return {dim3(unsigned(rows * vocab.chunks)), dim3(BLOCK)}; }

  private:
    void cut_up(int64_t n) {
        if (rows == 0) return;
        const int64_t width = vocab.width, useful = ceil_div(width, FEW_VALUES);
        const int64_t chunks = std::min<int64_t>({useful, MOST_CHUNKS, std::max<int64_t>(1, MANY_CHUNKS / rows)});
        const int64_t span = ceil_div(ceil_div(width, chunks), BLOCK * n) * BLOCK * n;
        vocab.span = int(span);
        vocab.chunks = unsigned(ceil_div(width, span));
        vocab.peaks = BLOCK;
        while (vocab.peaks * int(vocab.chunks) > MOST_PEAKS) vocab.peaks /= 2;
        STD_TORCH_CHECK(rows * vocab.chunks < (int64_t(1) << 31), "tskernel_native: too many rows: ", rows);
    }
};

// Calls `f(T{}, n)` with the values of one access.
template <typename F>
void for_vocab(const VocabView& view, F f) {
    for_float(view.type, [&](auto t) {
        using T = decltype(t);
        if (view.wide)
            f(t, std::integral_constant<int, FULL<T>>{});
        else
            f(t, std::integral_constant<int, 1>{});
    });
}

// `workspace` is bytes from torch's allocator, of any content. Without `filters` there are no bins and no lists.
inline Work work_of(const Tensor& workspace, int64_t rows, bool filters) {
    const int64_t head = int64_t(sizeof(RowState)) + MOST_CHUNKS * 4;
    const int64_t each = head + (filters ? BINS * 12 + LISTED * 8 + MOST_PEAKS * 4 : 0);
    STD_TORCH_CHECK(
        workspace.scalar_type() == ScalarType::Byte && workspace.is_contiguous() && workspace.numel() >= rows * each,
        "tskernel_native: workspace: expected ", each, " bytes for each of ", rows, " rows");
    char* p = static_cast<char*>(workspace.data_ptr());
    STD_TORCH_CHECK(aligned(p, 16), "tskernel_native: workspace: expected it at a 16-byte boundary");
    auto take = [&](int64_t bytes) {
        char* at = p;
        p += rows * bytes;
        return at;
    };
    Work work{};
    work.state = reinterpret_cast<RowState*>(take(sizeof(RowState)));
    work.maxima = reinterpret_cast<float*>(take(MOST_CHUNKS * 4));
    if (filters) {
        work.masses = reinterpret_cast<Wide*>(take(BINS * 8));
        work.list = reinterpret_cast<Wide*>(take(LISTED * 8));
        work.counts = reinterpret_cast<Word*>(take(BINS * 4));
        work.peaks = reinterpret_cast<Word*>(take(MOST_PEAKS * 4));
    }
    return work;
}

template <typename T>
const T* per_row(const Tensor& t, int64_t rows, ScalarType type, const char* name) {
    STD_TORCH_CHECK(t.dim() == 1 && t.size(0) == rows && t.scalar_type() == type && (rows <= 1 || t.stride(0) == 1),
                    "tskernel_native: ", name, ": expected one contiguous element per row");
    return static_cast<const T*>(t.data_ptr());
}

inline void check_result(const Tensor& out, const Tensor& x) {
    STD_TORCH_CHECK(out.is_contiguous() && out.dim() == 2 && out.size(0) == x.size(0) && out.size(1) == x.size(1) &&
                        out.scalar_type() == x.scalar_type(),
                    "tskernel_native: out: expected a contiguous tensor like the input");
}

}  // namespace tsk
