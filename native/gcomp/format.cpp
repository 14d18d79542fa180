#include "gcomp/format.hpp"

#include <algorithm>
#include <string>

#include "bits/bit_io.hpp"
#include "gcomp/lanes.hpp"
#include "gcomp/levels.hpp"
#include "huffman/streams.hpp"

namespace gradwire::gcomp {
namespace {

static_assert(kChunkValues == kMaxSegmentValues);

[[noreturn]] void fail(const std::string& what) { fail_message(kName, what); }

std::string got(std::uint64_t expected, std::uint64_t actual) {
  return "expected " + std::to_string(expected) + ", got " + std::to_string(actual);
}

}  // namespace

const char* name_of(Mode mode) {
  constexpr const char* names[kModes] = {"none", "paper", "uniform", "truncate"};
  return names[static_cast<int>(mode)];
}

std::size_t max_chunk_bytes(std::size_t n_values, Dtype dtype, Mode mode, Version version) {
  // The exponent segment is at most one byte a value, but touches max_segment_bytes before that shows.
  const std::size_t mantissa_bytes = (n_values * (1 + layout_of(dtype).mantissa_bits) + 7) / 8;
  if (version == Version::derived)
    return mantissa_bytes + kLaneTailBytes + std::max(n_values, max_segment_bytes(n_values)) + kPackSlackBytes;
  const std::size_t rest = (mode == Mode::paper ? (2 * n_values + 7) / 8 : 0) + mantissa_bytes;
  return std::max(n_values + rest, max_segment_bytes(n_values)) + kPackSlackBytes;
}

std::uint64_t max_message_bytes(std::uint64_t n_elements, Dtype dtype, Mode mode, Version version) {
  const std::uint64_t n_full = n_elements / kChunkValues, n_rest = n_elements % kChunkValues;
  return kFront.table_end(chunks_of(n_elements)) + n_full * max_chunk_bytes(kChunkValues, dtype, mode, version) +
         (n_rest > 0 ? max_chunk_bytes(n_rest, dtype, mode, version) : 0);
}

void write_block_header(const BlockHeader& header, std::uint8_t* message) {
  write_front(kFront, static_cast<int>(header.version), static_cast<int>(header.dtype), static_cast<int>(header.mode),
              header.kept_bits, message);
  store(message + 8, header.table_id);
  store(message + 16, header.n_elements);
  store(message + 24, header.message_bytes);
  store(message + 32, header.n_chunks);
  store(message + 36, header.flags);
  store(message + 40, std::uint32_t{0});
  write_checksum(kFront, message, header.n_chunks);
}

void write_chunk_header(const ChunkHeader& header, Version version, std::size_t chunk, std::uint8_t* message) {
  std::uint8_t* const at = message + kFront.table_end(chunk);
  store(at, header.offset);
  store(at + 8, header.exponent_bytes);
  store(at + 12, version == Version::levels ? header.level_bits : header.importance_checksum);
  store(at + 16, header.mantissa_bits);
  store(at + 20, header.n_values);
  store(at + 24, header.flags);
  store(at + 28, header.checksum);
}

ChunkHeader load_chunk_header(const std::uint8_t* message, Version version, std::size_t chunk) {
  const std::uint8_t* const at = message + kFront.table_end(chunk);
  const auto third = load<std::uint32_t>(at + 12);
  const bool is_derived = version == Version::derived;
  return {load<std::uint64_t>(at),      load<std::uint32_t>(at + 8),  is_derived ? 0 : third,
          is_derived ? third : 0,       load<std::uint32_t>(at + 16), load<std::uint32_t>(at + 20),
          load<std::uint32_t>(at + 24), load<std::uint32_t>(at + 28)};
}

BlockHeader read_block_header(std::span<const std::uint8_t> message) {
  check_front(kFront, message);
  const std::uint8_t* const at = message.data();
  const auto message_bytes = load<std::uint64_t>(at + 24);
  expect(kName, "length in bytes", message_bytes, message.size());
  const auto n_elements = load<std::uint64_t>(at + 16);
  const auto n_chunks = load<std::uint32_t>(at + 32);
  // The first test keeps the sums below from overflowing: a chunk header stands for at most 16,384 values.
  if (n_chunks > (message.size() - kBlockHeaderBytes) / kChunkHeaderBytes || n_elements > n_chunks * kChunkValues ||
      n_chunks != chunks_of(n_elements))
    fail(std::to_string(n_chunks) + " chunks for " + std::to_string(n_elements) + " values in " +
         std::to_string(message.size()) + " bytes");
  check_checksum(kFront, at, n_chunks);
  if (at[5] >= kDtypes) fail("unknown dtype code " + std::to_string(at[5]));
  if (at[6] >= kModes) fail("unknown mode code " + std::to_string(at[6]));
  const BlockHeader header{static_cast<Version>(at[4]),
                           static_cast<Dtype>(at[5]),
                           static_cast<Mode>(at[6]),
                           at[7],
                           load<std::uint32_t>(at + 36),
                           n_chunks,
                           load<std::uint64_t>(at + 8),
                           n_elements,
                           message_bytes};
  // Format 2 may cap what mode paper keeps.
  const bool keeps_all = header.mode == Mode::none || (header.mode == Mode::paper && header.version == Version::levels);
  const int mantissa_bits = layout_of(header.dtype).mantissa_bits;
  if (header.kept_bits > mantissa_bits || (keeps_all && header.kept_bits != mantissa_bits))
    fail(std::to_string(header.kept_bits) + " mantissa bits kept of " + std::to_string(mantissa_bits));
  if ((header.flags & ~kFlagNonfinite) != 0 || load<std::uint32_t>(at + 40) != 0) fail("unknown flags");
  return header;
}

ChunkHeader read_chunk_header(std::span<const std::uint8_t> message, const BlockHeader& block, std::size_t chunk) {
  const ChunkHeader header = load_chunk_header(message.data(), block.version, chunk);
  const auto in_chunk = [&](const std::string& what) { fail_in_chunk(kName, chunk, what); };
  const std::uint64_t n_values = std::min<std::uint64_t>(kChunkValues, block.n_elements - chunk * kChunkValues);
  if (header.n_values != n_values) in_chunk("number of values: " + got(n_values, header.n_values));
  const DtypeLayout& layout = layout_of(block.dtype);
  if (header.exponent_bytes > n_values || (header.flags & ~kFlagRawExponents) != 0 ||
      ((header.flags & kFlagRawExponents) != 0 && header.exponent_bytes != n_values))
    in_chunk("impossible exponent segment");
  const std::uint64_t most_bits = n_values * (1 + layout.mantissa_bits);
  if (block.version == Version::levels) {
    if (header.level_bits > (block.mode == Mode::paper ? 2 * n_values : 0)) in_chunk("impossible level segment");
    if (header.mantissa_bits > most_bits) in_chunk("impossible mantissa segment");
  } else {
    if (block.mode != Mode::paper && header.importance_checksum != 0) in_chunk("a checksum of importance bytes");
    if (header.mantissa_bits % 32 != 0 || header.mantissa_bits < 8 * kLaneTailBytes ||
        header.mantissa_bits - 8 * kLaneTailBytes > most_bits)
      in_chunk("impossible mantissa segment");
  }
  // The lengths are bounded by now; a huge offset must not wrap around.
  if (header.offset < kFront.table_end(block.n_chunks) || header.offset > message.size() ||
      header.end_offset() > message.size())
    in_chunk("its segments lie outside the message");
  return header;
}

void check_chunks_adjoin(std::span<const std::uint8_t> message, const BlockHeader& block) {
  std::uint64_t end = kFront.table_end(block.n_chunks);
  for (std::size_t chunk = 0; chunk < block.n_chunks; ++chunk) {
    const ChunkHeader header = read_chunk_header(message, block, chunk);
    if (header.offset != end) fail_in_chunk(kName, chunk, "its first byte: " + got(end, header.offset));
    end = header.end_offset();
  }
  expect(kName, "bytes used by its chunks", message.size(), end);
}

}  // namespace gradwire::gcomp
