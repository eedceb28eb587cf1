// moe_dispatch: slots in the order of their experts, every expert's in whole blocks.
#include "common/ids_host.h"
#include "kernels/dispatch.cuh"

namespace tsk {

// `counts` holds a word for each expert and each 4096 slots; it is not touched where there are no more than those.
void moe_dispatch(Tensor topk_ids, std::optional<Tensor> expert_map, Tensor sorted_token_ids, Tensor expert_ids,
                  Tensor num_tokens_post_padded, Tensor counts, int64_t num_experts, int64_t block_size) {
    const int64_t slots = topk_ids.size(0) * topk_ids.size(1), places = sorted_token_ids.numel();
    STD_TORCH_CHECK(num_experts >= 1 && num_experts <= MOST_EXPERTS, "tskernel_native: num_experts: expected 1 to ",
                    MOST_EXPERTS);
    STD_TORCH_CHECK(block_size >= 1 && places < (int64_t(1) << 31) - SEGMENT && block_size < (int64_t(1) << 31),
                    "tskernel_native: expected blocks of at least 1, and fewer places");
    DispatchArgs args{};
    args.ids = ids_of(topk_ids, "topk_ids");
    args.top_k = int(topk_ids.size(1)), args.experts = int(num_experts), args.block_size = int(block_size);
    args.slots = int(slots), args.places = int(places);
    args.segments = int(std::max<int64_t>(1, ceil_div(slots, SEGMENT)));
    if (expert_map) {
        STD_TORCH_CHECK(expert_map->scalar_type() == ScalarType::Int && expert_map->is_contiguous(),
                        "tskernel_native: expert_map: expected contiguous int32");
        args.map = static_cast<const int*>(expert_map->data_ptr());
        args.known = int(expert_map->numel());
    }
    args.sorted = int_results(sorted_token_ids, places, "sorted_token_ids");
    args.owners = int_results(expert_ids, places / block_size, "expert_ids");
    args.padded = int_results(num_tokens_post_padded, 1, "num_tokens_post_padded");
    const int64_t need = args.segments > 1 ? args.segments * num_experts : 0;
    STD_TORCH_CHECK(counts.scalar_type() == ScalarType::Int && counts.is_contiguous() && counts.numel() >= need,
                    "tskernel_native: counts: expected ", need, " elements of int32");
    args.counts = static_cast<Word*>(counts.data_ptr());
    const Launch shape{dim3(unsigned(args.segments)), dim3(DISPATCH_THREADS)};
    if (args.segments == 1) return launch(topk_ids, shape, dispatch_kernel<SLOTS_PER_THREAD>, args);
    launch(topk_ids, shape, count_kernel<SLOTS_PER_THREAD>, args);
    launch(topk_ids, shape, dispatch_kernel<SLOTS_PER_THREAD>, args);
}

}  // namespace tsk

TSK_OPS(m) {
    m.def(
        "moe_dispatch(Tensor topk_ids, Tensor? expert_map, Tensor(a!) sorted_token_ids, Tensor(b!) expert_ids, "
        "Tensor(c!) num_tokens_post_padded, Tensor(d!) counts, int num_experts, int block_size) -> ()");
}

TSK_IMPL(m) { m.impl("moe_dispatch", TORCH_BOX(&tsk::moe_dispatch)); }
