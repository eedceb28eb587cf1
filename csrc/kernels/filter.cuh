// Top-k and top-p without a sort: a histogram of the distance from the best value, then an exact search among the
// values of the bins in which the filters end. Everything that is kept has a rank (value, then lower index) of at least
// `cut`.
#pragma once

#include "philox.cuh"
#include "vocab.cuh"

namespace tsk {

constexpr int AT_LEAST = 3;  // blocks at a time: without a number the compiler spills to make room for more

// Parameters of rows, contiguous; a missing one is off.
struct Rules {
    const int* top_k;
    const float* top_p;
    const float* temperature;
    const Wide* seed;
    const Wide* offset;
};

// The parameters of one row. The filters are off at count == width and at share >= 1.
struct Rule {
    int count;
    double share;
    float temperature;
    bool counted, shared;

    TSK_DEVICE Rule(const Rules& rules, int64_t row, int width) : count(width), share(1.0), temperature(1.0f) {
        if (rules.top_k) {
            const int k = rules.top_k[row];
            if (k > 0 && k < width) count = k;
        }
        if (rules.top_p) {
            const float p = rules.top_p[row];
            share = p > 0.0f ? double(p) : 0.0;
        }
        if (rules.temperature) {
            const float t = rules.temperature[row];
            const float most = 3.4028234663852886e38f;
            if (!(t > 0.0f)) count = 1;
            temperature = t > 0.0f ? (t < most ? t : most) : 1.0f;
        }
        counted = count < width;
        shared = share < 1.0;
    }

    // The mass that the nucleus must reach: of nothing, the best value still stays.
    TSK_DEVICE Wide goal(Wide mass) const {
        const Wide want = Wide(ceil(share * double(mass)));
        return want ? want : 1;
    }
    TSK_DEVICE bool off() const { return !counted && !shared; }
};

// Sums of 64 bits in shared memory by 32-bit atomics: the high words are rarely touched.
TSK_DEVICE void add_mass(Word* low, Word* high, Wide mass) {
    const Word m = Word(mass);
    const Word old = atomic_add(low, m);
    const Word up = Word(mass >> 32) + Word(Word(old + m) < old);
    if (up) atomic_add(high, up);
}

struct Found {
    int bin;      // the number of bins where none reaches the goal
    Wide before;  // of the bins in front of it
};

// The first bin at which the running sum of this and all earlier bins reaches the goal. Thread i owns the bins from
// i * EACH on; `amount(j)` is that of its j-th.
template <int EACH, typename F>
TSK_DEVICE Found first_reaching(F amount, Wide start, Wide goal) {
    __shared__ Found found;
    Wide sum = 0;
#pragma unroll
    for (int j = 0; j < EACH; ++j) sum += amount(j);
    Wide before = start + block_scan(sum);
    const Wide whole = start + block_sum(sum);
    if (threadIdx.x == 0) found = {EACH * BLOCK, whole};
    __syncthreads();
    if (before < goal && before + sum >= goal) {
        for (int j = 0; j < EACH; ++j) {
            const Wide a = amount(j);
            if (before + a >= goal) {
                found = {int(threadIdx.x) * EACH + j, before};
                break;
            }
            before += a;
        }
    }
    __syncthreads();
    const Found result = found;
    __syncthreads();
    return result;
}

// By the last block of a row: in which bins the filters end, and what must be listed to find where.
template <int VALUES>
TSK_DEVICE void find_bins(const Rule& rule, const Work& work, int64_t row) {
    constexpr int EACH = BINS / BLOCK;
    const Word* counts = work.counts + row * BINS + threadIdx.x * EACH;
    const Wide* masses = work.masses + row * BINS + threadIdx.x * EACH;
    Word count[EACH];
    Wide mass[EACH];
#pragma unroll
    for (int j = 0; j < EACH; ++j) count[j] = peek(counts + j), mass[j] = peek(masses + j);
    const int own = int(threadIdx.x) * EACH;
    Found k{BINS, 0};
    if (rule.counted) k = first_reaching<EACH>([&](int j) { return Wide(count[j]); }, 0, Wide(rule.count));
    Found low{BINS, 0}, high{BINS, 0};
    Wide whole = 0;
    if (rule.shared) {
        // Bins after count_bin are out. Of count_bin some part is in, which decides only when it is known.
        Wide less = 0, more = 0;
#pragma unroll
        for (int j = 0; j < EACH; ++j) {
            if (own + j < k.bin) less += mass[j];
            if (own + j <= k.bin) more += mass[j];
        }
        whole = block_sum(less);
        const Wide most = block_sum(more);
        auto inside = [&](int j) { return own + j <= k.bin ? mass[j] : 0; };
        low = first_reaching<EACH>(inside, 0, rule.goal(whole));
        high = first_reaching<EACH>(inside, 0, rule.goal(most));
    }
    // For a draw it pays to list all that may win, if it is little.
    int listed_to = -1;
    if constexpr (VALUES == LOGITS) {
        auto within = [&](int bin) {
            Wide n = 0;
#pragma unroll
            for (int j = 0; j < EACH; ++j) n += own + j <= bin ? count[j] : 0;
            return block_sum(n) <= LISTED;
        };
        const int to = rule.counted ? k.bin : high.bin;
        if (within(to)) listed_to = to;
    }
    if (threadIdx.x == 0) {
        RowState& s = work.state[row];
        s.count_bin = k.bin;
        s.before_count = Word(k.before);
        s.mass_bins[0] = low.bin, s.mass_bins[1] = high.bin;
        s.before_mass = low.before;
        s.whole_mass = whole;
        s.kept_bins = low.bin < k.bin ? low.bin : k.bin;
        s.listed_to = listed_to;
    }
}

// A key that the count-th largest of all values reaches: it is at least the count-th largest maximum of parts, of which
// the first 14 bits are found. By the first group of lanes.
TSK_DEVICE Word key_reached(const Vocab& v, const Work& work, int64_t row, int count) {
    constexpr int EACH = MOST_PEAKS / LANES;
    const int lane = int(threadIdx.x), peaks = v.peaks * int(v.chunks);
    Word key[EACH];
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        const int at = lane + i * LANES;
        key[i] = at < peaks ? work.peaks[row * MOST_PEAKS + at] : 0;
    }
    Word least = 0;
    for (int bit = 31; bit >= 18; --bit) {
        const Word next = least | Word(1) << bit;
        Word n = 0;
#pragma unroll
        for (int i = 0; i < EACH; ++i) n += key[i] >= next;
        if (lanes_sum(n) >= Word(count)) least = next;
    }
    return least;
}

