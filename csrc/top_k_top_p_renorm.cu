// top_k_renorm and top_p_renorm. Holtzman et al. 2020, https://arxiv.org/abs/1904.09751.
#include "common/vocab_host.h"
#include "kernels/filter.cuh"

namespace tsk {

void renorm(const Tensor& probs, const Rules& rules, const Tensor& out, const Tensor& workspace) {
    VocabView view(probs);
    check_result(out, probs);
    if (view.rows == 0) return;
    view.wide = view.wide && aligned(out.data_ptr(), 16);
    const Vocab v = view.vocab;
    const Work work = work_of(workspace, view.rows, true);
    for_vocab(view, [&](auto t, auto n) {
        using T = decltype(t);
        const Launch shape = view.shape();
        launch(probs, shape, maxima_kernel<T, n, PROBS>, v, work, BINS);
        launch(probs, shape, histogram_kernel<T, n, PROBS>, v, rules, work);
        launch(probs, shape, list_kernel<T, n, PROBS>, v, rules, work, static_cast<int*>(nullptr));
        launch(probs, shape, renorm_kernel<T, n>, v, work, static_cast<T*>(out.data_ptr()));
    });
}

void top_k_renorm(Tensor probs, Tensor top_k, Tensor out, Tensor workspace) {
    Rules rules{};
    rules.top_k = per_row<int>(top_k, probs.size(0), ScalarType::Int, "top_k");
    renorm(probs, rules, out, workspace);
}

void top_p_renorm(Tensor probs, Tensor top_p, Tensor out, Tensor workspace) {
    Rules rules{};
    rules.top_p = per_row<float>(top_p, probs.size(0), ScalarType::Float, "top_p");
    renorm(probs, rules, out, workspace);
}

}  // namespace tsk

TSK_OPS(m) {
    m.def("top_k_renorm(Tensor probs, Tensor top_k, Tensor(a!) out, Tensor(b!) workspace) -> ()");
    m.def("top_p_renorm(Tensor probs, Tensor top_p, Tensor(a!) out, Tensor(b!) workspace) -> ()");
}

TSK_IMPL(m) {
    m.impl("top_k_renorm", TORCH_BOX(&tsk::top_k_renorm));
    m.impl("top_p_renorm", TORCH_BOX(&tsk::top_p_renorm));
}
