#include "embedded_float/format.hpp"

#include <algorithm>
#include <string>

#include "bits/bit_io.hpp"
#include "errors.hpp"

namespace gradwire::embedded_float {
namespace {

[[noreturn]] void fail(const std::string& what) { fail_message(kFront.name, what); }

}  // namespace

void check_settings(std::size_t partition, planes::Range range) {
  floats::check_partition(partition);
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
  return kFront.table_end(chunks_of(n_elements)) + payload_bytes(n_elements, partition, range) + escapes;
}

void write_entry(const ChunkEntry& entry, std::size_t chunk, std::uint8_t* message) {
  std::uint8_t* const at = message + kFront.table_end(chunk);
  store(at, entry.checksum);
  store(at + 4, entry.n_escapes);
}

ChunkEntry load_entry(const std::uint8_t* message, std::size_t chunk) {
  const std::uint8_t* const at = message + kFront.table_end(chunk);
  return {load<std::uint32_t>(at), load<std::uint32_t>(at + 4)};
}

void write_header(const Header& header, std::uint8_t* message) {
  const auto& [dtype, range, flags, partition, n_elements, message_bytes] = header;
  floats::write_head(kFront, {dtype, range.first, range.n, flags, partition, n_elements, message_bytes}, message);
  write_checksum(kFront, message, chunks_of(n_elements));
}

Header read_header(std::span<const std::uint8_t> message) {
  const floats::Head head = floats::read_head(kFront, message);
  const Header header{
      head.dtype, {head.first_code, head.second_code}, head.flags, head.partition, head.n_elements, head.message_bytes};
  // The first test keeps sums from overflowing: each table entry stands for at most 16,384 values.
  const std::uint64_t n_entries = (message.size() - kFront.header_bytes) / kChunkEntryBytes;
  const std::uint64_t n_elements = header.n_elements, n_chunks = chunks_of(n_elements);
  if (n_elements > n_entries * kChunkValues || n_chunks > n_entries)
    fail(std::to_string(n_elements) + " values in " + std::to_string(message.size()) + " bytes");
  const std::uint8_t* const at = message.data();
  check_checksum(kFront, at, n_chunks);
  if (header.range.n < 1 || header.range.first + header.range.n > kPlanes)
    fail("planes " + std::to_string(header.range.first) + " and " + std::to_string(header.range.n) + " more of 32");
  std::uint64_t n_escapes = 0;
  for (std::uint64_t chunk = 0; chunk < n_chunks; ++chunk) {
    const std::uint32_t n = load_entry(at, chunk).n_escapes;
    if (n > (header.is_last() ? std::min<std::uint64_t>(kChunkValues, n_elements - chunk * kChunkValues) : 0))
      fail("chunk " + std::to_string(chunk) + ": " + std::to_string(n) + " escapes");
    n_escapes += n;
  }
  const std::uint64_t expected =
      kFront.table_end(n_chunks) + payload_bytes(n_elements, header.partition, header.range) + n_escapes * kEscapeBytes;
  if (expected != message.size())
    fail("its content takes " + std::to_string(expected) + " bytes, not " + std::to_string(message.size()));
  return header;
}

}  // namespace gradwire::embedded_float
