// Philox4x32-10 (Salmon et al. 2011, https://doi.org/10.1145/2063384.2063405) and the Gumbel noise made of its words.
#pragma once

#include "../common/lanes.h"

namespace tsk {

struct Words4 {
    Word w[4];
};

TSK_DEVICE Word high_word(Word a, Word b) { return Word((Wide(a) * b) >> 32); }

// Words 4 * block .. 4 * block + 3 of a stream of a seed.
TSK_DEVICE Words4 philox(Wide seed, Wide stream, Word block) {
    Word c0 = block, c1 = 0, c2 = Word(stream), c3 = Word(stream >> 32), k0 = Word(seed), k1 = Word(seed >> 32);
#pragma unroll
    for (int round = 0; round < 10; ++round) {
        const Word h0 = high_word(0xD2511F53u, c0), l0 = 0xD2511F53u * c0;
        const Word h1 = high_word(0xCD9E8D57u, c2), l1 = 0xCD9E8D57u * c2;
        c0 = h1 ^ c1 ^ k0, c1 = l1, c2 = h0 ^ c3 ^ k1, c3 = l0;
        k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
    }
    return {{c0, c1, c2, c3}};
}

TSK_DEVICE float gumbel(Word word) {
    const float below_one = 1.0f - 5.9604644775390625e-8f;  // 1 - 2^-24
    const float v = (float(word) + 0.5f) * 2.3283064365386963e-10f;
    return -logf(-log1pf(-(v < below_one ? v : below_one)));
}

// False only where the noise of a word is surely below `least`: the noise is at most -log(v).
TSK_DEVICE bool may_reach(Word word, float least) {
    return float(word) * 2.3283064365386963e-10f < fast_exp(0.01f - least);
}

}  // namespace tsk
