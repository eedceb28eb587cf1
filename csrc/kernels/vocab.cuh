// Rows over a vocabulary: a row is cut into `chunks` blocks, so that one row alone fills the device.
#pragma once

#include "../common/block.h"
#include "../common/vector.h"

namespace tsk {

constexpr int MOST_CHUNKS = 128;
constexpr int MOST_PEAKS = 1024;  // maxima of parts of a row

struct Vocab {
    const void* data;
    int64_t row_stride, column;  // in elements
    int width;                   // of the vocabulary
    int span;                    // elements of a chunk, a multiple of 16 bytes' worth
    unsigned chunks;
    int peaks;  // parts of a chunk, of which each leaves its maximum: a power of two from 8 to BLOCK
};

// Where a block works.
struct Place {
    int64_t row;
    unsigned chunk;
    int first, last;  // elements

    explicit TSK_DEVICE Place(const Vocab& v)
        : row(blockIdx.x / v.chunks),
          chunk(blockIdx.x % v.chunks),
          first(int(chunk) * v.span),
          last(v.width - first < v.span ? v.width : first + v.span) {}
};

// Loads that are on their way at once.
#if defined(TSK_EMULATE)
template <int N>
constexpr int AHEAD_OF = 1;
#else
template <int N>
constexpr int AHEAD_OF = N < 4 ? 4 : 16 / N;
#endif

// Calls f(index, values) for every N neighbours in [first, last).
template <typename T, int N, int AHEAD = AHEAD_OF<N>, typename F>
TSK_DEVICE void for_elements(const Vocab& v, int64_t row, int first, int last, F f) {
    constexpr int STEP = BLOCK * N;
    const T* p = static_cast<const T*>(v.data) + row * v.row_stride;
    for (int at = first + int(threadIdx.x) * N; at < last; at += AHEAD * STEP) {
        Packed<T, N> x[AHEAD];
#pragma unroll
        for (int i = 0; i < AHEAD; ++i)
            if (at + i * STEP < last) x[i] = load<T, N>(p + (N == 1 ? (at + i * STEP) * v.column : at + i * STEP));
#pragma unroll
        for (int i = 0; i < AHEAD; ++i)
            if (at + i * STEP < last) {
                float y[N];
                unpack<T, N>(x[i], y);
                f(at + i * STEP, y);
            }
    }
}

TSK_DEVICE float minus_infinity() { return bits_float(0xff800000u); }
TSK_DEVICE bool is_infinite(float x) { return (float_bits(x) & 0x7fffffffu) == 0x7f800000u; }
TSK_DEVICE float larger(float a, float b) { return a < b ? b : a; }

// LOGITS: NaN as -inf. PROBS: NaN and negative values as 0.
enum Values : int { LOGITS, PROBS };

template <int VALUES>
TSK_DEVICE float clean(float x) {
    if constexpr (VALUES == LOGITS)
        return x == x ? x : minus_infinity();
    else
        return x > 0.0f ? x : 0.0f;
}

// What a value weighs, in fixed point: sums are exact, so they depend on no order of blocks or threads.
constexpr int FIXED = 44;

TSK_DEVICE float power_of_two_float(int e) { return bits_float(Word(e + 127) << 23); }

template <int VALUES>
struct Measure;

// exp((x - best) / temperature), of which 1.0 is 2^44.
template <>
struct Measure<LOGITS> {
    float best, temperature, inverse;

    TSK_DEVICE float scaled(float x) const { return x == best ? 0.0f : (x - best) / temperature; }
    TSK_DEVICE float nearly_scaled(float x) const { return x == best ? 0.0f : (x - best) * inverse; }
    TSK_DEVICE Wide mass(float x) const { return Wide(expf(nearly_scaled(x)) * 17592186044416.0f); }
    TSK_DEVICE float settle(float x) const { return x; }
    TSK_DEVICE bool counts(float x) const { return x > minus_infinity(); }

    // 64 bins for each of the first 24 units below the best, then four for every doubling of the distance.
    TSK_DEVICE int bin(float x) const {
        const float d = x == best ? 0.0f : best - x;
        if (d < 24.0f) return int(d * 64.0f);
        return 1536 + int((float_bits(d) - 0x41c00000u) >> 21);
    }
};

// The value itself; the largest one lies in [2^43, 2^44).
template <>
struct Measure<PROBS> {
    float best;
    float up[2];
    bool infinite;

    TSK_DEVICE float settle(float x) const { return infinite ? float(is_infinite(x)) : x; }
    TSK_DEVICE Wide mass(float x) const { return Wide(x * up[0] * up[1]); }
    TSK_DEVICE bool counts(float x) const { return x > 0.0f; }

