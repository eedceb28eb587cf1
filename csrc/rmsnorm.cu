// rmsnorm, gemma_rmsnorm (offset 1) and qk_rmsnorm. Zhang & Sennrich 2019, https://arxiv.org/abs/1910.07467.
#include "common/norm_host.h"

namespace tsk {

void rmsnorm(Tensor x, Tensor weight, Tensor out, double eps, double offset, int64_t accesses) {
    run_norm<NORM_RMS>(x, NormPart(x, weight, out), nullptr, eps, offset, accesses);
}

void qk_rmsnorm(Tensor q, Tensor k, Tensor q_weight, Tensor k_weight, Tensor q_out, Tensor k_out, double eps) {
    const NormPart second(k, k_weight, k_out);
    run_norm<NORM_RMS>(q, NormPart(q, q_weight, q_out), &second, eps, 0.0, 0);
}

}  // namespace tsk

TSK_OPS(m) {
    m.def("rmsnorm(Tensor x, Tensor weight, Tensor(a!) out, float eps, float offset=0.0, int accesses=0) -> ()");
    m.def(
        "qk_rmsnorm(Tensor q, Tensor k, Tensor q_weight, Tensor k_weight, Tensor(a!) q_out, Tensor(b!) k_out, "
        "float eps) -> ()");
}

TSK_IMPL(m) {
    m.impl("rmsnorm", TORCH_BOX(&tsk::rmsnorm));
    m.impl("qk_rmsnorm", TORCH_BOX(&tsk::qk_rmsnorm));
}
