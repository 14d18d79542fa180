// One run of words; what votes.cpp and its AVX2 twin share.
#pragma once

#include "signs/votes.hpp"

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

extern const Kernels kPortable[kDtypes];
extern const Kernels kAvx2[kDtypes];

}  // namespace gradwire::signs
