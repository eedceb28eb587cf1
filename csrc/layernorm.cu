// layernorm. Ba, Kiros & Hinton 2016, https://arxiv.org/abs/1607.06450.
#include "common/norm_host.h"

namespace tsk {

void layernorm(Tensor x, Tensor weight, std::optional<Tensor> bias, Tensor out, double eps) {
    NormPart part(x, weight, out);
    if (bias) part.shift(*bias);
    run_norm<NORM_LAYER>(x, part, nullptr, eps, 0.0, 0);
}

}  // namespace tsk

TSK_OPS(m) { m.def("layernorm(Tensor x, Tensor weight, Tensor? bias, Tensor(a!) out, float eps) -> ()"); }

TSK_IMPL(m) { m.impl("layernorm", TORCH_BOX(&tsk::layernorm)); }
