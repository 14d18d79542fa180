// Format 2's loops: one value at a time, for the baseline and the ends of AVX2's loops; eight lanes; all sixteen at
// once.
#include <algorithm>
#include <array>
#include <bit>

#include "bits/bit_io.hpp"
#include "floats/word_loops.hpp"
#include "gcomp/kernels.hpp"
#include "simd/lanes.hpp"

namespace gradwire::gcomp {
namespace {

template <Dtype kDtype>
void widen_loop(const std::uint8_t* values, std::size_t n, std::uint8_t* words) {
  load_words<kDtype>(values, n, reinterpret_cast<std::uint32_t*>(words));
}

template <Dtype kDtype, bool kAdds, bool kScales, bool kDivides>
void finish_values(const std::uint8_t* __restrict words, const std::uint8_t* addend, float divisor, std::size_t n,
                   std::uint8_t* values) {
  const float factor = kScales ? 1.0f / divisor : 1.0f;
  for (std::size_t i = 0; i < n; ++i) {
    auto word = load<std::uint32_t>(words + 4 * i);
    if constexpr (kAdds || kScales || kDivides) {
      float value = std::bit_cast<float>(word);
      if constexpr (kAdds) value += std::bit_cast<float>(load_word<kDtype>(addend, i));
      if constexpr (kScales) value *= factor;
      if constexpr (kDivides) value /= divisor;
      word = std::bit_cast<std::uint32_t>(value);
    }
    store_word<kDtype, Specials::cut>(values, i, word);
  }
}

// Callers add or divide, never both.
template <Dtype kDtype>
void finish_loop(const std::uint8_t* words, const std::uint8_t* addend, float divisor, std::size_t n,
                 std::uint8_t* values) {
  const bool is_power_of_two = (std::bit_cast<std::uint32_t>(divisor) & 0x7FFFFF) == 0;  // its reciprocal is exact
  if (addend != nullptr) return finish_values<kDtype, true, false, false>(words, addend, divisor, n, values);
  if (divisor == 1) return finish_values<kDtype, false, false, false>(words, addend, divisor, n, values);
  if (is_power_of_two) return finish_values<kDtype, false, true, false>(words, addend, divisor, n, values);
  return finish_values<kDtype, false, false, true>(words, addend, divisor, n, values);
}

#if defined(__AVX512VBMI2__)

// One step takes a value of every lane; compress and expand put the lanes' full words together and apart.

__m512i set(int value) { return _mm512_set1_epi32(value); }

constexpr __mmask16 kAllLanes = 0xFFFF;  // constant where a loop takes it, so that its loads and stores have no mask

__mmask16 first_lanes(std::size_t n) { return static_cast<__mmask16>((1u << n) - 1); }  // of n < kLanes

__m512i widen_bytes(const std::uint8_t* bytes, __mmask16 present) {
  return _mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(present, bytes));
}

// The rule with its constants in registers. kHalf: exponents below a float16's normal ones exist.
template <bool kByImportance, bool kHalf>
struct Rule {
  __m512i cap, floor, whole, offset, lowest;
  explicit Rule(const KeepRule& rule)
      : cap(set(rule.cap)),
        floor(set(rule.floor)),
        whole(set(rule.mantissa_bits)),
        offset(set(rule.mantissa_bits - kKeepOffset)),
        lowest(set(rule.lowest_exponent)) {}

