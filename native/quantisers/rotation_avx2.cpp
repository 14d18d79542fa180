// The AVX2 twin of rotation_portable.cpp: sizes are whole groups, so nothing is left over.
#if defined(__AVX2__)
#include <immintrin.h>

#include <cmath>
#include <type_traits>

#include "quantisers/rotation.hpp"
#include "random/counter_lanes.hpp"

namespace gradwire::quantisers {
namespace {

void draw_signs(const random::Stream& stream, std::uint64_t block, Signs& signs) {
  __m256i words[4];
  random::words_of_group(stream, block, words);
  for (int word = 0; word < 4; ++word)
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(signs.data() + 8 * word), words[word]);
}

// Sign bits of values 8 eight to 8 eight + 7, in place.
__m256 sign_bits(const Signs& signs, std::size_t eight) {
  const std::uint32_t bits = signs[eight / 4] >> 8 * (eight % 4);
  const __m256i spread =
      _mm256_sllv_epi32(_mm256_set1_epi32(static_cast<int>(bits)), _mm256_setr_epi32(31, 30, 29, 28, 27, 26, 25, 24));
  return _mm256_and_ps(_mm256_castsi256_ps(spread), _mm256_set1_ps(-0.0f));
}

// The stages inside a vector: the lower of two partners gets their sum, the upper their difference.
__m256 transform_eight(__m256 x) {
  __m256 other = _mm256_permute_ps(x, 0xB1);
  x = _mm256_blend_ps(_mm256_add_ps(x, other), _mm256_sub_ps(other, x), 0xAA);
  other = _mm256_permute_ps(x, 0x4E);
  x = _mm256_blend_ps(_mm256_add_ps(x, other), _mm256_sub_ps(other, x), 0xCC);
  other = _mm256_permute2f128_ps(x, x, 1);
  return _mm256_blend_ps(_mm256_add_ps(x, other), _mm256_sub_ps(other, x), 0xF0);
}

// Two stages at once: halves the traffic with L1.
void transform_wide(float* values, std::size_t size, std::size_t half) {
  for (std::size_t begin = 0; begin < size; begin += 4 * half)
    for (std::size_t i = begin; i < begin + half; i += 8) {
      float* const at[4] = {values + i, values + i + half, values + i + 2 * half, values + i + 3 * half};
      const __m256 a = _mm256_loadu_ps(at[0]), b = _mm256_loadu_ps(at[1]), c = _mm256_loadu_ps(at[2]),
                   d = _mm256_loadu_ps(at[3]);
      const __m256 ab = _mm256_add_ps(a, b), a_b = _mm256_sub_ps(a, b), cd = _mm256_add_ps(c, d),
                   c_d = _mm256_sub_ps(c, d);
      _mm256_storeu_ps(at[0], _mm256_add_ps(ab, cd));
      _mm256_storeu_ps(at[1], _mm256_add_ps(a_b, c_d));
      _mm256_storeu_ps(at[2], _mm256_sub_ps(ab, cd));
      _mm256_storeu_ps(at[3], _mm256_sub_ps(a_b, c_d));
    }
}

// All stages from 8 up.
void transform_rest(float* values, std::size_t size) {
  std::size_t half = 8;
  for (; 4 * half <= size; half *= 4) transform_wide(values, size, half);
  if (half < size)
    for (std::size_t i = 0; i < half; i += 8) {
      const __m256 a = _mm256_loadu_ps(values + i), b = _mm256_loadu_ps(values + i + half);
      _mm256_storeu_ps(values + i, _mm256_add_ps(a, b));
      _mm256_storeu_ps(values + i + half, _mm256_sub_ps(a, b));
    }
}

__m256 factor_for(std::size_t size) { return _mm256_set1_ps(1.0f / std::sqrt(static_cast<float>(size))); }

void rotate(float* values, std::size_t size, const Signs& signs) {
  for (std::size_t i = 0; i < size; i += 8)
    _mm256_storeu_ps(values + i, transform_eight(_mm256_xor_ps(_mm256_loadu_ps(values + i), sign_bits(signs, i / 8))));
  transform_rest(values, size);
  const __m256 factor = factor_for(size);
  for (std::size_t i = 0; i < size; i += 8)
    _mm256_storeu_ps(values + i, _mm256_mul_ps(_mm256_loadu_ps(values + i), factor));
}

void unrotate(float* values, std::size_t size, const Signs& signs) {
  for (std::size_t i = 0; i < size; i += 8) _mm256_storeu_ps(values + i, transform_eight(_mm256_loadu_ps(values + i)));
  transform_rest(values, size);
  const __m256 factor = factor_for(size);
  for (std::size_t i = 0; i < size; i += 8) {
    const __m256 scaled = _mm256_mul_ps(_mm256_loadu_ps(values + i), factor);
    _mm256_storeu_ps(values + i, _mm256_xor_ps(scaled, sign_bits(signs, i / 8)));
  }
}

__m256i narrow_to_bytes(const __m256i* lanes) {
  const __m256i low = _mm256_packs_epi32(lanes[0], lanes[1]), high = _mm256_packs_epi32(lanes[2], lanes[3]);
  return _mm256_permutevar8x32_epi32(_mm256_packus_epi16(low, high), _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}

void quantise(const float* values, std::size_t size, float per_unit, const random::Stream& stream, std::uint64_t group,
              Fields fields, std::uint8_t* codes) {
  static_assert(sizeof(Interval) == 4);
  const int* const intervals = reinterpret_cast<const int*>(kIntervals.data());
  const __m256 factor = _mm256_set1_ps(per_unit), middle = _mm256_set1_ps(kTableMiddle);
  const __m256 zero = _mm256_setzero_ps(), largest = _mm256_set1_ps(kTableLargest), unit = _mm256_set1_ps(0x1p-24f);
  const __m256i byte = _mm256_set1_epi32(255);
  for (std::size_t begin = 0; begin < size; begin += kGroup, ++group) {
    __m256i lanes[8];
    random::draw(stream, group, lanes);
    for (int part = 0; part < 8; ++part) {
      const __m256 value = _mm256_loadu_ps(values + begin + 8 * part);
      const __m256 place = _mm256_add_ps(_mm256_mul_ps(value, factor), middle);
      const __m256 clamped = _mm256_min_ps(_mm256_max_ps(place, zero), largest);
      const __m256i interval = _mm256_i32gather_epi32(intervals, _mm256_cvttps_epi32(clamped), 4);
      const __m256i low = _mm256_and_si256(interval, byte);
      const __m256i gap = _mm256_and_si256(_mm256_srli_epi32(interval, 8), byte);
      const __m256 fraction = _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_srli_epi32(lanes[part], 8)), unit);
      const __m256i up =
          _mm256_castps_si256(_mm256_cmp_ps(_mm256_mul_ps(fraction, _mm256_cvtepi32_ps(gap)),
                                            _mm256_sub_ps(clamped, _mm256_cvtepi32_ps(low)), _CMP_LT_OQ));
      lanes[part] = fields == Fields::bytes ? _mm256_add_epi32(low, _mm256_and_si256(up, gap))
                                            : _mm256_sub_epi32(_mm256_srli_epi32(interval, 16), up);
    }
    const __m256i first = narrow_to_bytes(lanes), second = narrow_to_bytes(lanes + 4);
    __m256i* const to = reinterpret_cast<__m256i*>(codes);
    if (fields == Fields::bytes) {
      _mm256_storeu_si256(to, first);
      _mm256_storeu_si256(to + 1, second);
    } else {
      _mm256_storeu_si256(to, _mm256_or_si256(first, _mm256_slli_epi16(second, 4)));
    }
    codes += bytes_for(kGroup, fields);
  }
}

