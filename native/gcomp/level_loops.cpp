// Format 1's loops: one value at a time, for the baseline and the ends of the vectors' loops; and eight or sixteen
// values.
#include <algorithm>
#include <array>
#include <cstring>
#include <type_traits>

#include "bits/bit_io.hpp"
#include "gcomp/kernels.hpp"
#include "simd/lanes.hpp"

namespace gradwire::gcomp {
namespace {

// Importance bytes count quarter octaves (exponent and two mantissa bits of a float32) from 2^-40 on.
inline constexpr int kImportanceOffset = 4 * (127 - 40);

template <Dtype kDtype>
struct Float {
  using Word = std::conditional_t<kDtype == Dtype::float32, std::uint32_t, std::uint16_t>;
  static constexpr DtypeLayout kLayout = kLayouts[static_cast<int>(kDtype)];
  static constexpr int kMantissaBits = kLayout.mantissa_bits;
  static constexpr Word kSign = static_cast<Word>(Word{1} << (8 * sizeof(Word) - 1));
  static constexpr Word kMantissa = static_cast<Word>((Word{1} << kMantissaBits) - 1);
  static constexpr Word kMaxExponent = static_cast<Word>((1 << kLayout.exponent_bits) - 1);
  static constexpr Word kExponent = static_cast<Word>(kMaxExponent << kMantissaBits);
  // |x| >> kCodeShift is the value's quarter octave, plus kCodeBias that of the same float32.
  static constexpr int kCodeShift = kMantissaBits - 2, kCodeBias = 4 * (127 - kMaxExponent / 2);
};

// By how many quarter octaves its importance exceeds a finite value's; 0 without any.
template <Dtype kDtype>
inline int margin_of(typename Float<kDtype>::Word bits, int importance) {
  using F = Float<kDtype>;
  const int code = ((bits & static_cast<typename F::Word>(~F::kSign)) >> F::kCodeShift) + F::kCodeBias;
  return importance == 0 ? 0 : importance + kImportanceOffset - code;
}

template <Dtype kDtype>
inline int level_of(typename Float<kDtype>::Word bits, int importance) {
  using F = Float<kDtype>;
  if ((bits & F::kExponent) == F::kExponent) return 0;
  const int margin = margin_of<kDtype>(bits, importance);
  return (margin > 4 * F::kLayout.dropped_bits[1]) + (margin > 4 * F::kLayout.dropped_bits[2]) +
         (margin > 4 * F::kLayout.dropped_bits[3]);
}

// Values rounded to what will be sent of them: to their level (mode paper), or to packing's bits (mode uniform). The
// level of a rounded value drops no more bits than it was rounded to: magnitudes that grow have lower levels, and the
// others keep the bits that their level is taken from.
template <Dtype kDtype>
void round_loop(const void* values, const std::uint8_t* importance, std::size_t n, const Packing& packing,
                void* rounded) {
  using F = Float<kDtype>;
  using Word = typename F::Word;
  const auto* const bytes = static_cast<const std::uint8_t*>(values);
  auto* __restrict const out = static_cast<std::uint8_t*>(rounded);
  const int fixed = packing.dropped_bits;
  const auto round_one = [&](std::size_t i, int dropped) {
    const std::uint32_t bits = load<Word>(bytes + i * sizeof(Word));
    const std::uint32_t field = bits & F::kExponent;
    const std::uint32_t last_kept = (bits >> dropped) & 1, half = (std::uint32_t{1} << dropped) >> 1;
    const std::uint32_t nearest =
        (bits + (dropped > 0 ? half - 1 + last_kept : 0)) & ~((std::uint32_t{1} << dropped) - 1);
    const bool overflows = (nearest & F::kExponent) == F::kExponent;
    const bool stays = field == 0 || field == F::kExponent;
    const std::uint32_t largest = (bits & F::kSign) | (F::kExponent - 1u);
    const std::uint32_t finite = overflows ? largest : nearest;
    store(out + i * sizeof(Word), static_cast<Word>(stays ? bits : finite));
  };
  if (packing.mode == Mode::paper)
    for (std::size_t i = 0; i < n; ++i) {
      const int margin = margin_of<kDtype>(load<Word>(bytes + i * sizeof(Word)), importance[i]);
      const DtypeLayout& layout = F::kLayout;
      int dropped = margin > 4 * layout.dropped_bits[1] ? layout.dropped_bits[1] : 0;
      dropped = margin > 4 * layout.dropped_bits[2] ? layout.dropped_bits[2] : dropped;
      dropped = margin > 4 * layout.dropped_bits[3] ? layout.dropped_bits[3] : dropped;
      round_one(i, dropped);
    }
  else
    for (std::size_t i = 0; i < n; ++i) round_one(i, fixed);
}

template <Dtype kDtype>
ExponentSummary split_exponents_loop(const void* values, std::size_t begin, std::size_t n, std::uint8_t* exponents) {
  using F = Float<kDtype>;
  using Word = typename F::Word;
  ExponentSummary summary{0, false};
  const auto* const bytes = static_cast<const std::uint8_t*>(values);
  for (std::size_t i = begin; i < n; ++i) {
    const Word bits = load<Word>(bytes + i * sizeof(Word));
    const auto exponent = static_cast<std::uint8_t>((bits & F::kExponent) >> F::kMantissaBits);
    exponents[i] = exponent;
    summary.n_nonzero += exponent != 0;
    summary.holds_nonfinite |= exponent == F::kMaxExponent;
  }
  return summary;
}

template <Dtype kDtype>
void pack_loop(const void* values, const std::uint8_t* exponents, const std::uint8_t* importance, std::size_t begin,
               std::size_t n, const Packing& packing, BitWriter& levels, BitWriter& mantissas) {
  using F = Float<kDtype>;
  using Word = typename F::Word;
  const auto* const bytes = static_cast<const std::uint8_t*>(values);
  for (std::size_t i = begin; i < n; ++i) {
    if (exponents[i] == 0) continue;
    const Word bits = load<Word>(bytes + i * sizeof(Word));
    int dropped = exponents[i] == F::kMaxExponent ? 0 : packing.dropped_bits;
    if (packing.mode == Mode::paper) {
      const int level = level_of<kDtype>(bits, importance[i]);
      write_bits(levels, static_cast<std::uint64_t>(level), 2);
      dropped = F::kLayout.dropped_bits[level];
    }
    const std::uint64_t sign = (bits & F::kSign) != 0;
    const std::uint64_t kept = static_cast<std::uint64_t>(bits & F::kMantissa) >> dropped;
    write_bits(mantissas, kept | sign << (F::kMantissaBits - dropped),
               static_cast<std::uint64_t>(1 + F::kMantissaBits - dropped));
  }
}

template <Dtype kDtype>
void unpack_loop(const std::uint8_t* exponents, std::size_t begin, std::size_t n, const Packing& packing,
                 BitReader& levels, BitReader& mantissas, void* values) {
  using F = Float<kDtype>;
  using Word = typename F::Word;
  auto* const bytes = static_cast<std::uint8_t*>(values);
  for (std::size_t i = begin; i < n; ++i) {
    Word bits = 0;
    if (exponents[i] != 0) {
      int dropped = exponents[i] == F::kMaxExponent ? 0 : packing.dropped_bits;
      if (packing.mode == Mode::paper) {
        dropped = F::kLayout.dropped_bits[peek_bits(levels) & 3];
        levels.position += 2;
      }
      const std::uint64_t field = peek_bits(mantissas);
      const int n_kept = F::kMantissaBits - dropped;
      mantissas.position += static_cast<std::uint64_t>(1 + n_kept);
      const std::uint64_t kept = field & ((std::uint64_t{1} << n_kept) - 1), sign = (field >> n_kept) & 1;
      bits = static_cast<Word>(kept << dropped | std::uint64_t{exponents[i]} << F::kMantissaBits |
                               sign << (8 * sizeof(Word) - 1));
    }
    store(bytes + i * sizeof(Word), bits);
  }
}

// Values that the kernels above and their like take at a time: what they keep beside the values stays in L1.
inline constexpr std::size_t kBlockValues = 512;
inline constexpr std::size_t kMaxValueBits = 24;  // sign and mantissa of a float32
inline constexpr std::size_t kTailBytes = kBlockValues * kMaxValueBits / 8 + 1 + kBitSlackBytes;  // one block's loads

// A reader that may load what a block of values can have at most: `reader`, or a copy of what is left in the message.
inline BitReader with_room(const BitReader& reader, std::size_t max_bits, const std::uint8_t* readable_end,
                           std::array<std::uint8_t, kTailBytes>& tail) {
  const std::uint8_t* const at = reader.data + (reader.position >> 3);
  const std::size_t reach = bytes_of_bits(max_bits) + 1 + kBitSlackBytes;
  const auto n_left = static_cast<std::size_t>(readable_end - at);
  if (n_left >= reach) return reader;
  std::memcpy(tail.data(), at, n_left);
  std::memset(tail.data() + n_left, 0, reach - n_left);
  return {tail.data(), reader.position & 7};
}

#if defined(__AVX2__)

// Eight floats (sixteen of the 16-bit types) a vector; pext and pdep cut out and put back the bits of all values of a
// 64-bit word at once, under a mask that says for each value which of its bits travel.

constexpr std::size_t kStep = 32;  // values a vector loop takes at a time: one vector of exponent bytes

// The few operations whose width depends on the value's. `kLanes` values a vector.
struct Lanes32 {
  static constexpr std::size_t kLanes = 8;
  static __m256i set(std::uint32_t value) { return _mm256_set1_epi32(static_cast<int>(value)); }
  static __m256i add(__m256i a, __m256i b) { return _mm256_add_epi32(a, b); }
  static __m256i equal(__m256i a, __m256i b) { return _mm256_cmpeq_epi32(a, b); }
  static __m256i shift_right(__m256i a, int count) { return _mm256_srl_epi32(a, _mm_cvtsi32_si128(count)); }
  static __m256i shift_left(__m256i a, int count) { return _mm256_sll_epi32(a, _mm_cvtsi32_si128(count)); }
  // Two values a word: pairs of state bytes to their index, 16 to a vector.
  using Index = std::uint16_t;
  static __m256i word_indices(__m256i states) {
    return _mm256_maddubs_epi16(states, _mm256_set1_epi16(1 | kStates << 8));
  }
  static __m256i widen(const std::uint8_t* bytes) {
    return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(bytes)));
  }
  // Four vectors of lanes below 256 to one of bytes, in order.
  static __m256i narrow(const __m256i (&v)[4]) { return narrow_to_bytes(v); }
};

