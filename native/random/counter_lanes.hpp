// The AVX2 twin of counter.hpp: eight counters at a time. Only files compiled for AVX2 include it.
#pragma once

#include <immintrin.h>

#include "random/counter.hpp"

namespace gradwire::random {

// 32 x 32 -> 64 bits in every lane: high and low halves.
[[maybe_unused]] static inline void multiply(__m256i lanes, std::uint32_t multiplier, __m256i& high, __m256i& low) {
  const __m256i factor = _mm256_set1_epi32(static_cast<int>(multiplier));
  const __m256i even = _mm256_mul_epu32(lanes, factor);
  const __m256i odd = _mm256_mul_epu32(_mm256_srli_epi64(lanes, 32), factor);
  low = _mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xAA);
  high = _mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xAA);
}

// words[k] holds word k of counters 8 group to 8 group + 7.
[[maybe_unused]] static inline void words_of_group(const Stream& stream, std::uint64_t group, __m256i* words) {
  const std::uint64_t first = 8 * group;  // its low three bits are 0: no lane carries into the next word
  __m256i c0 = _mm256_add_epi32(_mm256_set1_epi32(static_cast<int>(first)), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
  __m256i c1 = _mm256_set1_epi32(static_cast<int>(first >> 32));
  __m256i c2 = _mm256_set1_epi32(static_cast<int>(stream.step));
  __m256i c3 = _mm256_set1_epi32(static_cast<int>(stream.step >> 32));
  std::uint32_t key0 = static_cast<std::uint32_t>(stream.seed), key1 = static_cast<std::uint32_t>(stream.seed >> 32);
  for (int round = 0; round < kRounds; ++round) {
    __m256i high0, low0, high1, low1;
    multiply(c0, kMultiplier0, high0, low0);
    multiply(c2, kMultiplier1, high1, low1);
    c0 = _mm256_xor_si256(_mm256_xor_si256(high1, c1), _mm256_set1_epi32(static_cast<int>(key0)));
    c2 = _mm256_xor_si256(_mm256_xor_si256(high0, c3), _mm256_set1_epi32(static_cast<int>(key1)));
    c1 = low1;
    c3 = low0;
    key0 += kWeyl0;
    key1 += kWeyl1;
  }
  words[0] = c0;
  words[1] = c1;
  words[2] = c2;
  words[3] = c3;
}

// numbers[q] holds those of elements 64 group + 8 q to 64 group + 8 q + 7.
[[maybe_unused]] static inline void draw(const Stream& stream, std::uint64_t group, __m256i* numbers) {
  __m256i words[4];
  words_of_group(stream, group, words);
  for (int word = 0; word < 4; ++word) {
    numbers[2 * word] = words[word];
    numbers[2 * word + 1] = _mm256_or_si256(_mm256_slli_epi32(words[word], 16), _mm256_srli_epi32(words[word], 16));
  }
}

}  // namespace gradwire::random
