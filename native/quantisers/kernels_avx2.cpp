// The AVX2 twin of kernels_portable.cpp: whole groups here, the rest there.
#if defined(__AVX2__)
#include <immintrin.h>

#include "quantisers/kernels.hpp"
#include "quantisers/value_loops.hpp"
#include "random/counter_lanes.hpp"

namespace gradwire::quantisers {
namespace {

__m256i load256(const void* from) { return _mm256_loadu_si256(static_cast<const __m256i*>(from)); }
void store256(void* to, __m256i value) { _mm256_storeu_si256(static_cast<__m256i*>(to), value); }
__m256 magnitude_of(__m256 values) { return _mm256_and_ps(values, _mm256_castsi256_ps(_mm256_set1_epi32(kMagnitude))); }

std::uint32_t largest_of(__m256i lanes) {
  alignas(32) std::uint32_t all[8];
  store256(all, lanes);
  std::uint32_t largest = 0;
  for (const std::uint32_t one : all) largest = one > largest ? one : largest;
  return largest;
}

void add_doubles(__m256 values, __m256d* sums) {
  sums[0] = _mm256_add_pd(sums[0], _mm256_cvtps_pd(_mm256_castps256_ps128(values)));
  sums[1] = _mm256_add_pd(sums[1], _mm256_cvtps_pd(_mm256_extractf128_ps(values, 1)));
}

template <bool kHasResidual>
__m256 load_term(const Terms& terms, __m256 scale, std::size_t i) {
  const __m256 value = _mm256_loadu_ps(terms.values + i);
  if constexpr (!kHasResidual) return value;
  return _mm256_add_ps(value, _mm256_mul_ps(_mm256_loadu_ps(terms.residual + i), scale));
}

template <bool kHasResidual>
Magnitudes magnitudes_of(const Terms& terms, std::size_t n) {
  __m256d positive[2] = {}, negative[2] = {};
  __m256i largest = _mm256_setzero_si256();
  const __m256 zero = _mm256_setzero_ps(), scale = _mm256_set1_ps(terms.scale);
  MagnitudeLanes lanes;
  std::size_t i = 0;
  for (; i + 8 <= n; i += 8) {
    const __m256 value = load_term<kHasResidual>(terms, scale, i);
    add_doubles(_mm256_max_ps(value, zero), positive);
    add_doubles(_mm256_max_ps(_mm256_sub_ps(zero, value), zero), negative);
    lanes.n_negative += _mm_popcnt_u32(_mm256_movemask_ps(_mm256_cmp_ps(value, zero, _CMP_LT_OQ)));
    largest = _mm256_max_epu32(largest, _mm256_castps_si256(magnitude_of(value)));
  }
  for (int half = 0; half < 2; ++half) {
    _mm256_store_pd(lanes.positive + 4 * half, positive[half]);
    _mm256_store_pd(lanes.negative + 4 * half, negative[half]);
  }
  lanes.largest = largest_of(largest);
  lanes.add(terms.from(i), n - i);
  return lanes.result();
}

Magnitudes magnitudes(const Terms& terms, std::size_t n) {
  return terms.residual != nullptr ? magnitudes_of<true>(terms, n) : magnitudes_of<false>(terms, n);
}

Squares squares(const float* values, std::size_t n) {
  __m256d of_squares[2] = {};
  __m256i largest = _mm256_setzero_si256();
  std::size_t i = 0;
  for (; i + 8 <= n; i += 8) {
    const __m256 value = _mm256_loadu_ps(values + i);
    const __m256d parts[2] = {_mm256_cvtps_pd(_mm256_castps256_ps128(value)),
                              _mm256_cvtps_pd(_mm256_extractf128_ps(value, 1))};
    for (int half = 0; half < 2; ++half)
      of_squares[half] = _mm256_add_pd(of_squares[half], _mm256_mul_pd(parts[half], parts[half]));
    largest = _mm256_max_epu32(largest, _mm256_castps_si256(magnitude_of(value)));
  }
  SquareLanes lanes;
  for (int half = 0; half < 2; ++half) _mm256_store_pd(lanes.squares + 4 * half, of_squares[half]);
  lanes.largest = largest_of(largest);
  lanes.add(values + i, n - i);
  return lanes.result();
}

std::uint32_t mask_of(__m256 lanes) { return static_cast<std::uint32_t>(_mm256_movemask_ps(lanes)); }

// For values [0, n): pack(i, four vectors of terms, four of what they decode to) for every 32, and what is left out of
// them. Returns how many there were.
template <bool kHasResidual, bool kKeeps, typename Pack>
std::size_t pack_terms(const Terms& terms, std::size_t n, const LeftOut& left_out, const Pack& pack) {
  const __m256 scale = _mm256_set1_ps(terms.scale), inverse = _mm256_set1_ps(left_out.inverse_scale);
  std::size_t i = 0;
  for (; i + 32 <= n; i += 32) {
    __m256 values[4], decoded[4];
    for (int part = 0; part < 4; ++part) values[part] = load_term<kHasResidual>(terms, scale, i + 8 * part);
    pack(i, values, decoded);
    if constexpr (kKeeps)
      for (int part = 0; part < 4; ++part)
        _mm256_storeu_ps(left_out.out + i + 8 * part,
                         _mm256_mul_ps(_mm256_sub_ps(values[part], decoded[part]), inverse));
  }
  return i;
}

template <typename Pack>
std::size_t pack_terms(const Terms& terms, std::size_t n, const LeftOut& left_out, const Pack& pack) {
  if (left_out.out == nullptr)
    return terms.residual == nullptr ? pack_terms<false, false>(terms, n, left_out, pack)
                                     : pack_terms<true, false>(terms, n, left_out, pack);
  return terms.residual == nullptr ? pack_terms<false, true>(terms, n, left_out, pack)
                                   : pack_terms<true, true>(terms, n, left_out, pack);
}

void pack_signs(const Terms& terms, std::size_t n, float positive, float negative, const LeftOut& left_out,
                std::uint32_t* words) {
  const __m256 zero = _mm256_setzero_ps(), above = _mm256_set1_ps(positive), below = _mm256_set1_ps(negative);
  const std::size_t done = pack_terms(terms, n, left_out, [&](std::size_t i, const __m256* values, __m256* decoded) {
    std::uint32_t word = 0;
    for (int part = 0; part < 4; ++part) {
      const __m256 is_negative = _mm256_cmp_ps(values[part], zero, _CMP_LT_OQ);
      word |= mask_of(is_negative) << 8 * part;
      decoded[part] = _mm256_blendv_ps(above, below, is_negative);
    }
    words[i / 32] = word;
  });
  kPortable.pack_signs(terms.from(done), n - done, positive, negative, left_out.from(done), words + done / 32);
}

void unpack_signs(const std::uint32_t* words, std::size_t n, float positive, float negative, float* out) {
  const __m256 above = _mm256_set1_ps(positive), below = _mm256_set1_ps(negative);
  const __m256i to_sign = _mm256_setr_epi32(31, 30, 29, 28, 27, 26, 25, 24);
  std::size_t i = 0;
  for (; i + 32 <= n; i += 32) {
    const std::uint32_t word = *words++;
    for (int part = 0; part < 4; ++part) {
      const __m256i bits = _mm256_sllv_epi32(_mm256_set1_epi32(static_cast<int>(word >> 8 * part)), to_sign);
      _mm256_storeu_ps(out + i + 8 * part, _mm256_blendv_ps(above, below, _mm256_castsi256_ps(bits)));
    }
  }
  kPortable.unpack_signs(words, n - i, positive, negative, out + i);
}

// Bit i of each mask becomes the lower and the upper bit of code i.
void store_codes(std::uint32_t lower, std::uint32_t upper, void* to) {
  const std::uint64_t codes = _pdep_u64(lower, 0x5555555555555555) | _pdep_u64(upper, 0xAAAAAAAAAAAAAAAA);
  std::memcpy(to, &codes, sizeof codes);
}

void pack_beyond(const Terms& terms, std::size_t n, float threshold, const LeftOut& left_out, std::uint32_t* words) {
  const __m256 zero = _mm256_setzero_ps(), limit = _mm256_set1_ps(threshold), sign = _mm256_set1_ps(-0.0f);
  const std::size_t done = pack_terms(terms, n, left_out, [&](std::size_t i, const __m256* values, __m256* decoded) {
    std::uint32_t positive = 0, negative = 0;
    for (int part = 0; part < 4; ++part) {
      const __m256 value = values[part], beyond = _mm256_cmp_ps(magnitude_of(value), limit, _CMP_GE_OQ);
      positive |= mask_of(_mm256_and_ps(beyond, _mm256_cmp_ps(value, zero, _CMP_GT_OQ))) << 8 * part;
      negative |= mask_of(_mm256_and_ps(beyond, _mm256_cmp_ps(value, zero, _CMP_LT_OQ))) << 8 * part;
      decoded[part] = _mm256_and_ps(beyond, _mm256_or_ps(limit, _mm256_and_ps(value, sign)));
    }
    store_codes(positive, negative, words + i / 16);
  });
  kPortable.pack_beyond(terms.from(done), n - done, threshold, left_out.from(done), words + done / 16);
}

void pack_nearest(const Terms& terms, std::size_t n, float inner, float outer, const LeftOut& left_out,
                  std::uint32_t* words) {
  const __m256 zero = _mm256_setzero_ps(), limit = _mm256_set1_ps(boundary(inner, outer));
  const __m256 low = _mm256_set1_ps(inner), high = _mm256_set1_ps(outer), sign = _mm256_set1_ps(-0.0f);
  const std::size_t done = pack_terms(terms, n, left_out, [&](std::size_t i, const __m256* values, __m256* decoded) {
    std::uint32_t outside = 0, negative = 0;
    for (int part = 0; part < 4; ++part) {
      const __m256 value = values[part], is_outside = _mm256_cmp_ps(magnitude_of(value), limit, _CMP_GE_OQ);
      const __m256 is_negative = _mm256_cmp_ps(value, zero, _CMP_LT_OQ);
      outside |= mask_of(is_outside) << 8 * part;
      negative |= mask_of(is_negative) << 8 * part;
      decoded[part] = _mm256_or_ps(_mm256_blendv_ps(low, high, is_outside), _mm256_and_ps(is_negative, sign));
    }
    store_codes(outside, negative, words + i / 16);
  });
  kPortable.pack_nearest(terms.from(done), n - done, inner, outer, left_out.from(done), words + done / 16);
}

// For values [0, n): store(i, codes of eight values in the lowest bits of their lanes). Returns how many there were.
template <typename Store>
std::size_t for_codes(const std::uint32_t* words, std::size_t n, const Store& store) {
  const __m256i to_code = _mm256_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14);
  std::size_t i = 0;
  for (; i + 16 <= n; i += 16)
    for (int half = 0; half < 2; ++half)
      store(i + 8 * half, _mm256_srlv_epi32(_mm256_set1_epi32(static_cast<int>(words[i / 16] >> 16 * half)), to_code));
  return i;
}

void unpack_nearest(const std::uint32_t* words, std::size_t n, float inner, float outer, float* out) {
  const __m256 values = _mm256_setr_ps(inner, outer, -inner, -outer, inner, outer, -inner, -outer);
  const std::size_t done = for_codes(
      words, n, [&](std::size_t i, __m256i codes) { _mm256_storeu_ps(out + i, _mm256_permutevar_ps(values, codes)); });
  kPortable.unpack_nearest(words + done / 16, n - done, inner, outer, out + done);
}

// All ones where a value of a group is drawn; `numbers` are those of its eight vectors.
__m256 is_drawn(__m256 value, __m256i number, __m256 per_unit) {
  const __m256 upper = _mm256_cvtepi32_ps(_mm256_srli_epi32(number, 8));
  return _mm256_cmp_ps(upper, _mm256_mul_ps(magnitude_of(value), per_unit), _CMP_LT_OQ);
}

void pack_drawn(const float* values, std::size_t n, float per_unit, const random::Stream& stream, std::uint64_t group,
                std::uint32_t* words) {
  const __m256 factor = _mm256_set1_ps(per_unit), zero = _mm256_setzero_ps();
  std::size_t i = 0;
  for (; i + kGroup <= n; i += kGroup, ++group) {
    __m256i numbers[8];
    random::draw(stream, group, numbers);
    for (int half = 0; half < 2; ++half, words += 2) {
      std::uint32_t drawn = 0, negative = 0;
      for (int part = 0; part < 4; ++part) {
        const __m256 value = _mm256_loadu_ps(values + i + 32 * half + 8 * part);
        drawn |= mask_of(is_drawn(value, numbers[4 * half + part], factor)) << 8 * part;
        negative |= mask_of(_mm256_cmp_ps(value, zero, _CMP_LT_OQ)) << 8 * part;
      }
      store_codes(drawn & ~negative, drawn & negative, words);
    }
  }
  kPortable.pack_drawn(values + i, n - i, per_unit, stream, group, words);
}

bool unpack_ternary(const std::uint32_t* words, std::size_t n, float scale, float* out) {
  const __m256 values = _mm256_setr_ps(0, scale, -scale, 0, 0, scale, -scale, 0);
  std::uint32_t threes = 0;
  const std::size_t done = for_codes(words, n, [&](std::size_t i, __m256i codes) {
    threes |= words[i / 16] & words[i / 16] >> 1 & 0x55555555;
    _mm256_storeu_ps(out + i, _mm256_permutevar_ps(values, codes));
  });
  const bool rest_valid = kPortable.unpack_ternary(words + done / 16, n - done, scale, out + done);
  return rest_valid && threes == 0;
}

// Four vectors of eight small integers to 32 bytes in their order.
__m256i narrow_to_bytes(const __m256i* lanes) {
  const __m256i low = _mm256_packs_epi32(lanes[0], lanes[1]), high = _mm256_packs_epi32(lanes[2], lanes[3]);
  return _mm256_permutevar8x32_epi32(_mm256_packus_epi16(low, high), _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}

// The eight vectors of a group to its fields.
std::uint8_t* store_group(const __m256i* lanes, Fields fields, std::uint8_t* to) {
  const __m256i low = narrow_to_bytes(lanes), high = narrow_to_bytes(lanes + 4);
  if (fields == Fields::bytes) {
    store256(to, low);
    store256(to + 32, high);
    return to + 64;
  }
  store256(to, _mm256_or_si256(low, _mm256_slli_epi16(high, 4)));
  return to + 32;
}

// The codes of a group, a byte each: values 0 to 31, values 32 to 63.
const std::uint8_t* load_group(const std::uint8_t* from, Fields fields, __m256i& low, __m256i& high) {
  low = load256(from);
  if (fields == Fields::bytes) {
    high = load256(from + 32);
    return from + 64;
  }
  const __m256i mask = _mm256_set1_epi8(15);
  high = _mm256_and_si256(_mm256_srli_epi16(low, 4), mask);
  low = _mm256_and_si256(low, mask);
  return from + 32;
}

template <typename Body>
void for_eights(__m256i bytes, const Body& body) {
  const __m128i halves[2] = {_mm256_castsi256_si128(bytes), _mm256_extracti128_si256(bytes, 1)};
  for (int half = 0; half < 2; ++half) {
    body(2 * half, halves[half]);
    body(2 * half + 1, _mm_srli_si128(halves[half], 8));
  }
}

void count_drawn(const float* values, std::size_t n, float per_unit, const random::Stream& stream, std::uint64_t group,
                 Fields fields, std::uint8_t* codes) {
  const __m256 factor = _mm256_set1_ps(per_unit), zero = _mm256_setzero_ps();
  const __m256i one = _mm256_set1_epi32(1), two = _mm256_set1_epi32(2);
  std::size_t i = 0;
  for (; i + kGroup <= n; i += kGroup, ++group) {
    __m256i lanes[8];
    random::draw(stream, group, lanes);
    for (int part = 0; part < 8; ++part) {
      const __m256 value = _mm256_loadu_ps(values + i + 8 * part);
      const __m256i drawn = _mm256_castps_si256(is_drawn(value, lanes[part], factor));
      const __m256i negative = _mm256_castps_si256(_mm256_cmp_ps(value, zero, _CMP_LT_OQ));
      // 1, and where drawn 2 or 0
      const __m256i chosen = _mm256_andnot_si256(negative, two);
      lanes[part] = _mm256_blendv_epi8(one, chosen, drawn);
    }
    codes = store_group(lanes, fields, codes);
  }
  kPortable.count_drawn(values + i, n - i, per_unit, stream, group, fields, codes);
}

void unpack_counts(const std::uint8_t* codes, std::size_t n, Fields fields, int n_ranks, float step, float* out) {
  const __m256i bias = _mm256_set1_epi32(n_ranks);
  const __m256 factor = _mm256_set1_ps(step);
  std::size_t i = 0;
  for (; i + kGroup <= n; i += kGroup) {
    __m256i halves[2];
    codes = load_group(codes, fields, halves[0], halves[1]);
    for (int half = 0; half < 2; ++half)
      for_eights(halves[half], [&](int part, __m128i bytes) {
        const __m256 count = _mm256_cvtepi32_ps(_mm256_sub_epi32(_mm256_cvtepu8_epi32(bytes), bias));
        _mm256_storeu_ps(out + i + 32 * half + 8 * part, _mm256_mul_ps(count, factor));
      });
  }
  kPortable.unpack_counts(codes, n - i, fields, n_ranks, step, out + i);
}

void pack_levels(const float* values, std::size_t n, float per_unit, int levels, const random::Stream& stream,
                 std::uint64_t group, Fields fields, std::uint8_t* codes) {
  const __m256 factor = _mm256_set1_ps(per_unit), unit = _mm256_set1_ps(0x1p-24f), zero = _mm256_setzero_ps();
  const __m256i most = _mm256_set1_epi32(levels), sign = _mm256_set1_epi32(fields == Fields::nibbles ? 8 : 128);
  std::size_t i = 0;
  for (; i + kGroup <= n; i += kGroup, ++group) {
    __m256i lanes[8];
    random::draw(stream, group, lanes);
    for (int part = 0; part < 8; ++part) {
      const __m256 value = _mm256_loadu_ps(values + i + 8 * part);
      const __m256 fraction = _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_srli_epi32(lanes[part], 8)), unit);
      const __m256 raised = _mm256_add_ps(_mm256_mul_ps(magnitude_of(value), factor), fraction);
      const __m256i level = _mm256_min_epi32(_mm256_cvttps_epi32(raised), most);
      const __m256i negative = _mm256_castps_si256(_mm256_cmp_ps(value, zero, _CMP_LT_OQ));
      lanes[part] = _mm256_or_si256(level, _mm256_and_si256(negative, sign));
    }
    codes = store_group(lanes, fields, codes);
  }
  kPortable.pack_levels(values + i, n - i, per_unit, levels, stream, group, fields, codes);
}

