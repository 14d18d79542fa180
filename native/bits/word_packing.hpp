// Codes of k bits, 1 to 32, packed without gaps. 256 codes make a block of 32 k bytes: eight streams side by side, one
// for each lane of a 256-bit vector. Lane l holds codes l, 8 + l, 16 + l, ..., the first one in the lowest bits; word w
// of lane l is the block's 32-bit word 8 w + l. The last codes, fewer than 256, are one stream, least significant bit
// first.
#pragma once

#include <cstddef>
#include <cstdint>

#include "simd/dispatch.hpp"

namespace gradwire::word_packing {

inline constexpr std::size_t kBlock = 256;
inline constexpr int kMaxBits = 32;

constexpr std::size_t packed_bytes(std::size_t n, int n_bits) {
  return (n * static_cast<std::size_t>(n_bits) + 7) / 8;  // whole blocks are whole bytes
}

struct Kernel {
  void (*pack)(const std::uint32_t* codes, std::uint8_t* out);
  void (*unpack)(const std::uint8_t* data, std::uint32_t* codes);
};

// For one block of codes of n_bits.
const Kernel &kernel_at(Level<0>, int n_bits), &kernel_at(Level<1>, int n_bits);
inline const Kernel& kernel_for(int n_bits) {
  return at_current_level<1>([n_bits](auto level) -> const Kernel& { return kernel_at(level, n_bits); });
}

// Fewer than 256 codes, each below 2^n_bits; they touch packed_bytes(n, n_bits) bytes.
void pack_rest(const std::uint32_t* codes, std::size_t n, int n_bits, std::uint8_t* out);
void unpack_rest(const std::uint8_t* data, std::size_t n, int n_bits, std::uint32_t* codes);

}  // namespace gradwire::word_packing
