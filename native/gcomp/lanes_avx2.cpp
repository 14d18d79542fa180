// AVX2: two vectors of eight lanes a step; full words are put together and apart by permutations looked up by mask.
#include "gcomp/lane_loops.hpp"

#if defined(__x86_64__)
#include <immintrin.h>

#include <array>

namespace gradwire::gcomp {
namespace {

constexpr std::size_t kHalf = 8;  // lanes of a vector

// Byte j of entry m: the j-th lane that m has set; and how many lanes below j m has set.
constexpr auto kCompress = [] {
  std::array<std::uint64_t, 256> orders{};
  for (std::size_t mask = 0; mask < 256; ++mask)
    for (std::uint64_t lane = 0, n = 0; lane < 8; ++lane)
      if (mask >> lane & 1) orders[mask] |= lane << (8 * n++);
  return orders;
}();
constexpr auto kExpand = [] {
  std::array<std::uint64_t, 256> orders{};
  for (std::size_t mask = 0; mask < 256; ++mask)
    for (std::uint64_t lane = 0, n = 0; lane < 8; ++lane) {
      orders[mask] |= n << (8 * lane);
      n += mask >> lane & 1;
    }
  return orders;
}();

__m256i set(int value) { return _mm256_set1_epi32(value); }
__m256i load256(const void* data) { return _mm256_loadu_si256(static_cast<const __m256i*>(data)); }
void store256(void* data, __m256i vector) { _mm256_storeu_si256(static_cast<__m256i*>(data), vector); }
__m256i widen_bytes(const void* bytes) {
  return _mm256_cvtepu8_epi32(_mm_loadl_epi64(static_cast<const __m128i*>(bytes)));
}
int mask_of(__m256i lanes) { return _mm256_movemask_ps(_mm256_castsi256_ps(lanes)); }
__m256i exponent_of(__m256i words) { return _mm256_srli_epi32(_mm256_slli_epi32(words, 1), 24); }
__m256i is_zero(__m256i lanes) { return _mm256_cmpeq_epi32(lanes, _mm256_setzero_si256()); }

template <bool kByImportance>
struct Rule {
  __m256i cap, whole, lowest;
  explicit Rule(const KeepRule& rule)
      : cap(set(rule.cap)), whole(set(rule.mantissa_bits)), lowest(set(rule.lowest_exponent)) {}