struct Lanes16 {
  static constexpr std::size_t kLanes = 16;
  static __m256i set(std::uint32_t value) { return _mm256_set1_epi16(static_cast<short>(value)); }
  static __m256i add(__m256i a, __m256i b) { return _mm256_add_epi16(a, b); }
  static __m256i sub(__m256i a, __m256i b) { return _mm256_sub_epi16(a, b); }
  static __m256i equal(__m256i a, __m256i b) { return _mm256_cmpeq_epi16(a, b); }
  static __m256i greater(__m256i a, __m256i b) { return _mm256_cmpgt_epi16(a, b); }
  static __m256i shift_right(__m256i a, int count) { return _mm256_srl_epi16(a, _mm_cvtsi32_si128(count)); }
  static __m256i shift_left(__m256i a, int count) { return _mm256_sll_epi16(a, _mm_cvtsi32_si128(count)); }
  // Four values a word: quads of state bytes to their index, 8 to a vector.
  using Index = std::uint32_t;
  static __m256i word_indices(__m256i states) {
    const __m256i pairs = _mm256_maddubs_epi16(states, _mm256_set1_epi16(1 | kStates << 8));
    return _mm256_madd_epi16(pairs, _mm256_set1_epi32(1 | kStates * kStates << 16));
  }
  static __m256i widen(const std::uint8_t* bytes) {
    return _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes)));
  }
  static __m256i narrow(const __m256i (&v)[2]) {
    return _mm256_permute4x64_epi64(_mm256_packus_epi16(v[0], v[1]), 0xD8);
  }
};

