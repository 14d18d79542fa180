#include "gcomp/codec.hpp"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <string>

#include "bits/bit_io.hpp"
#include "checksum/crc32c.hpp"
#include "errors.hpp"
#include "gcomp/chunks.hpp"
#include "huffman/streams.hpp"
#include "parallel/thread_pool.hpp"

namespace gradwire::gcomp {
namespace {

MessageCoding coding_of(Dtype dtype, Mode mode, int kept_bits, Version version, bool rounds, const HuffmanTable& table,
                        WordMasks& masks) {
  const Packing packing{mode, layout_of(dtype).mantissa_bits - kept_bits};
  const Kernels& kernels = kernels_for(dtype);
  if (version == Version::levels) kernels.fill_masks(packing, masks);
  return {dtype, version, rounds, table, lane_kernels(), kernels, packing, masks, keep_rule(dtype, mode, kept_bits)};
}

void require_table(const HuffmanTable& table, Dtype dtype, Version version) {
  if (table.exponent_bits() != exponent_bits_of(dtype, version))
    throw InvalidArgument(std::string("this Huffman table is for another dtype than ") + name_of(dtype));
}

void decode_chunk(const MessageCoding& coding, std::span<const std::uint8_t> message, const BlockHeader& block,
                  std::size_t chunk, const std::uint8_t* importance, const Finish& finish, std::uint8_t* values) {
  const ChunkHeader header = read_chunk_header(message, block, chunk);
  if (crc32c(message.subspan(header.offset, header.end_offset() - header.offset)) != header.checksum)
    fail_in_chunk(kName, chunk, "the checksum does not match: bytes were changed on the way");
  const auto decode_with = block.version == Version::levels ? decode_levels_chunk : decode_lanes_chunk;
  decode_with(coding, message, header, chunk, importance, finish, values);
}

}  // namespace

Scratch& scratch() {
  static thread_local Scratch buffers;
  return buffers;
}

void write_exponents(const HuffmanTable& table, std::span<const std::uint8_t> exponents, std::uint8_t* begin,
                     ChunkHeader& header) {
  std::size_t n_bytes = encode_exponents(table, exponents, begin);
  if (n_bytes == 0) {  // a table that does not fit these values at all
    std::memcpy(begin, exponents.data(), exponents.size());
    n_bytes = exponents.size();
    header.flags = kFlagRawExponents;
  }
  header.exponent_bytes = static_cast<std::uint32_t>(n_bytes);
}

void read_exponents(const HuffmanTable& table, std::span<const std::uint8_t> segment, std::size_t chunk, bool is_raw,
                    const std::uint8_t* readable_end, std::span<std::uint8_t> exponents) {
  if (!is_raw) return decode_exponents(table, segment, readable_end, exponents);
  std::memcpy(exponents.data(), segment.data(), exponents.size());
  for (const std::uint8_t exponent : exponents)
    if (exponent >= table.n_symbols()) fail_in_chunk(kName, chunk, "an exponent is out of range");
}

std::uint64_t encode(std::span<const std::uint8_t> values, std::span<const std::uint8_t> importance,
                     const EncodeOptions& options, const HuffmanTable& table, std::span<std::uint8_t> out,
                     const Mean& mean) {
  const DtypeLayout& layout = layout_of(options.dtype);
  const std::uint64_t n_elements = elements_of(values, options.dtype);
  if (importance.size() != (options.mode == Mode::paper ? n_elements : 0))
    throw InvalidArgument("importance has to hold one byte a value in mode paper, and none in other modes");
  require_table(table, options.dtype, options.version);
  check_room(kName, out, max_message_bytes(n_elements, options.dtype, options.mode, options.version));
  const bool quantises = options.mode == Mode::uniform || options.mode == Mode::truncate ||
                         (options.mode == Mode::paper && options.version == Version::derived);
  const int kept_bits = quantises ? options.kept_bits : layout.mantissa_bits;
  if (kept_bits < 0 || kept_bits > layout.mantissa_bits)
    throw InvalidArgument("mantissa bits to keep: " + std::to_string(kept_bits) + " of " +
                          std::to_string(layout.mantissa_bits));

  const bool rounds =
      options.mode == Mode::uniform || (options.mode == Mode::paper && options.rounding == Rounding::nearest);
  WordMasks masks;
  const MessageCoding coding = coding_of(options.dtype, options.mode, kept_bits, options.version, rounds, table, masks);
  const auto encode_chunk = [&](std::size_t chunk, std::uint64_t offset, bool& nonfinite) {
    const std::size_t first = chunk * kChunkValues;
    const std::size_t n_values = std::min<std::uint64_t>(kChunkValues, n_elements - first);
    const auto encode_with = options.version == Version::levels ? encode_levels_chunk : encode_lanes_chunk;
    const std::size_t first_byte = first * bytes_of(options.dtype);
    ChunkHeader header = encode_with(
        coding, values.data() + first_byte, importance.empty() ? nullptr : importance.data() + first, n_values,
        out.data(), offset, {mean.values == nullptr ? nullptr : mean.values + first_byte, mean.divisor}, nonfinite);
    header.checksum = crc32c({out.data() + offset, out.data() + header.end_offset()});
    write_chunk_header(header, options.version, chunk, out.data());
    return header.end_offset();
  };
  const std::size_t n_chunks = chunks_of(n_elements);
  const std::uint64_t first_offset = kBlockHeaderBytes + n_chunks * kChunkHeaderBytes;
  bool holds_nonfinite = false;
  std::uint64_t end = first_offset;
  if (thread_count() == 1 || n_chunks == 1) {
    for (std::size_t chunk = 0; chunk < n_chunks; ++chunk) end = encode_chunk(chunk, end, holds_nonfinite);
  } else {
    // Each chunk into a slot of its own, as far apart as the longest ones would be, then moved together.
    const std::size_t slot_bytes = max_chunk_bytes(kChunkValues, options.dtype, options.mode, options.version);
    std::atomic<bool> any_nonfinite{false};
    const auto encode_into_slot = [&](std::size_t chunk) {
      bool nonfinite = false;
      encode_chunk(chunk, first_offset + chunk * slot_bytes, nonfinite);
      if (nonfinite) any_nonfinite.store(true, std::memory_order_relaxed);
    };
    parallel_for(n_chunks, [&encode_into_slot](std::size_t chunk) { encode_into_slot(chunk); });
    holds_nonfinite = any_nonfinite.load();
    for (std::size_t chunk = 0; chunk < n_chunks; ++chunk) {
      ChunkHeader header = load_chunk_header(out.data(), options.version, chunk);
      const std::uint64_t n_bytes = header.end_offset() - header.offset;
      std::memmove(out.data() + end, out.data() + header.offset, n_bytes);
      header.offset = end;
      write_chunk_header(header, options.version, chunk, out.data());
      end += n_bytes;
    }
  }
  write_block_header(
      {options.version, options.dtype, options.mode, static_cast<std::uint8_t>(kept_bits),
       holds_nonfinite ? kFlagNonfinite : 0, static_cast<std::uint32_t>(n_chunks), table.id(), n_elements, end},
      out.data());
  if (mean.values != nullptr && options.version == Version::levels)
    decode(out.first(end), options.dtype, table, importance, {nullptr, mean.divisor}, {mean.values, values.size()});
  return end;
}

void decode(std::span<const std::uint8_t> message, Dtype dtype, const HuffmanTable& table,
            std::span<const std::uint8_t> importance, const Finish& finish, std::span<std::uint8_t> values) {
  const BlockHeader block = read_block_header(message);
  const std::size_t value_bytes = bytes_of(dtype);
  expect_values(kName, dtype, values.size() / value_bytes, block.dtype, block.n_elements);
  if (block.table_id != table.id() || table.exponent_bits() != exponent_bits_of(dtype, block.version))
    fail_message(kName, "it was written with another Huffman table");
  const bool derives = block.version == Version::derived && block.mode == Mode::paper;
  if (derives && importance.size() != block.n_elements)
    throw InvalidArgument("decoding this message needs one importance byte a value: " +
                          std::to_string(block.n_elements) + ", got " + std::to_string(importance.size()));
  check_chunks_adjoin(message, block);
  WordMasks masks;
  const MessageCoding coding = coding_of(dtype, block.mode, block.kept_bits, block.version, false, table, masks);
  const auto decode_one = [&](std::size_t chunk) {
    const std::size_t first = chunk * kChunkValues, offset = first * value_bytes;
    decode_chunk(coding, message, block, chunk, derives ? importance.data() + first : nullptr,
                 {finish.addend == nullptr ? nullptr : finish.addend + offset, finish.divisor}, values.data() + offset);
  };
  parallel_for(block.n_chunks, [&decode_one](std::size_t chunk) { decode_one(chunk); });
}

void count_exponents(std::span<const std::uint8_t> values, Dtype dtype, Version version,
                     std::span<std::int64_t> histogram) {
  const std::size_t value_bytes = bytes_of(dtype);
  const bool widens = dtype == Dtype::float16 && version == Version::derived;
  const Kernels& kernels = kernels_for(widens ? Dtype::float32 : dtype);
  const std::size_t n_values = values.size() / value_bytes;
  Scratch& buffers = scratch();
  std::uint8_t* const exponents = buffers.exponents;
  // Four histograms in turn: equal exponents in a row do not wait for each other's count.
  std::array<std::array<std::uint32_t, 256>, 4> counts;
  for (std::size_t first = 0; first < n_values; first += kChunkValues) {
    const std::size_t n = std::min(kChunkValues, n_values - first);
    const std::uint8_t* words = values.data() + first * value_bytes;
    if (widens) {
      lane_kernels().widen[static_cast<int>(dtype)](words, n, buffers.words);
      words = buffers.words;
    }
    kernels.split_exponents(words, n, exponents);
    for (auto& part : counts) part.fill(0);
    std::size_t i = 0;
    for (; i + 8 <= n; i += 8) {
      const auto eight = load<std::uint64_t>(exponents + i);
      for (int j = 0; j < 8; ++j) ++counts[j % 4][(eight >> (8 * j)) & 0xFF];
    }
    for (; i < n; ++i) ++counts[0][exponents[i]];
    for (std::size_t symbol = 0; symbol < histogram.size(); ++symbol)
      histogram[symbol] += counts[0][symbol] + counts[1][symbol] + counts[2][symbol] + counts[3][symbol];
  }
}

Description describe(std::span<const std::uint8_t> message) {
  Description sums{read_block_header(message), 0, 0, 0, 0, 0};
  check_chunks_adjoin(message, sums.header);
  sums.header_bytes = kBlockHeaderBytes + std::uint64_t{sums.header.n_chunks} * kChunkHeaderBytes;
  for (std::size_t chunk = 0; chunk < sums.header.n_chunks; ++chunk) {
    const ChunkHeader header = load_chunk_header(message.data(), sums.header.version, chunk);
    sums.exponent_bytes += header.exponent_bytes;
    sums.level_bytes += header.mantissa_offset() - header.level_offset();
    sums.mantissa_bytes += header.end_offset() - header.mantissa_offset();
    sums.n_raw_chunks += (header.flags & kFlagRawExponents) != 0;
  }
  return sums;
}

}  // namespace gradwire::gcomp
