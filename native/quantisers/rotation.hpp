// THC's inner loops: random signs and the fast Walsh-Hadamard transform on blocks of 1,024 values, and the 16 levels of
// its table.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>

#include "quantisers/kernels.hpp"
#include "random/counter.hpp"
#include "simd/dispatch.hpp"

namespace gradwire::quantisers {

inline constexpr std::size_t kTransform = 1024;
inline constexpr int kTableLevels = 16, kTableMiddle = 15, kTableLargest = 30;
inline constexpr std::array<std::uint8_t, kTableLevels> kTable = {0,  3,  5,  7,  9,  11, 13, 14,
                                                                  16, 17, 19, 21, 23, 25, 27, 30};

// The last block is as long as it must be: a power of two of at least one group.
constexpr std::size_t transform_size(std::size_t n) {
  return n >= kTransform ? kTransform : n <= kGroup ? kGroup : std::bit_ceil(n);
}
constexpr std::size_t transform_blocks(std::size_t n) { return (n + kTransform - 1) / kTransform; }
constexpr std::size_t padded_elements(std::size_t n) {
  const std::size_t rest = n % kTransform;
  return n - rest + (rest == 0 ? 0 : transform_size(rest));
}

// For each whole number from 0 to 30: the table's value at or below it, the gap to the next one, and its index.
struct Interval {
  std::uint8_t low, gap, index, unused;
};
constexpr std::array<Interval, kTableLargest + 1> make_intervals() {
  std::array<Interval, kTableLargest + 1> intervals{};
  for (int index = 0; index < kTableLevels; ++index) {
    const int next = index + 1 < kTableLevels ? kTable[index + 1] : kTableLargest + 1;
    for (int whole = kTable[index]; whole < next; ++whole)
      intervals[whole] = {kTable[index], static_cast<std::uint8_t>(next - kTable[index]),
                          static_cast<std::uint8_t>(index), 0};
  }
  return intervals;
}
inline constexpr std::array<Interval, kTableLargest + 1> kIntervals = make_intervals();

// The 1,024 sign bits of one block: bit i % 32 of word i / 32.
using Signs = std::array<std::uint32_t, kTransform / 32>;

// `size` is a power of two from 64 to 1,024.
struct RotationKernels {
  void (*draw_signs)(const random::Stream& stream, std::uint64_t block, Signs& signs);
  // Signs, then the orthonormal transform; and back.
  void (*rotate)(float* values, std::size_t size, const Signs& signs);
  void (*unrotate)(float* values, std::size_t size, const Signs& signs);
  // clamp(value x per_unit + 15, 0, 30), rounded by chance to one of its neighbours in the table: the table's value as
  // bytes, its index as nibbles.
  void (*quantise)(const float* values, std::size_t size, float per_unit, const random::Stream& stream,
                   std::uint64_t group, Fields fields, std::uint8_t* codes);
  // (table's value - 15) x step
  void (*expand)(const std::uint8_t* codes, std::size_t size, Fields fields, float step, float* values);
  // (sum - 15 n_ranks) x step, of sums of bytes or of words
  void (*expand_sums)(const std::uint8_t* sums, std::size_t size, int n_ranks, float step, float* values);
  void (*expand_wide_sums)(const std::uint16_t* sums, std::size_t size, int n_ranks, float step, float* values);
};

const RotationKernels &rotation_kernels_at(Level<0>), &rotation_kernels_at(Level<1>);
inline const RotationKernels& rotation_kernels() {
  return at_current_level<1>([](auto level) -> const RotationKernels& { return rotation_kernels_at(level); });
}

}  // namespace gradwire::quantisers
