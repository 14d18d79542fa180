// The AVX2 twin of portable.cpp: the same loops, with wider vectors and fast bit counts, and the index by comparisons.
#if defined(__AVX2__)
#include <immintrin.h>

#include "sketch/index_loop.hpp"
#include "sketch/kernel_table.hpp"

namespace gradwire::sketch {
namespace {

std::uint32_t largest_of(__m256i magnitudes) {
  alignas(32) std::uint32_t lanes[8];
  _mm256_store_si256(reinterpret_cast<__m256i*>(lanes), magnitudes);
  return *std::max_element(lanes, lanes + 8);
}

IndexFacts with_tail(IndexFacts facts, IndexFacts tail) {
  return {facts.n_nonzeros + tail.n_nonzeros, std::max(facts.max_magnitude, tail.max_magnitude)};
}

IndexFacts index_float32(const void* values, std::size_t first, std::size_t end, std::uint32_t* words) {
  const float* const from = static_cast<const float*>(values);
  const __m256i magnitude_bits = _mm256_set1_epi32(0x7FFFFFFF);
  __m256i largest = _mm256_setzero_si256();
  IndexFacts facts{0, 0};
  std::size_t i = first;
  for (; i + 32 <= end; i += 32) {
    std::uint32_t zeros = 0;
    for (int part = 0; part < 4; ++part) {
      const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i + 8 * part));
      const __m256i magnitude = _mm256_and_si256(bits, magnitude_bits);
      largest = _mm256_max_epi32(largest, magnitude);
      const __m256i is_zero = _mm256_cmpeq_epi32(magnitude, _mm256_setzero_si256());
      zeros |= static_cast<std::uint32_t>(_mm256_movemask_ps(_mm256_castsi256_ps(is_zero))) << (8 * part);
    }
    *words++ = ~zeros;
    facts.n_nonzeros += static_cast<std::size_t>(std::popcount(~zeros));
  }
  facts.max_magnitude = largest_of(largest);
  return with_tail(facts, index_values<Dtype::float32>(values, i, end, words));
}

IndexFacts index_bfloat16(const void* values, std::size_t first, std::size_t end, std::uint32_t* words) {
  const std::uint16_t* const from = static_cast<const std::uint16_t*>(values);
  const __m256i magnitude_bits = _mm256_set1_epi16(0x7FFF);
  __m256i largest = _mm256_setzero_si256();
  IndexFacts facts{0, 0};
  std::size_t i = first;
  for (; i + 32 <= end; i += 32) {
    __m256i is_zero[2];
    for (int part = 0; part < 2; ++part) {
      const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i + 16 * part));
      const __m256i magnitude = _mm256_and_si256(bits, magnitude_bits);
      largest = _mm256_max_epi16(largest, magnitude);
      is_zero[part] = _mm256_cmpeq_epi16(magnitude, _mm256_setzero_si256());
    }
    const __m256i bytes = _mm256_permute4x64_epi64(_mm256_packs_epi16(is_zero[0], is_zero[1]), 0xD8);
    const std::uint32_t word = ~static_cast<std::uint32_t>(_mm256_movemask_epi8(bytes));
    *words++ = word;
    facts.n_nonzeros += static_cast<std::size_t>(std::popcount(word));
  }
  const __m256i low = _mm256_slli_epi32(largest, 16), high = _mm256_and_si256(largest, _mm256_set1_epi32(-65536));
  facts.max_magnitude = largest_of(_mm256_max_epi32(low, high));
  return with_tail(facts, index_values<Dtype::bfloat16>(values, i, end, words));
}

}  // namespace

const Kernels kAvx2 = kernels_with(index_float32, index_bfloat16);

}  // namespace gradwire::sketch
#endif
