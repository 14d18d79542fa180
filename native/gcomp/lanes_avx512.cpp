// AVX-512: one step takes a value of every lane; compress and expand put the lanes' full words together and apart.
#include "gcomp/lane_loops.hpp"

#if defined(__x86_64__)
#include <immintrin.h>

namespace gradwire::gcomp {
namespace {

__m512i set(int value) { return _mm512_set1_epi32(value); }

constexpr __mmask16 kAllLanes = 0xFFFF;  // constant where a loop takes it, so that its loads and stores have no mask

__mmask16 first_lanes(std::size_t n) { return static_cast<__mmask16>((1u << n) - 1); }  // of n < kLanes

__m512i widen_bytes(const std::uint8_t* bytes, __mmask16 present) {
  return _mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(present, bytes));
}

// The rule with its constants in registers. kHalf: exponents below a float16's normal ones exist.
template <bool kByImportance, bool kHalf>
struct Rule {
  __m512i cap, whole, offset, lowest;
  explicit Rule(const KeepRule& rule)
      : cap(set(rule.cap)),
        whole(set(rule.mantissa_bits)),
        offset(set(rule.mantissa_bits - kKeepOffset)),
        lowest(set(rule.lowest_exponent)) {}

  // Of finite values.
  __m512i kept(__m512i exponent, __m512i importance) const {
    __m512i kept = cap;
    if constexpr (kByImportance) {
      const __m512i above = _mm512_add_epi32(exponent, _mm512_sub_epi32(offset, _mm512_srli_epi32(importance, 2)));
      kept = _mm512_mask_min_epi32(kept, _mm512_test_epi32_mask(importance, importance), kept,
                                   _mm512_max_epi32(above, _mm512_setzero_si512()));
    }
    if constexpr (kHalf) kept = _mm512_min_epi32(kept, _mm512_sub_epi32(exponent, lowest));
    return kept;
  }

  __m512i kept_of_any(__m512i exponent, __m512i importance) const {
    return _mm512_mask_mov_epi32(kept(exponent, importance), is_nonfinite(exponent), whole);
  }

