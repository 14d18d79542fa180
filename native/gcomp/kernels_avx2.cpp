// AVX2 and BMI2: eight floats (sixteen of the 16-bit types) a vector; pext and pdep cut out and put back the bits of all
// values of a 64-bit word at once, under a mask that says for each value which of its bits travel.
#include "gcomp/value_loops.hpp"

#if defined(__x86_64__)
#include <immintrin.h>

#include <type_traits>

namespace gradwire::gcomp {
namespace {

constexpr std::size_t kStep = 32;  // values a vector loop takes at a time: one vector of exponent bytes

__m256i load256(const void* data) { return _mm256_loadu_si256(static_cast<const __m256i*>(data)); }
void store256(void* data, __m256i vector) { _mm256_storeu_si256(static_cast<__m256i*>(data), vector); }

// The few operations whose width depends on the value's. `kLanes` values a vector.
struct Lanes32 {
  static constexpr std::size_t kLanes = 8;
  static __m256i set(std::uint32_t value) { return _mm256_set1_epi32(static_cast<int>(value)); }
  static __m256i add(__m256i a, __m256i b) { return _mm256_add_epi32(a, b); }
  static __m256i sub(__m256i a, __m256i b) { return _mm256_sub_epi32(a, b); }
  static __m256i equal(__m256i a, __m256i b) { return _mm256_cmpeq_epi32(a, b); }
  static __m256i greater(__m256i a, __m256i b) { return _mm256_cmpgt_epi32(a, b); }
  static __m256i shift_right(__m256i a, int count) { return _mm256_srl_epi32(a, _mm_cvtsi32_si128(count)); }
  static __m256i shift_left(__m256i a, int count) { return _mm256_sll_epi32(a, _mm_cvtsi32_si128(count)); }
  static __m256i widen(const std::uint8_t* bytes) {
    return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(bytes)));
  }
  // Four vectors of lanes below 256 (of either sign) to one of bytes, in order.
  static __m256i narrow(const __m256i (&v)[4]) {
    const __m256i packed = _mm256_packs_epi16(_mm256_packs_epi32(v[0], v[1]), _mm256_packs_epi32(v[2], v[3]));
    return _mm256_permutevar8x32_epi32(packed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
  }
  static __m256i narrow_unsigned(const __m256i (&v)[4]) {
    const __m256i packed = _mm256_packus_epi16(_mm256_packs_epi32(v[0], v[1]), _mm256_packs_epi32(v[2], v[3]));
    return _mm256_permutevar8x32_epi32(packed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
  }
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
  static __m256i widen(const std::uint8_t* bytes) {
    return _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes)));
  }
  static __m256i narrow(const __m256i (&v)[2]) {
    return _mm256_permute4x64_epi64(_mm256_packs_epi16(v[0], v[1]), 0xD8);
  }
  static __m256i narrow_unsigned(const __m256i (&v)[2]) {
    return _mm256_permute4x64_epi64(_mm256_packus_epi16(v[0], v[1]), 0xD8);
  }
};

template <Dtype kDtype>
struct VectorFloat : Float<kDtype>, std::conditional_t<sizeof(typename Float<kDtype>::Word) == 4, Lanes32, Lanes16> {
  using F = Float<kDtype>;
  using L = std::conditional_t<sizeof(typename F::Word) == 4, Lanes32, Lanes16>;
  static constexpr std::size_t kVectors = kStep / L::kLanes;

  static __m256i round(__m256i bits, int dropped) {
    if (dropped == 0) return bits;
    const __m256i field_mask = L::set(F::kExponent);
    const __m256i field = _mm256_and_si256(bits, field_mask);
    const __m256i kept_as_is =
        _mm256_or_si256(L::equal(field, _mm256_setzero_si256()), L::equal(field, field_mask));
    const __m256i last_kept = _mm256_and_si256(L::shift_right(bits, dropped), L::set(1));
    const __m256i rounded = L::add(L::add(bits, L::set((1u << (dropped - 1)) - 1)), last_kept);
    const __m256i overflows = L::equal(_mm256_and_si256(rounded, field_mask), field_mask);
    const __m256i largest = _mm256_or_si256(_mm256_and_si256(bits, L::set(F::kSign)), L::set(F::kExponent - 1u));
    return _mm256_blendv_epi8(_mm256_blendv_epi8(rounded, largest, overflows), bits, kept_as_is);
  }
};

