// One value at a time: the portable kernels, and the ends of the vector kernels' loops. Internal linkage throughout,
// because files compiled for different instruction sets include it.
#pragma once

#include <cstddef>
#include <cstdint>

#include "gcomp/kernels.hpp"

namespace gradwire::gcomp {

// Importance bytes count quarter octaves (exponent and two mantissa bits of a float32) from 2^-40 on.
inline constexpr int kImportanceOffset = 4 * (127 - 40);

template <Dtype kDtype>
struct Traits;

// kCodeShift, kCodeBias: |x| >> kCodeShift is the value's quarter octave, plus kCodeBias that of the same float32.
template <>
struct Traits<Dtype::float32> {
  using Word = std::uint32_t;
  static constexpr int kCodeShift = 21, kCodeBias = 0;
};
template <>
struct Traits<Dtype::bfloat16> {
  using Word = std::uint16_t;
  static constexpr int kCodeShift = 5, kCodeBias = 0;
};
template <>
struct Traits<Dtype::float16> {
  using Word = std::uint16_t;
  static constexpr int kCodeShift = 8, kCodeBias = 4 * (127 - 15);
};

template <Dtype kDtype>
struct Float : Traits<kDtype> {
  using Word = typename Traits<kDtype>::Word;
  static constexpr DtypeLayout kLayout = kLayouts[static_cast<int>(kDtype)];
  static constexpr int kMantissaBits = kLayout.mantissa_bits;
  static constexpr Word kSign = static_cast<Word>(Word{1} << (8 * sizeof(Word) - 1));
  static constexpr Word kMantissa = static_cast<Word>((Word{1} << kMantissaBits) - 1);
  static constexpr Word kMaxExponent = static_cast<Word>((1 << kLayout.exponent_bits) - 1);
  static constexpr Word kExponent = static_cast<Word>(kMaxExponent << kMantissaBits);
};

// Nearest, ties to even, on the mantissa without its `dropped` lowest bits. A carry moves the exponent on, but never to
// Inf: the largest finite value stands for that. Zero, subnormals, Inf and NaN are left as they are.
template <Dtype kDtype>
[[maybe_unused]] static inline typename Float<kDtype>::Word round_to_even(typename Float<kDtype>::Word bits,
                                                                          int dropped) {
  using F = Float<kDtype>;
  using Word = typename F::Word;
  const Word field = bits & F::kExponent;
  if (dropped == 0 || field == 0 || field == F::kExponent) return bits;
  const Word last_kept = (bits >> dropped) & 1;
  const auto rounded = static_cast<Word>(bits + ((Word{1} << (dropped - 1)) - 1) + last_kept);
  if ((rounded & F::kExponent) != F::kExponent) return rounded;
  return static_cast<Word>((bits & F::kSign) | (F::kExponent - 1));
}

template <Dtype kDtype>
[[maybe_unused]] static inline int level_of(typename Float<kDtype>::Word bits, int importance) {
  using F = Float<kDtype>;
  if (importance == 0 || (bits & F::kExponent) == F::kExponent) return 0;
  const int code = ((bits & static_cast<typename F::Word>(~F::kSign)) >> F::kCodeShift) + F::kCodeBias;
  const int margin = importance + kImportanceOffset - code;
  return (margin > 4 * F::kLayout.dropped_bits[1]) + (margin > 4 * F::kLayout.dropped_bits[2]) +
         (margin > 4 * F::kLayout.dropped_bits[3]);
}

template <Dtype kDtype>
[[maybe_unused]] static ExponentSummary split_exponents_loop(const void* values, std::size_t begin, std::size_t n,
                                                             const Packing& packing, std::uint8_t* exponents) {
  using F = Float<kDtype>;
  using Word = typename F::Word;
  ExponentSummary summary{0, false};
  const auto* const bytes = static_cast<const std::uint8_t*>(values);
  for (std::size_t i = begin; i < n; ++i) {
    Word bits = load<Word>(bytes + i * sizeof(Word));
    if (packing.mode == Mode::uniform) bits = round_to_even<kDtype>(bits, packing.dropped_bits);
    const auto exponent = static_cast<std::uint8_t>((bits & F::kExponent) >> F::kMantissaBits);
    exponents[i] = exponent;
    summary.n_nonzero += exponent != 0;
    summary.holds_nonfinite |= exponent == F::kMaxExponent;
  }
  return summary;
}

template <Dtype kDtype>
[[maybe_unused]] static void pack_loop(const void* values, const std::uint8_t* exponents,
                                       const std::uint8_t* importance, std::size_t begin, std::size_t n,
                                       const Packing& packing, BitWriter& levels, BitWriter& mantissas) {
  using F = Float<kDtype>;
  using Word = typename F::Word;
  const auto* const bytes = static_cast<const std::uint8_t*>(values);
  for (std::size_t i = begin; i < n; ++i) {
    if (exponents[i] == 0) continue;
    Word bits = load<Word>(bytes + i * sizeof(Word));
    int dropped = exponents[i] == F::kMaxExponent ? 0 : packing.dropped_bits;
    if (packing.mode == Mode::uniform) bits = round_to_even<kDtype>(bits, packing.dropped_bits);
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
[[maybe_unused]] static void unpack_loop(const std::uint8_t* exponents, std::size_t begin, std::size_t n,
                                         const Packing& packing, BitReader& levels, BitReader& mantissas,
                                         void* values) {
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

}  // namespace gradwire::gcomp