    // 32 bins for every halving.
    TSK_DEVICE int bin(float x) const {
        const Word distance = (float_bits(best) - float_bits(x)) >> 18;
        return distance < 2047 ? int(distance) : 2047;
    }

    TSK_DEVICE float total(Wide mass) const {
        if (mass == 0) return 1.0f;
        return float(double(mass) / double(up[0]) / double(up[1]));
    }
};

template <int VALUES>
TSK_DEVICE Measure<VALUES> measure(float best, float temperature) {
    if constexpr (VALUES == LOGITS) {
        return {best, temperature, 1.0f / temperature};
    } else {
        Measure<PROBS> m;
        m.infinite = is_infinite(best);
        m.best = m.infinite ? 1.0f : best;
        // As for the smallest normal value where the best is smaller: less exact, but in range.
        const int exponent = int(float_bits(m.best) >> 23);
        const int up = FIXED - 1 - ((exponent > 1 ? exponent : 1) - 127);
        m.up[0] = power_of_two_float(up / 2), m.up[1] = power_of_two_float(up - up / 2);
        return m;
    }
}

// A row's part of `Work` is zeroed by the first launch of a call.
struct RowState {
    Word arrived[4];
    Word listed;        // entries of the list, which may be more than it holds
    int kept_bins;      // bins before this one are kept whole
    int count_bin;      // the one in which the k-th best value lies; BINS: the filter is off
    int mass_bins[2];   // those between which the nucleus ends; the first one BINS: the filter is off
    int listed_to;      // every value in bins up to here is listed; -1: only those of the bins above
    int drawn;          // the row is finished
    Word before_count;  // values in bins before count_bin
    Wide before_mass;   // in bins before mass_bins[0]
    Wide whole_mass;    // in bins before count_bin
    Wide kept;          // mass
    Wide cut;           // the worst rank that is kept
    Wide best;          // the winner of the race so far
    Word least;         // not 0: all values that may be among the k best are of this key at least, and no bins are used
    Word reserved[9];
};
static_assert(sizeof(RowState) == 128, "the host side counts on it");

constexpr int BINS = 2048;
constexpr int LISTED = 4096;  // ranks that a row can list

struct Work {
    RowState* state;
    float* maxima;  // [rows, MOST_CHUNKS]
    Word* peaks;    // [rows, MOST_PEAKS], ordered
    Word* counts;   // [rows, BINS]
    Wide* masses;
    Wide* list;  // [rows, LISTED]
};

// The first launch: the maxima of every chunk and of its parts, and a clean slate for what follows. `bins` is BINS, or
// 0 where no filter follows.
template <typename T, int N, int VALUES>
__global__ void __launch_bounds__(BLOCK) maxima_kernel(TSK_ARGS Vocab v, TSK_ARGS Work work, int bins) {
    start();
    const Place here(v);
    const int chunks = int(v.chunks), chunk = int(here.chunk);
    for (int i = chunk * BLOCK + int(threadIdx.x); i < bins; i += chunks * BLOCK) {
        work.counts[here.row * BINS + i] = 0;
        work.masses[here.row * BINS + i] = 0;
    }
    if (chunk == 0 && threadIdx.x < sizeof(RowState) / 4)
        reinterpret_cast<Word*>(work.state + here.row)[threadIdx.x] = 0;
    float best = clean<VALUES>(minus_infinity());
    for_elements<T, N>(v, here.row, here.first, here.last, [&](int, const float (&x)[N]) {
#pragma unroll
        for (int i = 0; i < N; ++i) best = larger(best, clean<VALUES>(x[i]));
    });
    if (bins) {
        Word peak = ordered(best);
        const int share = BLOCK / v.peaks;
        for (int mask = 1; mask < share; mask *= 2) {
            const Word other = lane_xor(peak, mask);
            peak = peak > other ? peak : other;
        }
        if (int(threadIdx.x) % share == 0)
            work.peaks[here.row * MOST_PEAKS + chunk * v.peaks + int(threadIdx.x) / share] = peak;
    }
    const Wide most = block_max(ranked(best, 0));
    if (threadIdx.x == 0) work.maxima[here.row * MOST_CHUNKS + chunk] = value_of(most);
}

TSK_DEVICE float row_maximum(const Vocab& v, const Work& work, int64_t row) {
    const float* p = work.maxima + row * MOST_CHUNKS;
    Word best = 0;
    for (int i = int(threadIdx.x) % LANES; i < int(v.chunks); i += LANES) {
        const Word key = ordered(p[i]);
        best = best > key ? best : key;
    }
    return unordered(lanes_max(best));
}

}  // namespace tsk
