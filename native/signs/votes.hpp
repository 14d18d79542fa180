// Sign-SGD's messages: one bit an element, 32 to a word, and the majority of what several ranks sent.
#pragma once

#include <array>

#include "simd/dispatch.hpp"
#include "spans.hpp"

namespace gradwire::signs {

using namespace floats;

// Bit i of word w is 1 where element 32 w + i is below zero; -0.0 is not. Bits past the end are 0. Returns whether all
// elements are finite.
bool pack_signs(ConstBytes values, Dtype dtype, Words words);

// Of `n_ranks` messages, one after another in `words`: +1 where more than half of the bits are 0, -1 where more than
// half are 1, and where halves are equal +1 if `ties_are_positive`, else 0; times `scale`, itself of `dtype`, as bits.
// Up to 255 messages: votes are counted in bytes.
void write_majority(ConstWords words, std::size_t n_ranks, Dtype dtype, std::uint32_t scale_bits,
                    bool ties_are_positive, Bytes values);

// One run of words: loops.cpp.

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
GW_KERNELS(KernelsByDtype, kernels, 1)
inline const Kernels& kernels_for(Dtype dtype) { return kernels()[static_cast<int>(dtype)]; }

}  // namespace gradwire::signs
