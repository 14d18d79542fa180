// Values of any dtype as 32-bit words and back: the word of the float32 of equal value, or ("raw") the value's own bits
// at the top of a word. Loops without branches, for the compiler to turn into vectors; included by files that are
// compiled for different instruction sets, so everything has internal linkage. No arithmetic on subnormals: a process
// may have them flushed to zero.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "floats/dtypes.hpp"

namespace gradwire::floats {
namespace {

constexpr std::uint32_t kSign = 0x80000000, kMagnitude = 0x7FFFFFFF, kInfinity = 0x7F800000, kQuietNan = 0x7FC00000;

// a if `first`, else b. Spelt out: a conditional would become a branch around floating-point operations.
inline std::uint32_t choose(bool first, std::uint32_t a, std::uint32_t b) {
  return b ^ ((a ^ b) & (0u - static_cast<std::uint32_t>(first)));
}

// float16 to the float32 of equal value; Inf and NaN keep their kind and mantissa.
inline std::uint32_t widen(std::uint16_t half) {
  const std::uint32_t magnitude = half & 0x7FFFu, exponent = magnitude >> 10;
  const std::uint32_t normal = (magnitude << 13) + (112u << 23);
  // Units of 2^-24, the smallest subnormal: exact, and normal as a float32.
  const std::uint32_t small =
      std::bit_cast<std::uint32_t>(static_cast<float>(static_cast<std::int32_t>(magnitude)) * 0x1p-24f);
  const std::uint32_t special = (magnitude << 13) | kInfinity;
  const std::uint32_t word = choose(exponent == 0, small, choose(exponent == 31, special, normal));
  return word | static_cast<std::uint32_t>(half & 0x8000u) << 16;
}

// A finite float32 to the nearest float16, ties to even; 65504 where that would be Inf.
inline std::uint16_t narrow(std::uint32_t word) {
  const std::uint32_t exponent = word >> 23 & 0xFF;
  const std::uint32_t significand = (word & 0x7FFFFF) | 0x800000;
  // 113: the exponent field of 2^-14, float16's smallest normal value. Below it, units of 2^-24.
  const std::uint32_t below = exponent < 113 ? 113 - exponent : 0;
  const std::uint32_t shift = 13 + (below < 12 ? below : 12);  // less than 2^-25 is 0 in any case
  const std::uint32_t base = (exponent > 113 ? exponent - 113 : 0) << 10;
  const std::uint32_t half = (1u << (shift - 1)) - 1 + (significand >> shift & 1);
  const std::uint32_t magnitude = base + ((significand + half) >> shift);
  return static_cast<std::uint16_t>((magnitude < 0x7BFF ? magnitude : 0x7BFF) | (word >> 16 & 0x8000u));
}

// A finite float32 to the nearest bfloat16, ties to even; the largest finite one where that would be Inf.
inline std::uint16_t narrow_to_bfloat16(std::uint32_t word) {
  const std::uint32_t magnitude = word & kMagnitude;
  const std::uint32_t rounded = (magnitude + 0x7FFF + (magnitude >> 16 & 1)) >> 16;
  return static_cast<std::uint16_t>((rounded < 0x7F7F ? rounded : 0x7F7F) | (word >> 16 & 0x8000u));
}

template <Dtype dtype>
void load_words(const void* values, std::size_t n, std::uint32_t* __restrict words) {
  if constexpr (dtype == Dtype::float32) {
    std::memcpy(words, values, 4 * n);
  } else {
    const std::uint16_t* __restrict const from = static_cast<const std::uint16_t*>(values);
    for (std::size_t i = 0; i < n; ++i) {
      if constexpr (dtype == Dtype::bfloat16)
        words[i] = static_cast<std::uint32_t>(from[i]) << 16;
      else
        words[i] = widen(from[i]);
    }
  }
}

// Finite words only.
template <Dtype dtype>
void store_words(const std::uint32_t* __restrict words, std::size_t n, void* values) {
  if constexpr (dtype == Dtype::float32) {
    std::memcpy(values, words, 4 * n);
  } else {
    std::uint16_t* __restrict const to = static_cast<std::uint16_t*>(values);
    for (std::size_t i = 0; i < n; ++i)
      to[i] = dtype == Dtype::bfloat16 ? narrow_to_bfloat16(words[i]) : narrow(words[i]);
  }
}

template <Dtype dtype>
void load_raw(const void* values, std::size_t n, std::uint32_t* __restrict words) {
  if constexpr (dtype == Dtype::float32) {
    std::memcpy(words, values, 4 * n);
  } else {
    const std::uint16_t* __restrict const from = static_cast<const std::uint16_t*>(values);
    for (std::size_t i = 0; i < n; ++i) words[i] = static_cast<std::uint32_t>(from[i]) << 16;
  }
}

template <Dtype dtype>
void store_raw(const std::uint32_t* __restrict words, std::size_t n, void* values) {
  if constexpr (dtype == Dtype::float32) {
    std::memcpy(values, words, 4 * n);
  } else {
    std::uint16_t* __restrict const to = static_cast<std::uint16_t*>(values);
    for (std::size_t i = 0; i < n; ++i) to[i] = static_cast<std::uint16_t>(words[i] >> 16);
  }
}

template <Dtype dtype>
void fill_nan(std::size_t n, void* values) {
  if constexpr (dtype == Dtype::float32) {
    for (std::size_t i = 0; i < n; ++i) std::memcpy(static_cast<std::uint8_t*>(values) + 4 * i, &kQuietNan, 4);
  } else {
    const std::uint16_t word = dtype == Dtype::bfloat16 ? 0x7FC0 : 0x7E00;
    for (std::size_t i = 0; i < n; ++i) static_cast<std::uint16_t*>(values)[i] = word;
  }
}

// The largest magnitude as a float32 word; at least kInfinity if any value is Inf or NaN.
template <Dtype dtype>
std::uint32_t largest_magnitude(const void* values, std::size_t n) {
  if constexpr (dtype == Dtype::float32) {
    const std::uint32_t* const from = static_cast<const std::uint32_t*>(values);
    std::uint32_t largest = 0;
    for (std::size_t i = 0; i < n; ++i) {
      const std::uint32_t magnitude = from[i] & kMagnitude;
      largest = largest > magnitude ? largest : magnitude;
    }
    return largest;
  } else {
    const std::uint16_t* const from = static_cast<const std::uint16_t*>(values);
    std::uint16_t largest = 0;
    for (std::size_t i = 0; i < n; ++i) {
      const std::uint16_t magnitude = from[i] & 0x7FFF;
      largest = largest > magnitude ? largest : magnitude;
    }
    return dtype == Dtype::bfloat16 ? static_cast<std::uint32_t>(largest) << 16 : widen(largest);
  }
}

}  // namespace
}  // namespace gradwire::floats
