#include "embedded_float/format.hpp"

#include <algorithm>
#include <bit>
#include <string>

#include "bits/bit_io.hpp"
#include "checksum/crc32c.hpp"
#include "errors.hpp"

namespace gradwire::embedded_float {
namespace {

constexpr std::size_t kChecksumOffset = 36;

std::uint32_t header_checksum(const std::uint8_t* message, std::uint64_t n_chunks) {
  const std::uint32_t crc = crc32c({message, kChecksumOffset});
  return crc32c({message + kHeaderBytes, n_chunks * kChunkEntryBytes}, crc);
}

[[noreturn]] void fail(const std::string& what) { throw CorruptMessage("embedded-float message: " + what); }

}  // namespace

void check_settings(std::size_t partition, planes::Range range) {
  if (!std::has_single_bit(partition) || partition < kMinPartition || partition > kMaxPartition)
    throw InvalidArgument("partition is a power of two from 32 to 1024, not " + std::to_string(partition));
  if (range.first < 0 || range.n < 1 || range.first > kPlanes || range.n > kPlanes - range.first)
    throw InvalidArgument("planes " + std::to_string(range.first) + " to " + std::to_string(range.first + range.n - 1) +
                          ": there are 32, 0 to 31, and a message holds at least one");
}

std::uint64_t payload_bytes(std::uint64_t n_values, std::size_t partition, planes::Range range) {
  const std::uint64_t n_full = n_values / partition * partition, n_rest = n_values - n_full;
  const std::uint64_t plane_bytes = n_full / 8 + (n_rest + 7) / 8;
  return (range.first == 0 ? partitions_of(n_values, partition) : 0) +
         plane_bytes * static_cast<std::uint64_t>(range.n);
}

std::uint64_t max_message_bytes(std::uint64_t n_elements, std::size_t partition, planes::Range range) {
  const std::uint64_t escapes = range.first + range.n == kPlanes ? n_elements * kEscapeBytes : 0;
  return table_end(chunks_of(n_elements)) + payload_bytes(n_elements, partition, range) + escapes;
}

void write_entry(const ChunkEntry& entry, std::size_t chunk, std::uint8_t* message) {
  std::uint8_t* const at = message + table_end(chunk);
  store(at, entry.checksum);
  store(at + 4, entry.n_escapes);
}

ChunkEntry load_entry(const std::uint8_t* message, std::size_t chunk) {
  const std::uint8_t* const at = message + table_end(chunk);
  return {load<std::uint32_t>(at), load<std::uint32_t>(at + 4)};
}

void write_header(const Header& header, std::uint8_t* message) {
  store(message, kMagic);
  message[4] = kVersion;
  message[5] = static_cast<std::uint8_t>(header.dtype);
  message[6] = static_cast<std::uint8_t>(header.range.first);
  message[7] = static_cast<std::uint8_t>(header.range.n);
  store(message + 8, header.n_elements);
  store(message + 16, static_cast<std::uint16_t>(header.partition));
  store(message + 18, header.flags);
  store(message + 20, std::uint32_t{0});
  store(message + 24, header.message_bytes);
  store(message + 32, std::uint32_t{0});
  store(message + kChecksumOffset, header_checksum(message, chunks_of(header.n_elements)));
}

Header read_header(std::span<const std::uint8_t> message) {
  const std::uint8_t* const at = message.data();
  if (message.size() < kHeaderBytes)
    fail("truncated: " + std::to_string(message.size()) + " bytes, a header alone has 40");
  if (load<std::uint32_t>(at) != kMagic)
    fail("it does not begin with GWEF: no embedded-float message, or bytes were lost");
  if (at[4] != kVersion)
    throw IncompatibleVersion("embedded-float message of format version " + std::to_string(at[4]) +
                              "; this build reads version 1: use the same gradwire release on every rank");
  const auto message_bytes = load<std::uint64_t>(at + 24);
  if (message_bytes != message.size())
    fail("length in bytes: expected " + std::to_string(message_bytes) + ", got " + std::to_string(message.size()));
  const auto n_elements = load<std::uint64_t>(at + 8);
  // The first test keeps sums from overflowing: each table entry stands for at most 16,384 values.
  const std::uint64_t n_entries = (message.size() - kHeaderBytes) / kChunkEntryBytes;
  if (n_elements > n_entries * kChunkValues || chunks_of(n_elements) > n_entries)
    fail(std::to_string(n_elements) + " values in " + std::to_string(message.size()) + " bytes");
  const std::uint64_t n_chunks = chunks_of(n_elements);
  if (load<std::uint32_t>(at + kChecksumOffset) != header_checksum(at, n_chunks))
    fail("the header's checksum does not match: bytes were changed on the way");
  if (at[5] >= floats::kDtypes) fail("unknown dtype code " + std::to_string(at[5]));
  const Header header{static_cast<Dtype>(at[5]),    {at[6], at[7]}, load<std::uint16_t>(at + 18),
                      load<std::uint16_t>(at + 16), n_elements,     message_bytes};
  if (header.range.n < 1 || header.range.first + header.range.n > kPlanes)
    fail("planes " + std::to_string(header.range.first) + " and " + std::to_string(header.range.n) + " more of 32");
  if (!std::has_single_bit(header.partition) || header.partition < kMinPartition || header.partition > kMaxPartition)
    fail("partitions of " + std::to_string(header.partition) + " values");
  if ((header.flags & ~kFlagNonfinite) != 0 || load<std::uint32_t>(at + 20) != 0 || load<std::uint32_t>(at + 32) != 0)
    fail("unknown flags");
  std::uint64_t n_escapes = 0;
  for (std::uint64_t chunk = 0; chunk < n_chunks; ++chunk) {
    const std::uint32_t n = load_entry(at, chunk).n_escapes;
    if (n > (header.is_last() ? std::min<std::uint64_t>(kChunkValues, n_elements - chunk * kChunkValues) : 0))
      fail("chunk " + std::to_string(chunk) + ": " + std::to_string(n) + " escapes");
    n_escapes += n;
  }
  const std::uint64_t expected =
      table_end(n_chunks) + payload_bytes(n_elements, header.partition, header.range) + n_escapes * kEscapeBytes;
  if (expected != message.size())
    fail("its content takes " + std::to_string(expected) + " bytes, not " + std::to_string(message.size()));
  return header;
}

}  // namespace gradwire::embedded_float
