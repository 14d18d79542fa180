#include "gcomp/codec.hpp"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <string>

#include "bits/bit_io.hpp"
#include "checksum/crc32c.hpp"
#include "errors.hpp"
#include "gcomp/kernels.hpp"
#include "huffman/streams.hpp"
#include "parallel/thread_pool.hpp"
#include "simd/dispatch.hpp"

namespace gradwire::gcomp {
namespace {

struct Scratch {
  alignas(64) std::array<std::uint8_t, 4 * kChunkValues> rounded;
  std::array<std::uint8_t, kChunkValues> exponents;
  std::array<std::uint8_t, kChunkValues / 4 + kPackSlackBytes> levels;
};

Scratch& scratch() {
  static thread_local Scratch buffers;
  return buffers;
}

const Kernels& kernels_for(Dtype dtype) {
#if defined(__x86_64__)
  if (simd_level() == SimdLevel::avx512) return kKernelsAvx512[static_cast<int>(dtype)];
  if (simd_level() == SimdLevel::avx2) return kKernelsAvx2[static_cast<int>(dtype)];
#endif
  return kKernelsPortable[static_cast<int>(dtype)];
}

// What every chunk of one message has in common.
struct Encoding {
  std::span<const std::uint8_t> values, importance;
  std::uint64_t n_elements;
  const HuffmanTable& table;
  const Kernels& kernels;
  Packing packing;
  bool rounds;
  const WordMasks& masks;
  std::size_t value_bytes;
  std::uint8_t* message;
};

// Sets `holds_nonfinite` if the chunk does; the header's offset is that of `offset`.
ChunkHeader encode_chunk(const Encoding& encoding, std::size_t chunk, std::uint64_t offset, bool& holds_nonfinite) {
  const std::size_t first = chunk * kChunkValues;
  const std::size_t n_values = std::min<std::uint64_t>(kChunkValues, encoding.n_elements - first);
  const std::uint8_t* values = encoding.values.data() + first * encoding.value_bytes;
  const std::uint8_t* const importance = encoding.importance.empty() ? nullptr : encoding.importance.data() + first;
  std::uint8_t* const begin = encoding.message + offset;
  Scratch& buffers = scratch();
  std::uint8_t* const exponents = buffers.exponents.data();

  if (encoding.rounds) {
    encoding.kernels.round(values, importance, n_values, encoding.packing, buffers.rounded.data());
    values = buffers.rounded.data();
  }
  const ExponentSummary summary = encoding.kernels.split_exponents(values, n_values, exponents);
  if (summary.holds_nonfinite) holds_nonfinite = true;
  ChunkHeader header{};
  header.exponent_offset = offset;
  header.n_values = static_cast<std::uint32_t>(n_values);
  std::size_t exponent_bytes = encode_exponents(encoding.table, {exponents, n_values}, begin);
  if (exponent_bytes == 0) {  // a table that does not fit these values at all
    std::memcpy(begin, exponents, n_values);
    exponent_bytes = n_values;
    header.flags = kFlagRawExponents;
  }
  header.exponent_bytes = static_cast<std::uint32_t>(exponent_bytes);
  if (encoding.packing.mode == Mode::paper) header.level_bits = static_cast<std::uint32_t>(2 * summary.n_nonzero);

  // Levels are few: they go to scratch first, because packing scribbles past their end.
  std::uint8_t* const level_begin = encoding.message + header.level_offset();
  std::uint8_t* const mantissa_begin = encoding.message + header.mantissa_offset();
  const SegmentBits bits = encoding.kernels.pack(values, exponents, importance, n_values, encoding.packing,
                                                 encoding.masks, buffers.levels.data(), mantissa_begin);
  header.mantissa_bits = static_cast<std::uint32_t>(bits.mantissas);
  std::memcpy(level_begin, buffers.levels.data(), bytes_of_bits(bits.levels));
  const std::uint8_t* const end = encoding.message + header.end_offset();
  header.checksum = crc32c({begin, end});
  return header;
}

void decode_chunk(std::span<const std::uint8_t> message, const BlockHeader& block, std::size_t chunk,
                  const HuffmanTable& table, const Kernels& kernels, const Packing& packing, const WordMasks& masks,
                  std::uint8_t* values) {
  const ChunkHeader header = read_chunk_header(message, block, chunk);
  const auto fail = [&](const char* what) {
    throw CorruptMessage("GComp message: chunk " + std::to_string(chunk) + ": " + what);
  };
  const std::span<const std::uint8_t> segments =
      message.subspan(header.exponent_offset, header.end_offset() - header.exponent_offset);
  if (crc32c(segments) != header.checksum) fail("the checksum does not match: bytes were changed on the way");

  Scratch& buffers = scratch();
  const std::uint8_t* const end = message.data() + message.size();
  const std::span<std::uint8_t> exponents(buffers.exponents.data(), header.n_values);
  if (header.flags & kFlagRawExponents) {
    std::memcpy(exponents.data(), segments.data(), exponents.size());
    for (const std::uint8_t exponent : exponents)
      if (exponent >= table.n_symbols()) fail("an exponent is out of range");
  } else {
    decode_exponents(table, segments.first(header.exponent_bytes), end, exponents);
  }

  const SegmentSpan levels{message.data() + header.level_offset(), header.level_bits, end};
  const SegmentSpan mantissas{message.data() + header.mantissa_offset(), header.mantissa_bits, end};
  const SegmentBits asked =
      kernels.unpack(exponents.data(), exponents.size(), packing, masks, levels, mantissas, values);
  if (asked.levels != header.level_bits || asked.mantissas != header.mantissa_bits)
    fail("the exponents announce other levels or mantissas than there are");
}

}  // namespace

std::uint64_t encode(std::span<const std::uint8_t> values, std::span<const std::uint8_t> importance,
                     const EncodeOptions& options, const HuffmanTable& table, std::span<std::uint8_t> out) {
  const DtypeLayout& layout = layout_of(options.dtype);
  const std::uint64_t n_elements = values.size() / layout.value_bytes;
  if (values.size() % layout.value_bytes != 0) throw InvalidArgument("the gradient's bytes are no whole values");
  if (importance.size() != (options.mode == Mode::paper ? n_elements : 0))
    throw InvalidArgument("importance has to hold one byte a value in mode paper, and none in other modes");
  if (table.exponent_bits() != layout.exponent_bits)
    throw InvalidArgument(std::string("this Huffman table is for another dtype than ") + name_of(options.dtype));
  if (out.size() < max_message_bytes(n_elements, options.dtype, options.mode))
    throw BufferTooSmall("GComp: out has " + std::to_string(out.size()) + " bytes; max_encoded_bytes is " +
                         std::to_string(max_message_bytes(n_elements, options.dtype, options.mode)));
  const bool quantises = options.mode == Mode::uniform || options.mode == Mode::truncate;
  const int kept_bits = quantises ? options.kept_bits : layout.mantissa_bits;
  if (kept_bits < 0 || kept_bits > layout.mantissa_bits)
    throw InvalidArgument("mantissa bits to keep: " + std::to_string(kept_bits) + " of " +
                          std::to_string(layout.mantissa_bits));

  const Packing packing{options.mode, layout.mantissa_bits - kept_bits};
  const Kernels& kernels = kernels_for(options.dtype);
  WordMasks masks;
  kernels.fill_masks(packing, masks);
  const bool rounds =
      options.mode == Mode::uniform || (options.mode == Mode::paper && options.rounding == Rounding::nearest);
  const Encoding encoding{values,    importance, n_elements,
                          table,     kernels,    packing,
                          rounds,    masks,      static_cast<std::size_t>(layout.value_bytes),
                          out.data()};
  const std::size_t n_chunks = chunks_of(n_elements);
  const std::uint64_t first_offset = kBlockHeaderBytes + n_chunks * kChunkHeaderBytes;
  bool holds_nonfinite = false;
  std::uint64_t end = first_offset;
  if (thread_count() == 1 || n_chunks == 1) {
    for (std::size_t chunk = 0; chunk < n_chunks; ++chunk) {
      const ChunkHeader header = encode_chunk(encoding, chunk, end, holds_nonfinite);
      write_chunk_header(header, chunk, out.data());
      end = header.end_offset();
    }
  } else {
    // Each chunk into a slot of its own, as far apart as the longest ones would be, then moved together.
    const std::size_t slot_bytes = max_chunk_bytes(kChunkValues, options.dtype, options.mode);
    std::atomic<bool> any_nonfinite{false};
    const auto encode_into_slot = [&](std::size_t chunk) {
      bool nonfinite = false;
      write_chunk_header(encode_chunk(encoding, chunk, first_offset + chunk * slot_bytes, nonfinite), chunk,
                         out.data());
      if (nonfinite) any_nonfinite.store(true, std::memory_order_relaxed);
    };
    parallel_for(n_chunks, [&encode_into_slot](std::size_t chunk) { encode_into_slot(chunk); });
    holds_nonfinite = any_nonfinite.load();
    for (std::size_t chunk = 0; chunk < n_chunks; ++chunk) {
      ChunkHeader header = load_chunk_header(out.data(), chunk);
      const std::uint64_t n_bytes = header.end_offset() - header.exponent_offset;
      std::memmove(out.data() + end, out.data() + header.exponent_offset, n_bytes);
      header.exponent_offset = end;
      write_chunk_header(header, chunk, out.data());
      end += n_bytes;
    }
  }
  write_block_header(
      {options.dtype, options.mode, static_cast<std::uint8_t>(kept_bits), holds_nonfinite ? kFlagNonfinite : 0,
       static_cast<std::uint32_t>(n_chunks), table.id(), n_elements, end},
      out.data());
  return end;
}

void decode(std::span<const std::uint8_t> message, Dtype dtype, const HuffmanTable& table,
            std::span<std::uint8_t> values) {
  const BlockHeader block = read_block_header(message);
  if (block.dtype != dtype)
    throw CorruptMessage(std::string("GComp message: dtype: expected ") + name_of(dtype) + ", got " +
                         name_of(block.dtype));
  const auto value_bytes = static_cast<std::uint64_t>(layout_of(dtype).value_bytes);
  if (block.n_elements != values.size() / value_bytes)
    throw CorruptMessage("GComp message: number of values: expected " + std::to_string(values.size() / value_bytes) +
                         ", got " + std::to_string(block.n_elements));
  if (block.table_id != table.id() || table.exponent_bits() != layout_of(dtype).exponent_bits)
    throw CorruptMessage("GComp message: it was written with another Huffman table");
  check_chunks_adjoin(message, block);
  const Kernels& kernels = kernels_for(dtype);
  const Packing packing{block.mode, layout_of(dtype).mantissa_bits - block.kept_bits};
  WordMasks masks;
  kernels.fill_masks(packing, masks);
  const auto decode_one = [&](std::size_t chunk) {
    decode_chunk(message, block, chunk, table, kernels, packing, masks,
                 values.data() + chunk * kChunkValues * value_bytes);
  };
  parallel_for(block.n_chunks, [&decode_one](std::size_t chunk) { decode_one(chunk); });
}

void count_exponents(std::span<const std::uint8_t> values, Dtype dtype, std::span<std::int64_t> histogram) {
  const Kernels& kernels = kernels_for(dtype);
  const auto value_bytes = static_cast<std::size_t>(layout_of(dtype).value_bytes);
  const std::size_t n_values = values.size() / value_bytes;
  std::uint8_t* const exponents = scratch().exponents.data();
  // Four histograms in turn: equal exponents in a row do not wait for each other's count.
  std::array<std::array<std::uint32_t, 256>, 4> counts;
  for (std::size_t first = 0; first < n_values; first += kChunkValues) {
    const std::size_t n = std::min(kChunkValues, n_values - first);
    kernels.split_exponents(values.data() + first * value_bytes, n, exponents);
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
    const ChunkHeader header = load_chunk_header(message.data(), chunk);
    sums.exponent_bytes += header.exponent_bytes;
    sums.level_bytes += header.mantissa_offset() - header.level_offset();
    sums.mantissa_bytes += header.end_offset() - header.mantissa_offset();
    sums.n_raw_chunks += (header.flags & kFlagRawExponents) != 0;
  }
  return sums;
}

}  // namespace gradwire::gcomp
