// What the quantisers' loops share; for files that are compiled for each instruction set.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <type_traits>

#include "floats/word_loops.hpp"
#include "quantisers/kernels.hpp"
#include "random/counter.hpp"
#include "simd/lanes.hpp"

namespace gradwire::quantisers {
namespace {

// body(lanes, first, n) for every run of `size` values, n a constant but for the last one.
template <std::size_t size, class Body>
[[gnu::always_inline]] inline void for_runs(std::size_t n, Body body) {
  std::size_t first = 0;
  for (; first + size <= n; first += size) body(Lanes(), first, std::integral_constant<std::size_t, size>());
  if (first < n) body(One(), first, n - first);
}

// body(lanes, first, n, numbers)
template <class Body>
void for_drawn(std::size_t n, const random::Stream& stream, std::uint64_t group, Body body) {
  for_runs<kGroup>(n, [&](auto lanes, std::size_t first, auto count) {
    alignas(32) std::uint32_t numbers[kGroup];
    random::draw(stream, group++, numbers);
    body(lanes, first, count, numbers);
  });
}

// A group of fields, of which those past the end are zero.
inline void write_group(const std::int32_t* fields_of, Fields fields, std::uint8_t* to) {
  alignas(32) std::uint8_t bytes[kGroup];
  for (std::size_t half : {0, 32}) write_bytes(fields_of + half, bytes + half);
  if (fields == Fields::bytes)
    std::memcpy(to, bytes, kGroup);
  else
    for (std::size_t i = 0; i < kGroup / 2; ++i) to[i] = static_cast<std::uint8_t>(bytes[i] | bytes[32 + i] << 4);
}

// A group of fields a byte each: where they lie, or in `room`.
inline const std::uint8_t* read_group(const std::uint8_t* from, Fields fields, std::uint8_t* room) {
  if (fields == Fields::bytes) return from;
  for (std::size_t i = 0; i < kGroup / 2; ++i) {
    room[i] = from[i] & 15;
    room[kGroup / 2 + i] = from[i] >> 4;
  }
  return room;
}

// Most of these are loops over runs of a constant length without branches, for the compiler to turn into vectors. Sums
// have an order of their own: eight lanes, which are then added in pairs. All levels get the same bits.
std::uint32_t bits_of(float value) { return std::bit_cast<std::uint32_t>(value); }

// ---- dtypes and arithmetic

void widen(const void* values, Dtype dtype, std::size_t n, float* out) {
  with_dtype(dtype, [=](auto type) {
    for (std::size_t i = 0; i < n; ++i) out[i] = std::bit_cast<float>(load_word<type()>(values, i));
  });
}

void narrow(const float* values, Dtype dtype, std::size_t n, void* out) {
  with_dtype(dtype, [values, n, to = out](auto type) {
    void* __restrict const out = to;
    for (std::size_t i = 0; i < n; ++i) store_word<type(), Specials::quiet>(out, i, bits_of(values[i]));
  });
}

void add(const float* values, const float* residual, float scale, std::size_t n, float* out) {
  for (std::size_t i = 0; i < n; ++i) out[i] = values[i] + residual[i] * scale;
}

void subtract(const float* values, const float* decoded, float inverse_scale, std::size_t n, float* out) {
  for (std::size_t i = 0; i < n; ++i) out[i] = (values[i] - decoded[i]) * inverse_scale;
}

void divide(float* values, float divisor, std::size_t n) {
  for (std::size_t i = 0; i < n; ++i) values[i] /= divisor;
}

// ---- sums, in double

double fold(const double* lanes) {
  return ((lanes[0] + lanes[1]) + (lanes[2] + lanes[3])) + ((lanes[4] + lanes[5]) + (lanes[6] + lanes[7]));
}

#if defined(__AVX2__)
void add_doubles(__m256 values, __m256d* sums) {
  sums[0] = _mm256_add_pd(sums[0], _mm256_cvtps_pd(_mm256_castps256_ps128(values)));
  sums[1] = _mm256_add_pd(sums[1], _mm256_cvtps_pd(_mm256_extractf128_ps(values, 1)));
}
void store_doubles(const __m256d* sums, double* to) {
  for (int half = 0; half < 2; ++half) _mm256_store_pd(to + 4 * half, sums[half]);
}
#endif

Magnitudes magnitudes(const Terms& terms, std::size_t n) {
  alignas(32) double positive[8] = {}, negative[8] = {};
  std::uint64_t n_negative = 0;
  std::uint32_t largest = 0;
  std::size_t i = 0;
#if defined(__AVX2__)
  __m256d above[2] = {}, below[2] = {};
  __m256i most = _mm256_setzero_si256();
  const __m256 zero = _mm256_setzero_ps(), scale = _mm256_set1_ps(terms.scale);
  for (; i + 8 <= n; i += 8) {
    __m256 value = _mm256_loadu_ps(terms.values + i);
    if (terms.residual != nullptr) value = value + _mm256_loadu_ps(terms.residual + i) * scale;
    add_doubles(_mm256_max_ps(value, zero), above);
    add_doubles(_mm256_max_ps(zero - value, zero), below);
    n_negative += static_cast<std::uint64_t>(
        _mm_popcnt_u32(mask_of(_mm256_castps_si256(_mm256_cmp_ps(value, zero, _CMP_LT_OQ)))));
    most = _mm256_max_epu32(most, _mm256_and_si256(_mm256_castps_si256(value), _mm256_set1_epi32(kMagnitude)));
  }
  store_doubles(above, positive);
  store_doubles(below, negative);
  largest = largest_of(most);
#endif
  for (; i < n; ++i) {
    const float value = terms[i];
    positive[i % 8] += value > 0 ? value : 0.0f;
    negative[i % 8] += value < 0 ? -value : 0.0f;
    n_negative += value < 0;
    largest = std::max(largest, bits_of(value) & kMagnitude);
  }
  return {fold(positive), fold(negative), n_negative, largest};
}

Squares squares(const float* values, std::size_t n) {
  alignas(32) double sums[8] = {};
  std::uint32_t largest = 0;
  std::size_t i = 0;
#if defined(__AVX2__)
  __m256d of_squares[2] = {};
  __m256i most = _mm256_setzero_si256();
  for (; i + 8 <= n; i += 8) {
    const __m256 value = _mm256_loadu_ps(values + i);
    const __m256d low = _mm256_cvtps_pd(_mm256_castps256_ps128(value)),
                  high = _mm256_cvtps_pd(_mm256_extractf128_ps(value, 1));
    of_squares[0] += low * low;
    of_squares[1] += high * high;
    most = _mm256_max_epu32(most, _mm256_and_si256(_mm256_castps_si256(value), _mm256_set1_epi32(kMagnitude)));
  }
  store_doubles(of_squares, sums);
  largest = largest_of(most);
#endif
  for (; i < n; ++i) {
    sums[i % 8] += double{values[i]} * double{values[i]};
    largest = std::max(largest, bits_of(values[i]) & kMagnitude);
  }
  return {fold(sums), largest};
}

// ---- one and two bits a value

// body(lanes, first, n, term, keep) for runs of 32: term(i) loads a term, keep(i, term, decoded) writes what is left
// out.
template <bool has_residual, bool keeps, class Body>
void for_terms(Terms terms, std::size_t n, LeftOut left_out, Body body) {
  for_runs<32>(n, [&](auto lanes, std::size_t first, auto count) {
    using V = decltype(lanes);
    const auto term = [&](std::size_t i) {
      const auto value = V::load(terms.values + first + i);
      if constexpr (!has_residual) return value;
      return value + V::load(terms.residual + first + i) * V::set(terms.scale);
    };
    const auto keep = [&](std::size_t i, auto value, auto decoded) {
      if constexpr (keeps) V::store(left_out.out + first + i, (value - decoded) * V::set(left_out.inverse_scale));
    };
    body(lanes, first, count, term, keep);
  });
}

template <class Body>
void for_terms(const Terms& terms, std::size_t n, const LeftOut& left_out, Body body) {
  if (left_out.out == nullptr)
    return terms.residual == nullptr ? for_terms<false, false>(terms, n, left_out, body)
                                     : for_terms<true, false>(terms, n, left_out, body);
  return terms.residual == nullptr ? for_terms<false, true>(terms, n, left_out, body)
                                   : for_terms<true, true>(terms, n, left_out, body);
}

// Bit i of both becomes the lower and the upper bit of code i, of n up to 32.
void store_codes(std::uint32_t lower, std::uint32_t upper, std::size_t n, std::uint32_t* words) {
#if defined(__AVX2__)
  const std::uint64_t codes = _pdep_u64(lower, 0x5555555555555555) | _pdep_u64(upper, 0xAAAAAAAAAAAAAAAA);
#else
  const auto spread = [](std::uint64_t bits) {
    bits = (bits | bits << 16) & 0x0000FFFF0000FFFF;
    bits = (bits | bits << 8) & 0x00FF00FF00FF00FF;
    bits = (bits | bits << 4) & 0x0F0F0F0F0F0F0F0F;
    bits = (bits | bits << 2) & 0x3333333333333333;
    return (bits | bits << 1) & 0x5555555555555555;
  };
  const std::uint64_t codes = spread(lower) | spread(upper) << 1;
#endif
  std::memcpy(words, &codes, n > 16 ? 8 : 4);
}

void pack_signs(const Terms& terms, std::size_t n, float positive, float negative, const LeftOut& left_out,
                std::uint32_t* words) {
  for_terms(terms, n, left_out, [=](auto lanes, std::size_t first, auto count, const auto& term, const auto& keep) {
    using V = decltype(lanes);
    std::uint32_t word = 0;
    for (std::size_t i = 0; i < count; i += V::n) {
      const auto value = term(i);
      const auto is_below = V::less(value, V::set(0));
      word |= V::bits(is_below) << i;
      keep(i, value, V::choose(is_below, V::set(negative), V::set(positive)));
    }
    words[first / 32] = word;
  });
}

void unpack_signs(const std::uint32_t* words, std::size_t n, float positive, float negative, float* out) {
  for_runs<32>(n, [=](auto lanes, std::size_t first, auto count) {
    using V = decltype(lanes);
    const std::uint32_t word = words[first / 32];
    for (std::size_t i = 0; i < count; i += V::n)
      V::store(out + first + i, V::choose(V::mask_of(word >> i), V::set(negative), V::set(positive)));
  });
}

void pack_beyond(const Terms& terms, std::size_t n, float threshold, const LeftOut& left_out, std::uint32_t* words) {
  for_terms(terms, n, left_out, [=](auto lanes, std::size_t first, auto count, const auto& term, const auto& keep) {
    using V = decltype(lanes);
    std::uint32_t above = 0, below = 0;
    for (std::size_t i = 0; i < count; i += V::n) {
      const auto value = term(i), zero = V::set(0), limit = V::set(threshold);
      const auto is_beyond = V::at_least(V::magnitude(value), limit);
      // A threshold of zero belongs to values that are all zero; those are sent as zeros.
      above |= V::bits(V::both(is_beyond, V::less(zero, value))) << i;
      below |= V::bits(V::both(is_beyond, V::less(value, zero))) << i;
      keep(i, value, V::where(is_beyond, V::with_sign_of(value, limit)));
    }
    store_codes(above, below, count, words + first / 16);
  });
}

void pack_nearest(const Terms& terms, std::size_t n, float inner, float outer, const LeftOut& left_out,
                  std::uint32_t* words) {
  const float boundary = 0.5f * inner + 0.5f * outer;  // from here on the outer level is the nearer one
  for_terms(terms, n, left_out, [=](auto lanes, std::size_t first, auto count, const auto& term, const auto& keep) {
    using V = decltype(lanes);
    std::uint32_t outside = 0, below = 0;
    for (std::size_t i = 0; i < count; i += V::n) {
      const auto value = term(i), low = V::set(inner), high = V::set(outer);
      const auto is_outside = V::at_least(V::magnitude(value), V::set(boundary)), is_below = V::less(value, V::set(0));
      outside |= V::bits(is_outside) << i;
      below |= V::bits(is_below) << i;
      keep(i, value, V::negate_if(is_below, V::choose(is_outside, high, low)));
    }
    store_codes(outside, below, count, words + first / 16);
  });
}

// out[i] = levels[code i]
void look_up(const std::uint32_t* words, std::size_t n, float a, float b, float c, float d, float* out) {
  for_runs<16>(n, [=](auto lanes, std::size_t first, auto count) {
    using V = decltype(lanes);
    const typename V::Levels levels{a, b, c, d};
    for (std::size_t i = 0; i < count; i += V::n)
      V::store(out + first + i, V::pick(levels, words[first / 16] >> 2 * i));
  });
}

void unpack_nearest(const std::uint32_t* words, std::size_t n, float inner, float outer, float* out) {
  look_up(words, n, inner, outer, -inner, -outer, out);
}

bool unpack_ternary(const std::uint32_t* words, std::size_t n, float scale, float* out) {
  look_up(words, n, 0, scale, -scale, 0, out);
  std::uint32_t threes = 0;
  for (std::size_t i = 0; i < n / 16; ++i) threes |= words[i] & words[i] >> 1 & 0x55555555;
  if (n % 16 != 0) threes |= words[n / 16] & words[n / 16] >> 1 & 0x55555555 >> (32 - 2 * (n % 16));
  return threes == 0;
}

// ---- by drawn numbers, group by group

void pack_drawn(const float* values, std::size_t n, float per_unit, const random::Stream& stream, std::uint64_t group,
                std::uint32_t* words) {
  for_drawn(n, stream, group, [=](auto lanes, std::size_t first, auto count, const std::uint32_t* numbers) {
    using V = decltype(lanes);
    std::uint64_t drawn = 0, below = 0;
    for (std::size_t i = 0; i < count; i += V::n) {
      const auto value = V::load(values + first + i);
      const auto is_drawn = V::less(V::load_upper(numbers + i), V::magnitude(value) * V::set(per_unit));
      drawn |= std::uint64_t{V::bits(is_drawn)} << i;
      below |= std::uint64_t{V::bits(V::less(value, V::set(0)))} << i;
    }
    for (std::size_t i = 0; i < count; i += 32) {
      const auto is_drawn = static_cast<std::uint32_t>(drawn >> i), is_below = static_cast<std::uint32_t>(below >> i);
      store_codes(is_drawn & ~is_below, is_drawn & is_below, count - i, words + (first + i) / 16);
    }
  });
}

void count_drawn(const float* values, std::size_t n, float per_unit, const random::Stream& stream, std::uint64_t group,
                 Fields fields, std::uint8_t* codes) {
  for_drawn(n, stream, group, [=](auto lanes, std::size_t first, auto count, const std::uint32_t* numbers) {
    using V = decltype(lanes);
    alignas(32) std::int32_t counts[kGroup];
    if (count < kGroup) std::memset(counts, 0, sizeof counts);
    for (std::size_t i = 0; i < count; i += V::n) {
      const auto value = V::load(values + first + i);
      const auto is_drawn = V::less(V::load_upper(numbers + i), V::magnitude(value) * V::set(per_unit));
      const auto drawn = V::choose(V::less(value, V::set(0)), V::set(0), V::set(2));
      V::store_integers(counts + i, V::choose(is_drawn, drawn, V::set(1)));
    }
    write_group(counts, fields, codes + bytes_for(first, fields));
  });
}

void unpack_counts(const std::uint8_t* codes, std::size_t n, Fields fields, int n_ranks, float step, float* out) {
  for_runs<kGroup>(n, [&](auto lanes, std::size_t first, auto count) {
    using V = decltype(lanes);
    std::uint8_t room[kGroup];
    const std::uint8_t* const counts = read_group(codes + bytes_for(first, fields), fields, room);
    for (std::size_t i = 0; i < count; i += V::n)
      V::store(out + first + i, (V::load(counts + i) - V::set(static_cast<float>(n_ranks))) * V::set(step));
  });
}

void pack_levels(const float* values, std::size_t n, float per_unit, int levels, const random::Stream& stream,
                 std::uint64_t group, Fields fields, std::uint8_t* codes) {
  const auto most = static_cast<float>(levels), sign = fields == Fields::nibbles ? 8.0f : 128.0f;
  for_drawn(n, stream, group, [=](auto lanes, std::size_t first, auto count, const std::uint32_t* numbers) {
    using V = decltype(lanes);
    alignas(32) std::int32_t own[kGroup];
    if (count < kGroup) std::memset(own, 0, sizeof own);
    for (std::size_t i = 0; i < count; i += V::n) {
      const auto value = V::load(values + first + i), fraction = V::load_upper(numbers + i) * V::set(0x1p-24f);
      const auto raised = V::magnitude(value) * V::set(per_unit) + fraction;
      const auto level = V::truncate(V::smaller(raised, V::set(most)));
      V::store_integers(own + i, level + V::choose(V::less(value, V::set(0)), V::set(sign), V::set(0)));
    }
    write_group(own, fields, codes + bytes_for(first, fields));
  });
}

bool unpack_levels(const std::uint8_t* codes, std::size_t n, float step, int levels, Fields fields, float* out) {
  const std::uint8_t mask = fields == Fields::nibbles ? 7 : 127;
  std::uint8_t largest = 0;
  for_runs<kGroup>(n, [&](auto lanes, std::size_t first, auto count) {
    using V = decltype(lanes);
    std::uint8_t room[kGroup];
    const std::uint8_t* const own = read_group(codes + bytes_for(first, fields), fields, room);
    std::uint8_t here = 0;
    for (std::size_t i = 0; i < count; ++i) here = std::max(here, static_cast<std::uint8_t>(own[i] & mask));
    largest = std::max(largest, here);
    const auto limit = V::set(static_cast<float>(mask + 1));
    for (std::size_t i = 0; i < count; i += V::n) {
      const auto code = V::load(own + i);
      // A level of zero is never below zero, whatever its sign.
      V::store(out + first + i, V::choose(V::at_least(code, limit), limit - code, code) * V::set(step));
    }
  });
  return largest <= levels;
}

// ---- rotations: every level adds the same pairs in the same stages. Sizes are whole groups, so nothing is left over.

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

const Kernels& kernels_at(Level<GW_LEVEL>) {
  static constexpr Kernels all = {widen,      narrow,         add,          subtract,      divide,       magnitudes,
                                  squares,    pack_signs,     unpack_signs, pack_beyond,   pack_nearest, unpack_nearest,
                                  pack_drawn, unpack_ternary, count_drawn,  unpack_counts, pack_levels,  unpack_levels};
  return all;
}

const RotationKernels& rotation_kernels_at(Level<GW_LEVEL>) {
  static constexpr RotationKernels all = {
      draw_signs, rotate, unrotate, quantise, expand, expand_any_sums<std::uint8_t>, expand_any_sums<std::uint16_t>};
  return all;
}

}  // namespace gradwire::quantisers