// Whether so few values of a row are wanted that the maxima of its parts already tell most of the others apart; if so,
// the smallest key that is of interest, else 0. Not where values lie so far below the best one that they were masked.
template <int VALUES>
TSK_DEVICE Word few_wanted(const Vocab& v, const Rule& rule, const Measure<VALUES>& m, const Work& work, int64_t row) {
    __shared__ Word least;
    if (!rule.counted || rule.count * 2 > v.peaks * int(v.chunks)) return 0;
    if (threadIdx.x < LANES) {
        const Word found = key_reached(v, work, row, rule.count);
        if (threadIdx.x == 0) least = found;
    }
    __syncthreads();
    if constexpr (VALUES == LOGITS)
        return least > ordered(m.best - 64.0f) ? least : 0;
    else
        return least > ordered(0.0f) && !m.infinite ? least : 0;
}

// The second launch: counts and masses by bin.
template <typename T, int N, int VALUES>
__global__ void __launch_bounds__(BLOCK, AT_LEAST)
    histogram_kernel(TSK_ARGS Vocab v, TSK_ARGS Rules rules, TSK_ARGS Work work) {
    start();
    __shared__ Word count[BINS], low[BINS], high[BINS];
    const Place here(v);
    for (int i = int(threadIdx.x); i < BINS; i += BLOCK) count[i] = low[i] = high[i] = 0;
    const Rule rule(rules, here.row, v.width);
    if (rule.off() && VALUES == LOGITS) return;
    const auto m = measure<VALUES>(row_maximum(v, work, here.row), rule.temperature);
    __syncthreads();
    if (rule.off()) {
        Wide sum = 0;
        for_elements<T, N>(v, here.row, here.first, here.last, [&](int, const float (&x)[N]) {
#pragma unroll
            for (int i = 0; i < N; ++i) sum += m.mass(m.settle(clean<VALUES>(x[i])));
        });
        sum = block_sum(sum);
        if (threadIdx.x == 0) atomic_add(&work.state[here.row].kept, sum);
        return;
    }
    if (const Word least = few_wanted<VALUES>(v, rule, m, work, here.row)) {
        if (here.chunk == 0 && threadIdx.x == 0) work.state[here.row].least = least;
        return;
    }
    const bool counted = rule.counted || VALUES == LOGITS;
    for_elements<T, N>(v, here.row, here.first, here.last, [&](int, const float (&x)[N]) {
#pragma unroll
        for (int i = 0; i < N; ++i) {
            const float y = m.settle(clean<VALUES>(x[i]));
            if (!m.counts(y)) continue;
            const int bin = m.bin(y);
            if (counted) atomic_add(&count[bin], Word(1));
            if (rule.shared)
                if (const Wide mass = m.mass(y)) add_mass(&low[bin], &high[bin], mass);
        }
    });
    __syncthreads();
    for (int i = int(threadIdx.x); i < BINS; i += BLOCK) {
        if (count[i]) atomic_add(&work.counts[here.row * BINS + i], count[i]);
        const Wide mass = Wide(high[i]) << 32 | low[i];
        if (mass) atomic_add(&work.masses[here.row * BINS + i], mass);
    }
    if (last_to_arrive(&work.state[here.row].arrived[0], v.chunks)) find_bins<VALUES>(rule, work, here.row);
}