template <Dtype kDtype, bool kRounds>
ExponentSummary split_vectors(const void* values, std::size_t n, const Packing& packing, std::uint8_t* exponents) {
  using V = VectorFloat<kDtype>;
  using L = typename V::L;
  const auto* const bytes = static_cast<const std::uint8_t*>(values);
  const __m256i max_exponent = _mm256_set1_epi8(static_cast<char>(V::kMaxExponent));
  __m256i n_zero = _mm256_setzero_si256(), nonfinite = _mm256_setzero_si256();
  std::size_t i = 0;
  for (; i + kStep <= n; i += kStep) {
    __m256i fields[V::kVectors];
    for (std::size_t v = 0; v < V::kVectors; ++v) {
      __m256i bits = load256(bytes + (i + v * L::kLanes) * sizeof(typename V::Word));
      if constexpr (kRounds) bits = V::round(bits, packing.dropped_bits);
      fields[v] = L::shift_right(_mm256_and_si256(bits, L::set(V::kExponent)), V::kMantissaBits);
    }
    const __m256i eight_bit = L::narrow_unsigned(fields);
    store256(exponents + i, eight_bit);
    nonfinite = _mm256_or_si256(nonfinite, _mm256_cmpeq_epi8(eight_bit, max_exponent));
    const __m256i zero = _mm256_cmpeq_epi8(eight_bit, _mm256_setzero_si256());
    n_zero = _mm256_add_epi64(n_zero, _mm256_sad_epu8(_mm256_and_si256(zero, _mm256_set1_epi8(1)),
                                                      _mm256_setzero_si256()));
  }
  const ExponentSummary rest = split_exponents_loop<kDtype>(values, i, n, packing, exponents);
  std::uint64_t zeros[4];
  store256(zeros, n_zero);
  return {i - (zeros[0] + zeros[1] + zeros[2] + zeros[3]) + rest.n_nonzero,
          _mm256_testz_si256(nonfinite, nonfinite) == 0 || rest.holds_nonfinite};
}

template <Dtype kDtype>
ExponentSummary split_exponents(const void* values, std::size_t n, const Packing& packing, std::uint8_t* exponents) {
  return packing.mode == Mode::uniform ? split_vectors<kDtype, true>(values, n, packing, exponents)
                                       : split_vectors<kDtype, false>(values, n, packing, exponents);
}

// Appends the bits of each word of `values` that `masks` names, lowest first.
void extract_words(const void* values, const void* masks, std::size_t n_words, BitWriter& writer) {
  BitWriter local = writer;
  const auto* const value = static_cast<const std::uint8_t*>(values);
  const auto* const mask = static_cast<const std::uint8_t*>(masks);
  for (std::size_t word = 0; word < n_words; ++word) {
    const auto bits = load<std::uint64_t>(mask + 8 * word);
    write_bits(local, _pext_u64(load<std::uint64_t>(value + 8 * word), bits),
               static_cast<std::uint64_t>(_mm_popcnt_u64(bits)));
  }
  writer = local;
}

// Constants of the level of one value, and of what it lets go of.
template <Dtype kDtype>
struct LevelMasks {
  using V = VectorFloat<kDtype>;
  using L = typename V::L;
  static __m256i dropped(int level) { return L::set((1u << V::kLayout.dropped_bits[level]) - 1); }
};

