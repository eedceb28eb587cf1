// argmax over a vocabulary, the lowest index among equals.
#include "common/vocab_host.h"
#include "kernels/argmax.cuh"

namespace tsk {

// `partial` holds 128 words for each row; it is not touched where a row is one block.
void argmax(Tensor logits, Tensor out, Tensor partial) {
    const VocabView view(logits);
    int* result = const_cast<int*>(per_row<int>(out, view.rows, ScalarType::Int, "out"));
    if (view.rows == 0) return;
    STD_TORCH_CHECK(partial.scalar_type() == ScalarType::Long && partial.is_contiguous() &&
                        partial.numel() >= view.rows * MOST_CHUNKS,
                    "tskernel_native: partial: expected ", MOST_CHUNKS, " words for each of ", view.rows, " rows");
    Wide* words = static_cast<Wide*>(partial.data_ptr());
    const Vocab v = view.vocab;
    for_vocab(view, [&](auto t, auto n) {
        using T = decltype(t);
        launch(logits, view.shape(), argmax_kernel<T, n>, v, words, result);
    });
    if (v.chunks == 1) return;
    const Launch join{dim3(unsigned(ceil_div(view.rows, GROUPS))), dim3(BLOCK)};
    launch(logits, join, join_argmax_kernel<MOST_CHUNKS>, words, result, view.rows, v.chunks);
}

}  // namespace tsk

TSK_OPS(m) { m.def("argmax(Tensor logits, Tensor(a!) out, Tensor(b!) partial) -> ()"); }

TSK_IMPL(m) { m.impl("argmax", TORCH_BOX(&tsk::argmax)); }
