// The loops of packing, one set for each instruction set. All give the same bytes, and touch nothing past their range.
#pragma once

#include <cstddef>
#include <cstdint>

namespace gradwire::packing {

struct Kernels {
  std::size_t (*count)(const std::uint32_t* words, std::size_t n_words);
  // n values, whose first is bit 0 of the first word; by size: 2 bytes, 4 bytes.
  void (*pack[2])(const void* values, const std::uint32_t* words, std::size_t n, void* packed);
  void (*unpack[2])(const void* packed, const std::uint32_t* words, std::size_t n, void* values);
};

extern const Kernels kPortable;
extern const Kernels kAvx2;
extern const Kernels kAvx512;

}  // namespace gradwire::packing
