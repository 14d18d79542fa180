// What vector code shares. A loop over floats that is written for `Lanes` takes one value at a time, or eight where its
// file is compiled for AVX2; the bits are the same. Everything has internal linkage.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "spans.hpp"

namespace gradwire {
namespace {

struct One {
  static constexpr std::size_t n = 1;
  using Floats = float;
  using Levels = std::array<float, 4>;

  static float set(float value) { return value; }
  static float load(const float* from) { return *from; }
  static void store(float* to, float value) { *to = value; }
  static float magnitude(float value) { return std::bit_cast<float>(std::bit_cast<std::uint32_t>(value) & 0x7FFFFFFF); }
  static float smaller(float a, float b) { return a < b ? a : b; }
  static float larger(float a, float b) { return a > b ? a : b; }
  static bool less(float a, float b) { return a < b; }
  static bool at_least(float a, float b) { return a >= b; }
  static bool both(bool a, bool b) { return a & b; }
  // Of these four: spelt out, as a conditional would become a branch.
  static float where(bool mask, float value) {
    return std::bit_cast<float>(std::bit_cast<std::uint32_t>(value) & (0u - std::uint32_t{mask}));
  }
  static float negate_if(bool mask, float value) {
    return std::bit_cast<float>(std::bit_cast<std::uint32_t>(value) ^ std::uint32_t{mask} << 31);
  }
  static float with_sign_of(float a, float magnitude) {
    return std::bit_cast<float>(std::bit_cast<std::uint32_t>(magnitude) | (std::bit_cast<std::uint32_t>(a) & 1u << 31));
  }
  static float choose(bool mask, float a, float b) {
    const auto first = std::bit_cast<std::uint32_t>(a), second = std::bit_cast<std::uint32_t>(b);
    return std::bit_cast<float>(second ^ ((first ^ second) & (0u - std::uint32_t{mask})));
  }
  static std::uint32_t bits(bool mask) { return mask; }
  static bool mask_of(std::uint32_t bits) { return (bits & 1) != 0; }
  static float load(const std::uint8_t* from) { return *from; }
  static float load(const std::uint16_t* from) { return *from; }
  static float load_upper(const std::uint32_t* from) { return static_cast<float>(static_cast<int>(*from >> 8)); }
  // Towards zero.
  static float truncate(float value) { return static_cast<float>(static_cast<int>(value)); }
  static void store_integers(std::int32_t* to, float value) { *to = static_cast<std::int32_t>(value); }
  // By the codes of two bits from the lowest one on.
  static float pick(const Levels& levels, std::uint32_t codes) { return levels[codes & 3]; }
};

#if defined(__AVX2__)

inline __m256i load256(const void* from) { return _mm256_loadu_si256(static_cast<const __m256i*>(from)); }
inline void store256(void* to, __m256i lanes) { _mm256_storeu_si256(static_cast<__m256i*>(to), lanes); }

// Bit i is the highest one of lane i.
inline std::uint32_t mask_of(__m256i lanes) {
  return static_cast<std::uint32_t>(_mm256_movemask_ps(_mm256_castsi256_ps(lanes)));
}

// The same of 32 lanes, all ones or zeros: four vectors of 32 bits, or two of 16.
inline std::uint32_t mask_of(const __m256i (&lanes)[4]) {
  return mask_of(lanes[0]) | mask_of(lanes[1]) << 8 | mask_of(lanes[2]) << 16 | mask_of(lanes[3]) << 24;
}
inline std::uint32_t mask_of(const __m256i (&lanes)[2]) {
  const __m256i bytes = _mm256_permute4x64_epi64(_mm256_packs_epi16(lanes[0], lanes[1]), 0xD8);
  return static_cast<std::uint32_t>(_mm256_movemask_epi8(bytes));
}

inline std::uint32_t largest_of(__m256i lanes) {
  alignas(32) std::uint32_t all[8];
  store256(all, lanes);
  return *std::max_element(all, all + 8);
}

struct Eight {
  static constexpr std::size_t n = 8;
  using Floats = __m256;
  struct Levels {
    __m256 twice;
    Levels(float a, float b, float c, float d) : twice(_mm256_setr_ps(a, b, c, d, a, b, c, d)) {}
  };

