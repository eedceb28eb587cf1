// Penalties on tokens that were seen. Most were not: their logits are neither read nor written.
#pragma once

#include "vocab.cuh"

namespace tsk {

struct Penalties {
    Vocab logits;  // data is written
    const uint8_t* prompt;
    const int* counts;
    int64_t prompt_stride, prompt_column, counts_stride, counts_column;
    const float* presence;
    const float* frequency;
    const float* repetition;
};

template <typename T, int N>
__global__ void __launch_bounds__(BLOCK) penalties_kernel(TSK_ARGS Penalties args) {
    start();
    const Place here(args.logits);
    const float presence = args.presence[here.row], frequency = args.frequency[here.row];
    const float repetition = args.repetition[here.row];
    T* logits = static_cast<T*>(const_cast<void*>(args.logits.data)) + here.row * args.logits.row_stride;
    const uint8_t* prompt = args.prompt + here.row * args.prompt_stride;
    const int* counts = args.counts + here.row * args.counts_stride;
    for (int at = here.first + int(threadIdx.x) * N; at < here.last; at += BLOCK * N) {
        const Words<4 * N> c = load_words<4 * N>(counts + (N == 1 ? at * args.counts_column : at));
        const Words<N> p = load_words<N>(prompt + (N == 1 ? at * args.prompt_column : at));
        int count[N];
        bool in_prompt[N], any = false;
#pragma unroll
        for (int i = 0; i < N; ++i) {
            count[i] = int(c.w[i]);
            if constexpr (N == 1)
                in_prompt[i] = p.w != 0;
            else
                in_prompt[i] = (p.w[i / 4] >> (8 * (i % 4)) & 0xffu) != 0;
            any = any || count[i] != 0 || in_prompt[i];
        }
        if (!any) continue;
        T* here_at = logits + (N == 1 ? at * args.logits.column : at);
        float x[N];
        unpack<T, N>(load<T, N>(here_at), x);
#pragma unroll
        for (int i = 0; i < N; ++i) {
            const bool output = count[i] > 0;
            if (output || in_prompt[i]) x[i] = x[i] > 0.0f ? x[i] / repetition : x[i] * repetition;
            x[i] = x[i] - frequency * float(count[i]);
            x[i] = x[i] - presence * (output ? 1.0f : 0.0f);
        }
        store<T, N>(here_at, pack<T, N>(x));
    }
}

}  // namespace tsk
