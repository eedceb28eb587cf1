// top_k_top_p_sample: temperature, top-k, top-p and a Gumbel race by Philox words.
#include "common/vocab_host.h"
#include "kernels/filter.cuh"

namespace tsk {

void top_k_top_p_sample(Tensor logits, Tensor top_k, Tensor top_p, Tensor temperature, Tensor seed, Tensor offset,
                        Tensor out, Tensor workspace) {
    const VocabView view(logits);
    const int64_t rows = view.rows;
    Rules rules{};
    rules.top_k = per_row<int>(top_k, rows, ScalarType::Int, "top_k");
    rules.top_p = per_row<float>(top_p, rows, ScalarType::Float, "top_p");
    rules.temperature = per_row<float>(temperature, rows, ScalarType::Float, "temperature");
    rules.seed = per_row<Wide>(seed, rows, ScalarType::Long, "seed");
    rules.offset = per_row<Wide>(offset, rows, ScalarType::Long, "offset");
    int* drawn = const_cast<int*>(per_row<int>(out, rows, ScalarType::Int, "out"));
    if (rows == 0) return;
    const Vocab v = view.vocab;
    const Work work = work_of(workspace, rows, true);
    for_vocab(view, [&](auto t, auto n) {
        using T = decltype(t);
        const Launch shape = view.shape();
        launch(logits, shape, maxima_kernel<T, n, LOGITS>, v, work, BINS);
        launch(logits, shape, histogram_kernel<T, n, LOGITS>, v, rules, work);
        launch(logits, shape, list_kernel<T, n, LOGITS>, v, rules, work, drawn);
        launch(logits, shape, race_kernel<T, n>, v, rules, work, drawn);
    });
}

}  // namespace tsk

TSK_OPS(m) {
    m.def(
        "top_k_top_p_sample(Tensor logits, Tensor top_k, Tensor top_p, Tensor temperature, Tensor seed, Tensor offset, "
        "Tensor(a!) out, Tensor(b!) workspace) -> ()");
}

TSK_IMPL(m) { m.impl("top_k_top_p_sample", TORCH_BOX(&tsk::top_k_top_p_sample)); }
