// The bytes of an embedded-float message: header, chunk table, and the checks that every reader makes first.
// docs/format.md#embedded-float
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "bits/planes.hpp"
#include "floats/dtypes.hpp"
#include "messages/front.hpp"

namespace gradwire::embedded_float {

using floats::Dtype;

using floats::chunks_of;
using floats::kChunkValues;
using floats::kFlagNonfinite;
using floats::kMaxPartition;
using floats::partitions_of;

inline constexpr int kPlanes = 32;  // the sign, then 31 bits of magnitude
inline constexpr std::size_t kChunkEntryBytes = 8;
inline constexpr Front kFront{"embedded-float", "GWEF", 1, 40, kChunkEntryBytes};
inline constexpr std::size_t kEscapeBytes = 6;  // an index of 2 bytes, a word of 4

struct Header {
  Dtype dtype;
  planes::Range range;
  std::uint16_t flags;
  std::size_t partition;
  std::uint64_t n_elements;
  std::uint64_t message_bytes;

  bool holds_exponents() const { return range.first == 0; }
  bool is_last() const { return range.first + range.n == kPlanes; }
};

struct ChunkEntry {
  std::uint32_t checksum;  // CRC32C of the chunk's exponents and planes, then of its escapes
  std::uint32_t n_escapes;
};

// Throws InvalidArgument where partition or range is out of range.
void check_settings(std::size_t partition, planes::Range range);
// Bytes of the exponents and planes of n_values values that begin at a chunk.
std::uint64_t payload_bytes(std::uint64_t n_values, std::size_t partition, planes::Range range);
// Bytes that no message exceeds.
std::uint64_t max_message_bytes(std::uint64_t n_elements, std::size_t partition, planes::Range range);

void write_entry(const ChunkEntry& entry, std::size_t chunk, std::uint8_t* message);
ChunkEntry load_entry(const std::uint8_t* message, std::size_t chunk);
// The header's fields and the checksum over header and chunk table, which is in place already.
void write_header(const Header& header, std::uint8_t* message);
// Magic, version, lengths, known codes, numbers of escapes and the checksum over header and table are right. Throws
// CorruptMessage, IncompatibleVersion.
Header read_header(std::span<const std::uint8_t> message);

}  // namespace gradwire::embedded_float
