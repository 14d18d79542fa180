// Embedded floats: one shared exponent a partition, signs and magnitudes in bit planes, the most significant first. Any
// first planes decode, any further ones refine, and after all 32 and the escapes every value is exact.
// docs/format.md#embedded-float
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "embedded_float/format.hpp"

namespace gradwire::embedded_float {

// Writes planes [range.first, range.first + range.n) of `values` (raw bytes of `dtype`) as one message; returns its
// bytes. Throws InvalidArgument, BufferTooSmall (less than max_message_bytes).
std::uint64_t encode(std::span<const std::uint8_t> values, Dtype dtype, std::size_t partition, planes::Range range,
                     std::span<std::uint8_t> out);

// Reads a message that begins with plane 0. Throws CorruptMessage, IncompatibleVersion; `values` are undefined then.
void decode(std::span<const std::uint8_t> message, Dtype dtype, std::span<std::uint8_t> values);

// What a receiver knows of a gradient: codes with their first n_known bits, and one exponent a partition. With all 32
// known, float32 words (raw partitions: the values' own bits at the top) in place of the codes.
struct Known {
  std::span<std::uint32_t> codes;
  std::span<std::uint8_t> exponents;
  Dtype dtype;
  std::size_t partition;
  int n_known;
};

// Takes in the message with the planes that follow the known ones; returns how many are known then. Throws
// CorruptMessage, IncompatibleVersion, and leaves everything as it was then.
int refine(std::span<const std::uint8_t> message, const Known& known);

// Writes the values as they are known; at least one plane is.
void write(const Known& known, std::span<std::uint8_t> values);
// Adds them to float32 sums.
void add(const Known& known, std::span<float> sums);

// Writes what a receiver of the first n_known planes of `values` has, which may be the same memory.
void quantise(std::span<const std::uint8_t> values, Dtype dtype, std::size_t partition, int n_known,
              std::span<std::uint8_t> out);

}  // namespace gradwire::embedded_float