  static __m256 set(float value) { return _mm256_set1_ps(value); }
  static __m256 load(const float* from) { return _mm256_loadu_ps(from); }
  static void store(float* to, __m256 value) { _mm256_storeu_ps(to, value); }
  static __m256 magnitude(__m256 value) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), value); }
  static __m256 smaller(__m256 a, __m256 b) { return _mm256_min_ps(a, b); }
  static __m256 larger(__m256 a, __m256 b) { return _mm256_max_ps(a, b); }
  static __m256 less(__m256 a, __m256 b) { return _mm256_cmp_ps(a, b, _CMP_LT_OQ); }
  static __m256 at_least(__m256 a, __m256 b) { return _mm256_cmp_ps(a, b, _CMP_GE_OQ); }
  static __m256 both(__m256 a, __m256 b) { return _mm256_and_ps(a, b); }
  static __m256 where(__m256 mask, __m256 value) { return _mm256_and_ps(mask, value); }
  static __m256 negate_if(__m256 mask, __m256 value) {
    return _mm256_xor_ps(value, _mm256_and_ps(mask, _mm256_set1_ps(-0.0f)));
  }
  static __m256 with_sign_of(__m256 a, __m256 magnitude) {
    return _mm256_or_ps(magnitude, _mm256_and_ps(a, _mm256_set1_ps(-0.0f)));
  }
  static __m256 choose(__m256 mask, __m256 a, __m256 b) { return _mm256_blendv_ps(b, a, mask); }
  static std::uint32_t bits(__m256 mask) { return static_cast<std::uint32_t>(_mm256_movemask_ps(mask)); }
  static __m256 mask_of(std::uint32_t bits) {
    const __m256i to_sign = _mm256_setr_epi32(31, 30, 29, 28, 27, 26, 25, 24);
    return _mm256_castsi256_ps(_mm256_sllv_epi32(_mm256_set1_epi32(static_cast<int>(bits)), to_sign));
  }
  static __m256 load(const std::uint8_t* from) {
    return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
  }
  static __m256 load(const std::uint16_t* from) {
    return _mm256_cvtepi32_ps(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
  }
  static __m256 load_upper(const std::uint32_t* from) {
    return _mm256_cvtepi32_ps(_mm256_srli_epi32(load256(from), 8));
  }
  static __m256 truncate(__m256 value) { return _mm256_round_ps(value, _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC); }
  static void store_integers(std::int32_t* to, __m256 value) { store256(to, _mm256_cvttps_epi32(value)); }
  static __m256 pick(const Levels& levels, std::uint32_t codes) {
    const __m256i each = _mm256_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14);
    return _mm256_permutevar_ps(levels.twice, _mm256_srlv_epi32(_mm256_set1_epi32(static_cast<int>(codes)), each));
  }
};
using Lanes = Eight;

#else

using Lanes = One;

#endif

// 32 integers to bytes, clamped to 0 and 255.
inline void write_bytes(const std::int32_t* from, std::uint8_t* to) {
#if defined(__AVX2__)
  const __m256i low = _mm256_packs_epi32(load256(from), load256(from + 8));
  const __m256i high = _mm256_packs_epi32(load256(from + 16), load256(from + 24));
  // Packing works within halves: this puts the eight groups of four bytes back in order.
  const __m256i in_order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  store256(to, _mm256_permutevar8x32_epi32(_mm256_packus_epi16(low, high), in_order));
#else
  for (std::size_t i = 0; i < 32; ++i) to[i] = static_cast<std::uint8_t>(std::clamp(from[i], 0, 255));
#endif
}

}  // namespace
}  // namespace gradwire
