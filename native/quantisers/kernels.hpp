// The quantisers' inner loops, over blocks that lie in the first-level cache: loops.cpp.
#pragma once

#include <array>
#include <bit>

#include "random/counter.hpp"
#include "simd/dispatch.hpp"

namespace gradwire::quantisers {

using namespace floats;

// Values that are worked on at a time: 16 KiB of float32, so that values, sums and decoded values stay in L1.
inline constexpr std::size_t kBlock = 4096;
inline constexpr std::size_t kGroup = random::kGroup;

// Sums over a block; in double, so that no sum of float32 overflows.
struct Magnitudes {
  double positive, negative;  // of the values above and, without their sign, below zero
  std::uint64_t n_negative;   // values below zero; -0.0 is not
  std::uint32_t largest;      // the largest magnitude, as bits: kInfinity and above if a value is not finite
};

// What is quantised: values[i] + residual[i] x scale, or values[i] where there is no residual. Never stored, so that
// error feedback costs no pass of its own.
struct Terms {
  const float* values;
  const float* residual;  // or null
  float scale;
  float operator[](std::size_t i) const { return residual == nullptr ? values[i] : values[i] + residual[i] * scale; }
  Terms from(std::size_t i) const { return {values + i, residual == nullptr ? nullptr : residual + i, scale}; }
};

// Where (term - what its code decodes to) x inverse_scale goes: nowhere if `out` is null; to the residual itself too.
struct LeftOut {
  float* out;
  float inverse_scale;
  LeftOut from(std::size_t i) const { return {out == nullptr ? nullptr : out + i, inverse_scale}; }
};

struct Squares {
  double squares;
  std::uint32_t largest;
};

// How codes lie in memory: two values a byte (value j of a group of 64 below value 32 + j), or a byte each.
enum class Fields : int { nibbles = 4, bytes = 8 };
constexpr std::size_t bytes_for(std::size_t n, Fields fields) {
  return (n + kGroup - 1) / kGroup * (fields == Fields::nibbles ? kGroup / 2 : kGroup);
}

// `group` is the number of the first group of 64 values within the stream; `n` may end inside a group, never begin
// there. Codes past the end of the last group are zero.
struct Kernels {
  void (*widen)(const void* values, Dtype dtype, std::size_t n, float* out);
  void (*narrow)(const float* values, Dtype dtype, std::size_t n, void* out);
  // out = values + residual x scale
  void (*add)(const float* values, const float* residual, float scale, std::size_t n, float* out);
  // out = (values - decoded) x inverse_scale
  void (*subtract)(const float* values, const float* decoded, float inverse_scale, std::size_t n, float* out);
  // values /= divisor
  void (*divide)(float* values, float divisor, std::size_t n);
  Magnitudes (*magnitudes)(const Terms& terms, std::size_t n);
  Squares (*squares)(const float* values, std::size_t n);

  // One bit a value, 32 to a word: 1 below zero. A bit decodes to `positive` or `negative`.
  void (*pack_signs)(const Terms& terms, std::size_t n, float positive, float negative, const LeftOut& left_out,
                     std::uint32_t* words);
  void (*unpack_signs)(const std::uint32_t* words, std::size_t n, float positive, float negative, float* out);

  // Two bits a value, 16 to a word: 0 zero, 1 positive, 2 negative, 3 never.
  void (*pack_beyond)(const Terms& terms, std::size_t n, float threshold, const LeftOut& left_out,
                      std::uint32_t* words);
  // Two bits a value, 16 to a word: the sign above, and below it whether the magnitude is nearer to `outer` than to
  // `inner`, which is not larger. Codes decode to inner, outer, -inner, -outer.
  void (*pack_nearest)(const Terms& terms, std::size_t n, float inner, float outer, const LeftOut& left_out,
                       std::uint32_t* words);
  void (*unpack_nearest)(const std::uint32_t* words, std::size_t n, float inner, float outer, float* out);
  // Not zero with probability |value| x per_unit / 2^24.
  void (*pack_drawn)(const float* values, std::size_t n, float per_unit, const random::Stream& stream,
                     std::uint64_t group, std::uint32_t* words);
  // Returns false if a code is 3.
  bool (*unpack_ternary)(const std::uint32_t* words, std::size_t n, float scale, float* out);
  // What pack_drawn draws, as fields that can be summed: 0 negative, 1 zero, 2 positive.
  void (*count_drawn)(const float* values, std::size_t n, float per_unit, const random::Stream& stream,
                      std::uint64_t group, Fields fields, std::uint8_t* codes);
  // (field - n_ranks) x step
  void (*unpack_counts)(const std::uint8_t* codes, std::size_t n, Fields fields, int n_ranks, float step, float* out);

  // floor(|value| x per_unit + a number in [0, 1)), at most `levels`, and the sign in the field's highest bit.
  void (*pack_levels)(const float* values, std::size_t n, float per_unit, int levels, const random::Stream& stream,
                      std::uint64_t group, Fields fields, std::uint8_t* codes);
  // +-level x step. Returns false if a level is above `levels`.
  bool (*unpack_levels)(const std::uint8_t* codes, std::size_t n, float step, int levels, Fields fields, float* out);
};

GW_KERNELS(Kernels, kernels, 1)

// THC's inner loops: random signs and the fast Walsh-Hadamard transform on blocks of 1,024 values, and the 16 levels of
// its table.
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

GW_KERNELS(RotationKernels, rotation_kernels, 1)

}  // namespace gradwire::quantisers