template <Dtype kDtype>
struct VectorFloat : Float<kDtype>, std::conditional_t<sizeof(typename Float<kDtype>::Word) == 4, Lanes32, Lanes16> {
  using F = Float<kDtype>;
  using L = std::conditional_t<sizeof(typename F::Word) == 4, Lanes32, Lanes16>;
  static constexpr std::size_t kVectors = kStep / L::kLanes;
};

// 0x03 for every value that has a level, as masks of the level bits.
__m256i level_mask(__m256i exponents) {
  return _mm256_andnot_si256(_mm256_cmpeq_epi8(exponents, _mm256_setzero_si256()), _mm256_set1_epi8(3));
}

// In the modes without levels: the states of 32 values.
template <Dtype kDtype>
__m256i states_of(__m256i exponents) {
  const __m256i is_zero = _mm256_cmpeq_epi8(exponents, _mm256_setzero_si256());
  const __m256i is_nonfinite =
      _mm256_cmpeq_epi8(exponents, _mm256_set1_epi8(static_cast<char>(Float<kDtype>::kMaxExponent)));
  return _mm256_or_si256(_mm256_and_si256(is_zero, _mm256_set1_epi8(kStateZero)),
                         _mm256_and_si256(is_nonfinite, _mm256_set1_epi8(kStateNonfinite)));
}

