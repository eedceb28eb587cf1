// apply_penalties_: repetition, frequency and presence. Keskar et al. 2019, https://arxiv.org/abs/1909.05858.
#include "common/vocab_host.h"
#include "kernels/penalties.cuh"

namespace tsk {

void apply_penalties_(Tensor logits, Tensor prompt_mask, Tensor output_counts, Tensor presence, Tensor frequency,
                      Tensor repetition) {
    VocabView view(logits);
    const int64_t rows = view.rows, width = logits.size(1);
    for (const Tensor* t : {&prompt_mask, &output_counts})
        STD_TORCH_CHECK(t->dim() == 2 && t->size(0) == rows && t->size(1) == width,
                        "tskernel_native: prompt_mask and output_counts: expected the shape of the logits");
    STD_TORCH_CHECK(prompt_mask.scalar_type() == ScalarType::Bool, "tskernel_native: prompt_mask: expected bool");
    STD_TORCH_CHECK(output_counts.scalar_type() == ScalarType::Int, "tskernel_native: output_counts: expected int32");
    Penalties args{};
    args.presence = per_row<float>(presence, rows, ScalarType::Float, "presence_penalty");
    args.frequency = per_row<float>(frequency, rows, ScalarType::Float, "frequency_penalty");
    args.repetition = per_row<float>(repetition, rows, ScalarType::Float, "repetition_penalty");
    if (rows == 0) return;
    args.logits = view.vocab;
    args.prompt = static_cast<const uint8_t*>(prompt_mask.data_ptr());
    args.counts = static_cast<const int*>(output_counts.data_ptr());
    args.prompt_stride = prompt_mask.stride(0), args.counts_stride = output_counts.stride(0);
    args.prompt_column = width == 1 ? 1 : prompt_mask.stride(1);
    args.counts_column = width == 1 ? 1 : output_counts.stride(1);
    const int64_t n = 16 / element_size(view.type);
    view.wide = view.wide && args.prompt_column == 1 && args.counts_column == 1 && aligned(args.prompt, n) &&
                aligned(args.counts, 16) && (rows <= 1 || (args.prompt_stride % n == 0 && args.counts_stride % 4 == 0));
    for_vocab(view, [&](auto t, auto wide) {
        using T = decltype(t);
        launch(logits, view.shape(), penalties_kernel<T, wide>, args);
    });
}

}  // namespace tsk

TSK_OPS(m) {
    m.def(
        "apply_penalties_(Tensor(a!) logits, Tensor prompt_mask, Tensor output_counts, Tensor presence_penalty, "
        "Tensor frequency_penalty, Tensor repetition_penalty) -> ()");
}

TSK_IMPL(m) { m.impl("apply_penalties_", TORCH_BOX(&tsk::apply_penalties_)); }