// The values among which the filters end: those that were listed or, if they were too many, the whole row again.
template <typename T, int N, int VALUES>
struct Suspects {
    const Vocab& v;
    int64_t row;
    Measure<VALUES> m;
    const RowState& state;
    const Wide* list;
    int listed;  // -1: read the row

    TSK_DEVICE bool wanted(float y) const {
        if (state.least) return ordered(y) >= state.least;
        const int bin = m.bin(y);
        return bin <= state.listed_to || bin == state.count_bin ||
               (bin >= state.mass_bins[0] && bin <= state.mass_bins[1]);
    }

    template <typename F>
    TSK_DEVICE void each(F f) const {
        if (listed >= 0) {
            for (int i = int(threadIdx.x); i < listed; i += BLOCK) f(list[i]);
            return;
        }
        for_elements<T, N, 1>(v, row, 0, v.width, [&](int at, const float (&x)[N]) {
#pragma unroll
            for (int i = 0; i < N; ++i) {
                const float y = m.settle(clean<VALUES>(x[i]));
                if (m.counts(y) && wanted(y)) f(ranked(y, Word(at + i)));
            }
        });
    }
};

// The worst rank in the shortest prefix, best rank first, whose amounts bring `before` up to the goal; 0 where all of
// them do not. Digit by digit of the ranks, from the highest one in which they differ.
template <typename S, typename Eligible, typename Amount>
TSK_DEVICE Wide cut_at(const S& suspects, Eligible eligible, Amount amount, Wide before, Wide goal) {
    __shared__ Word low[BLOCK], high[BLOCK], number[BLOCK];
    __shared__ Wide only;
    Wide most = 0, least = 0;  // `least` of the complements
    suspects.each([&](Wide r) {
        if (!eligible(r)) return;
        most = most > r ? most : r;
        least = least > ~r ? least : ~r;
    });
    most = block_max(most), least = ~block_max(least);
    if (most < least) return 0;  // there are none
    if (most == least) return before + amount(most) >= goal ? most : 0;
    const int differing = 64 - leading_zeros(most ^ least);  // low bits
    int shift = differing > 8 ? differing - 8 : 0, width = differing - shift;
    Wide prefix = differing < 64 ? most >> differing : 0;
    const int me = int(threadIdx.x), mine = BLOCK - 1 - me;  // thread 0 owns the largest digit
    for (;;) {
        low[me] = high[me] = number[me] = 0;
        __syncthreads();
        suspects.each([&](Wide r) {
            if (shift + width < 64 && r >> (shift + width) != prefix) return;
            if (!eligible(r)) return;
            const int digit = int(r >> shift) & ((1 << width) - 1);
            add_mass(&low[digit], &high[digit], amount(r));
            atomic_add(&number[digit], Word(1));
        });
        __syncthreads();
        const Found found = first_reaching<1>([&](int) { return Wide(high[mine]) << 32 | low[mine]; }, before, goal);
        if (found.bin == BLOCK) return 0;
        const int digit = BLOCK - 1 - found.bin;
        prefix = prefix << width | Wide(digit);
        before = found.before;
        const bool single = number[digit] == 1;
        if (shift == 0) return prefix;
        if (single) {
            suspects.each([&](Wide r) {
                if (r >> shift == prefix && eligible(r)) only = r;
            });
            __syncthreads();
            const Wide result = only;
            __syncthreads();
            return result;
        }
        width = shift < 8 ? shift : 8;
        shift -= width;
        __syncthreads();
    }
}