// The levels of 32 values, as bytes. The comparison is exact: quarter octaves are whole numbers.
template <Dtype kDtype>
__m256i levels_of(const std::uint8_t* values, const std::uint8_t* importance) {
  using V = VectorFloat<kDtype>;
  using L = typename V::L;
  __m256i narrowed[2];  // 16-bit lanes hold every code
  for (std::size_t half = 0; half < 2; ++half) {
    const auto code = [&](std::size_t v) {
      const __m256i bits = load256(values + 32 * v);
      return L::shift_right(_mm256_and_si256(bits, L::set(V::kExponent | V::kMantissa)), V::kCodeShift);
    };
    __m256i codes;
    if constexpr (sizeof(typename V::Word) == 4)
      codes = _mm256_permute4x64_epi64(_mm256_packs_epi32(code(2 * half), code(2 * half + 1)), 0xD8);
    else
      codes = code(half);
    const __m256i scale = Lanes16::widen(importance + 16 * half);
    __m256i ineligible = Lanes16::equal(scale, _mm256_setzero_si256());
    // Inf and NaN: in float32 and bfloat16 their codes exceed every importance anyway.
    constexpr int kNonfiniteCode = V::kExponent >> V::kCodeShift;
    if constexpr (kNonfiniteCode + V::kCodeBias < 255 + kImportanceOffset)
      ineligible = _mm256_or_si256(ineligible, Lanes16::greater(codes, Lanes16::set(kNonfiniteCode - 1)));
    const __m256i margin = _mm256_andnot_si256(
        ineligible, Lanes16::sub(Lanes16::add(scale, Lanes16::set(kImportanceOffset - V::kCodeBias)), codes));
    __m256i level = _mm256_setzero_si256();
    for (int n = 1; n < 4; ++n)
      level = Lanes16::sub(level, Lanes16::greater(margin, Lanes16::set(4 * V::kLayout.dropped_bits[n])));
    narrowed[half] = level;
  }
  return Lanes16::narrow(narrowed);
}

// Appends the levels of 16 values at a time.
void write_levels(const std::uint8_t* levels, const std::uint8_t* masks, std::size_t n, BitWriter& writer) {
  BitWriter local = writer;
  for (std::size_t i = 0; i < n; i += 16) {
    const auto low = load<std::uint64_t>(masks + i), high = load<std::uint64_t>(masks + i + 8);
    const auto n_low = static_cast<std::uint64_t>(_mm_popcnt_u64(low));
    write_bits(local,
               _pext_u64(load<std::uint64_t>(levels + i), low) | _pext_u64(load<std::uint64_t>(levels + i + 8), high)
                                                                     << n_low,
               n_low + static_cast<std::uint64_t>(_mm_popcnt_u64(high)));
  }
  writer = local;
}