  static __mmask16 is_nonfinite(__m512i exponent) { return _mm512_cmpeq_epi32_mask(exponent, set(kWordMaxExponent)); }
};

__m512i exponent_of(__m512i words) { return _mm512_srli_epi32(_mm512_slli_epi32(words, 1), 24); }

// `word` with its mantissa rounded at the lowest of the bits kept, those below not cleared. Where that carries into the
// exponent, the bits kept and the one after them are 0: so they are right for the new exponent too, which keeps at most
// one bit more.
__m512i rounded(__m512i word, __m512i kept) {
  const __m512i dropped = _mm512_sub_epi32(set(kWordMantissa), kept);
  const __m512i below_half = _mm512_srlv_epi32(set(-1), _mm512_add_epi32(kept, set(33 - kWordMantissa)));
  const __m512i last_kept =
      _mm512_and_si512(_mm512_srlv_epi32(word, dropped), _mm512_min_epu32(dropped, set(1)));  // 0 where none is dropped
  return _mm512_add_epi32(_mm512_add_epi32(word, below_half), last_kept);
}

template <bool kByImportance, bool kHalf, bool kRounds>
std::uint8_t* push(const std::uint8_t* words, const std::uint8_t* importance, std::size_t n, const KeepRule& limits,
                   LaneStack& stack, std::uint8_t* at, std::uint8_t* exponents, std::uint8_t* sent,
                   bool& holds_nonfinite) {
  const Rule<kByImportance, kHalf> rule(limits);
  const __m512i highest = set(limits.highest_exponent), infinity = set((limits.highest_exponent + 1) << kWordMantissa);
  __m512i bits = _mm512_load_si512(stack.bits), n_bits = _mm512_load_si512(stack.n_bits);
  const auto step = [&](std::size_t i, __mmask16 present) {
    __m512i word = _mm512_maskz_loadu_epi32(present, words + 4 * i);
    __m512i byte = _mm512_setzero_si512();
    if constexpr (kByImportance) byte = widen_bytes(importance + i, present);
    __m512i exponent = exponent_of(word);
    __m512i kept;
    if (_mm512_cmpge_epi32_mask(exponent, highest) == 0) [[likely]] {
      kept = rule.kept(exponent, byte);
      if constexpr (kRounds) {
        word = rounded(_mm512_maskz_mov_epi32(_mm512_test_epi32_mask(exponent, exponent), word), kept);
        exponent = exponent_of(word);
        kept = rule.kept(exponent, byte);
      }
    } else {  // Inf, NaN, or what may be rounded to Inf: that is truncated
      kept = rule.kept_of_any(exponent, byte);
      if constexpr (kRounds) {
        const __mmask16 travels = _mm512_test_epi32_mask(exponent, exponent);
        const __m512i nearest = rounded(_mm512_maskz_mov_epi32(travels, word), kept);
        const __mmask16 overflows = _mm512_mask_cmpge_epi32_mask(static_cast<__mmask16>(~rule.is_nonfinite(exponent)),
                                                                 _mm512_and_si512(nearest, set(0x7FFFFFFF)), infinity);
        word = _mm512_mask_mov_epi32(nearest, overflows, word);
        exponent = exponent_of(word);
        kept = rule.kept_of_any(exponent, byte);
      }
      holds_nonfinite |= rule.is_nonfinite(exponent) != 0;
    }
    _mm_mask_storeu_epi8(exponents + i, present, _mm512_cvtepi32_epi8(exponent));
    const __mmask16 travels = _mm512_test_epi32_mask(exponent, exponent);
    if (sent != nullptr) {
      const __m512i dropped = _mm512_sub_epi32(set(kWordMantissa), kept);
      _mm512_mask_storeu_epi32(
          sent + 4 * i, present,
          _mm512_maskz_sllv_epi32(travels, _mm512_maskz_srlv_epi32(travels, word, dropped), dropped));
    }
    // The sign on top, the mantissa below: (word & sign bit) | (word << 8 & the others), of which n_field bits count.
    const __m512i field = _mm512_ternarylogic_epi32(set(1 << 31), word, _mm512_slli_epi32(word, 8), 0xCA);
    const __m512i n_field = _mm512_maskz_add_epi32(travels, kept, set(1));
    // Bits above a lane's n_bits are left over from words already written: every use shifts them out. A lane that is
    // full had some before: a field has fewer than 32.
    const __m512i n_joined = _mm512_add_epi32(n_bits, n_field);
    const __mmask16 is_full = _mm512_cmpge_epi32_mask(n_joined, set(32));
    const __m512i full = _mm512_shldv_epi32(bits, field, _mm512_sub_epi32(_mm512_setzero_si512(), n_bits));
    _mm512_storeu_si512(at, _mm512_maskz_compress_epi32(is_full, full));
    at += 4 * static_cast<std::size_t>(_mm_popcnt_u32(is_full));
    bits = _mm512_shldv_epi32(bits, field, n_field);
    n_bits = _mm512_and_si512(n_joined, set(31));
  };
  std::size_t i = 0;
  for (; i + kLanes <= n; i += kLanes) step(i, kAllLanes);
  if (i < n) step(i, first_lanes(n - i));
  const __m512i clean = _mm512_sub_epi32(_mm512_sllv_epi32(set(1), n_bits), set(1));
  _mm512_store_si512(stack.bits, _mm512_and_si512(bits, clean));
  _mm512_store_si512(stack.n_bits, n_bits);
  return at;
}

// How many bits of 64 values are on the stacks, by their exponents: one byte each, so that the rule costs a quarter of
// what it does on words.
template <bool kByImportance, bool kHalf>
struct FieldWidths {
  __m512i cap, whole, offset, lowest;
  explicit FieldWidths(const KeepRule& rule)
      : cap(_mm512_set1_epi8(static_cast<char>(rule.cap))),
        whole(_mm512_set1_epi8(static_cast<char>(rule.mantissa_bits))),
        offset(_mm512_set1_epi8(static_cast<char>(kKeepOffset - rule.mantissa_bits))),
        lowest(_mm512_set1_epi8(static_cast<char>(rule.lowest_exponent))) {}

