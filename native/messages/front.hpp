// What the codecs' messages have in common: a header, which lies in memory as it travels (four letters, a version and
// three bytes of the codec's own in front, a checksum at its end), and the checks that every reader makes first.
#pragma once

#include <algorithm>

#include "bits/bit_io.hpp"
#include "errors.hpp"

namespace gradwire {

struct Front {
  const char* name;  // in errors
  const char* letters;
  int last_version;          // 1 to this one are read
  std::size_t header_bytes;  // the last four of them are the checksum
  std::size_t entry_bytes;   // of the table that follows, an entry for every chunk

  std::uint64_t table_end(std::uint64_t n_chunks) const { return header_bytes + n_chunks * entry_bytes; }
};

// Throw CorruptMessage.
template <class... Parts>
[[noreturn]] void fail_message(const char* name, const Parts&... what) {
  throw CorruptMessage(name, " message: ", what...);
}
template <class... Parts>
[[noreturn]] void fail_in_chunk(const char* name, std::size_t chunk, const Parts&... what) {
  fail_message(name, "chunk ", chunk, ": ", what...);
}
void expect(const char* name, const char* what, std::uint64_t expected, std::uint64_t got);
inline void check_dtype(const char* name, floats::Dtype dtype) {
  if (static_cast<int>(dtype) >= floats::kDtypes) fail_message(name, "unknown dtype code ", static_cast<int>(dtype));
}
// What the receiver has room for, and what the message holds.
void expect_values(const char* name, floats::Dtype dtype, std::uint64_t n_elements, floats::Dtype got_dtype,
                   std::uint64_t got_elements);

// A whole header that begins with the right letters and version. Throws CorruptMessage, IncompatibleVersion.
void check_front(const Front& front, ConstBytes message);
template <class Header>
Header load_header(const Front& front, ConstBytes message) {
  check_front(front, message);
  return load<Header>(message.data());
}

// Letters and checksum are put in here; the latter is over the header, the table and `more`, which are in place.
void seal_header(const Front& front, std::uint8_t* message, std::uint64_t n_chunks, ConstBytes more);
template <class Header>
void write_header(const Front& front, const Header& header, std::uint8_t* message, std::uint64_t n_chunks,
                  ConstBytes more = {}) {
  store(message, header);
  seal_header(front, message, n_chunks, more);
}
void check_checksum(const Front& front, const std::uint8_t* message, std::uint64_t n_chunks, ConstBytes more = {});

// Throws BufferTooSmall.
void check_room(const char* name, ConstBytes out, std::uint64_t n_needed);

// ---- float codecs: values in chunks, which some cut into partitions

namespace floats {

// Values of every chunk but the last: what one partition after another needs stays in a 32 KiB L1d, 64 KiB of float32
// with GComp's exponents and output in a 512 KiB L2, and a chunk is work enough (some 4 us) for a thread.
inline constexpr std::size_t kChunkValues = 16384;
inline constexpr std::size_t kMinPartition = 32, kMaxPartition = 1024;  // powers of two between; they divide a chunk
inline constexpr std::uint16_t kFlagNonfinite = 1;  // some value is Inf or NaN, and bits are cut off

constexpr std::uint64_t chunks_of(std::uint64_t n_elements) { return (n_elements + kChunkValues - 1) / kChunkValues; }
constexpr std::uint64_t partitions_of(std::uint64_t n_elements, std::size_t partition) {
  return (n_elements + partition - 1) / partition;
}

// Values of a chunk, and where its payload lies in a message.
struct Chunk {
  std::size_t index, first, n;
  std::uint64_t begin, end;
  std::size_t n_partitions;
};

// payload_bytes(n) of n values that begin at a chunk.
template <class PayloadBytes>
Chunk chunk_at(std::size_t index, std::uint64_t n_elements, std::size_t partition, std::uint64_t table_end,
               const PayloadBytes& payload_bytes) {
  const std::size_t first = index * kChunkValues;
  const std::size_t n = std::min<std::uint64_t>(kChunkValues, n_elements - first);
  const std::uint64_t begin = table_end + index * payload_bytes(kChunkValues);
  return {index, first, n, begin, begin + payload_bytes(n), partitions_of(n, partition)};
}

struct Head {
  char letters[4]{};
  std::uint8_t version;
  Dtype dtype;
  std::uint8_t first_code, second_code;  // the codec's own
  std::uint64_t n_elements;
  std::uint16_t partition, flags;
  std::uint32_t first_zero = 0;
  std::uint64_t message_bytes;
  std::uint32_t second_zero = 0, checksum = 0;
};
static_assert(sizeof(Head) == 40);

// Letters, version, length, known dtype, flags and partition are right. Throws CorruptMessage, IncompatibleVersion.
Head read_head(const Front& front, ConstBytes message);

}  // namespace floats
}  // namespace gradwire
