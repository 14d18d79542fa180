// Format 1's loops over values: floats to exponents, levels and mantissas, and back: level_loops.cpp.
#pragma once

#include <array>

#include "bits/bit_io.hpp"
#include "gcomp/codec.hpp"
#include "simd/dispatch.hpp"

namespace gradwire::gcomp {

// How values become bits; the same for a whole message.
struct Packing {
  Mode mode;
  int dropped_bits;  // of the mantissa, at level 0: 0 but for uniform and truncate
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
  // To nearest, ties to even, on the bits that will be sent: by level in mode paper, else without the dropped bits. A
  // carry moves the exponent on, but never to Inf: the largest finite value stands for that (as a level or dropped bits
  // cut it). Zero, subnormals, Inf and NaN are left as they are.
  void (*round)(const void* values, const std::uint8_t* importance, std::size_t n, const Packing& packing,
                void* rounded);
  // The exponent field of every value.
  ExponentSummary (*split_exponents)(const void* values, std::size_t n, std::uint8_t* exponents);
  // Writes the levels (mode paper) and the signs and mantissas. Scribbles up to kPackSlackBytes past the end of each.
  SegmentBits (*pack)(const void* values, const std::uint8_t* exponents, const std::uint8_t* importance, std::size_t n,
                      const Packing& packing, std::uint8_t* levels, std::uint8_t* mantissas);
  // The reverse. Returns how many bits the exponents and levels asked for; where that is not what there was, the values
  // mean nothing, but no byte beyond readable_end was loaded.
  SegmentBits (*unpack)(const std::uint8_t* exponents, std::size_t n, const Packing& packing, const SegmentSpan& levels,
                        const SegmentSpan& mantissas, void* values);
};
inline constexpr std::size_t kPackSlackBytes = 64;

using KernelsByDtype = std::array<Kernels, kDtypes>;
GW_KERNELS(KernelsByDtype, kernels, 1)
inline const Kernels& kernels_for(Dtype dtype) { return kernels()[static_cast<int>(dtype)]; }

// Format 2's signs and mantissas: sixteen stacks of bits, one for every sixteenth value, that share one run of words.
// docs/format.md#gcomp-format-2

// Values of all dtypes are taken as the float32 that they equal: so a subnormal float16 has an exponent of its own.
inline constexpr std::size_t kLanes = 16;
inline constexpr std::size_t kLaneTailBytes = 4 * kLanes;  // what is left of each lane, below a one
// Values that are taken through every step together, so that what lies between two steps stays in L1; whole lanes.
inline constexpr std::size_t kLaneBlock = 1024;
static_assert(kLaneBlock % kLanes == 0 && kChunkValues % kLaneBlock == 0);

inline constexpr int kWordMantissa = 23, kWordMaxExponent = 255;  // of a float32

// How many mantissa bits of a value travel: a function of its exponent (as it is sent) and of its importance byte.
struct KeepRule {
  bool by_importance;    // mode paper
  int mantissa_bits;     // of the dtype; Inf and NaN keep them all
  int cap;               // a finite value keeps at most so many
  int floor;             // and at least so many, whatever its importance, where the cap lets it
  int lowest_exponent;   // of a value of the dtype; a value has at most its exponent - this many bits
  int highest_exponent;  // of a finite value
};

// kept = min(cap, max(floor, exponent - importance / 4 + mantissa_bits - kKeepOffset)): 2^(importance / 4 - 40) is at
// most the S of the importance byte, and what lies 2^-mantissa_bits below it cannot matter.
inline constexpr int kKeepOffset = 86;

// Every lane's newest bits, at the bottom of its word; full words go to `at`, oldest bits first.
struct LaneStack {
  alignas(64) std::uint32_t bits[kLanes] = {};
  alignas(64) std::uint32_t n_bits[kLanes] = {};  // below 32
};

// A stretch of the values of one chunk that begins in lane 0, at most a block. `importance` is null but in mode paper.
struct LaneKernels {
  // Rounds (to nearest even, or towards zero), writes the exponents as they will be sent, pushes signs and mantissas.
  // Returns the end of the words written at `at`; scribbles up to kLaneTailBytes past it. Sets holds_nonfinite. If
  // `sent` is not null, the words that `pop` will give go there; it may be where `words` lie.
  std::uint8_t* (*push)(const std::uint8_t* words, const std::uint8_t* importance, std::size_t n, const KeepRule& rule,
                        bool rounds, LaneStack& stack, std::uint8_t* at, std::uint8_t* exponents, std::uint8_t* sent,
                        bool& holds_nonfinite);
  // The reverse, last value first: takes words from before `at`. Returns the first word not taken, or null where the
  // values ask for words before `begin`. Loads no byte outside [begin - 4, at + kLaneTailBytes).
  const std::uint8_t* (*pop)(const std::uint8_t* exponents, const std::uint8_t* importance, std::size_t n,
                             const KeepRule& rule, LaneStack& stack, const std::uint8_t* begin, const std::uint8_t* at,
                             std::uint8_t* words);
  // By dtype: values as float32 words; and words, exact or not, to values: (word + addend) / divisor, rounded to
  // nearest even. Without addend (null) and with divisor 1, every bit is kept.
  void (*widen[kDtypes])(const std::uint8_t* values, std::size_t n, std::uint8_t* words);
  void (*finish[kDtypes])(const std::uint8_t* words, const std::uint8_t* addend, float divisor, std::size_t n,
                          std::uint8_t* values);
};

GW_KERNELS(LaneKernels, lane_kernels, 2)

}  // namespace gradwire::gcomp
