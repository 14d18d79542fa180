// One run of words: loops.cpp.
#pragma once

#include <array>

#include "signs/votes.hpp"
#include "simd/dispatch.hpp"

namespace gradwire::signs {

// Messages of all ranks begin `rank_stride` words apart.
struct Ballot {
  const std::uint32_t* words;
  std::size_t rank_stride;
  std::size_t n_ranks;
  std::uint32_t scale_bits;
  bool ties_are_positive;
};

struct Kernels {
  bool (*pack)(const void* values, std::size_t n_elements, std::uint32_t* words);
  void (*vote)(const Ballot& ballot, std::size_t n_elements, void* values);
};

using KernelsByDtype = std::array<Kernels, kDtypes>;
const KernelsByDtype &kernels_at(Level<0>), &kernels_at(Level<1>);
inline const Kernels& kernels_for(Dtype dtype) {
  return at_current_level<1>(
      [dtype](auto level) -> const Kernels& { return kernels_at(level)[static_cast<int>(dtype)]; });
}

}  // namespace gradwire::signs
