// The experts of a token and their weights: a group of 32 lanes for each token, all logits in registers.
#pragma once

#include "../common/lanes.h"
#include "../common/reduce.h"
#include "../common/vector.h"

namespace tsk {

constexpr int MOST_EXPERTS = 512;
constexpr int TOKENS_AT_ONCE = 4;  // of a block

enum Score : int { SCORE_SOFTMAX = 0, SCORE_SIGMOID = 1, SCORE_SQRT_SOFTPLUS = 2 };

struct RouteArgs {
    const void* logits;
    const void* bias;  // null: none
    int bias_size;     // bytes of an element: 4; 2 is the dtype that `bias_half` says
    bool bias_half;
    int64_t token_stride, column, bias_stride;
    int64_t tokens;
    int experts, top_k, score, groups, group_size, kept_groups;
    bool renormalize;
    float scaling;
    float* weights;
    int* ids;
};

TSK_DEVICE float lowest() { return bits_float(0xff800000u); }

// NaN as -inf and +inf as the largest finite value.
TSK_DEVICE float finite_or_dropped(float x) {
    const float most = bits_float(0x7f7fffffu);
    return x == x ? (x > most ? most : x) : lowest();
}

TSK_DEVICE float bias_of(const RouteArgs& args, int expert) {
    const int64_t at = expert * args.bias_stride;
    if (args.bias_size == 4) return static_cast<const float*>(args.bias)[at];
    return args.bias_half ? to_float(static_cast<const fp16*>(args.bias)[at])
                          : to_float(static_cast<const bf16*>(args.bias)[at]);
}

TSK_DEVICE float score_of(int score, float x) {
    if (score == SCORE_SIGMOID) return 1.0f / (1.0f + expf(-x));
    return sqrtf(x > 20.0f ? x : log1pf(expf(x)));
}

// The two best of two pairs.
struct Best2 {
    float first, second;
    TSK_DEVICE void join(float a, float b) {
        const float low = first < a ? first : a;
        first = first < a ? a : first;
        second = second < b ? b : second;
        second = second < low ? low : second;
    }
};

// Every lane of the block takes part. Returns whether an expert's group is among the best ones, in `chosen`.
template <int R>
TSK_DEVICE void choose_groups(const RouteArgs& args, const float (&choice)[R], bool (&chosen)[R]) {
    __shared__ float values[TOKENS_AT_ONCE][MOST_EXPERTS];
    __shared__ Word scores[TOKENS_AT_ONCE][MOST_EXPERTS];
    __shared__ uint8_t kept[TOKENS_AT_ONCE][MOST_EXPERTS];
    const int lane = int(threadIdx.x), team = int(threadIdx.y);
#pragma unroll
    for (int r = 0; r < R; ++r)
        if (lane + r * LANES < args.experts) values[team][lane + r * LANES] = choice[r];
    __syncthreads();
    int share = 1;  // lanes of a group
    while (share * 2 * args.groups <= LANES) share *= 2;
    for (int base = 0; base < args.groups; base += LANES / share) {
        const int group = base + lane / share;
        Best2 best{lowest(), lowest()};
        if (group < args.groups)
            for (int i = lane % share; i < args.group_size; i += share)
                best.join(values[team][group * args.group_size + i], lowest());
        for (int mask = 1; mask < share; mask *= 2) best.join(lane_xor(best.first, mask), lane_xor(best.second, mask));
        const float sum = args.bias && args.group_size > 1 ? best.first + best.second : best.first;
        if (group < args.groups) scores[team][group] = sum == sum ? ordered(sum) : ~Word(0);
    }
    __syncthreads();
    for (int group = lane; group < args.groups; group += LANES) {
        const Word own = scores[team][group];
        int better = 0;
        for (int i = 0; i < args.groups; ++i) {
            const Word other = scores[team][i];
            better += other > own || (other == own && i < group);
        }
        kept[team][group] = better < args.kept_groups;
    }
    __syncthreads();
#pragma unroll
    for (int r = 0; r < R; ++r) {
        const int e = lane + r * LANES;
        chosen[r] = e < args.experts && kept[team][e / args.group_size];
    }
}

// Weights from what the chosen ones have: their logits (softmax) or scores. Lane i holds the i-th; `sum` is that of the
// exponentials of all logits, relative to `most`.
TSK_DEVICE float routing_weight(const RouteArgs& args, float picked, float most, float sum) {
    const bool mine = int(threadIdx.x) < args.top_k;
    float weight = mine ? picked : 0.0f;
    if (args.score == SCORE_SOFTMAX) {
        // Relative to the largest chosen one, which a far larger logit of a dropped group cannot make vanish.
        if (args.renormalize) most = unordered(lanes_max(mine ? ordered(picked) : 0));
        weight = mine && picked > lowest() ? expf(picked - most) : 0.0f;
        if (!args.renormalize) weight = weight / (sum == 0.0f ? 1.0f : sum);
    }
    if (args.renormalize) {
        const float total = reduce_lanes<Sum>(weight);
        weight = weight / (total == 0.0f ? 1.0f : total);
    }
    return weight * args.scaling;
}

// Lane l holds experts l, l + 32, ..., R of them.
template <typename T, int R>
__global__ void __launch_bounds__(LANES* TOKENS_AT_ONCE) route_kernel(TSK_ARGS RouteArgs args) {
    start();
    const int64_t token = int64_t(blockIdx.x) * blockDim.y + threadIdx.y;
    const int lane = int(threadIdx.x);
    const int experts = token < args.tokens ? args.experts : 0;  // the lanes of a missing token still take part
    const T* p = static_cast<const T*>(args.logits) + (experts ? token * args.token_stride : 0);
    float x[R];
#pragma unroll
    for (int r = 0; r < R; ++r) {
        const int e = lane + r * LANES;
        x[r] = e < experts ? finite_or_dropped(to_float(p[e * args.column])) : lowest();
    }
    float most = lowest(), sum = 0.0f;
    if (args.score == SCORE_SOFTMAX && (args.bias || !args.renormalize)) {
#pragma unroll
        for (int r = 0; r < R; ++r) most = most < x[r] ? x[r] : most;
        most = unordered(lanes_max(ordered(most)));
#pragma unroll
        for (int r = 0; r < R; ++r) sum += x[r] > lowest() ? expf(x[r] - most) : 0.0f;
        sum = reduce_lanes<Sum>(sum);
    }
    // `pick` is what the weights come from, `choice` what experts are ranked by.
    float pick[R], choice[R];
#pragma unroll
    for (int r = 0; r < R; ++r) {
        const int e = lane + r * LANES;
        pick[r] = args.score == SCORE_SOFTMAX ? x[r] : score_of(args.score, x[r]);
        choice[r] = x[r];
        if (args.bias && e < experts) {
            const float score = args.score != SCORE_SOFTMAX ? pick[r]
                                : x[r] > lowest()           ? expf(x[r] - most) / sum
                                                            : 0.0f;
            choice[r] = score + bias_of(args, e);
            if (choice[r] != choice[r]) choice[r] = lowest();
        }
    }
    if (args.groups > 1) {
        bool chosen[R];
        choose_groups<R>(args, choice, chosen);
#pragma unroll
        for (int r = 0; r < R; ++r) choice[r] = chosen[r] ? choice[r] : lowest();
    }
    Word key[R];  // 0: taken, or no expert
#pragma unroll
    for (int r = 0; r < R; ++r) key[r] = lane + r * LANES < experts ? ordered(choice[r]) : 0;
    float picked = 0.0f;
    int id = 0;
    for (int i = 0; i < args.top_k; ++i) {
        Word best = 0;
#pragma unroll
        for (int r = 0; r < R; ++r) best = best < key[r] ? key[r] : best;
        best = lanes_max(best);
        Word winner = ~Word(0);
#pragma unroll
        for (int r = R - 1; r >= 0; --r)
            if (key[r] == best) winner = Word(lane + r * LANES);
        winner = lanes_min(winner);
        float value = 0.0f;
#pragma unroll
        for (int r = 0; r < R; ++r)
            if (winner == Word(lane + r * LANES)) value = pick[r], key[r] = 0;
        value = bits_float(lane_read(float_bits(value), int(winner % LANES)));
        if (lane == i) picked = value, id = int(winner);
    }
    const float weight = routing_weight(args, picked, most, sum);
    if (experts && lane < args.top_k) {
        args.weights[token * args.top_k + lane] = weight;
        args.ids[token * args.top_k + lane] = id;
    }
}

}  // namespace tsk
