// Random numbers that are a function of (seed, step, index): no state, so every thread, rank and instruction set draws
// the same ones in any order. Philox4x32-10 (Salmon et al., SC 2011), checked against its published test vectors.
//
// Element i of a stream gets a uniform 32-bit number out of a group of 64 elements: elements 64 g + 8 q + l (q < 8,
// l < 8) share the eight counters 8 g + l, and take word q / 2 of them, with its halves exchanged where q is odd. The
// order is that of AVX2's lanes; two elements to a word halve the work, and each number alone is uniform: two elements
// that share a word could only show it in numbers whose halves tie.
#pragma once

#include <array>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "spans.hpp"

namespace gradwire::random {

// Elements that are drawn for together.
inline constexpr std::size_t kGroup = 64;
inline constexpr int kRounds = 10;
inline constexpr std::uint32_t kMultiplier0 = 0xD2511F53, kMultiplier1 = 0xCD9E8D57;
inline constexpr std::uint32_t kWeyl0 = 0x9E3779B9, kWeyl1 = 0xBB67AE85;

// A stream of numbers: the seed is Philox's key, the step the upper half of its counter.
struct Stream {
  std::uint64_t seed, step;
};

using Words = std::array<std::uint32_t, 4>;

[[maybe_unused]] static inline Words philox(Words counter, std::uint64_t key) {
  std::uint32_t key0 = static_cast<std::uint32_t>(key), key1 = static_cast<std::uint32_t>(key >> 32);
  for (int round = 0; round < kRounds; ++round) {
    const std::uint64_t product0 = std::uint64_t{kMultiplier0} * counter[0];
    const std::uint64_t product1 = std::uint64_t{kMultiplier1} * counter[2];
    counter = {static_cast<std::uint32_t>(product1 >> 32) ^ counter[1] ^ key0, static_cast<std::uint32_t>(product1),
               static_cast<std::uint32_t>(product0 >> 32) ^ counter[3] ^ key1, static_cast<std::uint32_t>(product0)};
    key0 += kWeyl0;
    key1 += kWeyl1;
  }
  return counter;
}

[[maybe_unused]] static inline Words words_at(const Stream& stream, std::uint64_t counter) {
  return philox({static_cast<std::uint32_t>(counter), static_cast<std::uint32_t>(counter >> 32),
                 static_cast<std::uint32_t>(stream.step), static_cast<std::uint32_t>(stream.step >> 32)},
                stream.seed);
}

#if defined(__AVX2__)

// 32 x 32 -> 64 bits in every lane: high and low halves.
[[maybe_unused]] static inline void multiply(__m256i lanes, std::uint32_t multiplier, __m256i& high, __m256i& low) {
  const __m256i factor = _mm256_set1_epi32(static_cast<int>(multiplier));
  const __m256i even = _mm256_mul_epu32(lanes, factor);
  const __m256i odd = _mm256_mul_epu32(_mm256_srli_epi64(lanes, 32), factor);
  low = _mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xAA);
  high = _mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xAA);
}

// words[8 k + l] is word k of counter 8 group + l.
[[maybe_unused]] static inline void words_of_group(const Stream& stream, std::uint64_t group, std::uint32_t* words) {
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
  const __m256i all[4] = {c0, c1, c2, c3};
  for (int word = 0; word < 4; ++word) _mm256_storeu_si256(reinterpret_cast<__m256i*>(words + 8 * word), all[word]);
}

#else

// words[8 k + l] is word k of counter 8 group + l.
[[maybe_unused]] static inline void words_of_group(const Stream& stream, std::uint64_t group, std::uint32_t* words) {
  for (std::size_t lane = 0; lane < 8; ++lane) {
    const Words own = words_at(stream, 8 * group + lane);
    for (std::size_t word = 0; word < 4; ++word) words[8 * word + lane] = own[word];
  }
}

#endif

// The numbers of elements 64 group to 64 group + 63.
[[maybe_unused]] static inline void draw(const Stream& stream, std::uint64_t group, std::uint32_t* numbers) {
  alignas(32) std::uint32_t words[32];
  words_of_group(stream, group, words);
  for (std::size_t word = 0; word < 4; ++word)
    for (std::size_t lane = 0; lane < 8; ++lane) {
      const std::uint32_t own = words[8 * word + lane];
      numbers[16 * word + lane] = own;
      numbers[16 * word + 8 + lane] = own << 16 | own >> 16;
    }
}

}  // namespace gradwire::random
