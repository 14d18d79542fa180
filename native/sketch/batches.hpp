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
      : granule_bits_(granule_bits),
        n_batches_(geometry.n_batches),
        full_slots_(geometry.n_granules / geometry.n_batches),
        n_longer_(geometry.n_granules % geometry.n_batches) {}

  void find(std::size_t batch, Occupied& found) const {
    const std::size_t n_slots = full_slots_ + (batch < n_longer_);
    const std::uint16_t* bits = granule_bits_ + batch;
    int n = 0, n_nonzeros = 0;
    for (std::size_t slot = 0; slot < n_slots; ++slot, bits += n_batches_) {
      found.slot[n] = static_cast<std::uint16_t>(slot);
      found.bits[n] = *bits;
      n += *bits != 0;
      n_nonzeros += std::popcount(*bits);
    }
    found.n_granules = n;
    found.n_nonzeros = n_nonzeros;
  }

  std::size_t granule(std::size_t batch, std::size_t slot) const { return batch + slot * n_batches_; }

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
  const std::uint16_t* granule_bits_;
  std::size_t n_batches_, full_slots_, n_longer_;
};

}  // namespace
}  // namespace gradwire::sketch
