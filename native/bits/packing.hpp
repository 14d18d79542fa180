// Bit planes: plane b of 32 words is one word whose bit i is bit 31 - b of word i, so that plane 0 holds the most
// significant bits. Planes of a run of words lie `stride_bytes` apart, 4 bytes for every 32 words.
#pragma once

#include <array>

#include "simd/dispatch.hpp"
#include "spans.hpp"

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

GW_KERNELS(Kernels, kernels, 1)

}  // namespace gradwire::planes

namespace gradwire::word_packing {

// Codes of k bits, 1 to 32, packed without gaps. 256 codes make a block of 32 k bytes: eight streams side by side, one
// for each lane of a 256-bit vector. Lane l holds codes l, 8 + l, 16 + l, ..., the first one in the lowest bits; word w
// of lane l is the block's 32-bit word 8 w + l. The last codes, fewer than 256, are one stream, least significant bit
// first.
inline constexpr std::size_t kBlock = 256;
inline constexpr int kMaxBits = 32;

constexpr std::size_t packed_bytes(std::size_t n, int n_bits) {
  return (n * static_cast<std::size_t>(n_bits) + 7) / 8;  // whole blocks are whole bytes
}

struct Kernel {
  void (*pack)(const std::uint32_t* codes, std::uint8_t* out);
  void (*unpack)(const std::uint8_t* data, std::uint32_t* codes);
};

using KernelsByBits = std::array<Kernel, kMaxBits>;
GW_KERNELS(KernelsByBits, kernels, 1)
// For one block of codes of n_bits.
inline const Kernel& kernel_for(int n_bits) { return kernels()[static_cast<std::size_t>(n_bits - 1)]; }

}  // namespace gradwire::word_packing
