// GComp messages: floats to bytes and back. Li et al., SoCC 2024, sections 4 to 6; docs/format.md#gcomp
#pragma once

#include "huffman/table.hpp"
#include "messages/front.hpp"

namespace gradwire::gcomp {

using namespace floats;
using floats::name_of;

enum class Mode : std::uint8_t { none = 0, paper = 1, uniform = 2, truncate = 3 };
inline constexpr int kModes = 4;
// Format 1 sends levels; in format 2 the receiver derives what was kept.
enum class Version : std::uint8_t { levels = 1, derived = 2 };
inline constexpr std::size_t kBlockHeaderBytes = 48;
inline constexpr std::size_t kChunkHeaderBytes = 32;
inline constexpr Front kFront{"GComp", "GWGC", 2, kBlockHeaderBytes, kChunkHeaderBytes};
inline constexpr const char* kName = kFront.name;
inline constexpr std::uint32_t kFlagNonfinite = 1;     // block: some value is Inf or NaN
inline constexpr std::uint32_t kFlagRawExponents = 1;  // chunk: the exponent segment is one byte a value, uncoded

struct DtypeLayout {
  int exponent_bits;
  int mantissa_bits;
  int dropped_bits[4];  // by level
};
inline constexpr DtypeLayout kLayouts[kDtypes] = {{8, 23, {0, 6, 12, 18}}, {8, 7, {0, 2, 4, 6}}, {5, 10, {0, 3, 5, 8}}};
inline const DtypeLayout& layout_of(Dtype dtype) { return kLayouts[static_cast<int>(dtype)]; }

// Width of the exponents that are Huffman-coded: format 2 takes every value as a float32.
inline int exponent_bits_of(Dtype dtype, Version version) {
  return version == Version::derived ? 8 : layout_of(dtype).exponent_bits;
}

struct BlockHeader {
  char letters[4]{};
  Version version;
  Dtype dtype;
  Mode mode;
  std::uint8_t kept_bits : 5;   // of the mantissa: at level 0, or at most
  std::uint8_t least_bits : 3;  // format 2, mode paper: of every value
  std::uint64_t table_id;
  std::uint64_t n_elements;
  std::uint64_t message_bytes;
  std::uint32_t n_chunks;
  std::uint32_t flags;
  std::uint32_t zero = 0, checksum = 0;
};
static_assert(sizeof(BlockHeader) == kBlockHeaderBytes);

// Format 1: exponents, levels, mantissas; format 2: mantissas (whole words), exponents.
struct ChunkHeader {
  std::uint64_t offset;  // from the message's first byte; the segments follow one another
  std::uint32_t exponent_bytes;
  std::uint32_t own;  // format 1: bits of levels; format 2: CRC32C of the importance bytes (mode paper), else 0
  std::uint32_t mantissa_bits;
  std::uint32_t n_values;
  std::uint32_t flags;
  std::uint32_t checksum;  // CRC32C of the chunk's segments

  std::uint64_t level_bytes(Version version) const { return version == Version::levels ? bytes_of_bits(own) : 0; }
  std::uint64_t mantissa_bytes() const { return bytes_of_bits(mantissa_bits); }
  std::uint64_t end_offset(Version version) const {
    return offset + exponent_bytes + level_bytes(version) + mantissa_bytes();
  }
};
static_assert(sizeof(ChunkHeader) == kChunkHeaderBytes);

// Bytes that no message of n_elements values exceeds.
std::uint64_t max_message_bytes(std::uint64_t n_elements, Dtype dtype, Mode mode, Version version);

// Unchecked: for headers that were checked before, or just written.
inline ChunkHeader load_chunk_header(const std::uint8_t* message, std::size_t chunk) {
  return load<ChunkHeader>(message + kFront.table_end(chunk));
}

// The block header of `message`: magic, version, lengths, known codes and the checksum over all headers are right.
// Throws CorruptMessage, IncompatibleVersion.
BlockHeader read_block_header(ConstBytes message);

// The table that `message` was written with. Throws CorruptMessage (none of `known`), IncompatibleVersion.
const HuffmanTable& table_of(ConstBytes message, std::span<const HuffmanTable* const> known);

const char* name_of(Mode mode);

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
  int least_bits = 0;  // format 2, mode paper: of the mantissa of every value; 0 to 7
};

// Writes `values` (little-endian floats of options.dtype) as one message into `out` of at least max_message_bytes;
// returns its bytes. `importance`: one byte a value in mode paper, else empty. `table` is of exponent_bits_of(dtype,
// version). Same bytes for every number of threads and instruction set; allocates nothing once a thread has encoded
// before. Throws BufferTooSmall.
std::uint64_t encode(ConstBytes values, ConstBytes importance, const EncodeOptions& options, const HuffmanTable& table,
                     Bytes out, const Mean& mean = {});

// What is made of decoded values in the same pass: addend + value, or value / divisor; callers use one of the two.
struct Finish {
  const std::uint8_t* addend = nullptr;  // as many values of the dtype; may be where the result goes
  float divisor = 1;
};

// Reads `message` into `values`, whose dtype and size the caller knows; `table` is the one the message names.
// `importance`: one byte a value where the message is of format 2 and mode paper; otherwise not looked at. On an error
// the values are undefined. Throws CorruptMessage, IncompatibleVersion, InvalidArgument (no importance), RankMismatch
// (other importance bytes than the sender's).
void decode(ConstBytes message, Dtype dtype, const HuffmanTable& table, ConstBytes importance, const Finish& finish,
            Bytes values);

// Adds the exponents of `values`, as messages of this version code them, to `histogram` (2^exponent_bits counts).
void count_exponents(ConstBytes values, Dtype dtype, Version version, std::span<std::int64_t> histogram);

// Where a message's bytes go.
struct Description {
  BlockHeader header;
  std::uint64_t header_bytes, exponent_bytes, level_bytes, mantissa_bytes;
  std::uint64_t n_raw_chunks;  // whose exponents are not Huffman-coded
};
Description describe(ConstBytes message);

}  // namespace gradwire::gcomp