  __m512i of(__m512i exponent, __m512i importance) const {
    __m512i kept = cap;
    if constexpr (kByImportance) {
      const __m512i quarter = _mm512_and_si512(_mm512_srli_epi16(importance, 2), _mm512_set1_epi8(0x3F));
      kept = _mm512_mask_min_epu8(kept, _mm512_test_epi8_mask(importance, importance), kept,
                                  _mm512_subs_epu8(exponent, _mm512_add_epi8(quarter, offset)));
    }
    if constexpr (kHalf) kept = _mm512_min_epu8(kept, _mm512_subs_epu8(exponent, lowest));
    kept = _mm512_mask_mov_epi8(kept, _mm512_cmpeq_epi8_mask(exponent, _mm512_set1_epi8(-1)), whole);
    return _mm512_maskz_add_epi8(_mm512_test_epi8_mask(exponent, exponent), kept, _mm512_set1_epi8(1));
  }
};

template <bool kByImportance, bool kHalf>
void write_widths(const std::uint8_t* exponents, const std::uint8_t* importance, std::size_t n, const KeepRule& limits,
                  std::uint8_t* widths) {
  const FieldWidths<kByImportance, kHalf> rule(limits);
  for (std::size_t i = 0; i < n; i += 64) {
    const __mmask64 present = n - i >= 64 ? ~__mmask64{0} : (__mmask64{1} << (n - i)) - 1;
    __m512i bytes = _mm512_setzero_si512();
    if constexpr (kByImportance) bytes = _mm512_maskz_loadu_epi8(present, importance + i);
    _mm512_store_si512(widths + i, rule.of(_mm512_maskz_loadu_epi8(present, exponents + i), bytes));
  }
}

// A block at most: n <= kLaneBlock.
template <bool kByImportance, bool kHalf>
const std::uint8_t* pop(const std::uint8_t* exponents, const std::uint8_t* importance, std::size_t n,
                        const KeepRule& limits, LaneStack& stack, const std::uint8_t* begin, const std::uint8_t* at,
                        std::uint8_t* words) {
  alignas(64) std::uint8_t widths[kLaneBlock];
  write_widths<kByImportance, kHalf>(exponents, importance, n, limits, widths);
  __m512i bits = _mm512_load_si512(stack.bits), n_bits = _mm512_load_si512(stack.n_bits);
  const auto step = [&](std::size_t i, __mmask16 present) {
    const __m512i exponent = widen_bytes(exponents + i, present), n_field = widen_bytes(widths + i, kAllLanes);
    const __mmask16 is_short = _mm512_cmplt_epi32_mask(n_bits, n_field);
    const auto n_bytes = 4 * static_cast<std::ptrdiff_t>(_mm_popcnt_u32(is_short));
    if (at - begin < n_bytes) return false;
    at -= n_bytes;
    __m512i loaded = _mm512_loadu_si512(at);
    asm("" : "+v"(loaded));  // in a register first: expanding from memory takes longer
    const __m512i more = _mm512_maskz_expand_epi32(is_short, loaded);
    const __m512i joined = _mm512_or_si512(bits, _mm512_sllv_epi32(more, n_bits));
    bits = _mm512_mask_srlv_epi32(_mm512_srlv_epi32(bits, n_field), is_short, more, _mm512_sub_epi32(n_field, n_bits));
    n_bits = _mm512_and_si512(_mm512_sub_epi32(n_bits, n_field), set(31));
    // The field's sign on top, its mantissa below; then the exponent comes between them.
    const __m512i field = _mm512_shrdv_epi32(_mm512_setzero_si512(), joined, n_field);
    const __m512i sign_and_exponent =  // (field & sign bit) | exponent
        _mm512_ternarylogic_epi32(_mm512_slli_epi32(exponent, kWordMantissa), field, set(1 << 31), 0xF8);
    const __m512i word = _mm512_ternarylogic_epi32(set(0x7FFFFF), _mm512_srli_epi32(field, 8), sign_and_exponent, 0xCA);
    _mm512_mask_storeu_epi32(words + 4 * i, present, word);
    return true;
  };
  std::size_t i = n / kLanes * kLanes;
  if (i < n && !step(i, first_lanes(n - i))) return nullptr;
  for (; i > 0; i -= kLanes)
    if (!step(i - kLanes, kAllLanes)) return nullptr;
  _mm512_store_si512(stack.bits, bits);
  _mm512_store_si512(stack.n_bits, n_bits);
  return at;
}

template <bool kRounds>
std::uint8_t* push_by_rule(const std::uint8_t* words, const std::uint8_t* importance, std::size_t n,
                           const KeepRule& rule, LaneStack& stack, std::uint8_t* at, std::uint8_t* exponents,
                           std::uint8_t* sent, bool& holds_nonfinite) {
  const auto go = [&](auto kernel) {
    return kernel(words, importance, n, rule, stack, at, exponents, sent, holds_nonfinite);
  };
  if (rule.lowest_exponent > 0)
    return rule.by_importance ? go(push<true, true, kRounds>) : go(push<false, true, kRounds>);
  return rule.by_importance ? go(push<true, false, kRounds>) : go(push<false, false, kRounds>);
}

std::uint8_t* push_any(const std::uint8_t* words, const std::uint8_t* importance, std::size_t n, const KeepRule& rule,
                       bool rounds, LaneStack& stack, std::uint8_t* at, std::uint8_t* exponents, std::uint8_t* sent,
                       bool& holds_nonfinite) {
  return rounds ? push_by_rule<true>(words, importance, n, rule, stack, at, exponents, sent, holds_nonfinite)
                : push_by_rule<false>(words, importance, n, rule, stack, at, exponents, sent, holds_nonfinite);
}

const std::uint8_t* pop_any(const std::uint8_t* exponents, const std::uint8_t* importance, std::size_t n,
                            const KeepRule& rule, LaneStack& stack, const std::uint8_t* begin, const std::uint8_t* at,
                            std::uint8_t* words) {
  const auto go = [&](auto kernel) { return kernel(exponents, importance, n, rule, stack, begin, at, words); };
  if (rule.lowest_exponent > 0) return rule.by_importance ? go(pop<true, true>) : go(pop<false, true>);
  return rule.by_importance ? go(pop<true, false>) : go(pop<false, false>);
}

}  // namespace

const LaneKernels kLaneKernelsAvx512 = {
    push_any,
    pop_any,
    {widen_loop<Dtype::float32>, widen_loop<Dtype::bfloat16>, widen_loop<Dtype::float16>},
    {finish_loop<Dtype::float32>, finish_loop<Dtype::bfloat16>, finish_loop<Dtype::float16>}};

}  // namespace gradwire::gcomp
#endif
