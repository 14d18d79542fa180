// Every level adds the same pairs in the same stages. Sizes are whole groups, so nothing is left over.
#include <cmath>
#include <cstring>

#include "quantisers/rotation.hpp"
#include "quantisers/runs.hpp"
#include "random/counter.hpp"
#include "simd/lanes.hpp"

namespace gradwire::quantisers {
namespace {

using V = Lanes;

void draw_signs(const random::Stream& stream, std::uint64_t block, Signs& signs) {
  random::words_of_group(stream, block, signs.data());
}

V::Floats flip(V::Floats values, const Signs& signs, std::size_t i) {
  return V::negate_if(V::mask_of(signs[i / 32] >> i % 32), values);
}

// The stages inside a vector: the lower of two partners gets their sum, the upper their difference.
#if defined(__AVX2__)
__m256 transform_within(__m256 x) {
  __m256 other = _mm256_permute_ps(x, 0xB1);
  x = _mm256_blend_ps(x + other, other - x, 0xAA);
  other = _mm256_permute_ps(x, 0x4E);
  x = _mm256_blend_ps(x + other, other - x, 0xCC);
  other = _mm256_permute2f128_ps(x, x, 1);
  return _mm256_blend_ps(x + other, other - x, 0xF0);
}
#else
float transform_within(float x) { return x; }
#endif

// All other stages, two at once where there are two: that halves the traffic with L1.
void transform_rest(float* values, std::size_t size) {
  std::size_t half = V::n;
  for (; 4 * half <= size; half *= 4)
    for (std::size_t begin = 0; begin < size; begin += 4 * half)
      for (std::size_t i = begin; i < begin + half; i += V::n) {
        float* const at[4] = {values + i, values + i + half, values + i + 2 * half, values + i + 3 * half};
        const auto a = V::load(at[0]), b = V::load(at[1]), c = V::load(at[2]), d = V::load(at[3]);
        V::store(at[0], (a + b) + (c + d));
        V::store(at[1], (a - b) + (c - d));
        V::store(at[2], (a + b) - (c + d));
        V::store(at[3], (a - b) - (c - d));
      }
  if (half < size)
    for (std::size_t i = 0; i < half; i += V::n) {
      const auto a = V::load(values + i), b = V::load(values + i + half);
      V::store(values + i, a + b);
      V::store(values + i + half, a - b);
    }
}

// before(vector, i) changes what goes into the transform, after(vector, i) what comes out.
template <class Before, class After>
void transform(float* values, std::size_t size, Before before, After after) {
  for (std::size_t i = 0; i < size; i += V::n) V::store(values + i, transform_within(before(V::load(values + i), i)));
  transform_rest(values, size);
  const auto factor = V::set(1.0f / std::sqrt(static_cast<float>(size)));
  for (std::size_t i = 0; i < size; i += V::n) V::store(values + i, after(V::load(values + i) * factor, i));
}

void rotate(float* values, std::size_t size, const Signs& signs) {
  transform(
      values, size, [&](auto x, std::size_t i) { return flip(x, signs, i); }, [](auto x, std::size_t) { return x; });
}

void unrotate(float* values, std::size_t size, const Signs& signs) {
  transform(
      values, size, [](auto x, std::size_t) { return x; }, [&](auto x, std::size_t i) { return flip(x, signs, i); });
}

// The fields of a group, from where its values lie in the table and the numbers that were drawn.
void find_fields(const float* places, const std::uint32_t* numbers, Fields fields, std::int32_t* found) {
#if defined(__AVX2__)
  const __m256i byte = _mm256_set1_epi32(255);
  for (std::size_t i = 0; i < kGroup; i += 8) {
    const __m256 place = V::load(places + i);
    const __m256i interval =
        _mm256_i32gather_epi32(reinterpret_cast<const int*>(kIntervals.data()), _mm256_cvttps_epi32(place), 4);
    const __m256i low = _mm256_and_si256(interval, byte), gap = _mm256_and_si256(_mm256_srli_epi32(interval, 8), byte);
    const __m256 fraction = V::load_upper(numbers + i) * V::set(0x1p-24f);
    const __m256i up =
        _mm256_castps_si256(V::less(fraction * _mm256_cvtepi32_ps(gap), place - _mm256_cvtepi32_ps(low)));
    store256(found + i, fields == Fields::bytes ? _mm256_add_epi32(low, _mm256_and_si256(up, gap))
                                                : _mm256_sub_epi32(_mm256_srli_epi32(interval, 16), up));
  }
#else
  for (std::size_t i = 0; i < kGroup; ++i) {
    const Interval interval = kIntervals[static_cast<std::size_t>(places[i])];
    const float fraction = V::load_upper(numbers + i) * 0x1p-24f;
    const bool up = fraction * interval.gap < places[i] - interval.low;
    found[i] = fields == Fields::bytes ? interval.low + (up ? interval.gap : 0) : interval.index + up;
  }
#endif
}

void quantise(const float* values, std::size_t size, float per_unit, const random::Stream& stream, std::uint64_t group,
              Fields fields, std::uint8_t* codes) {
  for_drawn(size, stream, group, [=](auto, std::size_t first, std::size_t, const std::uint32_t* numbers) {
    alignas(32) float places[kGroup];
    alignas(32) std::int32_t found[kGroup];
    for (std::size_t i = 0; i < kGroup; i += V::n) {
      const auto place = V::load(values + first + i) * V::set(per_unit) + V::set(kTableMiddle);
      V::store(places + i, V::smaller(V::larger(place, V::set(0)), V::set(kTableLargest)));
    }
    find_fields(places, numbers, fields, found);
    write_group(found, fields, codes + bytes_for(first, fields));
  });
}

// The table's values of a group's indices.
void look_up(const std::uint8_t* indices, std::uint8_t* found) {
#if defined(__AVX2__)
  const __m256i table = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(kTable.data())));
  for (std::size_t i = 0; i < kGroup; i += 32) store256(found + i, _mm256_shuffle_epi8(table, load256(indices + i)));
#else
  for (std::size_t i = 0; i < kGroup; ++i) found[i] = kTable[indices[i]];
#endif
}

template <typename Sum>
void expand_any_sums(const Sum* sums, std::size_t size, int n_ranks, float step, float* values) {
  const auto bias = V::set(static_cast<float>(kTableMiddle * n_ranks));
  for (std::size_t i = 0; i < size; i += V::n) V::store(values + i, (V::load(sums + i) - bias) * V::set(step));
}

void expand(const std::uint8_t* codes, std::size_t size, Fields fields, float step, float* values) {
  if (fields == Fields::bytes) return expand_any_sums(codes, size, 1, step, values);
  for (std::size_t begin = 0; begin < size; begin += kGroup) {
    std::uint8_t indices[kGroup], own[kGroup];
    look_up(read_group(codes + bytes_for(begin, fields), fields, indices), own);
    expand_any_sums(own, kGroup, 1, step, values + begin);
  }
}

}  // namespace

const RotationKernels& rotation_kernels_at(Level<GW_LEVEL>) {
  static constexpr RotationKernels all = {
      draw_signs, rotate, unrotate, quantise, expand, expand_any_sums<std::uint8_t>, expand_any_sums<std::uint16_t>};
  return all;
}

}  // namespace gradwire::quantisers
