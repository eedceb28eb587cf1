// A stable counting sort of slots by expert, every expert's places padded to whole blocks.
#pragma once

#include "../common/ids.h"
#include "route.cuh"

namespace tsk {

constexpr int DISPATCH_THREADS = 1024;
constexpr int DISPATCH_TEAMS = DISPATCH_THREADS / LANES;
constexpr int SLOTS_PER_THREAD = 4;
constexpr int SEGMENT = DISPATCH_THREADS * SLOTS_PER_THREAD;  // slots of a block

// In the kernels, SLOTS is SLOTS_PER_THREAD.

struct DispatchArgs {
    Ids ids;
    int top_k, experts, block_size;
    int slots, places, segments;
    const int* map;  // global to local experts, or null
    int known;
    Word* counts;  // [segments, experts], where there are several segments
    int* sorted;
    int* owners;
    int* padded;
};

// Slots that are skipped belong to expert `experts`.
TSK_DEVICE int expert_of(const DispatchArgs& args, int slot) {
    const int64_t token = slot / args.top_k;
    int64_t id = args.ids.at(token, slot - token * args.top_k);
    if (args.map) id = id >= 0 && id < args.known ? args.map[id] : -1;
    return id >= 0 && id < args.experts ? int(id) : args.experts;
}

// The first of two launches: slots of every expert in every segment.
template <int SLOTS>
__global__ void __launch_bounds__(DISPATCH_THREADS, 1) count_kernel(TSK_ARGS DispatchArgs args) {
    start();
    __shared__ Word count[MOST_EXPERTS + 1];
    for (int e = int(threadIdx.x); e <= args.experts; e += DISPATCH_THREADS) count[e] = 0;
    __syncthreads();
    const int first = int(blockIdx.x) * (DISPATCH_THREADS * SLOTS) + int(threadIdx.x);
#pragma unroll
    for (int i = 0; i < SLOTS; ++i) {
        const int slot = first + i * DISPATCH_THREADS;
        if (slot < args.slots) atomic_add(&count[expert_of(args, slot)], Word(1));
    }
    __syncthreads();
    for (int e = int(threadIdx.x); e < args.experts; e += DISPATCH_THREADS)
        args.counts[int64_t(blockIdx.x) * args.experts + e] = count[e];
}

// The exclusive sum over DISPATCH_THREADS threads.
TSK_DEVICE Word dispatch_scan(Word v) {
    __shared__ Word parts[DISPATCH_TEAMS];
    const int lane = int(threadIdx.x) % LANES, team = int(threadIdx.x) / LANES;
    const Word upto = Word(lanes_scan(v, lane));
    if (lane == LANES - 1) parts[team] = upto;
    __syncthreads();
    Word before = upto - v;
    for (int i = 0; i < team; ++i) before += parts[i];
    return before;
}

// Places without a slot, and the expert of every block: shared out among blocks and teams.
TSK_DEVICE void fill_rest(const DispatchArgs& args, const Word* start, const Word* total) {
    const int lane = int(threadIdx.x) % LANES, team = int(threadIdx.x) / LANES;
    const int teams = int(gridDim.x) * DISPATCH_TEAMS;
    for (int e = team * int(gridDim.x) + int(blockIdx.x); e < args.experts; e += teams) {
        const int end = int(start[e + 1]);
        for (int i = int(start[e] + total[e]) + lane; i < end; i += LANES) args.sorted[i] = args.slots;
        for (int b = int(start[e]) / args.block_size + lane; b < end / args.block_size; b += LANES) args.owners[b] = e;
    }
    const int used = int(start[args.experts]), step = int(gridDim.x) * DISPATCH_THREADS;
    const int first = int(blockIdx.x) * DISPATCH_THREADS + int(threadIdx.x);
    for (int i = used + first; i < args.places; i += step) args.sorted[i] = args.slots;
    for (int b = used / args.block_size + first; b < args.places / args.block_size; b += step) args.owners[b] = -1;
    if (first == 0) args.padded[0] = used;
}

// The only launch of one segment, or the second one of several.
template <int SLOTS>
__global__ void __launch_bounds__(DISPATCH_THREADS, 1) dispatch_kernel(TSK_ARGS DispatchArgs args) {
    start();
    __shared__ uint16_t ahead[DISPATCH_TEAMS][MOST_EXPERTS + 1];  // slots of an expert in earlier teams
    __shared__ Word start[MOST_EXPERTS + 1], total[MOST_EXPERTS], earlier[MOST_EXPERTS];
    const int lane = int(threadIdx.x) % LANES, team = int(threadIdx.x) / LANES, me = int(threadIdx.x);
    for (int e = lane; e <= args.experts; e += LANES) ahead[team][e] = 0;
    lanes_sync();
    // A team walks through neighbouring slots in order, so ranks are stable.
    const int first = int(blockIdx.x) * (DISPATCH_THREADS * SLOTS) + team * LANES * SLOTS + lane;
    int expert[SLOTS], rank[SLOTS];
#pragma unroll
    for (int i = 0; i < SLOTS; ++i)
        expert[i] = first + i * LANES < args.slots ? expert_of(args, first + i * LANES) : args.experts;
#pragma unroll
    for (int i = 0; i < SLOTS; ++i) {
        const Word same = lanes_equal<10>(Word(expert[i]));
        const int before = ahead[team][expert[i]], below = count_bits(same & ((Word(1) << lane) - 1));
        rank[i] = before + below;
        lanes_sync();
        if (below == 0) ahead[team][expert[i]] = uint16_t(before + count_bits(same));
        lanes_sync();
    }
    __syncthreads();
    Word sum = 0;
    if (me < args.experts) {
        for (int t = 0; t < DISPATCH_TEAMS; ++t) {
            const Word n = ahead[t][me];
            ahead[t][me] = uint16_t(sum);
            sum += n;
        }
        Word before = 0;
        if (args.segments > 1) {
            sum = 0;
            for (int s = 0; s < args.segments; ++s) {
                const Word n = args.counts[int64_t(s) * args.experts + me];
                before += s < int(blockIdx.x) ? n : 0;
                sum += n;
            }
        }
        earlier[me] = before, total[me] = sum;
    }
    const Word whole = (sum + Word(args.block_size) - 1) / Word(args.block_size) * Word(args.block_size);
    const Word begin = dispatch_scan(whole);
    if (me < args.experts) start[me] = begin;
    if (me == args.experts) start[me] = begin;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < SLOTS; ++i) {
        const int e = expert[i];
        if (e < args.experts) args.sorted[start[e] + earlier[e] + ahead[team][e] + Word(rank[i])] = first + i * LANES;
    }
    fill_rest(args, start, total);
}

}  // namespace tsk
