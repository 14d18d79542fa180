// One pass over a gradient: which values are not zero, how many, and how large the largest is.
#pragma once

#include <algorithm>

#include "sketch/batches.hpp"

namespace gradwire::sketch {
namespace {

template <Dtype dtype>
IndexFacts index_values(const void* values, std::size_t first, std::size_t end, std::uint32_t* words) {
  IndexFacts facts{0, 0};
  for (std::size_t i = first; i < end; ++words) {
    std::uint32_t word = 0;
    for (std::uint32_t bit = 0; bit < 32 && i < end; ++bit, ++i) {
      const std::uint32_t magnitude = std::bit_cast<std::uint32_t>(value_at<dtype>(values, i)) & 0x7FFFFFFFu;
      word |= static_cast<std::uint32_t>(magnitude != 0) << bit;
      facts.max_magnitude = std::max(facts.max_magnitude, magnitude);
    }
    *words = word;
    facts.n_nonzeros += static_cast<std::size_t>(std::popcount(word));
  }
  return facts;
}

}  // namespace
}  // namespace gradwire::sketch
