// Most of these are loops over runs of a constant length without branches, for the compiler to turn into vectors. Sums
// have an order of their own: eight lanes, which are then added in pairs. All levels get the same bits.
#include <algorithm>
#include <bit>
#include <cstring>

#include "floats/word_loops.hpp"
#include "quantisers/kernels.hpp"
#include "quantisers/runs.hpp"

namespace gradwire::quantisers {
namespace {

std::uint32_t bits_of(float value) { return std::bit_cast<std::uint32_t>(value); }

// ---- dtypes and arithmetic

template <Dtype dtype>
void widen(const void* values, std::size_t n, float* out) {
  for (std::size_t i = 0; i < n; ++i) out[i] = std::bit_cast<float>(floats::load_word<dtype>(values, i));
}

template <Dtype dtype>
void narrow(const float* values, std::size_t n, void* __restrict out) {
  for (std::size_t i = 0; i < n; ++i) floats::store_word<dtype, floats::Specials::quiet>(out, i, bits_of(values[i]));
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

// The largest levels of many groups, by their place.
template <class Count>
void raise(std::uint8_t* __restrict largest, const std::uint8_t* __restrict fields, Count n, std::uint8_t mask) {
  for (std::size_t i = 0; i < n; ++i) largest[i] = std::max(largest[i], static_cast<std::uint8_t>(fields[i] & mask));
}

bool unpack_levels(const std::uint8_t* codes, std::size_t n, float step, int levels, Fields fields, float* out) {
  const std::uint8_t mask = fields == Fields::nibbles ? 7 : 127;
  std::uint8_t largest[kGroup] = {};
  for_runs<kGroup>(n, [&](auto lanes, std::size_t first, auto count) {
    using V = decltype(lanes);
    std::uint8_t room[kGroup];
    const std::uint8_t* const own = read_group(codes + bytes_for(first, fields), fields, room);
    raise(largest, own, count, mask);
    const auto limit = V::set(static_cast<float>(mask + 1));
    for (std::size_t i = 0; i < count; i += V::n) {
      const auto code = V::load(own + i);
      // A level of zero is never below zero, whatever its sign.
      V::store(out + first + i, V::choose(V::at_least(code, limit), limit - code, code) * V::set(step));
    }
  });
  return *std::max_element(largest, largest + kGroup) <= levels;
}

}  // namespace

const Kernels& kernels_at(Level<GW_LEVEL>) {
  constexpr Dtype f = Dtype::float32, b = Dtype::bfloat16, h = Dtype::float16;
  static constexpr Kernels all = {{widen<f>, widen<b>, widen<h>},
                                  {narrow<f>, narrow<b>, narrow<h>},
                                  add,
                                  subtract,
                                  divide,
                                  magnitudes,
                                  squares,
                                  pack_signs,
                                  unpack_signs,
                                  pack_beyond,
                                  pack_nearest,
                                  unpack_nearest,
                                  pack_drawn,
                                  unpack_ternary,
                                  count_drawn,
                                  unpack_counts,
                                  pack_levels,
                                  unpack_levels};
  return all;
}

}  // namespace gradwire::quantisers
