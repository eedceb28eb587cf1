// moe_topk. Shazeer et al. 2017, https://arxiv.org/abs/1701.06538; groups and bias: https://arxiv.org/abs/2412.19437.
#include "common/ids_host.h"
#include "kernels/route.cuh"

namespace tsk {

// Calls `f(std::integral_constant<int, R>{})` with registers for the experts of a lane.
template <typename F>
void for_experts(int64_t experts, F f) {
    if (experts <= 1 * LANES) return f(std::integral_constant<int, 1>{});
    if (experts <= 2 * LANES) return f(std::integral_constant<int, 2>{});
    if (experts <= 4 * LANES) return f(std::integral_constant<int, 4>{});
    if (experts <= 8 * LANES) return f(std::integral_constant<int, 8>{});
    if (experts <= 12 * LANES) return f(std::integral_constant<int, 12>{});
    return f(std::integral_constant<int, 16>{});
}

void add_bias(RouteArgs& args, const Tensor& bias) {
    STD_TORCH_CHECK(bias.dim() == 1 && bias.size(0) == args.experts,
                    "tskernel_native: correction_bias: expected one element per expert");
    args.bias = bias.data_ptr();
    args.bias_size = int(element_size(bias.scalar_type()));
    args.bias_half = bias.scalar_type() == ScalarType::Half;
    args.bias_stride = bias.stride(0);
}

// `score`: 0 softmax, 1 sigmoid, 2 sqrt_softplus.
void moe_topk(Tensor router_logits, std::optional<Tensor> correction_bias, Tensor weights, Tensor ids, int64_t top_k,
              int64_t score, bool renormalize, double scaling, int64_t n_group, int64_t topk_group) {
    const int64_t tokens = router_logits.size(0), experts = router_logits.size(1);
    STD_TORCH_CHECK(router_logits.dim() == 2 && experts <= MOST_EXPERTS,
                    "tskernel_native: router_logits: expected at most ", MOST_EXPERTS, " experts");
    STD_TORCH_CHECK(top_k >= 1 && top_k <= experts && top_k <= LANES, "tskernel_native: top_k: expected at most ",
                    LANES, " and no more than experts");
    STD_TORCH_CHECK(n_group >= 1 && experts % n_group == 0, "tskernel_native: n_group: expected a divisor of experts");
    RouteArgs args{};
    args.logits = router_logits.data_ptr();
    args.token_stride = router_logits.stride(0), args.column = router_logits.stride(1);
    args.tokens = tokens, args.experts = int(experts), args.top_k = int(top_k);
    args.score = int(score), args.renormalize = renormalize, args.scaling = float(scaling);
    args.groups = int(n_group), args.group_size = int(experts / n_group), args.kept_groups = int(topk_group);
    if (correction_bias) add_bias(args, *correction_bias);
    STD_TORCH_CHECK(
        weights.scalar_type() == ScalarType::Float && weights.is_contiguous() && weights.numel() == tokens * top_k,
        "tskernel_native: weights: expected contiguous float32");
    args.weights = static_cast<float*>(weights.data_ptr());
    args.ids = int_results(ids, tokens * top_k, "ids");
    if (tokens == 0) return;
    const unsigned teams = tokens > MANY_BLOCKS ? TOKENS_AT_ONCE : 1;
    const Launch shape{dim3(unsigned(ceil_div(tokens, teams))), dim3(LANES, teams)};
    for_float(router_logits.scalar_type(), [&](auto t) {
        using T = decltype(t);
        for_experts(experts, [&](auto r) { launch(router_logits, shape, route_kernel<T, r>, args); });
    });
}

}  // namespace tsk

TSK_OPS(m) {
    m.def(
        "moe_topk(Tensor router_logits, Tensor? correction_bias, Tensor(a!) weights, Tensor(b!) ids, int top_k, "
        "int score=0, bool renormalize=True, float scaling=1.0, int n_group=1, int topk_group=1) -> ()");
}

TSK_IMPL(m) { m.impl("moe_topk", TORCH_BOX(&tsk::moe_topk)); }
