// The bytes of an embedded-float message: header, chunk table, and the checks that every reader makes first.
// docs/format.md#embedded-float
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "bits/planes.hpp"
#include "floats/dtypes.hpp"

namespace gradwire::embedded_float {

using floats::Dtype;

inline constexpr std::uint32_t kMagic = 0x46455747;  // "GWEF"
inline constexpr std::uint8_t kVersion = 1;
inline constexpr int kPlanes = 32;  // the sign, then 31 bits of magnitude
// Values of every chunk but the last: codes, planes and values of one partition after another stay in a 32 KiB L1d,
// and a chunk is work enough (some 4 us) for a thread.
inline constexpr std::size_t kChunkValues = 16384;
inline constexpr std::size_t kMinPartition = 32, kMaxPartition = 1024;  // powers of two between; they divide a chunk
inline constexpr std::size_t kHeaderBytes = 40;
inline constexpr std::size_t kChunkEntryBytes = 8;
inline constexpr std::size_t kEscapeBytes = 6;      // an index of 2 bytes, a word of 4
inline constexpr std::uint16_t kFlagNonfinite = 1;  // some value is Inf or NaN

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

constexpr std::uint64_t chunks_of(std::uint64_t n_elements) { return (n_elements + kChunkValues - 1) / kChunkValues; }
constexpr std::uint64_t partitions_of(std::uint64_t n_elements, std::size_t partition) {
  return (n_elements + partition - 1) / partition;
}

// Throws InvalidArgument where partition or range is out of range.
void check_settings(std::size_t partition, planes::Range range);
// Bytes of the exponents and planes of n_values values that begin at a chunk.
std::uint64_t payload_bytes(std::uint64_t n_values, std::size_t partition, planes::Range range);
// Bytes that no message exceeds.
std::uint64_t max_message_bytes(std::uint64_t n_elements, std::size_t partition, planes::Range range);

inline std::uint64_t table_end(std::uint64_t n_chunks) { return kHeaderBytes + n_chunks * kChunkEntryBytes; }
void write_entry(const ChunkEntry& entry, std::size_t chunk, std::uint8_t* message);
ChunkEntry load_entry(const std::uint8_t* message, std::size_t chunk);
// The header's fields and the checksum over header and chunk table, which is in place already.
void write_header(const Header& header, std::uint8_t* message);
// Magic, version, lengths, known codes, numbers of escapes and the checksum over header and table are right. Throws
// CorruptMessage, IncompatibleVersion.
Header read_header(std::span<const std::uint8_t> message);

}  // namespace gradwire::embedded_float
