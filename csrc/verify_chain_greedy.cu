// verify_chain_greedy. Leviathan et al. 2023, https://arxiv.org/abs/2211.17192.
#include "common/ids_host.h"
#include "kernels/verify.cuh"

namespace tsk {

void verify_chain_greedy(Tensor draft_tokens, Tensor target_ids, Tensor accepted_len, Tensor tokens) {
    const Ids draft = ids_of(draft_tokens, "draft_tokens"), target = ids_of(target_ids, "target_ids");
    const int64_t rows = draft_tokens.size(0), drafted = draft_tokens.size(1);
    STD_TORCH_CHECK(target_ids.size(0) == rows && target_ids.size(1) == drafted + 1,
                    "tskernel_native: target_ids: expected one column more than draft_tokens");
    int* accepted = int_results(accepted_len, rows, "accepted_len");
    int* out = int_results(tokens, rows * (drafted + 1), "tokens");
    if (rows == 0) return;
    const unsigned teams = rows > MANY_BLOCKS ? 4 : 1;
    const Launch shape{dim3(unsigned(ceil_div(rows, teams))), dim3(LANES, teams)};
    launch(draft_tokens, shape, verify_kernel<LANES>, draft, target, accepted, out, rows, int(drafted));
}

}  // namespace tsk

TSK_OPS(m) {
    m.def(
        "verify_chain_greedy(Tensor draft_tokens, Tensor target_ids, Tensor(a!) accepted_len, Tensor(b!) tokens) -> "
        "()");
}

TSK_IMPL(m) { m.impl("verify_chain_greedy", TORCH_BOX(&tsk::verify_chain_greedy)); }