void store_expanded(__m256i sums, __m256i bias, __m256 step, float* to) {
  _mm256_storeu_ps(to, _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_sub_epi32(sums, bias)), step));
}

template <typename Sum>
void expand_any_sums(const Sum* sums, std::size_t size, int n_ranks, float step, float* values) {
  const __m256i bias = _mm256_set1_epi32(kTableMiddle * n_ranks);
  const __m256 factor = _mm256_set1_ps(step);
  for (std::size_t i = 0; i < size; i += 8) {
    __m256i wide;
    if constexpr (std::is_same_v<Sum, std::uint8_t>)
      wide = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(sums + i)));
    else
      wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(sums + i)));
    store_expanded(wide, bias, factor, values + i);
  }
}

void expand(const std::uint8_t* codes, std::size_t size, Fields fields, float step, float* values) {
  if (fields == Fields::bytes) {
    expand_any_sums(codes, size, 1, step, values);
    return;
  }
  const __m128i table = _mm_loadu_si128(reinterpret_cast<const __m128i*>(kTable.data())), mask = _mm_set1_epi8(15);
  const __m256i bias = _mm256_set1_epi32(kTableMiddle);
  const __m256 factor = _mm256_set1_ps(step);
  for (std::size_t begin = 0; begin < size; begin += kGroup, codes += kGroup / 2)
    for (std::size_t half = 0; half < 2; ++half) {  // bytes 0 to 15 and 16 to 31
      const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + 16 * half));
      const __m128i low = _mm_shuffle_epi8(table, _mm_and_si128(bytes, mask));
      const __m128i high = _mm_shuffle_epi8(table, _mm_and_si128(_mm_srli_epi16(bytes, 4), mask));
      float* const to = values + begin + 16 * half;
      store_expanded(_mm256_cvtepu8_epi32(low), bias, factor, to);
      store_expanded(_mm256_cvtepu8_epi32(_mm_srli_si128(low, 8)), bias, factor, to + 8);
      store_expanded(_mm256_cvtepu8_epi32(high), bias, factor, to + 32);
      store_expanded(_mm256_cvtepu8_epi32(_mm_srli_si128(high, 8)), bias, factor, to + 40);
    }
}

}  // namespace

const RotationKernels kRotationAvx2 = {
    draw_signs, rotate, unrotate, quantise, expand, expand_any_sums<std::uint8_t>, expand_any_sums<std::uint16_t>};

}  // namespace gradwire::quantisers
#endif