  // Of finite values.
  __m512i kept(__m512i exponent, __m512i importance) const {
    __m512i kept = cap;
    if constexpr (kByImportance) {
      const __m512i above = _mm512_add_epi32(exponent, _mm512_sub_epi32(offset, _mm512_srli_epi32(importance, 2)));
      kept = _mm512_mask_min_epi32(kept, _mm512_test_epi32_mask(importance, importance), kept,
                                   _mm512_max_epi32(above, floor));
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
  __m512i cap, floor, whole, offset, lowest;
  explicit FieldWidths(const KeepRule& rule)
      : cap(_mm512_set1_epi8(static_cast<char>(rule.cap))),
        floor(_mm512_set1_epi8(static_cast<char>(rule.floor))),
        whole(_mm512_set1_epi8(static_cast<char>(rule.mantissa_bits))),
        offset(_mm512_set1_epi8(static_cast<char>(kKeepOffset - rule.mantissa_bits))),
        lowest(_mm512_set1_epi8(static_cast<char>(rule.lowest_exponent))) {}

  __m512i of(__m512i exponent, __m512i importance) const {
    __m512i kept = cap;
    if constexpr (kByImportance) {
      const __m512i quarter = _mm512_and_si512(_mm512_srli_epi16(importance, 2), _mm512_set1_epi8(0x3F));
      kept = _mm512_mask_min_epu8(kept, _mm512_test_epi8_mask(importance, importance), kept,
                                  _mm512_max_epu8(_mm512_subs_epu8(exponent, _mm512_add_epi8(quarter, offset)), floor));
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

#else

inline int kept_bits_of(const KeepRule& rule, int exponent, int importance) {
  if (exponent == kWordMaxExponent) return rule.mantissa_bits;
  int kept = std::min(rule.cap, exponent - rule.lowest_exponent);
  if (rule.by_importance && importance != 0)
    kept = std::min(kept, std::max(rule.floor, exponent - importance / 4 + rule.mantissa_bits - kKeepOffset));
  return kept;
}

// To nearest, ties to even, on the `kept` highest mantissa bits; what would become Inf is truncated instead: the
// largest finite value of so many bits.
inline std::uint32_t round_word(std::uint32_t word, int kept, int highest_exponent) {
  const int dropped = kWordMantissa - kept;
  if (dropped == 0) return word;
  const std::uint32_t mask = ~((std::uint32_t{1} << dropped) - 1);
  const std::uint32_t nearest = (word + (std::uint32_t{1} << (dropped - 1)) - 1 + ((word >> dropped) & 1)) & mask;
  const bool overflows = static_cast<int>((nearest >> kWordMantissa) & 255) > highest_exponent;
  return overflows && static_cast<int>((word >> kWordMantissa) & 255) <= highest_exponent ? word & mask : nearest;
}

std::uint8_t* push_loop(const std::uint8_t* words, const std::uint8_t* importance, std::size_t n, const KeepRule& rule,
                        bool rounds, LaneStack& stack, std::uint8_t* at, std::uint8_t* exponents, std::uint8_t* sent,
                        bool& holds_nonfinite) {
  for (std::size_t i = 0; i < n; ++i) {
    auto word = load<std::uint32_t>(words + 4 * i);
    const int byte = importance == nullptr ? 0 : importance[i];
    const auto exponent_of = [](std::uint32_t w) { return static_cast<int>((w >> kWordMantissa) & 255); };
    if (rounds && exponent_of(word) != 0)
      word = round_word(word, kept_bits_of(rule, exponent_of(word), byte), rule.highest_exponent);
    const int exponent = exponent_of(word);
    exponents[i] = static_cast<std::uint8_t>(exponent);
    holds_nonfinite |= exponent == kWordMaxExponent;
    if (exponent == 0) {
      if (sent != nullptr) store(sent + 4 * i, std::uint32_t{0});
      continue;
    }
    const int kept = kept_bits_of(rule, exponent, byte);
    const std::uint32_t field = (word & 0x7FFFFF) >> (kWordMantissa - kept) | (word >> 31) << kept;
    if (sent != nullptr) store(sent + 4 * i, word >> (kWordMantissa - kept) << (kWordMantissa - kept));
    const std::size_t lane = i % kLanes;
    const std::uint64_t joined = std::uint64_t{stack.bits[lane]} << (kept + 1) | field;
    std::uint32_t n_bits = stack.n_bits[lane] + static_cast<std::uint32_t>(kept) + 1;
    if (n_bits >= 32) {
      n_bits -= 32;
      store(at, static_cast<std::uint32_t>(joined >> n_bits));
      at += 4;
    }
    stack.bits[lane] = static_cast<std::uint32_t>(joined & ((std::uint64_t{1} << n_bits) - 1));
    stack.n_bits[lane] = n_bits;
  }
  return at;
}

const std::uint8_t* pop_loop(const std::uint8_t* exponents, const std::uint8_t* importance, std::size_t n,
                             const KeepRule& rule, LaneStack& stack, const std::uint8_t* begin, const std::uint8_t* at,
                             std::uint8_t* words) {
  for (std::size_t i = n; i-- > 0;) {
    std::uint32_t word = 0;
    if (exponents[i] != 0) {
      const int kept = kept_bits_of(rule, exponents[i], importance == nullptr ? 0 : importance[i]);
      const auto n_bits = static_cast<std::uint32_t>(kept) + 1;
      const std::size_t lane = i % kLanes;
      std::uint64_t joined = stack.bits[lane];
      if (stack.n_bits[lane] < n_bits) {
        if (at - begin < 4) return nullptr;
        at -= 4;
        joined |= std::uint64_t{load<std::uint32_t>(at)} << stack.n_bits[lane];
        stack.n_bits[lane] += 32;
      }
      stack.n_bits[lane] -= n_bits;
      stack.bits[lane] = static_cast<std::uint32_t>(joined >> n_bits);
      const auto field = static_cast<std::uint32_t>(joined & ((std::uint64_t{1} << n_bits) - 1));
      const std::uint32_t sign = field >> kept, mantissa = field & ((std::uint32_t{1} << kept) - 1);
      word = sign << 31 | std::uint32_t{exponents[i]} << kWordMantissa | mantissa << (kWordMantissa - kept);
    }
    store(words + 4 * i, word);
  }
  return at;
}

#if defined(__AVX2__)

// Two vectors of eight lanes a step; full words are put together and apart by permutations looked up by mask.

constexpr std::size_t kHalfLanes = 8;  // lanes of a vector

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
__m256i widen_bytes(const void* bytes) {
  return _mm256_cvtepu8_epi32(_mm_loadl_epi64(static_cast<const __m128i*>(bytes)));
}
__m256i exponent_of(__m256i words) { return _mm256_srli_epi32(_mm256_slli_epi32(words, 1), 24); }
__m256i is_zero(__m256i lanes) { return _mm256_cmpeq_epi32(lanes, _mm256_setzero_si256()); }

template <bool kByImportance, bool kHalf>
struct Rule {
  __m256i cap, floor, whole, lowest;
  explicit Rule(const KeepRule& rule)
      : cap(set(rule.cap)), floor(set(rule.floor)), whole(set(rule.mantissa_bits)), lowest(set(rule.lowest_exponent)) {}

  __m256i kept(__m256i exponent, __m256i importance) const {
    __m256i kept = cap;
    if constexpr (kHalf) kept = _mm256_min_epi32(kept, _mm256_sub_epi32(exponent, lowest));
    if constexpr (kByImportance) {
      const __m256i above = _mm256_sub_epi32(_mm256_add_epi32(exponent, _mm256_sub_epi32(whole, set(kKeepOffset))),
                                             _mm256_srli_epi32(importance, 2));
      const __m256i limit = _mm256_max_epi32(above, floor);
      kept = _mm256_min_epi32(kept, _mm256_blendv_epi8(limit, cap, is_zero(importance)));
    }
    return _mm256_blendv_epi8(kept, whole, _mm256_cmpeq_epi32(exponent, set(kWordMaxExponent)));
  }
};

template <bool kByImportance, bool kHalf, bool kRounds>
std::uint8_t* push(const std::uint8_t* words, const std::uint8_t* importance, std::size_t n, const KeepRule& limits,
                   LaneStack& stack, std::uint8_t* at, std::uint8_t* exponents, std::uint8_t* sent,
                   bool& holds_nonfinite) {
  const Rule<kByImportance, kHalf> rule(limits);
  const __m256i one = set(1), largest = set(((limits.highest_exponent + 1) << kWordMantissa) - 1);
  __m256i bits[2], n_bits[2], nonfinite = _mm256_setzero_si256();
  for (std::size_t half = 0; half < 2; ++half) {
    bits[half] = load256(stack.bits + kHalfLanes * half);
    n_bits[half] = load256(stack.n_bits + kHalfLanes * half);
  }
  const std::size_t n_vector = n / kLanes * kLanes;
  for (std::size_t first = 0; first < n_vector; first += kLanes)
    for (std::size_t half = 0; half < 2; ++half) {
      const std::size_t i = first + kHalfLanes * half;
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
      const std::uint32_t is_full = mask_of(_mm256_cmpgt_epi32(n_joined, set(31)));
      const __m256i full = _mm256_or_si256(_mm256_sllv_epi32(bits[half], _mm256_sub_epi32(set(32), n_bits[half])),
                                           _mm256_srlv_epi32(field, _mm256_sub_epi32(n_joined, set(32))));
      store256(at, _mm256_permutevar8x32_epi32(full, widen_bytes(&kCompress[is_full])));
      at += 4 * _mm_popcnt_u32(is_full);
      bits[half] = _mm256_or_si256(_mm256_sllv_epi32(bits[half], n_field), field);
      n_bits[half] = _mm256_and_si256(n_joined, set(31));
    }
  for (std::size_t half = 0; half < 2; ++half) {
    const __m256i clean = _mm256_sub_epi32(_mm256_sllv_epi32(one, n_bits[half]), one);
    store256(stack.bits + kHalfLanes * half, _mm256_and_si256(bits[half], clean));
    store256(stack.n_bits + kHalfLanes * half, n_bits[half]);
  }
  holds_nonfinite |= _mm256_testz_si256(nonfinite, nonfinite) == 0;
  return push_loop(words + 4 * n_vector, importance == nullptr ? nullptr : importance + n_vector, n - n_vector, limits,
                   kRounds, stack, at, exponents + n_vector, sent == nullptr ? nullptr : sent + 4 * n_vector,
                   holds_nonfinite);
}

template <bool kByImportance, bool kHalf>
const std::uint8_t* pop(const std::uint8_t* exponents, const std::uint8_t* importance, std::size_t n,
                        const KeepRule& limits, LaneStack& stack, const std::uint8_t* begin, const std::uint8_t* at,
                        std::uint8_t* words) {
  const Rule<kByImportance, kHalf> rule(limits);
  const std::size_t n_vector = n / kLanes * kLanes;
  at = pop_loop(exponents + n_vector, importance == nullptr ? nullptr : importance + n_vector, n - n_vector, limits,
                stack, begin, at, words + 4 * n_vector);
  if (at == nullptr) return nullptr;
  __m256i bits[2], n_bits[2];
  for (std::size_t half = 0; half < 2; ++half) {
    bits[half] = load256(stack.bits + kHalfLanes * half);
    n_bits[half] = load256(stack.n_bits + kHalfLanes * half);
  }
  for (std::size_t end = n_vector; end > 0; end -= kLanes)
    for (std::size_t half = 2; half-- > 0;) {
      const std::size_t i = end - kLanes + kHalfLanes * half;
      const __m256i exponent = widen_bytes(exponents + i);
      __m256i byte = _mm256_setzero_si256();
      if constexpr (kByImportance) byte = widen_bytes(importance + i);
      const __m256i n_field =
          _mm256_andnot_si256(is_zero(exponent), _mm256_add_epi32(rule.kept(exponent, byte), set(1)));
      const __m256i shortage = _mm256_cmpgt_epi32(n_field, n_bits[half]);
      const std::uint32_t is_short = mask_of(shortage);
      const auto n_bytes = 4 * static_cast<std::ptrdiff_t>(_mm_popcnt_u32(is_short));
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
    store256(stack.bits + kHalfLanes * half, bits[half]);
    store256(stack.n_bits + kHalfLanes * half, n_bits[half]);
  }
  return at;
}

#endif
#endif

#if defined(__AVX2__)

std::uint8_t* push_any(const std::uint8_t* words, const std::uint8_t* importance, std::size_t n, const KeepRule& rule,
                       bool rounds, LaneStack& stack, std::uint8_t* at, std::uint8_t* exponents, std::uint8_t* sent,
                       bool& holds_nonfinite) {
  constexpr decltype(&push<false, false, false>) by_rule[] = {
      push<false, false, false>, push<false, false, true>, push<false, true, false>, push<false, true, true>,
      push<true, false, false>,  push<true, false, true>,  push<true, true, false>,  push<true, true, true>};
  const auto kernel = by_rule[4 * rule.by_importance + 2 * (rule.lowest_exponent > 0) + rounds];
  return kernel(words, importance, n, rule, stack, at, exponents, sent, holds_nonfinite);
}

const std::uint8_t* pop_any(const std::uint8_t* exponents, const std::uint8_t* importance, std::size_t n,
                            const KeepRule& rule, LaneStack& stack, const std::uint8_t* begin, const std::uint8_t* at,
                            std::uint8_t* words) {
  constexpr decltype(&pop<false, false>) by_rule[] = {pop<false, false>, pop<false, true>, pop<true, false>,
                                                      pop<true, true>};
  const auto kernel = by_rule[2 * rule.by_importance + (rule.lowest_exponent > 0)];
  return kernel(exponents, importance, n, rule, stack, begin, at, words);
}

#else

constexpr auto push_any = push_loop;
constexpr auto pop_any = pop_loop;

#endif

}  // namespace

const LaneKernels& lane_kernels_at(Level<GW_LEVEL>) {
  static constexpr LaneKernels all = {
      push_any,
      pop_any,
      {widen_loop<Dtype::float32>, widen_loop<Dtype::bfloat16>, widen_loop<Dtype::float16>},
      {finish_loop<Dtype::float32>, finish_loop<Dtype::bfloat16>, finish_loop<Dtype::float16>}};
  return all;
}

}  // namespace gradwire::gcomp
