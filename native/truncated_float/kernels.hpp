// The work on runs of at most 256 values: loops.cpp.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "random/counter.hpp"
#include "simd/dispatch.hpp"
#include "truncated_float/format.hpp"

namespace gradwire::truncated_float {

inline constexpr std::uint32_t kUnitScale = 0x3F800000;  // 1.0

struct Kernels {
  // float32 word of the largest magnitude; at least that of Inf if any value is Inf or NaN.
  std::uint32_t (*find_largest)(const void* values, std::size_t n);
  // Codes of n_bits. truncate: the first ones, towards zero; compact formats round to their full width first. nearest:
  // ties to even, between powers of two downwards. stochastic: each number decides for one value.
  void (*to_codes)(const void* values, std::size_t n, const Settings& settings, Rounding rounding, std::uint32_t scale,
                   const std::uint32_t* numbers, std::uint32_t* codes);
  void (*to_values)(const std::uint32_t* codes, std::size_t n, const Settings& settings, std::uint32_t scale,
                    void* values);
  void (*fill_nan)(std::size_t n, void* values);
  // Random numbers of 64 elements.
  void (*draw)(const random::Stream& stream, std::uint64_t group, std::uint32_t* numbers);
};

using KernelsByDtype = std::array<Kernels, floats::kDtypes>;
const KernelsByDtype &kernels_at(Level<0>), &kernels_at(Level<1>);
inline const Kernels& kernels_for(Dtype dtype) {
  return at_current_level<1>(
      [dtype](auto level) -> const Kernels& { return kernels_at(level)[static_cast<int>(dtype)]; });
}

}  // namespace gradwire::truncated_float
