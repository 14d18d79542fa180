// The values at the set bits of an index, one after the other; docs/format.md#count-sketch
#pragma once

#include "simd/dispatch.hpp"
#include "spans.hpp"

namespace gradwire::packing {

// Throw InvalidArgument (another number of words than `n_values` have), CorruptMessage (bits past the end).
void check_index_size(ConstWords words, std::size_t n_values);
void check_index(ConstWords words, std::size_t n_values);

// Writes the value of each set bit, in order. Values are of `item_bytes` bytes, 2 or 4; bit i % 32 of word i / 32
// stands for value i. Throws InvalidArgument (sizes), CorruptMessage (bits past the end).
void pack(ConstBytes values, std::size_t item_bytes, ConstWords words, Bytes packed);

// The inverse: values without a bit become 0. Throws as `pack` does.
void unpack(ConstBytes packed, std::size_t item_bytes, ConstWords words, Bytes values);

// The loops of packing: loops.cpp. They touch nothing past their range.
struct Kernels {
  // Bits set in halves of words.
  std::size_t (*count)(const std::uint16_t* granules, std::size_t n_granules);
  // n values, whose first is bit 0 of the first word; by size: 2 bytes, 4 bytes.
  void (*pack[2])(const void* values, const std::uint32_t* words, std::size_t n, void* packed);
  void (*unpack[2])(const void* packed, const std::uint32_t* words, std::size_t n, void* values);
};

GW_KERNELS(Kernels, kernels, 2)

}  // namespace gradwire::packing
