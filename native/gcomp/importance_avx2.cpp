// The AVX2 twin of importance.cpp: the same operations in the same order, each rounded on its own (no fused
// multiply-add; square roots are exact in IEEE 754), so the bytes are the same.
#if defined(__AVX2__)
#include <immintrin.h>

#include "gcomp/importance_kernel.hpp"

namespace gradwire::gcomp {
namespace {

// Eight codes minus the offset, as int32; 0 for NaN and for a second moment that is not positive. Not clamped yet.
template <bool has_second_moment, bool has_first_moment>
__m256i codes_of_8(const ImportanceTile& tile, std::size_t i, __m256 a, __m256 b, __m256 c) {
  __m256 factor = b;
  __m256i unknown = _mm256_setzero_si256();
  if constexpr (has_second_moment) {
    const __m256 second_moment = _mm256_loadu_ps(tile.second_moment + i);
    factor = _mm256_add_ps(_mm256_mul_ps(a, _mm256_sqrt_ps(second_moment)), b);
    unknown = _mm256_cmpgt_epi32(_mm256_set1_epi32(1), _mm256_castps_si256(second_moment));
  }
  __m256 scale = _mm256_mul_ps(_mm256_loadu_ps(tile.parameter + i), factor);
  if constexpr (has_first_moment)
    scale = _mm256_add_ps(scale, _mm256_mul_ps(c, _mm256_loadu_ps(tile.first_moment + i)));
  const __m256i magnitude = _mm256_and_si256(_mm256_castps_si256(scale), _mm256_set1_epi32(0x7FFFFFFF));
  const __m256i is_nan = _mm256_cmpgt_epi32(magnitude, _mm256_set1_epi32(0x7F800000));
  const __m256i code = _mm256_sub_epi32(_mm256_srli_epi32(magnitude, 21), _mm256_set1_epi32(kImportanceOffset));
  return _mm256_andnot_si256(_mm256_or_si256(unknown, is_nan), code);
}

template <bool has_second_moment, bool has_first_moment>
void write_tile(const ImportanceTile& tile, const ImportanceTerms& terms) {
  const __m256 a = _mm256_set1_ps(terms.a), b = _mm256_set1_ps(terms.b), c = _mm256_set1_ps(terms.c);
  // Both packs work within 128-bit lanes: this puts the eight groups of four bytes back in order.
  const __m256i in_order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  std::size_t i = 0;
  for (; i + 32 <= tile.n_elements; i += 32) {
    const auto codes = [&](std::size_t offset) {
      return codes_of_8<has_second_moment, has_first_moment>(tile, i + offset, a, b, c);
    };
    const __m256i low = _mm256_packs_epi32(codes(0), codes(8));  // -348..675 fits int16
    const __m256i high = _mm256_packs_epi32(codes(16), codes(24));
    const __m256i bytes = _mm256_packus_epi16(low, high);  // clamps to 0..255
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(tile.out + i), _mm256_permutevar8x32_epi32(bytes, in_order));
  }
  const auto after = [i](const float* values) { return values == nullptr ? nullptr : values + i; };
  write_importance_tile_portable(
      {tile.parameter + i, after(tile.second_moment), after(tile.first_moment), tile.out + i, tile.n_elements - i},
      terms);
}

}  // namespace

void write_importance_tile_avx2(const ImportanceTile& tile, const ImportanceTerms& terms) {
  if (tile.second_moment != nullptr) {
    if (tile.first_moment != nullptr) return write_tile<true, true>(tile, terms);
    return write_tile<true, false>(tile, terms);
  }
  if (tile.first_moment != nullptr) return write_tile<false, true>(tile, terms);
  return write_tile<false, false>(tile, terms);
}

}  // namespace gradwire::gcomp
#endif
