// Format 2's signs and mantissas: sixteen stacks of bits, one for every sixteenth value, that share one run of words.
// docs/format.md#gcomp-format-2
#pragma once

#include <cstddef>
#include <cstdint>

#include "gcomp/format.hpp"
#include "simd/dispatch.hpp"

namespace gradwire::gcomp {

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
  int lowest_exponent;   // of a value of the dtype; a value has at most its exponent - this many bits
  int highest_exponent;  // of a finite value
};
KeepRule keep_rule(Dtype dtype, Mode mode, int kept_bits);

// kept = min(cap, max(0, exponent - importance / 4 + mantissa_bits - kKeepOffset)): 2^(importance / 4 - 40) is at most
// the S of the importance byte, and what lies 2^-mantissa_bits below it cannot matter.
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

const LaneKernels &lane_kernels_at(Level<0>), &lane_kernels_at(Level<1>), &lane_kernels_at(Level<2>);
inline const LaneKernels& lane_kernels() {
  return at_current_level<2>([](auto level) -> const LaneKernels& { return lane_kernels_at(level); });
}

}  // namespace gradwire::gcomp