void read_levels(const std::uint8_t* masks, std::size_t n, BitReader& reader, std::uint8_t* levels) {
  std::uint64_t position = reader.position;
  for (std::size_t i = 0; i < n; i += 16) {
    const auto low = load<std::uint64_t>(masks + i), high = load<std::uint64_t>(masks + i + 8);
    const auto n_low = static_cast<std::uint64_t>(_mm_popcnt_u64(low));
    const std::uint64_t bits = peek_bits({reader.data, position});
    store(levels + i, _pdep_u64(bits, low));
    store(levels + i + 8, _pdep_u64(bits >> n_low, high));
    position += n_low + static_cast<std::uint64_t>(_mm_popcnt_u64(high));
  }
  reader.position = position;
}

// The mask of every word of n values, by their states; levels_at(i): in mode paper, the levels of the 32 from i on.
template <Dtype kDtype, class Index, class LevelsAt>
void find_indices(const std::uint8_t* exponents, std::size_t n, Mode mode, LevelsAt levels_at, Index* indices) {
  using V = VectorFloat<kDtype>;
  for (std::size_t i = 0; i < n; i += kStep) {
    const __m256i exponent = load256(exponents + i), is_zero = _mm256_cmpeq_epi8(exponent, _mm256_setzero_si256());
    const __m256i states = mode == Mode::paper ? _mm256_blendv_epi8(levels_at(i), _mm256_set1_epi8(kStateZero), is_zero)
                                               : states_of<kDtype>(exponent);
    store256(indices + i * sizeof(typename V::Word) / 8, V::L::word_indices(states));
  }
}

#endif

template <Dtype kDtype>
ExponentSummary split_exponents(const void* values, std::size_t n, std::uint8_t* exponents) {
  std::size_t i = 0, n_nonzero = 0;
  bool holds_nonfinite = false;
#if defined(__AVX2__)
  using V = VectorFloat<kDtype>;
  using L = typename V::L;
  const auto* const bytes = static_cast<const std::uint8_t*>(values);
  const __m256i max_exponent = _mm256_set1_epi8(static_cast<char>(V::kMaxExponent));
  __m256i n_zero = _mm256_setzero_si256(), nonfinite = _mm256_setzero_si256();
  for (; i + kStep <= n; i += kStep) {
    __m256i fields[V::kVectors];
    for (std::size_t v = 0; v < V::kVectors; ++v) {
      const __m256i bits = load256(bytes + (i + v * L::kLanes) * sizeof(typename V::Word));
      fields[v] = L::shift_right(_mm256_and_si256(bits, L::set(V::kExponent)), V::kMantissaBits);
    }
    const __m256i eight_bit = L::narrow(fields);
    store256(exponents + i, eight_bit);
    nonfinite = _mm256_or_si256(nonfinite, _mm256_cmpeq_epi8(eight_bit, max_exponent));
    const __m256i zero = _mm256_cmpeq_epi8(eight_bit, _mm256_setzero_si256());
    n_zero =
        _mm256_add_epi64(n_zero, _mm256_sad_epu8(_mm256_and_si256(zero, _mm256_set1_epi8(1)), _mm256_setzero_si256()));
  }
  std::uint64_t zeros[4];
  store256(zeros, n_zero);
  n_nonzero = i - (zeros[0] + zeros[1] + zeros[2] + zeros[3]);
  holds_nonfinite = _mm256_testz_si256(nonfinite, nonfinite) == 0;
#endif
  const ExponentSummary rest = split_exponents_loop<kDtype>(values, i, n, exponents);
  return {n_nonzero + rest.n_nonzero, holds_nonfinite || rest.holds_nonfinite};
}

