// Format 2's loops one value at a time: the portable kernels, and the ends of the vector kernels' loops. Internal
// linkage throughout, because files compiled for different instruction sets include it.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>

#include "bits/bit_io.hpp"
#include "gcomp/lanes.hpp"

namespace gradwire::gcomp {

[[maybe_unused]] static inline int kept_bits_of(const KeepRule& rule, int exponent, int importance) {
  if (exponent == kWordMaxExponent) return rule.mantissa_bits;
  int kept = std::min(rule.cap, exponent - rule.lowest_exponent);
  if (rule.by_importance && importance != 0)
    kept = std::min(kept, std::max(0, exponent - importance / 4 + rule.mantissa_bits - kKeepOffset));
  return kept;
}

// To nearest, ties to even, on the `kept` highest mantissa bits; what would become Inf is truncated instead: the
// largest finite value of so many bits.
[[maybe_unused]] static inline std::uint32_t round_word(std::uint32_t word, int kept, int highest_exponent) {
  const int dropped = kWordMantissa - kept;
  if (dropped == 0) return word;
  const std::uint32_t mask = ~((std::uint32_t{1} << dropped) - 1);
  const std::uint32_t nearest = (word + (std::uint32_t{1} << (dropped - 1)) - 1 + ((word >> dropped) & 1)) & mask;
  const bool overflows = static_cast<int>((nearest >> kWordMantissa) & 255) > highest_exponent;
  return overflows && static_cast<int>((word >> kWordMantissa) & 255) <= highest_exponent ? word & mask : nearest;
}

[[maybe_unused]] static std::uint8_t* push_loop(const std::uint8_t* words, const std::uint8_t* importance,
                                                std::size_t n, const KeepRule& rule, bool rounds, LaneStack& stack,
                                                std::uint8_t* at, std::uint8_t* exponents, std::uint8_t* sent,
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

[[maybe_unused]] static const std::uint8_t* pop_loop(const std::uint8_t* exponents, const std::uint8_t* importance,
                                                     std::size_t n, const KeepRule& rule, LaneStack& stack,
                                                     const std::uint8_t* begin, const std::uint8_t* at,
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

// Float16's bias is 15, float32's 127. The float arithmetic below is exact, and never sees a subnormal float32.
[[maybe_unused]] static inline std::uint32_t widen_half(std::uint32_t half) {
  const std::uint32_t sign = (half & 0x8000) << 16, shifted = (half & 0x7FFF) << 13;
  const float subnormal = std::bit_cast<float>(shifted + (113u << 23)) - std::bit_cast<float>(113u << 23);
  const std::uint32_t normal = shifted + ((half & 0x7C00) == 0x7C00 ? 224u << 23 : 112u << 23);
  return sign | ((half & 0x7C00) == 0 ? std::bit_cast<std::uint32_t>(subnormal) : normal);
}

[[maybe_unused]] static inline std::uint32_t narrow_to_half(std::uint32_t word) {
  const std::uint32_t sign = (word >> 16) & 0x8000, magnitude = word & 0x7FFFFFFF;
  // Adding 1/2 leaves multiples of 2^-24, rounded by the addition.
  const std::uint32_t subnormal =
      std::bit_cast<std::uint32_t>(std::bit_cast<float>(magnitude) + 0.5f) - std::bit_cast<std::uint32_t>(0.5f);
  const std::uint32_t normal = ((magnitude + 0xFFF + ((magnitude >> 13) & 1)) >> 13) - (112u << 10);
  const std::uint32_t finite = magnitude < (113u << 23) ? subnormal : std::min(normal, 0x7C00u);
  return sign | (magnitude > 0x7F800000    ? 0x7C00 | ((magnitude >> 13) & 0x3FF)
                 : magnitude == 0x7F800000 ? 0x7C00
                                           : finite);
}

[[maybe_unused]] static inline std::uint32_t narrow_to_bfloat16(std::uint32_t word) {
  const std::uint32_t rounded = (word + 0x7FFF + ((word >> 16) & 1)) >> 16;
  return (word & 0x7FFFFFFF) > 0x7F800000 ? word >> 16 : rounded;
}

template <Dtype kDtype>
[[maybe_unused]] static inline std::uint32_t load_word(const std::uint8_t* values, std::size_t i) {
  if constexpr (kDtype == Dtype::float32) return load<std::uint32_t>(values + 4 * i);
  const std::uint32_t bits = load<std::uint16_t>(values + 2 * i);
  return kDtype == Dtype::bfloat16 ? bits << 16 : widen_half(bits);
}

template <Dtype kDtype>
[[maybe_unused]] static inline void store_word(std::uint8_t* values, std::size_t i, std::uint32_t word) {
  if constexpr (kDtype == Dtype::float32) return store(values + 4 * i, word);
  if constexpr (kDtype == Dtype::bfloat16)
    return store(values + 2 * i, static_cast<std::uint16_t>(narrow_to_bfloat16(word)));
  if constexpr (kDtype == Dtype::float16)
    return store(values + 2 * i, static_cast<std::uint16_t>(narrow_to_half(word)));
}

template <Dtype kDtype>
[[maybe_unused]] static void widen_loop(const std::uint8_t* values, std::size_t n, std::uint8_t* __restrict words) {
  for (std::size_t i = 0; i < n; ++i) store(words + 4 * i, load_word<kDtype>(values, i));
}

template <Dtype kDtype, bool kAdds, bool kScales, bool kDivides>
[[maybe_unused]] static void finish_values(const std::uint8_t* __restrict words, const std::uint8_t* addend,
                                           float divisor, std::size_t n, std::uint8_t* values) {
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
    store_word<kDtype>(values, i, word);
  }
}

// Callers add or divide, never both.
template <Dtype kDtype>
[[maybe_unused]] static void finish_loop(const std::uint8_t* words, const std::uint8_t* addend, float divisor,
                                         std::size_t n, std::uint8_t* values) {
  const bool is_power_of_two = (std::bit_cast<std::uint32_t>(divisor) & 0x7FFFFF) == 0;  // its reciprocal is exact
  if (addend != nullptr) return finish_values<kDtype, true, false, false>(words, addend, divisor, n, values);
  if (divisor == 1) return finish_values<kDtype, false, false, false>(words, addend, divisor, n, values);
  if (is_power_of_two) return finish_values<kDtype, false, true, false>(words, addend, divisor, n, values);
  return finish_values<kDtype, false, false, true>(words, addend, divisor, n, values);
}

}  // namespace gradwire::gcomp