template <Dtype kDtype, Mode kMode>
void pack_vectors(const void* values, const std::uint8_t* exponents, const std::uint8_t* importance, std::size_t n,
                  const Packing& packing, BitWriter& levels, BitWriter& mantissas) {
  using V = VectorFloat<kDtype>;
  using L = typename V::L;
  using Word = typename V::Word;
  alignas(32) Word masks[kBlockValues], rounded[kBlockValues];
  alignas(32) std::uint8_t level_bytes[kBlockValues], level_masks[kBlockValues];
  const auto* const bytes = static_cast<const std::uint8_t*>(values);
  const __m256i zero = _mm256_setzero_si256();
  const __m256i field_mask = L::set(V::kExponent), all = L::set(V::kSign | V::kMantissa);
  const __m256i kept = L::set(static_cast<Word>((V::kSign | V::kMantissa) & ~((1u << packing.dropped_bits) - 1)));
  const std::size_t n_vector = n / kStep * kStep;
  for (std::size_t i = 0; i < n_vector; i += kStep) {
    __m256i level[V::kVectors];
    for (std::size_t v = 0; v < V::kVectors; ++v) {
      const std::size_t at = i + v * L::kLanes;
      __m256i bits = load256(bytes + at * sizeof(Word));
      const __m256i field = _mm256_and_si256(bits, field_mask);
      const __m256i is_zero = L::equal(field, zero), is_nonfinite = L::equal(field, field_mask);
      __m256i mask;
      if constexpr (kMode == Mode::paper) {
        const __m256i scale = L::widen(importance + at);
        const __m256i code = L::shift_right(_mm256_and_si256(bits, L::set(V::kExponent | V::kMantissa)), V::kCodeShift);
        const __m256i none = _mm256_or_si256(is_nonfinite, L::equal(scale, zero));
        const __m256i margin =
            _mm256_andnot_si256(none, L::sub(L::add(scale, L::set(kImportanceOffset - V::kCodeBias)), code));
        const __m256i level_1 = L::greater(margin, L::set(4 * V::kLayout.dropped_bits[1]));
        const __m256i level_2 = L::greater(margin, L::set(4 * V::kLayout.dropped_bits[2]));
        const __m256i level_3 = L::greater(margin, L::set(4 * V::kLayout.dropped_bits[3]));
        level[v] = L::sub(zero, L::add(L::add(level_1, level_2), level_3));
        const __m256i dropped =
            _mm256_or_si256(_mm256_or_si256(_mm256_and_si256(level_1, LevelMasks<kDtype>::dropped(1)),
                                            _mm256_and_si256(level_2, LevelMasks<kDtype>::dropped(2))),
                            _mm256_and_si256(level_3, LevelMasks<kDtype>::dropped(3)));
        mask = _mm256_andnot_si256(dropped, all);
      } else if constexpr (kMode == Mode::none) {
        mask = all;
      } else {
        mask = _mm256_blendv_epi8(kept, all, is_nonfinite);
      }
      if constexpr (kMode == Mode::uniform) {
        bits = V::round(bits, packing.dropped_bits);
        store256(rounded + at, bits);
      }
      store256(masks + at, _mm256_andnot_si256(is_zero, mask));
    }
    if constexpr (kMode == Mode::paper) {
      store256(level_bytes + i, L::narrow(level));
      const __m256i is_zero = _mm256_cmpeq_epi8(load256(exponents + i), zero);
      store256(level_masks + i, _mm256_andnot_si256(is_zero, _mm256_set1_epi8(3)));
    }
  }
  if constexpr (kMode == Mode::paper) extract_words(level_bytes, level_masks, n_vector / 8, levels);
  extract_words(kMode == Mode::uniform ? static_cast<const void*>(rounded) : values, masks,
                n_vector * sizeof(Word) / 8, mantissas);
  pack_loop<kDtype>(values, exponents, importance, n_vector, n, packing, levels, mantissas);
}

template <Dtype kDtype>
void pack(const void* values, const std::uint8_t* exponents, const std::uint8_t* importance, std::size_t n,
          const Packing& packing, BitWriter& levels, BitWriter& mantissas) {
  switch (packing.mode) {
    case Mode::none:
      return pack_vectors<kDtype, Mode::none>(values, exponents, importance, n, packing, levels, mantissas);
    case Mode::paper:
      return pack_vectors<kDtype, Mode::paper>(values, exponents, importance, n, packing, levels, mantissas);
    case Mode::uniform:
      return pack_vectors<kDtype, Mode::uniform>(values, exponents, importance, n, packing, levels, mantissas);
    case Mode::truncate:
      return pack_vectors<kDtype, Mode::truncate>(values, exponents, importance, n, packing, levels, mantissas);
  }
}