// The masks of every combination of states that a word's values can have.
template <Dtype kDtype>
void fill_masks([[maybe_unused]] const Packing& packing, [[maybe_unused]] WordMasks& masks) {
#if defined(__AVX2__)  // value by value there are no words, and no masks
  using F = Float<kDtype>;
  const std::uint64_t all = F::kSign | F::kMantissa;
  std::uint64_t of_state[kStates] = {};
  for (int state = 0; state < kStateZero; ++state) {
    int dropped = state == kStateNonfinite ? 0 : packing.dropped_bits;
    if (packing.mode == Mode::paper) dropped = F::kLayout.dropped_bits[state];
    of_state[state] = all & ~((std::uint64_t{1} << dropped) - 1);
  }
  constexpr std::size_t kValueBits = 8 * sizeof(typename F::Word);
  constexpr std::size_t kIndices = kValueBits == 32 ? kStates * kStates : kStates * kStates * kStates * kStates;
  for (std::size_t index = 0; index < kIndices; ++index) {
    std::uint64_t bits = 0;
    std::size_t digits = index;
    for (std::size_t shift = 0; shift < 64; shift += kValueBits, digits /= kStates)
      bits |= of_state[digits % kStates] << shift;
    masks.bits[index] = bits;
    masks.n_bits[index] = static_cast<std::uint8_t>(_mm_popcnt_u64(bits));
  }
#endif
}

template <Dtype kDtype>
void pack_block(const void* values, const std::uint8_t* exponents, const std::uint8_t* importance, std::size_t n,
                const Packing& packing, [[maybe_unused]] const WordMasks& masks, BitWriter& levels,
                BitWriter& mantissas) {
  std::size_t n_vector = 0;
#if defined(__AVX2__)
  using V = VectorFloat<kDtype>;
  using L = typename V::L;
  using Word = typename V::Word;
  constexpr std::size_t kWordValues = 8 / sizeof(Word);
  alignas(32) typename L::Index indices[kBlockValues / kWordValues];
  alignas(32) std::uint8_t level_bytes[kBlockValues], level_masks[kBlockValues];
  const auto* const bytes = static_cast<const std::uint8_t*>(values);
  n_vector = n / kStep * kStep;
  const auto levels_at = [&](std::size_t i) {
    const __m256i level = levels_of<kDtype>(bytes + i * sizeof(Word), importance + i);
    store256(level_bytes + i, level);
    store256(level_masks + i, level_mask(load256(exponents + i)));
    return level;
  };
  find_indices<kDtype>(exponents, n_vector, packing.mode, levels_at, indices);
  if (packing.mode == Mode::paper) write_levels(level_bytes, level_masks, n_vector, levels);
  BitWriter writer = mantissas;
  for (std::size_t word = 0; word < n_vector / kWordValues; ++word) {
    const std::size_t index = indices[word];
    write_bits(writer, _pext_u64(load<std::uint64_t>(bytes + 8 * word), masks.bits[index]), masks.n_bits[index]);
  }
  mantissas = writer;
#endif
  pack_loop<kDtype>(values, exponents, importance, n_vector, n, packing, levels, mantissas);
}

template <Dtype kDtype>
void unpack_block(const std::uint8_t* exponents, std::size_t n, const Packing& packing,
                  [[maybe_unused]] const WordMasks& masks, BitReader& levels, BitReader& mantissas, void* values) {
  std::size_t n_vector = 0;
#if defined(__AVX2__)
  using V = VectorFloat<kDtype>;
  using L = typename V::L;
  using Word = typename V::Word;
  constexpr std::size_t kWordValues = 8 / sizeof(Word);
  alignas(32) Word fields[kBlockValues];
  alignas(32) typename L::Index indices[kBlockValues / kWordValues];
  alignas(32) std::uint8_t level_bytes[kBlockValues], level_masks[kBlockValues];
  auto* const out = static_cast<std::uint8_t*>(values);
  n_vector = n / kStep * kStep;
  if (packing.mode == Mode::paper) {
    for (std::size_t i = 0; i < n_vector; i += kStep) store256(level_masks + i, level_mask(load256(exponents + i)));
    read_levels(level_masks, n_vector, levels, level_bytes);
  }
  find_indices<kDtype>(
      exponents, n_vector, packing.mode, [&](std::size_t i) { return load256(level_bytes + i); }, indices);
  for (std::size_t i = 0; i < n_vector; i += L::kLanes)
    store256(fields + i, L::shift_left(L::widen(exponents + i), V::kMantissaBits));
  const auto* const field_bytes = reinterpret_cast<const std::uint8_t*>(fields);
  std::uint64_t position = mantissas.position;
  for (std::size_t word = 0; word < n_vector / kWordValues; ++word) {
    const std::size_t index = indices[word];
    const std::uint64_t bits = _pdep_u64(peek_bits({mantissas.data, position}), masks.bits[index]);
    store(out + 8 * word, bits | load<std::uint64_t>(field_bytes + 8 * word));
    position += masks.n_bits[index];
  }
  mantissas.position = position;
#endif
  unpack_loop<kDtype>(exponents, n_vector, n, packing, levels, mantissas, values);
}

