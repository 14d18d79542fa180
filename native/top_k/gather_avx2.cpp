#if defined(__AVX2__)
#include <immintrin.h>

#include <bit>

#include "top_k/gather.hpp"

namespace gradwire::top_k {

void gather_avx2(const float* values, std::size_t n, std::uint32_t lowest, std::int32_t begin,
                 std::vector<std::int32_t>& indices) {
  const __m256i magnitude_bits = _mm256_set1_epi32(0x7FFFFFFF);
  const __m256i below = _mm256_set1_epi32(static_cast<std::int32_t>(lowest) - 1);
  std::size_t i = 0;
  for (; i + 32 <= n; i += 32) {  // hits are rare (k / n = 0.001): one branch for 32 elements
    std::uint32_t hits = 0;
    for (int part = 0; part < 4; ++part) {
      const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(values + i + 8 * part));
      const __m256i hit = _mm256_cmpgt_epi32(_mm256_and_si256(bits, magnitude_bits), below);
      hits |= static_cast<std::uint32_t>(_mm256_movemask_ps(_mm256_castsi256_ps(hit))) << (8 * part);
    }
    for (; hits != 0; hits &= hits - 1)
      indices.push_back(begin + static_cast<std::int32_t>(i) + std::countr_zero(hits));
  }
  gather_portable(values + i, n - i, lowest, begin + static_cast<std::int32_t>(i), indices);
}

}  // namespace gradwire::top_k
#endif
