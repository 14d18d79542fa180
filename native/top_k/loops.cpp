#include <bit>

#include "simd/lanes.hpp"
#include "top_k/select.hpp"

namespace gradwire::top_k {
namespace {

void gather(const float* values, std::size_t n, std::uint32_t lowest, std::int32_t begin,
            std::vector<std::int32_t>& indices) {
  std::size_t i = 0;
#if defined(__AVX2__)
  const __m256i magnitude_bits = _mm256_set1_epi32(0x7FFFFFFF);
  const __m256i below = _mm256_set1_epi32(static_cast<std::int32_t>(lowest) - 1);
  for (; i + 32 <= n; i += 32) {  // hits are rare (k / n = 0.001): one branch for 32 elements
    std::uint32_t hits = 0;
    for (int part = 0; part < 4; ++part) {
      const __m256i magnitude = _mm256_and_si256(load256(values + i + 8 * part), magnitude_bits);
      hits |= mask_of(_mm256_cmpgt_epi32(magnitude, below)) << (8 * part);
    }
    for (; hits != 0; hits &= hits - 1)
      indices.push_back(begin + static_cast<std::int32_t>(i) + std::countr_zero(hits));
  }
#endif
  for (; i < n; ++i)
    if ((std::bit_cast<std::uint32_t>(values[i]) & 0x7FFFFFFF) >= lowest)
      indices.push_back(begin + static_cast<std::int32_t>(i));
}

}  // namespace

Gather& gather_at(Level<GW_LEVEL>) { return gather; }

}  // namespace gradwire::top_k
