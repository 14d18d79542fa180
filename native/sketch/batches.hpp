// Walking the non-zeros of one batch; part of loops.hpp, so compiled once per instruction set.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "sketch/kernels.hpp"

namespace gradwire::sketch {
namespace {

template <Dtype dtype>
float value_at(const void* values, std::size_t i) {
  if constexpr (dtype == Dtype::float32) {
    return static_cast<const float*>(values)[i];
  } else {
    return std::bit_cast<float>(static_cast<std::uint32_t>(static_cast<const std::uint16_t*>(values)[i]) << 16);
  }
}

// Nearest, ties to even; NaN stays NaN.
inline std::uint16_t bfloat16_of(float value) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
  if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return static_cast<std::uint16_t>((bits >> 16) | 0x40);
  return static_cast<std::uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

// The granules of one batch that hold non-zeros.
struct Occupied {
  std::uint16_t slot[kMaxBatchValues / kGranuleValues];
  std::uint16_t bits[kMaxBatchValues / kGranuleValues];
  int n_granules;
  int n_nonzeros;
};

class Batches {
 public:
  Batches(const Geometry& geometry, const std::uint16_t* granule_bits)
      : geometry_(geometry), granule_bits_(granule_bits), full_slots_(geometry.n_granules / geometry.n_batches) {}

  void find(std::size_t batch, Occupied& found) const {
    int n = 0, n_nonzeros = 0;
    const auto look = [&](std::size_t slot, std::size_t granule) {
      const std::uint16_t bits = granule_bits_[granule];
      found.slot[n] = static_cast<std::uint16_t>(slot);
      found.bits[n] = bits;
      n += bits != 0;
      n_nonzeros += std::popcount(bits);
    };
    for (std::size_t slot = 0; slot < full_slots_; ++slot) look(slot, geometry_.granule(batch, slot));
    if (full_slots_ < geometry_.slots()) {  // the last stretch may end early
      const std::size_t last = geometry_.granule(batch, full_slots_);
      if (last < geometry_.n_granules) look(full_slots_, last);
    }
    found.n_granules = n;
    found.n_nonzeros = n_nonzeros;
  }

  std::size_t granule(std::size_t batch, std::size_t slot) const { return geometry_.granule(batch, slot); }

  // visit(position in the batch, index in the gradient) for every non-zero, in order.
  template <typename Visit>
  void for_each(std::size_t batch, const Occupied& found, Visit&& visit) const {
    for (int i = 0; i < found.n_granules; ++i) {
      const std::uint32_t start = static_cast<std::uint32_t>(found.slot[i] * kGranuleValues);
      const std::size_t first = granule(batch, found.slot[i]) * kGranuleValues;
      for (std::uint32_t bits = found.bits[i]; bits != 0; bits &= bits - 1) {
        const auto lane = static_cast<std::uint32_t>(std::countr_zero(bits));
        visit(start + lane, first + lane);
      }
    }
  }

 private:
  const Geometry& geometry_;
  const std::uint16_t* granule_bits_;
  std::size_t full_slots_;
};

}  // namespace
}  // namespace gradwire::sketch
