// min_p_renorm. Nguyen et al. 2024, https://arxiv.org/abs/2407.01082.
#include "common/vocab_host.h"
#include "kernels/min_p.cuh"

namespace tsk {

void min_p_renorm(Tensor probs, Tensor min_p, Tensor out, Tensor workspace) {
    VocabView view(probs);
    check_result(out, probs);
    const float* share = per_row<float>(min_p, view.rows, ScalarType::Float, "min_p");
    if (view.rows == 0) return;
    view.wide = view.wide && aligned(out.data_ptr(), 16);
    const Vocab v = view.vocab;
    const Work work = work_of(workspace, view.rows, false);
    for_vocab(view, [&](auto t, auto n) {
        using T = decltype(t);
        const Launch shape = view.shape();
        launch(probs, shape, maxima_kernel<T, n, PROBS>, v, work, 0);
        launch(probs, shape, min_p_mass_kernel<T, n>, v, share, work);
        launch(probs, shape, min_p_kernel<T, n>, v, share, work, static_cast<T*>(out.data_ptr()));
    });
}

}  // namespace tsk

TSK_OPS(m) { m.def("min_p_renorm(Tensor probs, Tensor min_p, Tensor(a!) out, Tensor(b!) workspace) -> ()"); }

TSK_IMPL(m) { m.impl("min_p_renorm", TORCH_BOX(&tsk::min_p_renorm)); }
