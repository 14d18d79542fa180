// Bit planes: plane b of 32 words is one word whose bit i is bit 31 - b of word i, so that plane 0 holds the most
// significant bits. Planes of a run of words lie `stride_bytes` apart, 4 bytes for every 32 words.
#pragma once

#include <cstddef>
#include <cstdint>

#include "simd/dispatch.hpp"

namespace gradwire::planes {

inline constexpr std::size_t kGroup = 32;  // words that make one word of each plane

// Which planes of a word: [first, first + n), 1 <= n <= 32 - first.
struct Range {
  int first;
  int n;
};

struct Kernels {
  // Writes the planes of 32 * n_groups words.
  void (*pack)(const std::uint32_t* words, std::size_t n_groups, Range range, std::uint8_t* out,
               std::size_t stride_bytes);
  // words = (words & keep) | bits of these planes.
  void (*unpack)(const std::uint8_t* planes, std::size_t stride_bytes, std::size_t n_groups, Range range,
                 std::uint32_t keep, std::uint32_t* words);
};

const Kernels &kernels_at(Level<0>), &kernels_at(Level<1>);
inline const Kernels& kernels() {
  return at_current_level<1>([](auto level) -> const Kernels& { return kernels_at(level); });
}

}  // namespace gradwire::planes