template <Dtype kDtype, Mode kMode>
void unpack_vectors(const std::uint8_t* exponents, std::size_t n, const Packing& packing, BitReader& levels,
                    BitReader& mantissas, void* values) {
  using V = VectorFloat<kDtype>;
  using L = typename V::L;
  using Word = typename V::Word;
  alignas(32) Word masks[kBlockValues], fields[kBlockValues];
  alignas(32) std::uint8_t level_bytes[kBlockValues], level_masks[kBlockValues];
  auto* const out = static_cast<std::uint8_t*>(values);
  const __m256i zero = _mm256_setzero_si256();
  const __m256i all = L::set(V::kSign | V::kMantissa);
  const __m256i kept = L::set(static_cast<Word>((V::kSign | V::kMantissa) & ~((1u << packing.dropped_bits) - 1)));
  const std::size_t n_vector = n / kStep * kStep;
  if constexpr (kMode == Mode::paper) {
    for (std::size_t i = 0; i < n_vector; i += kStep) {
      const __m256i is_zero = _mm256_cmpeq_epi8(load256(exponents + i), zero);
      store256(level_masks + i, _mm256_andnot_si256(is_zero, _mm256_set1_epi8(3)));
    }
    BitReader reader = levels;
    for (std::size_t i = 0; i < n_vector; i += 8) {
      const auto mask = load<std::uint64_t>(level_masks + i);
      store(level_bytes + i, _pdep_u64(peek_bits(reader), mask));
      reader.position += static_cast<std::uint64_t>(_mm_popcnt_u64(mask));
    }
    levels = reader;
  }
  for (std::size_t i = 0; i < n_vector; i += L::kLanes) {
    const __m256i exponent = L::widen(exponents + i);
    const __m256i is_zero = L::equal(exponent, zero);
    __m256i mask = all;
    if constexpr (kMode == Mode::paper) {
      const __m256i level = L::widen(level_bytes + i);
      const __m256i dropped = _mm256_or_si256(
          _mm256_or_si256(_mm256_and_si256(L::greater(level, zero), LevelMasks<kDtype>::dropped(1)),
                          _mm256_and_si256(L::greater(level, L::set(1)), LevelMasks<kDtype>::dropped(2))),
          _mm256_and_si256(L::greater(level, L::set(2)), LevelMasks<kDtype>::dropped(3)));
      mask = _mm256_andnot_si256(dropped, all);
    } else if constexpr (kMode != Mode::none) {
      mask = _mm256_blendv_epi8(kept, all, L::equal(exponent, L::set(V::kMaxExponent)));
    }
    store256(masks + i, _mm256_andnot_si256(is_zero, mask));
    store256(fields + i, L::shift_left(exponent, V::kMantissaBits));
  }
  BitReader reader = mantissas;
  const auto* const mask_bytes = reinterpret_cast<const std::uint8_t*>(masks);
  const auto* const field_bytes = reinterpret_cast<const std::uint8_t*>(fields);
  for (std::size_t at = 0; at < n_vector * sizeof(Word); at += 8) {
    const auto mask = load<std::uint64_t>(mask_bytes + at);
    store(out + at, _pdep_u64(peek_bits(reader), mask) | load<std::uint64_t>(field_bytes + at));
    reader.position += static_cast<std::uint64_t>(_mm_popcnt_u64(mask));
  }
  mantissas = reader;
  unpack_loop<kDtype>(exponents, n_vector, n, packing, levels, mantissas, values);
}

template <Dtype kDtype>
void unpack(const std::uint8_t* exponents, std::size_t n, const Packing& packing, BitReader& levels,
            BitReader& mantissas, void* values) {
  switch (packing.mode) {
    case Mode::none:
      return unpack_vectors<kDtype, Mode::none>(exponents, n, packing, levels, mantissas, values);
    case Mode::paper:
      return unpack_vectors<kDtype, Mode::paper>(exponents, n, packing, levels, mantissas, values);
    case Mode::uniform:
    case Mode::truncate:
      return unpack_vectors<kDtype, Mode::truncate>(exponents, n, packing, levels, mantissas, values);
  }
}

template <Dtype kDtype>
constexpr Kernels kKernels = {split_exponents<kDtype>, pack<kDtype>, unpack<kDtype>};

}  // namespace

const Kernels kKernelsAvx2[kDtypes] = {kKernels<Dtype::float32>, kKernels<Dtype::bfloat16>, kKernels<Dtype::float16>};

}  // namespace gradwire::gcomp
#endif
