// GComp messages: floats to bytes and back. Li et al., SoCC 2024, sections 4 to 6; docs/format.md#gcomp
#pragma once

#include <cstdint>
#include <span>

#include "gcomp/format.hpp"
#include "huffman/table.hpp"

namespace gradwire::gcomp {

// What becomes of the bits that mode paper lets go of; mode uniform rounds to nearest, mode truncate towards zero.
enum class Rounding : std::uint8_t { nearest = 0, truncate = 1 };

struct EncodeOptions {
  Dtype dtype;
  Mode mode;
  int kept_bits;  // of the mantissa; modes uniform and truncate, the whole mantissa otherwise
  Rounding rounding = Rounding::nearest;
};

// Writes `values` (little-endian floats of options.dtype) as one message into `out` of at least max_message_bytes;
// returns its bytes. `importance`: one byte a value in mode paper, else empty. Same bytes for every number of threads
// and instruction set; allocates nothing once a thread has encoded before. Throws InvalidArgument, BufferTooSmall.
std::uint64_t encode(std::span<const std::uint8_t> values, std::span<const std::uint8_t> importance,
                     const EncodeOptions& options, const HuffmanTable& table, std::span<std::uint8_t> out);

// Reads `message` into `values`, whose dtype and size the caller knows; `table` is the one the message names. On an
// error the values are undefined. Throws CorruptMessage, IncompatibleVersion.
void decode(std::span<const std::uint8_t> message, Dtype dtype, const HuffmanTable& table,
            std::span<std::uint8_t> values);

// Adds the exponent fields of `values` to `histogram` (2^exponent_bits counts).
void count_exponents(std::span<const std::uint8_t> values, Dtype dtype, std::span<std::int64_t> histogram);

// Where a message's bytes go.
struct Description {
  BlockHeader header;
  std::uint64_t header_bytes, exponent_bytes, level_bytes, mantissa_bytes;
  std::uint64_t n_raw_chunks;  // whose exponents are not Huffman-coded
};
Description describe(std::span<const std::uint8_t> message);

}  // namespace gradwire::gcomp
