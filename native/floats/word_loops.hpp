// Values of any dtype as 32-bit words and back: the word of the float32 of equal value, or ("raw") the value's own bits
// at the top of a word. Loops without branches, for the compiler to turn into vectors; included by files that are
// compiled for different instruction sets, so everything has internal linkage. No arithmetic on subnormals: a process
// may have them flushed to zero.
#pragma once

#include <bit>
#include <cstring>
#include <limits>
#include <type_traits>

#include "spans.hpp"

namespace gradwire::floats {
namespace {

constexpr std::uint32_t kQuietNan = 0x7FC00000;

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

// What becomes of values that are not finite, or too large. finite: there are none, and the largest value stands for
// what is too large. Otherwise Inf does, and of a NaN its first bits are left (cut), or its kind (quiet), or it is the
// one NaN of all (canonical).
enum class Specials { finite, cut, quiet, canonical };

// A float32 to the nearest value of 16 bits, ties to even.
template <Dtype dtype, Specials specials>
std::uint16_t narrow(std::uint32_t word) {
  const std::uint32_t magnitude = word & kMagnitude, upper = word >> 16, sign = upper & 0x8000;
  std::uint32_t number, nan;
  if constexpr (dtype == Dtype::bfloat16) {
    number = (word + 0x7FFF + (upper & 1)) >> 16;
    if constexpr (specials == Specials::finite) {
      number &= 0x7FFF;
      return static_cast<std::uint16_t>((number < 0x7F7F ? number : 0x7F7F) | sign);
    }
    nan = specials == Specials::canonical ? 0x7FC0 : specials == Specials::quiet ? upper | 0x40 : upper;
  } else {
    const std::uint32_t normal = ((magnitude + 0xFFF + (magnitude >> 13 & 1)) >> 13) - (112u << 10);
    // The addition leaves units of 2^-24, the smallest subnormal, and rounds to them.
    const std::uint32_t small = std::bit_cast<std::uint32_t>(std::bit_cast<float>(magnitude) + 0.5f) - (126u << 23);
    const std::uint32_t rounded = choose(magnitude < 113u << 23, small, normal);
    constexpr std::uint32_t kLargest = specials == Specials::finite ? 0x7BFF : 0x7C00;
    number = (rounded < kLargest ? rounded : kLargest) | sign;
    if constexpr (specials == Specials::finite) return static_cast<std::uint16_t>(number);
    nan = specials == Specials::canonical
              ? 0x7E00
              : sign | (specials == Specials::quiet ? 0x7E00 : 0x7C00 | (magnitude >> 13 & 0x3FF));
  }
  return static_cast<std::uint16_t>(choose(magnitude > kInfinity, nan, number));
}

// body(constant of the dtype)
template <class Body>
auto with_dtype(Dtype dtype, const Body& body) {
  switch (dtype) {
    case Dtype::bfloat16:
      return body(std::integral_constant<Dtype, Dtype::bfloat16>());
    case Dtype::float16:
      return body(std::integral_constant<Dtype, Dtype::float16>());
    default:
      return body(std::integral_constant<Dtype, Dtype::float32>());
  }
}

// The word of value i.
template <Dtype dtype>
std::uint32_t load_word(const void* values, std::size_t i) {
  if constexpr (dtype == Dtype::float32) {
    std::uint32_t word;
    std::memcpy(&word, static_cast<const std::uint8_t*>(values) + 4 * i, 4);
    return word;
  } else {
    std::uint16_t half;
    std::memcpy(&half, static_cast<const std::uint8_t*>(values) + 2 * i, 2);
    return dtype == Dtype::bfloat16 ? static_cast<std::uint32_t>(half) << 16 : widen(half);
  }
}

template <Dtype dtype, Specials specials>
void store_word(void* values, std::size_t i, std::uint32_t word) {
  if constexpr (dtype == Dtype::float32) {
    std::memcpy(static_cast<std::uint8_t*>(values) + 4 * i, &word, 4);
  } else {
    const std::uint16_t half = narrow<dtype, specials>(word);
    std::memcpy(static_cast<std::uint8_t*>(values) + 2 * i, &half, 2);
  }
}

template <Dtype dtype>
void load_words(const void* values, std::size_t n, std::uint32_t* __restrict words) {
  for (std::size_t i = 0; i < n; ++i) words[i] = load_word<dtype>(values, i);
}

template <Dtype dtype, Specials specials = Specials::finite>
void store_words(const std::uint32_t* __restrict words, std::size_t n, void* __restrict values) {
  for (std::size_t i = 0; i < n; ++i) store_word<dtype, specials>(values, i, words[i]);
}

template <Dtype dtype>
void load_raw(const void* values, std::size_t n, std::uint32_t* __restrict words) {
  constexpr Dtype same = dtype == Dtype::float16 ? Dtype::bfloat16 : dtype;  // whose bits are the upper half of a word
  for (std::size_t i = 0; i < n; ++i) words[i] = load_word<same>(values, i);
}

template <Dtype dtype>
void store_raw_word(void* values, std::size_t i, std::uint32_t word) {
  if constexpr (dtype == Dtype::float32) return store_word<dtype, Specials::finite>(values, i, word);
  const auto half = static_cast<std::uint16_t>(word >> 16);
  std::memcpy(static_cast<std::uint8_t*>(values) + 2 * i, &half, 2);
}

template <Dtype dtype>
void store_raw(const std::uint32_t* __restrict words, std::size_t n, void* __restrict values) {
  for (std::size_t i = 0; i < n; ++i) store_raw_word<dtype>(values, i, words[i]);
}

template <Dtype dtype>
void fill_nan(std::size_t n, void* values) {
  for (std::size_t i = 0; i < n; ++i) store_word<dtype, Specials::canonical>(values, i, kQuietNan);
}

// The largest magnitude as a float32 word; at least kInfinity if any value is Inf or NaN.
template <Dtype dtype>
std::uint32_t largest_magnitude(const void* values, std::size_t n) {
  using Word = std::conditional_t<dtype == Dtype::float32, std::uint32_t, std::uint16_t>;
  const Word* const from = static_cast<const Word*>(values);
  Word largest = 0;
  for (std::size_t i = 0; i < n; ++i) {
    const Word magnitude = from[i] & (std::numeric_limits<Word>::max() / 2);
    largest = largest > magnitude ? largest : magnitude;
  }
  return load_word<dtype>(&largest, 0);
}

}  // namespace
}  // namespace gradwire::floats