// By the last block of a row: the exact cut, and the mass that is kept.
template <typename T, int N, int VALUES>
TSK_DEVICE void find_cut(const Suspects<T, N, VALUES>& suspects, const Rule& rule, RowState& state) {
    const auto& m = suspects.m;
    auto bin_of = [&](Wide r) { return m.bin(value_of(r)); };
    auto mass_of = [&](Wide r) { return m.mass(value_of(r)); };
    const bool few = state.least != 0;  // then the bins of the state are 0, and all that is listed is eligible
    Wide cut = 0, within = 0;
    if (state.count_bin < BINS) {
        auto inside = [&](Wide r) { return few || bin_of(r) == state.count_bin; };
        cut = cut_at(suspects, inside, [](Wide) { return Wide(1); }, state.before_count, Wide(rule.count));
        suspects.each([&](Wide r) { within += inside(r) && r >= cut ? mass_of(r) : 0; });
        within = block_sum(within);
    }
    Wide kept = VALUES == PROBS && !rule.shared ? peek(&state.kept) + within : 0;
    if (rule.shared) {
        const Wide goal = rule.goal(state.whole_mass + within);
        auto inside = [&](Wide r) {
            const int bin = few ? 0 : bin_of(r);
            return r >= cut && bin >= state.mass_bins[0] && bin <= state.mass_bins[1];
        };
        const Wide nucleus = cut_at(suspects, inside, mass_of, state.before_mass, goal);
        cut = cut > nucleus ? cut : nucleus;
        if constexpr (VALUES == PROBS) {
            suspects.each([&](Wide r) { kept += inside(r) && r >= cut ? mass_of(r) : 0; });
            kept = block_sum(kept) + state.before_mass;
        }
    }
    if (threadIdx.x == 0) {
        state.cut = cut;
        if (VALUES == PROBS) state.kept = kept;
    }
}

// The race of one row: the kept token with the largest score, then the lower index. `bar` is a score that some thread
// has reached: most words cannot reach it, and need no logarithms.
struct Race {
    Wide seed, stream, cut;
    Measure<LOGITS> m;
    Wide* row_best;  // of all threads of the row
    Wide best = 0;
    Word bar = 0, next_bar = 0;  // ordered

    TSK_DEVICE bool kept(float x, Word index) const {
        return x > minus_infinity() && (cut == 0 || ranked(x, index) >= cut);
    }

    // Look up how far the others are, for the time after next: nobody waits for the answer.
    TSK_DEVICE void look() {
        bar = next_bar;
        next_bar = Word(peek(row_best) >> 32);
    }

    TSK_DEVICE void enter(float x, Word index, Word word) {
        const float about = m.nearly_scaled(x);
        if (bar && !may_reach(word, unordered(bar) - about - fabsf(about) * 1e-6f)) return;
        const Word key = ordered(m.scaled(x) + gumbel(word));
        const Wide r = Wide(key) << 32 | Word(~index);
        if (r <= best) return;
        best = r;
        if (key > bar) {
            atomic_max(row_best, r);
            bar = key;
        }
    }

    TSK_DEVICE void enter_alone(float x, Word index) {
        if (!kept(x, index)) return;
        const Words4 words = philox(seed, stream, index / 4);
        const Word at = index % 4;
        enter(x, index, at == 0 ? words.w[0] : at == 1 ? words.w[1] : at == 2 ? words.w[2] : words.w[3]);
    }
};