  __m256i kept(__m256i exponent, __m256i importance) const {
    __m256i kept = _mm256_min_epi32(cap, _mm256_sub_epi32(exponent, lowest));
    if constexpr (kByImportance) {
      const __m256i above = _mm256_sub_epi32(_mm256_add_epi32(exponent, _mm256_sub_epi32(whole, set(kKeepOffset))),
                                             _mm256_srli_epi32(importance, 2));
      const __m256i limit = _mm256_max_epi32(above, _mm256_setzero_si256());
      kept = _mm256_min_epi32(kept, _mm256_blendv_epi8(limit, cap, is_zero(importance)));
    }
    return _mm256_blendv_epi8(kept, whole, _mm256_cmpeq_epi32(exponent, set(kWordMaxExponent)));
  }
};

template <bool kByImportance, bool kRounds>
std::uint8_t* push(const std::uint8_t* words, const std::uint8_t* importance, std::size_t n, const KeepRule& limits,
                   LaneStack& stack, std::uint8_t* at, std::uint8_t* exponents, std::uint8_t* sent,
                   bool& holds_nonfinite) {
  const Rule<kByImportance> rule(limits);
  const __m256i one = set(1), largest = set(((limits.highest_exponent + 1) << kWordMantissa) - 1);
  __m256i bits[2], n_bits[2], nonfinite = _mm256_setzero_si256();
  for (std::size_t half = 0; half < 2; ++half) {
    bits[half] = load256(stack.bits + kHalf * half);
    n_bits[half] = load256(stack.n_bits + kHalf * half);
  }
  const std::size_t n_vector = n / kLanes * kLanes;
  for (std::size_t first = 0; first < n_vector; first += kLanes)
    for (std::size_t half = 0; half < 2; ++half) {
      const std::size_t i = first + kHalf * half;
      __m256i word = load256(words + 4 * i), byte = _mm256_setzero_si256();
      if constexpr (kByImportance) byte = widen_bytes(importance + i);
      __m256i exponent = exponent_of(word);
      __m256i kept = rule.kept(exponent, byte);
      if constexpr (kRounds) {
        const __m256i dropped = _mm256_sub_epi32(set(kWordMantissa), kept);
        const __m256i below_half = _mm256_sub_epi32(_mm256_srli_epi32(_mm256_sllv_epi32(one, dropped), 1), one);
        const __m256i last_kept = _mm256_and_si256(_mm256_srlv_epi32(word, dropped), one);
        const __m256i stays = _mm256_or_si256(is_zero(exponent), is_zero(dropped));
        const __m256i nearest =
            _mm256_add_epi32(word, _mm256_andnot_si256(stays, _mm256_add_epi32(below_half, last_kept)));
        const __m256i overflows =
            _mm256_andnot_si256(_mm256_cmpeq_epi32(exponent, set(kWordMaxExponent)),
                                _mm256_cmpgt_epi32(_mm256_and_si256(nearest, set(0x7FFFFFFF)), largest));
        const __m256i rounded = _mm256_blendv_epi8(nearest, word, overflows);
        word = _mm256_sllv_epi32(_mm256_srlv_epi32(rounded, dropped), dropped);
        exponent = exponent_of(word);
        kept = rule.kept(exponent, byte);
      }
      const __m256i pairs = _mm256_permute4x64_epi64(_mm256_packs_epi32(exponent, exponent), 0xD8);
      _mm_storel_epi64(reinterpret_cast<__m128i*>(exponents + i),
                       _mm_packus_epi16(_mm256_castsi256_si128(pairs), _mm256_castsi256_si128(pairs)));
      nonfinite = _mm256_or_si256(nonfinite, _mm256_cmpeq_epi32(exponent, set(kWordMaxExponent)));
      const __m256i stays_away = is_zero(exponent);
      const __m256i dropped = _mm256_sub_epi32(set(kWordMantissa), kept);
      if (sent != nullptr)
        store256(sent + 4 * i,
                 _mm256_andnot_si256(stays_away, _mm256_sllv_epi32(_mm256_srlv_epi32(word, dropped), dropped)));
      const __m256i mantissa = _mm256_srlv_epi32(_mm256_and_si256(word, set(0x7FFFFF)), dropped);
      const __m256i field = _mm256_andnot_si256(
          stays_away, _mm256_or_si256(mantissa, _mm256_sllv_epi32(_mm256_srli_epi32(word, 31), kept)));
      const __m256i n_field = _mm256_andnot_si256(stays_away, _mm256_add_epi32(kept, one));
      // Bits above a lane's n_bits are left over from words already written: every use shifts them out.
      const __m256i n_joined = _mm256_add_epi32(n_bits[half], n_field);
      const int is_full = mask_of(_mm256_cmpgt_epi32(n_joined, set(31)));
      const __m256i full = _mm256_or_si256(_mm256_sllv_epi32(bits[half], _mm256_sub_epi32(set(32), n_bits[half])),
                                           _mm256_srlv_epi32(field, _mm256_sub_epi32(n_joined, set(32))));
      store256(at, _mm256_permutevar8x32_epi32(full, widen_bytes(&kCompress[is_full])));
      at += 4 * _mm_popcnt_u32(static_cast<unsigned>(is_full));
      bits[half] = _mm256_or_si256(_mm256_sllv_epi32(bits[half], n_field), field);
      n_bits[half] = _mm256_and_si256(n_joined, set(31));
    }
  for (std::size_t half = 0; half < 2; ++half) {
    const __m256i clean = _mm256_sub_epi32(_mm256_sllv_epi32(one, n_bits[half]), one);
    store256(stack.bits + kHalf * half, _mm256_and_si256(bits[half], clean));
    store256(stack.n_bits + kHalf * half, n_bits[half]);
  }
  holds_nonfinite |= _mm256_testz_si256(nonfinite, nonfinite) == 0;
  return push_loop(words + 4 * n_vector, importance == nullptr ? nullptr : importance + n_vector, n - n_vector, limits,
                   kRounds, stack, at, exponents + n_vector, sent == nullptr ? nullptr : sent + 4 * n_vector,
                   holds_nonfinite);
}

template <bool kByImportance>
const std::uint8_t* pop(const std::uint8_t* exponents, const std::uint8_t* importance, std::size_t n,
                        const KeepRule& limits, LaneStack& stack, const std::uint8_t* begin, const std::uint8_t* at,
                        std::uint8_t* words) {
  const Rule<kByImportance> rule(limits);
  const std::size_t n_vector = n / kLanes * kLanes;
  at = pop_loop(exponents + n_vector, importance == nullptr ? nullptr : importance + n_vector, n - n_vector, limits,
                stack, begin, at, words + 4 * n_vector);
  if (at == nullptr) return nullptr;
  __m256i bits[2], n_bits[2];
  for (std::size_t half = 0; half < 2; ++half) {
    bits[half] = load256(stack.bits + kHalf * half);
    n_bits[half] = load256(stack.n_bits + kHalf * half);
  }
  for (std::size_t end = n_vector; end > 0; end -= kLanes)
    for (std::size_t half = 2; half-- > 0;) {
      const std::size_t i = end - kLanes + kHalf * half;
      const __m256i exponent = widen_bytes(exponents + i);
      __m256i byte = _mm256_setzero_si256();
      if constexpr (kByImportance) byte = widen_bytes(importance + i);
      const __m256i n_field =
          _mm256_andnot_si256(is_zero(exponent), _mm256_add_epi32(rule.kept(exponent, byte), set(1)));
      const __m256i shortage = _mm256_cmpgt_epi32(n_field, n_bits[half]);
      const int is_short = mask_of(shortage);
      const auto n_bytes = 4 * static_cast<std::ptrdiff_t>(_mm_popcnt_u32(static_cast<unsigned>(is_short)));
      if (at - begin < n_bytes) return nullptr;
      at -= n_bytes;
      const __m256i spread = _mm256_permutevar8x32_epi32(load256(at), widen_bytes(&kExpand[is_short]));
      const __m256i more = _mm256_and_si256(spread, shortage);
      const __m256i joined = _mm256_or_si256(bits[half], _mm256_sllv_epi32(more, n_bits[half]));
      bits[half] = _mm256_blendv_epi8(_mm256_srlv_epi32(bits[half], n_field),
                                      _mm256_srlv_epi32(more, _mm256_sub_epi32(n_field, n_bits[half])), shortage);
      n_bits[half] = _mm256_and_si256(_mm256_sub_epi32(n_bits[half], n_field), set(31));
      // The field's sign to the top, its mantissa below: then the exponent comes between them.
      const __m256i field = _mm256_sllv_epi32(joined, _mm256_sub_epi32(set(32), n_field));
      const __m256i mantissa = _mm256_srli_epi32(_mm256_slli_epi32(field, 1), 9);
      const __m256i sign = _mm256_and_si256(field, set(1 << 31));
      store256(words + 4 * i,
               _mm256_or_si256(_mm256_or_si256(sign, mantissa), _mm256_slli_epi32(exponent, kWordMantissa)));
    }
  for (std::size_t half = 0; half < 2; ++half) {
    store256(stack.bits + kHalf * half, bits[half]);
    store256(stack.n_bits + kHalf * half, n_bits[half]);
  }
  return at;
}

std::uint8_t* push_any(const std::uint8_t* words, const std::uint8_t* importance, std::size_t n, const KeepRule& rule,
                       bool rounds, LaneStack& stack, std::uint8_t* at, std::uint8_t* exponents, std::uint8_t* sent,
                       bool& holds_nonfinite) {
  const auto go = [&](auto kernel) {
    return kernel(words, importance, n, rule, stack, at, exponents, sent, holds_nonfinite);
  };
  if (rule.by_importance) return rounds ? go(push<true, true>) : go(push<true, false>);
  return rounds ? go(push<false, true>) : go(push<false, false>);
}

const std::uint8_t* pop_any(const std::uint8_t* exponents, const std::uint8_t* importance, std::size_t n,
                            const KeepRule& rule, LaneStack& stack, const std::uint8_t* begin, const std::uint8_t* at,
                            std::uint8_t* words) {
  const auto kernel = rule.by_importance ? pop<true> : pop<false>;
  return kernel(exponents, importance, n, rule, stack, begin, at, words);
}

}  // namespace

const LaneKernels kLaneKernelsAvx2 = {
    push_any,
    pop_any,
    {widen_loop<Dtype::float32>, widen_loop<Dtype::bfloat16>, widen_loop<Dtype::float16>},
    {finish_loop<Dtype::float32>, finish_loop<Dtype::bfloat16>, finish_loop<Dtype::float16>}};

}  // namespace gradwire::gcomp
#endif
