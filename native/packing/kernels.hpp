// The loops of packing: loops.cpp. They touch nothing past their range.
#pragma once

#include <cstddef>
#include <cstdint>

#include "simd/dispatch.hpp"

namespace gradwire::packing {

struct Kernels {
  std::size_t (*count)(const std::uint32_t* words, std::size_t n_words);
  // n values, whose first is bit 0 of the first word; by size: 2 bytes, 4 bytes.
  void (*pack[2])(const void* values, const std::uint32_t* words, std::size_t n, void* packed);
  void (*unpack[2])(const void* packed, const std::uint32_t* words, std::size_t n, void* values);
};

const Kernels &kernels_at(Level<0>), &kernels_at(Level<1>), &kernels_at(Level<2>);
inline const Kernels& kernels() {
  return at_current_level<2>([](auto level) -> const Kernels& { return kernels_at(level); });
}

}  // namespace gradwire::packing
