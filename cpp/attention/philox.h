// Dropout: which probabilities are kept.
//
// The decision is a pure function of (key, batch index, head index, query i, key j), so forward,
// backward and every tiling draw the same mask. One call of Philox4x32 (Salmon et al., SC11; seven
// rounds, the fewest that pass BigCrush there) decides eight (i, j) pairs with 16 bits each: rows r
// and r + 8, columns 2c, 2c + 1, 2c + 8, 2c + 9 of a 16x16 block, which is what one thread holds of
// a tensor-core accumulator.
#pragma once

#include <cstdint>

#include "attention/config.h"

namespace jaxflash {

// Four words, in uint32_t or in a vector of them.
template <class U>
struct PhiloxWords {
  U word[4];
};

// Both halves of a 64-bit product.
template <class U>
struct WideProduct {
  U high;
  U low;
};

// `multiply` is the WideProduct of U and uint32_t.
template <class U, class Multiply>
JAXFLASH_INLINE PhiloxWords<U> philox(PhiloxWords<U> counter, const uint32_t (&key)[2],
                                      Multiply multiply) {
  constexpr uint32_t kMultiplier0 = 0xD2511F53, kMultiplier1 = 0xCD9E8D57;
  constexpr uint32_t kWeyl0 = 0x9E3779B9, kWeyl1 = 0xBB67AE85;
  uint32_t key0 = key[0], key1 = key[1];
  U(&c)[4] = counter.word;
  for (int round = 0; round < 7; ++round) {
    const WideProduct<U> product0 = multiply(c[0], kMultiplier0);
    const WideProduct<U> product1 = multiply(c[2], kMultiplier1);
    c[0] = product1.high ^ c[1] ^ key0;
    c[1] = product1.low;
    c[2] = product0.high ^ c[3] ^ key1;
    c[3] = product0.low;
    key0 += kWeyl0;
    key1 += kWeyl1;
  }
  return counter;
}

// The Philox counter words that (i, j) shares with the seven others of its call.
JAXFLASH_INLINE uint32_t dropout_row_word(int64_t i) {
  return static_cast<uint32_t>((i >> 4) * 8 + (i & 7));
}
JAXFLASH_INLINE uint32_t dropout_column_word(int64_t j) {
  return static_cast<uint32_t>((j >> 4) * 4 + ((j & 7) >> 1));
}

// Which 16 bits of its call (i, j) takes: word lane / 2, upper half where lane is odd.
JAXFLASH_INLINE int dropout_lane(int64_t i, int64_t j) {
  return static_cast<int>(((i >> 3) & 1) * 4 + ((j >> 3) & 1) * 2 + (j & 1));
}

// Whether a lane is kept: its draw is the threshold at least. Compared in the upper halves of
// words, so that odd lanes are not shifted.
template <class U>
JAXFLASH_INLINE auto dropout_keeps(const PhiloxWords<U>& draws, int lane, uint32_t threshold) {
  const U word = draws.word[lane / 2];
  return (lane % 2 != 0 ? word : word << 16) >= threshold << 16;
}

// What a kept probability is multiplied by.
JAXFLASH_INLINE double dropout_keep_scale(int64_t threshold) {
  return 65536.0 / static_cast<double>(65536 - threshold);
}

}  // namespace jaxflash
