// Format 1's loops over values: floats to exponents, levels and mantissas, and back: level_loops.cpp.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "bits/bit_io.hpp"
#include "gcomp/format.hpp"
#include "simd/dispatch.hpp"

namespace gradwire::gcomp {

// How values become bits; the same for a whole message.
struct Packing {
  Mode mode;
  int dropped_bits;  // of the mantissa, at level 0: 0 but for uniform and truncate
};

// The vector kernels take the values of a 64-bit word together. A value's state says which of its bits travel; the
// states of a word's values, as digits to the base 5, index the word's mask.
inline constexpr int kStates = 5;
inline constexpr int kStateNonfinite = 1;  // in the modes without levels; in mode paper, states 0 to 3 are the levels
inline constexpr int kStateZero = 4;
struct WordMasks {
  std::uint64_t bits[kStates * kStates * kStates * kStates];  // two float32, or four 16-bit values
  std::uint8_t n_bits[kStates * kStates * kStates * kStates];
};

struct ExponentSummary {
  std::size_t n_nonzero;  // values whose exponent field is not 0
  bool holds_nonfinite;   // an exponent field is all ones
};

// Bits of the level and of the mantissa segment.
struct SegmentBits {
  std::uint64_t levels, mantissas;
};

// A segment to be read: n_bits of it, but bytes up to readable_end may be loaded.
struct SegmentSpan {
  const std::uint8_t* data;
  std::uint64_t n_bits;
  const std::uint8_t* readable_end;
};

// Each call takes the values of one chunk.
struct Kernels {
  // What the packing comes to, for the kernels that look it up; once a message.
  void (*fill_masks)(const Packing& packing, WordMasks& masks);
  // To nearest, ties to even, on the bits that will be sent: by level in mode paper, else without the dropped bits. A
  // carry moves the exponent on, but never to Inf: the largest finite value stands for that (as a level or dropped bits
  // cut it). Zero, subnormals, Inf and NaN are left as they are.
  void (*round)(const void* values, const std::uint8_t* importance, std::size_t n, const Packing& packing,
                void* rounded);
  // The exponent field of every value.
  ExponentSummary (*split_exponents)(const void* values, std::size_t n, std::uint8_t* exponents);
  // Writes the levels (mode paper) and the signs and mantissas. Scribbles up to kPackSlackBytes past the end of each.
  SegmentBits (*pack)(const void* values, const std::uint8_t* exponents, const std::uint8_t* importance, std::size_t n,
                      const Packing& packing, const WordMasks& masks, std::uint8_t* levels, std::uint8_t* mantissas);
  // The reverse. Returns how many bits the exponents and levels asked for; where that is not what there was, the values
  // mean nothing, but no byte beyond readable_end was loaded.
  SegmentBits (*unpack)(const std::uint8_t* exponents, std::size_t n, const Packing& packing, const WordMasks& masks,
                        const SegmentSpan& levels, const SegmentSpan& mantissas, void* values);
};
inline constexpr std::size_t kPackSlackBytes = 64;

using KernelsByDtype = std::array<Kernels, kDtypes>;
const KernelsByDtype &kernels_at(Level<0>), &kernels_at(Level<1>), &kernels_at(Level<2>);
inline const Kernels& kernels_for(Dtype dtype) {
  return at_current_level<2>(
      [dtype](auto level) -> const Kernels& { return kernels_at(level)[static_cast<int>(dtype)]; });
}

}  // namespace gradwire::gcomp
