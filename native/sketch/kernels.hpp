// The loops of the sketch: loops.cpp.
#pragma once

#include "simd/dispatch.hpp"
#include "sketch/plan.hpp"

namespace gradwire::sketch {

// One gradient and its index, as a kernel sees it.
struct Source {
  const void* values;
  const std::uint16_t* granule_bits;  // bit i of granule g: value 16 g + i is not zero
};

struct Quantiser {
  double scale;
  std::int64_t limit;
};

struct Kernels {
  // Values [first, end) of one gradient, first a multiple of 32; the words of that range.
  IndexFacts (*index[kDtypes])(const void* values, std::size_t first, std::size_t end, std::uint32_t* words);
  std::size_t (*count_bits)(const std::uint16_t* granule_bits, std::size_t n_granules);
  // False if a value is beyond the limit.
  bool (*add[kCellKinds][kDtypes])(const Geometry& geometry, const Block& block, std::uint64_t key,
                                   const Source& source, const Quantiser& quantiser, void* cells);
  // Fills the block's entries, peeled ones first, and its n_peeled and n_rounds.
  void (*peel)(const Geometry& geometry, Block& block, std::uint64_t key, const std::uint16_t* granule_bits,
               Entry* entries);
  Outcome (*recover[kCellKinds][kDtypes])(const Geometry& geometry, const Block& block, const Entry* entries,
                                          double scale, bool estimate, float bound, void* cells, void* values);
};

const Kernels &kernels_at(Level<0>), &kernels_at(Level<1>);
inline const Kernels& kernels() {
  return at_current_level<1>([](auto level) -> const Kernels& { return kernels_at(level); });
}

}  // namespace gradwire::sketch