// The third launch: lists what the bins leave open; the last block of a row decides it and, where all that may win is
// listed, draws.
template <typename T, int N, int VALUES>
__global__ void __launch_bounds__(BLOCK, AT_LEAST)
    list_kernel(TSK_ARGS Vocab v, TSK_ARGS Rules rules, TSK_ARGS Work work, int* drawn) {
    start();
    __shared__ Wide list[LISTED];
    __shared__ Word entries, base;
    const Place here(v);
    if (threadIdx.x == 0) entries = 0;
    const Rule rule(rules, here.row, v.width);
    if (rule.off()) return;
    const auto m = measure<VALUES>(row_maximum(v, work, here.row), rule.temperature);
    RowState& state = work.state[here.row];
    Wide* listed = work.list + here.row * LISTED;
    Suspects<T, N, VALUES> suspects{v, here.row, m, state, list, -1};
    const int kept_bins = state.kept_bins, to = state.listed_to, count_bin = state.count_bin;
    const int mass_first = state.mass_bins[0], mass_last = state.mass_bins[1];
    const Word least = state.least;
    __syncthreads();
    Wide kept = 0;
    for_elements<T, N>(v, here.row, here.first, here.last, [&](int at, const float (&x)[N]) {
#pragma unroll
        for (int i = 0; i < N; ++i) {
            const float y = m.settle(clean<VALUES>(x[i]));
            if (!m.counts(y) || (least && ordered(y) < least)) continue;
            const int bin = least ? 0 : m.bin(y);
            if (VALUES == PROBS && !rule.shared && bin < kept_bins) kept += m.mass(y);
            if (bin <= to || bin == count_bin || (bin >= mass_first && bin <= mass_last)) {
                const Word n = atomic_add(&entries, Word(1));
                if (n < LISTED) list[n] = ranked(y, Word(at + i));
            }
        }
    });
    if (VALUES == PROBS && !rule.shared) kept = block_sum(kept);
    __syncthreads();
    if (threadIdx.x == 0) {
        base = entries ? atomic_add(&state.listed, entries) : 0;
        if (VALUES == PROBS && kept) atomic_add(&state.kept, kept);
    }
    __syncthreads();
    for (Word i = threadIdx.x; i < entries && i < LISTED && base + i < LISTED; i += BLOCK) listed[base + i] = list[i];
    if (!last_to_arrive(&state.arrived[1], v.chunks)) return;
    const Word all = peek(&state.listed);
    if (all <= LISTED) {
        suspects.listed = int(all);
        for (Word i = threadIdx.x; i < all; i += BLOCK) list[i] = peek(listed + i);
        __syncthreads();
    }
    find_cut(suspects, rule, state);
    if constexpr (VALUES == LOGITS) {
        if (to < 0 || all > LISTED) return;
        __syncthreads();
        Race race{rules.seed[here.row], rules.offset[here.row], peek(&state.cut), m, &state.best};
        suspects.each([&](Wide r) { race.enter_alone(value_of(r), index_of(r)); });
        const Wide best = block_max(race.best);
        if (threadIdx.x == 0) {
            drawn[here.row] = best ? int(index_of(best)) : 0;
            state.drawn = 1;
        }
    }
}

// The last launch of a renormalisation.
template <typename T, int N>
__global__ void __launch_bounds__(BLOCK) renorm_kernel(TSK_ARGS Vocab v, TSK_ARGS Work work, T* out) {
    start();
    const Place here(v);
    const auto m = measure<PROBS>(row_maximum(v, work, here.row), 1.0f);
    const RowState& state = work.state[here.row];
    const Wide cut = state.cut;
    const float total = m.total(state.kept);
    T* o = out + here.row * int64_t(v.width);
    for_elements<T, N>(v, here.row, here.first, here.last, [&](int at, const float (&x)[N]) {
        float y[N];
#pragma unroll
        for (int i = 0; i < N; ++i) {
            const float value = m.settle(clean<PROBS>(x[i]));
            y[i] = ranked(value, Word(at + i)) >= cut ? value / total : 0.0f;
        }
        store<T, N>(o + at, pack<T, N>(y));
    });
}

// The last launch of a draw, for rows in which many tokens may win.
template <typename T, int N>
__global__ void __launch_bounds__(BLOCK, AT_LEAST)
    race_kernel(TSK_ARGS Vocab v, TSK_ARGS Rules rules, TSK_ARGS Work work, int* drawn) {
    start();
    const Place here(v);
    RowState& state = work.state[here.row];
    if (state.drawn) return;
    const Rule rule(rules, here.row, v.width);
    const auto m = measure<LOGITS>(row_maximum(v, work, here.row), rule.temperature);
    Race race{rules.seed[here.row], rules.offset[here.row], state.cut, m, &state.best};
    for_elements<T, N>(v, here.row, here.first, here.last, [&](int at, const float (&x)[N]) {
        race.look();
        if constexpr (N == 1) {
            race.enter_alone(clean<LOGITS>(x[0]), Word(at));
        } else {
#pragma unroll
            for (int group = 0; group < N; group += 4) {
                bool any = false;
#pragma unroll
                for (int i = group; i < group + 4; ++i) any = any || race.kept(clean<LOGITS>(x[i]), Word(at + i));
                if (!any) continue;
                const Words4 words = philox(race.seed, race.stream, Word(at + group) / 4);
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const float y = clean<LOGITS>(x[group + i]);
                    if (race.kept(y, Word(at + group + i))) race.enter(y, Word(at + group + i), words.w[i]);
                }
            }
        }
    });
    const Wide best = block_max(race.best);
    if (threadIdx.x == 0 && best) atomic_max(&state.best, best);
    if (!last_to_arrive(&state.arrived[2], v.chunks)) return;
    if (threadIdx.x == 0) {
        const Wide winner = peek(&state.best);
        drawn[here.row] = winner ? int(index_of(winner)) : 0;
    }
}

}  // namespace tsk