// A chunk, block by block.
template <Dtype kDtype>
SegmentBits pack(const void* values, const std::uint8_t* exponents, const std::uint8_t* importance, std::size_t n,
                 const Packing& packing, const WordMasks& masks, std::uint8_t* levels, std::uint8_t* mantissas) {
  const auto* const bytes = static_cast<const std::uint8_t*>(values);
  BitWriter level_writer{levels}, mantissa_writer{mantissas};
  for (std::size_t i = 0; i < n; i += kBlockValues)
    pack_block<kDtype>(bytes + i * sizeof(typename Float<kDtype>::Word), exponents + i,
                       importance == nullptr ? nullptr : importance + i, std::min(kBlockValues, n - i), packing, masks,
                       level_writer, mantissa_writer);
  finish(level_writer);
  finish(mantissa_writer);
  return {8 * static_cast<std::uint64_t>(level_writer.data - levels) + level_writer.n_pending,
          8 * static_cast<std::uint64_t>(mantissa_writer.data - mantissas) + mantissa_writer.n_pending};
}

// Ends early where a segment does, so that no reader starts beyond it.
template <Dtype kDtype>
SegmentBits unpack(const std::uint8_t* exponents, std::size_t n, const Packing& packing, const WordMasks& masks,
                   const SegmentSpan& levels, const SegmentSpan& mantissas, void* values) {
  auto* const bytes = static_cast<std::uint8_t*>(values);
  std::array<std::uint8_t, kTailBytes> level_tail, mantissa_tail;
  BitReader level_reader{levels.data}, mantissa_reader{mantissas.data};
  for (std::size_t i = 0; i < n; i += kBlockValues) {
    const std::size_t n_block = std::min(kBlockValues, n - i);
    const BitReader level_start = with_room(level_reader, 2 * n_block, levels.readable_end, level_tail);
    const BitReader mantissa_start =
        with_room(mantissa_reader, n_block * kMaxValueBits, mantissas.readable_end, mantissa_tail);
    BitReader level_block = level_start, mantissa_block = mantissa_start;
    unpack_block<kDtype>(exponents + i, n_block, packing, masks, level_block, mantissa_block,
                         bytes + i * sizeof(typename Float<kDtype>::Word));
    level_reader.position += level_block.position - level_start.position;
    mantissa_reader.position += mantissa_block.position - mantissa_start.position;
    if (level_reader.position > levels.n_bits || mantissa_reader.position > mantissas.n_bits) break;
  }
  return {level_reader.position, mantissa_reader.position};
}

template <Dtype kDtype>
constexpr Kernels make_kernels() {
  return {fill_masks<kDtype>, round_loop<kDtype>, split_exponents<kDtype>, pack<kDtype>, unpack<kDtype>};
}

}  // namespace

const KernelsByDtype& kernels_at(Level<GW_LEVEL>) {
  static constexpr KernelsByDtype all = {make_kernels<Dtype::float32>(), make_kernels<Dtype::bfloat16>(),
                                         make_kernels<Dtype::float16>()};
  return all;
}

}  // namespace gradwire::gcomp
