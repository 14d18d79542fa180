// The bytes of a GComp message: headers, and the checks that every reader makes first. docs/format.md#gcomp
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "floats/dtypes.hpp"
#include "messages/front.hpp"

namespace gradwire::gcomp {

using floats::bytes_of;
using floats::Dtype;
using floats::kDtypes;
using floats::name_of;
enum class Mode : std::uint8_t { none = 0, paper = 1, uniform = 2, truncate = 3 };

inline constexpr int kModes = 4;
// Format 1 sends levels; in format 2 the receiver derives what was kept.
enum class Version : std::uint8_t { levels = 1, derived = 2 };
// Values of every chunk but the last. 64 KiB of float32 with their exponents and output stay in a 512 KiB L2.
inline constexpr std::size_t kChunkValues = 16384;
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
  Version version;
  Dtype dtype;
  Mode mode;
  std::uint8_t kept_bits;  // of the mantissa: at level 0, or at most
  std::uint32_t flags;
  std::uint32_t n_chunks;
  std::uint64_t table_id;
  std::uint64_t n_elements;
  std::uint64_t message_bytes;
};

// Format 1: exponents, levels, mantissas; format 2: mantissas (whole words), exponents.
struct ChunkHeader {
  std::uint64_t offset;  // from the message's first byte; the segments follow one another
  std::uint32_t exponent_bytes;
  std::uint32_t level_bits;           // format 1, else 0
  std::uint32_t importance_checksum;  // format 2: CRC32C of the importance bytes (mode paper), else 0
  std::uint32_t mantissa_bits;
  std::uint32_t n_values;
  std::uint32_t flags;
  std::uint32_t checksum;  // CRC32C of the chunk's segments

  std::uint64_t level_offset() const { return offset + exponent_bytes; }
  std::uint64_t mantissa_offset() const { return level_offset() + (std::uint64_t{level_bits} + 7) / 8; }
  std::uint64_t end_offset() const { return mantissa_offset() + (std::uint64_t{mantissa_bits} + 7) / 8; }
};

constexpr std::uint64_t chunks_of(std::uint64_t n_elements) { return (n_elements + kChunkValues - 1) / kChunkValues; }

// Bytes that no chunk of n_values exceeds, what its encoder scribbles past the end included.
std::size_t max_chunk_bytes(std::size_t n_values, Dtype dtype, Mode mode, Version version);
// Bytes that no message of n_elements values exceeds.
std::uint64_t max_message_bytes(std::uint64_t n_elements, Dtype dtype, Mode mode, Version version);

// Both headers' fields and the checksum over them; the chunk headers are in place already.
void write_block_header(const BlockHeader& header, std::uint8_t* message);
void write_chunk_header(const ChunkHeader& header, Version version, std::size_t chunk, std::uint8_t* message);
// Unchecked: for headers that were checked before, or just written.
ChunkHeader load_chunk_header(const std::uint8_t* message, Version version, std::size_t chunk);

// The block header of `message`: magic, version, lengths, known codes and the checksum over all headers are right.
// Throws CorruptMessage, IncompatibleVersion.
BlockHeader read_block_header(std::span<const std::uint8_t> message);
// The header of one chunk: number of values, lengths and offsets are possible and lie within the message.
ChunkHeader read_chunk_header(std::span<const std::uint8_t> message, const BlockHeader& block, std::size_t chunk);
// Every chunk begins where the one before ends, and the last ends with the message.
void check_chunks_adjoin(std::span<const std::uint8_t> message, const BlockHeader& block);

const char* name_of(Mode mode);

}  // namespace gradwire::gcomp
