// GComp messages: floats to bytes and back. Li et al., SoCC 2024, sections 4 to 6; docs/format.md#gcomp
#pragma once

#include <cstdint>
#include <span>

#include "gcomp/format.hpp"
#include "huffman/table.hpp"

namespace gradwire::gcomp {

// What becomes of the bits that mode paper lets go of; mode uniform rounds to nearest, mode truncate towards zero.
enum class Rounding : std::uint8_t { nearest = 0, truncate = 1 };

// Where what a message decodes to is written in the pass that encodes it, divided.
struct Mean {
  std::uint8_t* values = nullptr;  // as many as are encoded, not where they lie; null: nowhere
  float divisor = 1;
};

struct EncodeOptions {
  Dtype dtype;
  Mode mode;
  int kept_bits;  // of the mantissa: modes uniform and truncate; format 2, mode paper: at most. Else the whole mantissa
  Rounding rounding = Rounding::nearest;
  Version version = Version::derived;
};

// Writes `values` (little-endian floats of options.dtype) as one message into `out` of at least max_message_bytes;
// returns its bytes. `importance`: one byte a value in mode paper, else empty. `table` is of exponent_bits_of(dtype,
// version). Same bytes for every number of threads and instruction set; allocates nothing once a thread has encoded
// before. Throws InvalidArgument, BufferTooSmall.
std::uint64_t encode(std::span<const std::uint8_t> values, std::span<const std::uint8_t> importance,
                     const EncodeOptions& options, const HuffmanTable& table, std::span<std::uint8_t> out,
                     const Mean& mean = {});

// What is made of decoded values in the same pass: addend + value, or value / divisor; callers use one of the two.
struct Finish {
  const std::uint8_t* addend = nullptr;  // as many values of the dtype; may be where the result goes
  float divisor = 1;
};

// Reads `message` into `values`, whose dtype and size the caller knows; `table` is the one the message names.
// `importance`: one byte a value where the message is of format 2 and mode paper; otherwise not looked at. On an error
// the values are undefined. Throws CorruptMessage, IncompatibleVersion, InvalidArgument (no importance), RankMismatch
// (other importance bytes than the sender's).
void decode(std::span<const std::uint8_t> message, Dtype dtype, const HuffmanTable& table,
            std::span<const std::uint8_t> importance, const Finish& finish, std::span<std::uint8_t> values);

// Adds the exponents of `values`, as messages of this version code them, to `histogram` (2^exponent_bits counts).
void count_exponents(std::span<const std::uint8_t> values, Dtype dtype, Version version,
                     std::span<std::int64_t> histogram);

// Where a message's bytes go.
struct Description {
  BlockHeader header;
  std::uint64_t header_bytes, exponent_bytes, level_bytes, mantissa_bytes;
  std::uint64_t n_raw_chunks;  // whose exponents are not Huffman-coded
};
Description describe(std::span<const std::uint8_t> message);

}  // namespace gradwire::gcomp
