// The work on one partition: loops.cpp.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "embedded_float/format.hpp"
#include "simd/dispatch.hpp"

namespace gradwire::embedded_float {

// Shared exponents are at least that of 2^-96, so that 2^(exponent - 157), the weight of a code's lowest bit, is a
// normal float32.
inline constexpr std::uint32_t kMinExponent = 31;
inline constexpr std::uint32_t kRawExponent = 255;  // a partition with Inf or NaN: codes are the values' own bits

// One set a dtype. Codes are words: sign in bit 31, below it the magnitude in units of 2^(exponent - 157).
struct Kernels {
  // Writes the codes of n values, and zeros up to n_padded; returns the shared exponent.
  std::uint32_t (*to_codes)(const void* values, std::size_t n, std::size_t n_padded, std::uint32_t* codes);
  // The float32 words that codes stand for of which the `n_known` highest bits are known, 1 to 32; not for raw ones.
  void (*to_words)(const std::uint32_t* codes, std::size_t n, std::uint32_t exponent, int n_known,
                   std::uint32_t* words);
  // float32 words (raw: the values' own bits at the top) to values.
  void (*store)(const std::uint32_t* words, std::size_t n, bool is_raw, void* values);
  // sums += words, not for raw ones.
  void (*add)(const std::uint32_t* words, std::size_t n, float* sums);
  void (*fill_nan)(std::size_t n, void* values);
  // float32 words of n finite values.
  void (*load)(const void* values, std::size_t n, std::uint32_t* words);
};

using KernelsByDtype = std::array<Kernels, floats::kDtypes>;
const KernelsByDtype &kernels_at(Level<0>), &kernels_at(Level<1>);
inline const Kernels& kernels_for(Dtype dtype) {
  return at_current_level<1>(
      [dtype](auto level) -> const Kernels& { return kernels_at(level)[static_cast<int>(dtype)]; });
}

}  // namespace gradwire::embedded_float