bool unpack_levels(const std::uint8_t* codes, std::size_t n, float step, int levels, Fields fields, float* out) {
  const __m256 factor = _mm256_set1_ps(step);
  const __m256i mask = _mm256_set1_epi8(fields == Fields::nibbles ? 7 : 127);
  // Codes of four bits to signed bytes.
  const __m256i signed_levels =
      _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 1, 2, 3, 4, 5, 6, 7, 0, -1, -2, -3, -4, -5, -6, -7));
  __m256i largest = _mm256_setzero_si256();
  std::size_t i = 0;
  for (; i + kGroup <= n; i += kGroup) {
    __m256i halves[2];
    codes = load_group(codes, fields, halves[0], halves[1]);
    for (int half = 0; half < 2; ++half) {
      const __m256i level = _mm256_and_si256(halves[half], mask);
      largest = _mm256_max_epu8(largest, level);
      // psignb: a byte is negated where the other is below zero, and zero where it is; |1 guards against the latter.
      const __m256i value = fields == Fields::nibbles
                                ? _mm256_shuffle_epi8(signed_levels, halves[half])
                                : _mm256_sign_epi8(level, _mm256_or_si256(halves[half], _mm256_set1_epi8(1)));
      for_eights(value, [&](int part, __m128i bytes) {
        const __m256 lanes = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes));
        _mm256_storeu_ps(out + i + 32 * half + 8 * part, _mm256_mul_ps(lanes, factor));
      });
    }
  }
  const __m256i bound = _mm256_set1_epi8(static_cast<char>(levels));
  const bool bounded = _mm256_movemask_epi8(_mm256_cmpeq_epi8(_mm256_max_epu8(largest, bound), bound)) == -1;
  const bool rest_bounded = kPortable.unpack_levels(codes, n - i, step, levels, fields, out + i);
  return bounded && rest_bounded;
}

}  // namespace

const Kernels kAvx2 = {widen,      narrow,         add,          subtract,      divide,       magnitudes,
                       squares,    pack_signs,     unpack_signs, pack_beyond,   pack_nearest, unpack_nearest,
                       pack_drawn, unpack_ternary, count_drawn,  unpack_counts, pack_levels,  unpack_levels};

}  // namespace gradwire::quantisers
#endif
