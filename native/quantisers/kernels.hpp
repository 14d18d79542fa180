// The quantisers' inner loops, over blocks that lie in the first-level cache: loops.cpp.
#pragma once

#include <cstddef>
#include <cstdint>

#include "floats/dtypes.hpp"
#include "random/counter.hpp"
#include "simd/dispatch.hpp"

namespace gradwire::quantisers {

using floats::bytes_of;
using floats::Dtype;
using floats::kDtypes;

// Values that are worked on at a time: 16 KiB of float32, so that values, sums and decoded values stay in L1.
inline constexpr std::size_t kBlock = 4096;
inline constexpr std::size_t kGroup = random::kGroup;
inline constexpr std::uint32_t kMagnitude = 0x7FFFFFFF, kInfinity = 0x7F800000;

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
  // By dtype.
  void (*widen[kDtypes])(const void* values, std::size_t n, float* out);
  void (*narrow[kDtypes])(const float* values, std::size_t n, void* out);
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

const Kernels &kernels_at(Level<0>), &kernels_at(Level<1>);
inline const Kernels& kernels() {
  return at_current_level<1>([](auto level) -> const Kernels& { return kernels_at(level); });
}

}  // namespace gradwire::quantisers
