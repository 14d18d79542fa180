// The loops over values: floats to exponents, levels and mantissas, and back. One implementation an instruction set.
#pragma once

#include <cstddef>
#include <cstdint>

#include "bits/bit_io.hpp"
#include "gcomp/format.hpp"

namespace gradwire::gcomp {

// Values a kernel call packs or unpacks at most: their masks stay in L1.
inline constexpr std::size_t kBlockValues = 512;

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

struct Kernels {
  // What the other two need to know of a message's packing; filled in once a message.
  void (*fill_masks)(const Packing& packing, WordMasks& masks);
  // The exponent field of every value as it will be sent: in mode uniform, after rounding.
  ExponentSummary (*split_exponents)(const void* values, std::size_t n, const Packing& packing,
                                     std::uint8_t* exponents);
  // Appends the levels (mode paper) and the signs and mantissas of at most kBlockValues values.
  void (*pack)(const void* values, const std::uint8_t* exponents, const std::uint8_t* importance, std::size_t n,
               const Packing& packing, const WordMasks& masks, BitWriter& levels, BitWriter& mantissas);
  // The reverse. Loads at most kBitSlackBytes beyond the bits that n values can have.
  void (*unpack)(const std::uint8_t* exponents, std::size_t n, const Packing& packing, const WordMasks& masks,
                 BitReader& levels, BitReader& mantissas, void* values);
};

// By dtype.
extern const Kernels kKernelsPortable[kDtypes];
#if defined(__x86_64__)
extern const Kernels kKernelsAvx2[kDtypes];
#endif

}  // namespace gradwire::gcomp
