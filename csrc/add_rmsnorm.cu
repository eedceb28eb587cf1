// fused_add_rmsnorm (out and sum are x and residual) and add_rmsnorm (fresh ones).
#include "common/norm_host.h"

namespace tsk {

void add_rmsnorm(Tensor x, Tensor residual, Tensor weight, Tensor out, Tensor sum, double eps, int64_t accesses) {
    NormPart part(x, weight, out);
    part.add(residual, sum);
    run_norm<NORM_ADD>(x, part, nullptr, eps, 0.0, accesses);
}

void fused_add_rmsnorm(Tensor x, Tensor residual, Tensor weight, double eps, int64_t accesses) {
    NormPart part(x, weight, x);
    part.add(residual, residual);
    run_norm<NORM_ADD>(x, part, nullptr, eps, 0.0, accesses);
}

}  // namespace tsk

TSK_OPS(m) {
    m.def(
        "add_rmsnorm(Tensor x, Tensor residual, Tensor weight, Tensor(a!) out, Tensor(b!) sum, float eps, "
        "int accesses=0) -> ()");
    m.def("fused_add_rmsnorm(Tensor(a!) x, Tensor(b!) residual, Tensor weight, float eps, int accesses=0) -> ()");
}

TSK_IMPL(m) {
    m.impl("add_rmsnorm", TORCH_BOX(&tsk::add_rmsnorm));
    m.impl("fused_add_rmsnorm", TORCH_BOX(&tsk::fused_add_rmsnorm));
}
