#include "gcomp/codec.hpp"

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cinttypes>
#include <cstdio>
#include <cstring>
#include <functional>

#include "bits/bit_io.hpp"
#include "checksum/crc32c.hpp"
#include "errors.hpp"
#include "gcomp/kernels.hpp"
#include "parallel/thread_pool.hpp"

namespace gradwire::gcomp {
namespace {

static_assert(kChunkValues == kMaxSegmentValues);

// Bytes that no chunk of n_values exceeds, what its encoder scribbles past the end included.
std::size_t max_chunk_bytes(std::size_t n_values, Dtype dtype, Mode mode, Version version) {
  // The exponent segment is at most one byte a value, but touches max_segment_bytes before that shows.
  const std::size_t mantissa_bytes = (n_values * (1 + layout_of(dtype).mantissa_bits) + 7) / 8;
  if (version == Version::derived)
    return mantissa_bytes + kLaneTailBytes + std::max(n_values, max_segment_bytes(n_values)) + kPackSlackBytes;
  const std::size_t rest = (mode == Mode::paper ? (2 * n_values + 7) / 8 : 0) + mantissa_bytes;
  return std::max(n_values + rest, max_segment_bytes(n_values)) + kPackSlackBytes;
}

// The header of one chunk: number of values, lengths and offsets are possible and lie within the message.
ChunkHeader read_chunk_header(ConstBytes message, const BlockHeader& block, std::size_t chunk) {
  const ChunkHeader header = load_chunk_header(message.data(), chunk);
  const auto in_chunk = [&](const auto&... what) { fail_in_chunk(kName, chunk, what...); };
  const std::uint64_t n_values = std::min<std::uint64_t>(kChunkValues, block.n_elements - chunk * kChunkValues);
  if (header.n_values != n_values) in_chunk("number of values: expected ", n_values, ", got ", header.n_values);
  const DtypeLayout& layout = layout_of(block.dtype);
  if (header.exponent_bytes > n_values || (header.flags & ~kFlagRawExponents) != 0 ||
      ((header.flags & kFlagRawExponents) != 0 && header.exponent_bytes != n_values))
    in_chunk("impossible exponent segment");
  const std::uint64_t most_bits = n_values * (1 + layout.mantissa_bits);
  if (block.version == Version::levels) {
    if (header.own > (block.mode == Mode::paper ? 2 * n_values : 0)) in_chunk("impossible level segment");
    if (header.mantissa_bits > most_bits) in_chunk("impossible mantissa segment");
  } else {
    if (block.mode != Mode::paper && header.own != 0) in_chunk("a checksum of importance bytes");
    if (header.mantissa_bits % 32 != 0 || header.mantissa_bits < 8 * kLaneTailBytes ||
        header.mantissa_bits - 8 * kLaneTailBytes > most_bits)
      in_chunk("impossible mantissa segment");
  }
  // The lengths are bounded by now; a huge offset must not wrap around.
  if (header.offset < kFront.table_end(block.n_chunks) || header.offset > message.size() ||
      header.end_offset(block.version) > message.size())
    in_chunk("its segments lie outside the message");
  return header;
}

// Every chunk begins where the one before ends, and the last ends with the message.
void check_chunks_adjoin(ConstBytes message, const BlockHeader& block) {
  std::uint64_t end = kFront.table_end(block.n_chunks);
  for (std::size_t chunk = 0; chunk < block.n_chunks; ++chunk) {
    const ChunkHeader header = read_chunk_header(message, block, chunk);
    if (header.offset != end) fail_in_chunk(kName, chunk, "its first byte: expected ", end, ", got ", header.offset);
    end = header.end_offset(block.version);
  }
  expect(kName, "bytes used by its chunks", message.size(), end);
}

// What every chunk of one message has in common.
struct MessageCoding {
  Dtype dtype;
  Version version;
  bool rounds;  // to nearest, where bits are dropped
  const HuffmanTable& table;
  const LaneKernels& lanes;
  const Kernels& kernels;  // the rest: format 1 alone
  Packing packing;
  KeepRule rule;  // format 2 alone
};

struct Scratch {
  alignas(64) std::uint8_t words[4 * kChunkValues];
  alignas(64) std::uint8_t block[4 * kLaneBlock];
  std::uint8_t exponents[kChunkValues];
  std::uint8_t levels[kChunkValues / 4 + kPackSlackBytes];
};
Scratch& scratch() {  // this thread's
  static thread_local Scratch buffers;
  return buffers;
}

// The exponent segment at `begin`, Huffman-coded, or raw where that is not longer; sets the header's fields.
void write_exponents(const HuffmanTable& table, ConstBytes exponents, std::uint8_t* begin, ChunkHeader& header) {
  std::size_t n_bytes = encode_exponents(table, exponents, begin);
  if (n_bytes == 0) {  // a table that does not fit these values at all
    std::memcpy(begin, exponents.data(), exponents.size());
    n_bytes = exponents.size();
    header.flags = kFlagRawExponents;
  }
  header.exponent_bytes = static_cast<std::uint32_t>(n_bytes);
}

void read_exponents(const HuffmanTable& table, ConstBytes segment, std::size_t chunk, bool is_raw,
                    const std::uint8_t* readable_end, Bytes exponents) {
  if (!is_raw) return decode_exponents(table, segment, readable_end, exponents);
  std::memcpy(exponents.data(), segment.data(), exponents.size());
  for (const std::uint8_t exponent : exponents)
    if (exponent >= table.n_symbols()) fail_in_chunk(kName, chunk, "an exponent is out of range");
}

// ---- chunks of format 1: exponents, two-bit levels, signs and mantissas. docs/format.md#gcomp

// Encodes n_values (with as many importance bytes, or null) into `message` from byte `offset` on; sets holds_nonfinite.
ChunkHeader encode_levels_chunk(const MessageCoding& coding, const std::uint8_t* values, const std::uint8_t* importance,
                                std::size_t n_values, std::uint8_t* message, std::uint64_t offset, const Mean&,
                                bool& holds_nonfinite) {
  Scratch& buffers = scratch();
  std::uint8_t* const exponents = buffers.exponents;
  if (coding.rounds) {
    coding.kernels.round(values, importance, n_values, coding.packing, buffers.words);
    values = buffers.words;
  }
  const ExponentSummary summary = coding.kernels.split_exponents(values, n_values, exponents);
  if (summary.holds_nonfinite) holds_nonfinite = true;
  ChunkHeader header{};
  header.offset = offset;
  header.n_values = static_cast<std::uint32_t>(n_values);
  write_exponents(coding.table, {exponents, n_values}, message + offset, header);
  if (coding.packing.mode == Mode::paper) header.own = static_cast<std::uint32_t>(2 * summary.n_nonzero);

  // Levels are few: they go to scratch first, because packing scribbles past their end.
  std::uint8_t* const level_begin = message + offset + header.exponent_bytes;
  const SegmentBits bits = coding.kernels.pack(values, exponents, importance, n_values, coding.packing, buffers.levels,
                                               level_begin + header.level_bytes(coding.version));
  header.mantissa_bits = static_cast<std::uint32_t>(bits.mantissas);
  std::memcpy(level_begin, buffers.levels, bytes_of_bits(bits.levels));
  return header;
}

// Decodes a chunk whose header and checksum are right. Throws CorruptMessage.
void decode_levels_chunk(const MessageCoding& coding, ConstBytes message, const ChunkHeader& header, std::size_t chunk,
                         const std::uint8_t*, const Finish& finish, std::uint8_t* values) {
  Scratch& buffers = scratch();
  const std::uint8_t* const end = message.data() + message.size();
  const Bytes exponents(buffers.exponents, header.n_values);
  read_exponents(coding.table, message.subspan(header.offset, header.exponent_bytes), chunk,
                 (header.flags & kFlagRawExponents) != 0, end, exponents);
  const bool is_done = finish.addend == nullptr && finish.divisor == 1;
  const SegmentSpan levels{message.data() + header.offset + header.exponent_bytes, header.own, end};
  const SegmentSpan mantissas{levels.data + header.level_bytes(coding.version), header.mantissa_bits, end};
  const SegmentBits asked = coding.kernels.unpack(exponents.data(), exponents.size(), coding.packing, levels, mantissas,
                                                  is_done ? values : buffers.words);
  if (asked.levels != header.own || asked.mantissas != header.mantissa_bits)
    fail_in_chunk(kName, chunk, "the exponents announce other levels or mantissas than there are");
  if (is_done) return;
  const auto dtype = static_cast<int>(coding.dtype);
  const std::size_t value_bytes = bytes_of(coding.dtype);
  for (std::size_t i = 0; i < exponents.size(); i += kLaneBlock) {
    const std::size_t n = std::min(kLaneBlock, exponents.size() - i);
    coding.lanes.widen[dtype](buffers.words + i * value_bytes, n, buffers.block);
    coding.lanes.finish[dtype](buffers.block, finish.addend == nullptr ? nullptr : finish.addend + i * value_bytes,
                               finish.divisor, n, values + i * value_bytes);
  }
}

// ---- chunks of format 2: words of signs and mantissas, then the exponents. docs/format.md#gcomp-format-2

constexpr int kLowestOfHalf = 103, kHighestOfHalf = 142;  // 2^-24 and 2^15 as exponents of float32

void check_importance(const ChunkHeader& header, std::size_t chunk, const std::uint8_t* importance) {
  if (crc32c({importance, header.n_values}) != header.own)
    throw RankMismatch(
        "GComp message: chunk ", chunk,
        ": the sender derives other importance bytes for these values than this rank. Both have to hold the same "
        "parameters, optimizer state, hyper-parameters and loss scale: load one checkpoint on all ranks, change "
        "learning rates on all of them alike, or use importance=\"uniform\" or format=1");
}

// What is left of each lane, below a one that marks its end.
void write_tail(const LaneStack& stack, std::uint8_t* at) {
  for (std::size_t lane = 0; lane < kLanes; ++lane)
    store(at + 4 * lane, stack.bits[lane] | std::uint32_t{1} << stack.n_bits[lane]);
}

void read_tail(const std::uint8_t* at, std::size_t chunk, LaneStack& stack) {
  for (std::size_t lane = 0; lane < kLanes; ++lane) {
    const auto word = load<std::uint32_t>(at + 4 * lane);
    if (word == 0) fail_in_chunk(kName, chunk, "a lane of mantissas has no end");
    stack.n_bits[lane] = 31 - static_cast<std::uint32_t>(std::countl_zero(word));
    stack.bits[lane] = word ^ std::uint32_t{1} << stack.n_bits[lane];
  }
}

void check_half_exponents(ConstBytes exponents, std::size_t chunk) {
  unsigned bad = 0;
  for (const std::uint8_t exponent : exponents)
    bad |=
        (exponent != 0) & (exponent != kWordMaxExponent) & ((exponent < kLowestOfHalf) | (exponent > kHighestOfHalf));
  if (bad != 0) fail_in_chunk(kName, chunk, "an exponent is out of range");
}

KeepRule keep_rule(Dtype dtype, Mode mode, int kept_bits, int least_bits) {
  const bool is_half = dtype == Dtype::float16;
  return {
      mode == Mode::paper, layout_of(dtype).mantissa_bits,           kept_bits,
      least_bits,          is_half ? kLowestOfHalf : -kWordMantissa, is_half ? kHighestOfHalf : kWordMaxExponent - 1};
}

// As of format 1; and what the chunk decodes to goes to `mean`.
ChunkHeader encode_lanes_chunk(const MessageCoding& coding, const std::uint8_t* values, const std::uint8_t* importance,
                               std::size_t n_values, std::uint8_t* message, std::uint64_t offset, const Mean& mean,
                               bool& holds_nonfinite) {
  Scratch& buffers = scratch();
  const std::size_t value_bytes = bytes_of(coding.dtype);
  std::uint8_t* const begin = message + offset;
  std::uint8_t* at = begin;
  LaneStack stack;
  const auto finish_block = coding.lanes.finish[static_cast<int>(coding.dtype)];
  std::uint8_t* const sent = mean.values == nullptr ? nullptr : buffers.block;
  for (std::size_t i = 0; i < n_values; i += kLaneBlock) {
    const std::size_t n = std::min(kLaneBlock, n_values - i);
    const std::uint8_t* words = values + i * value_bytes;
    if (coding.dtype != Dtype::float32) {
      coding.lanes.widen[static_cast<int>(coding.dtype)](words, n, buffers.block);
      words = buffers.block;
    }
    at = coding.lanes.push(words, importance == nullptr ? nullptr : importance + i, n, coding.rule, coding.rounds,
                           stack, at, buffers.exponents + i, sent, holds_nonfinite);
    if (sent != nullptr) finish_block(sent, nullptr, mean.divisor, n, mean.values + i * value_bytes);
  }
  write_tail(stack, at);
  at += kLaneTailBytes;
  ChunkHeader header{};
  header.offset = offset;
  header.n_values = static_cast<std::uint32_t>(n_values);
  header.mantissa_bits = static_cast<std::uint32_t>(8 * (at - begin));
  if (importance != nullptr) header.own = crc32c({importance, n_values});
  write_exponents(coding.table, {buffers.exponents, n_values}, at, header);
  return header;
}

// Throws CorruptMessage, RankMismatch.
void decode_lanes_chunk(const MessageCoding& coding, ConstBytes message, const ChunkHeader& header, std::size_t chunk,
                        const std::uint8_t* importance, const Finish& finish, std::uint8_t* values) {
  if (importance != nullptr) check_importance(header, chunk, importance);
  Scratch& buffers = scratch();
  const std::uint8_t* const begin = message.data() + header.offset;
  const std::uint8_t* const end = begin + header.mantissa_bits / 8;
  const Bytes exponents(buffers.exponents, header.n_values);
  read_exponents(coding.table, {end, header.exponent_bytes}, chunk, (header.flags & kFlagRawExponents) != 0,
                 message.data() + message.size(), exponents);
  if (coding.dtype == Dtype::float16) check_half_exponents(exponents, chunk);

  const std::size_t value_bytes = bytes_of(coding.dtype);
  const bool is_done = coding.dtype == Dtype::float32 && finish.addend == nullptr && finish.divisor == 1;
  const auto finish_block = coding.lanes.finish[static_cast<int>(coding.dtype)];
  const std::uint8_t* at = end - kLaneTailBytes;
  LaneStack stack;
  read_tail(at, chunk, stack);
  for (std::size_t i = (exponents.size() - 1) / kLaneBlock * kLaneBlock;; i -= kLaneBlock) {
    const std::size_t n = std::min(kLaneBlock, exponents.size() - i);
    std::uint8_t* const out = values + i * value_bytes;
    std::uint8_t* const words = is_done ? out : buffers.block;
    at = coding.lanes.pop(exponents.data() + i, importance == nullptr ? nullptr : importance + i, n, coding.rule, stack,
                          begin, at, words);
    if (at == nullptr) fail_in_chunk(kName, chunk, "the exponents announce more mantissas than there are");
    if (!is_done)
      finish_block(words, finish.addend == nullptr ? nullptr : finish.addend + i * value_bytes, finish.divisor, n, out);
    if (i == 0) break;
  }
  if (at != begin || std::any_of(stack.n_bits, stack.n_bits + kLanes, [](std::uint32_t n) { return n != 0; }))
    fail_in_chunk(kName, chunk, "the exponents announce fewer mantissas than there are");
}

// ---- messages

MessageCoding coding_of(Dtype dtype, Mode mode, int kept_bits, int least_bits, Version version, bool rounds,
                        const HuffmanTable& table) {
  const Packing packing{mode, layout_of(dtype).mantissa_bits - kept_bits};
  return {dtype,          version,
          rounds,         table,
          lane_kernels(), kernels_for(dtype),
          packing,        keep_rule(dtype, mode, kept_bits, least_bits)};
}

void decode_chunk(const MessageCoding& coding, ConstBytes message, const BlockHeader& block, std::size_t chunk,
                  const std::uint8_t* importance, const Finish& finish, std::uint8_t* values) {
  const ChunkHeader header = read_chunk_header(message, block, chunk);
  if (crc32c(message.subspan(header.offset, header.end_offset(block.version) - header.offset)) != header.checksum)
    fail_in_chunk(kName, chunk, "the checksum does not match: bytes were changed on the way");
  const auto decode_with = block.version == Version::levels ? decode_levels_chunk : decode_lanes_chunk;
  decode_with(coding, message, header, chunk, importance, finish, values);
}

}  // namespace

const char* name_of(Mode mode) {
  constexpr const char* names[kModes] = {"none", "paper", "uniform", "truncate"};
  return names[static_cast<int>(mode)];
}

std::uint64_t max_message_bytes(std::uint64_t n_elements, Dtype dtype, Mode mode, Version version) {
  const std::uint64_t n_full = n_elements / kChunkValues, n_rest = n_elements % kChunkValues;
  return kFront.table_end(chunks_of(n_elements)) + n_full * max_chunk_bytes(kChunkValues, dtype, mode, version) +
         (n_rest > 0 ? max_chunk_bytes(n_rest, dtype, mode, version) : 0);
}

BlockHeader read_block_header(ConstBytes message) {
  const auto header = load_header<BlockHeader>(kFront, message);
  const std::uint64_t n_elements = header.n_elements, n_chunks = header.n_chunks;
  expect(kName, "length in bytes", header.message_bytes, message.size());
  // The first test keeps the sums below from overflowing: a chunk header stands for at most 16,384 values.
  if (n_chunks > (message.size() - kBlockHeaderBytes) / kChunkHeaderBytes || n_elements > n_chunks * kChunkValues ||
      n_chunks != chunks_of(n_elements))
    fail_message(kName, n_chunks, " chunks for ", n_elements, " values in ", message.size(), " bytes");
  check_checksum(kFront, message.data(), n_chunks);
  check_dtype(kName, header.dtype);
  if (static_cast<int>(header.mode) >= kModes) fail_message(kName, "unknown mode code ", static_cast<int>(header.mode));
  // Format 2 may cap what mode paper keeps.
  const bool keeps_all = header.mode == Mode::none || (header.mode == Mode::paper && header.version == Version::levels);
  const int mantissa_bits = layout_of(header.dtype).mantissa_bits;
  const bool has_least = header.mode == Mode::paper && header.version == Version::derived;
  if (header.kept_bits > mantissa_bits || (keeps_all && header.kept_bits != mantissa_bits) ||
      (header.least_bits != 0 && !has_least))
    fail_message(kName, int{header.kept_bits}, " mantissa bits kept of ", mantissa_bits);
  if ((header.flags & ~kFlagNonfinite) != 0 || header.zero != 0) fail_message(kName, "unknown flags");
  return header;
}

std::uint64_t encode(ConstBytes values, ConstBytes importance, const EncodeOptions& options, const HuffmanTable& table,
                     Bytes out, const Mean& mean) {
  const DtypeLayout& layout = layout_of(options.dtype);
  const std::uint64_t n_elements = values.size() / bytes_of(options.dtype);
  check_room(kName, out, max_message_bytes(n_elements, options.dtype, options.mode, options.version));
  const bool quantises = options.mode == Mode::uniform || options.mode == Mode::truncate ||
                         (options.mode == Mode::paper && options.version == Version::derived);
  const int kept_bits = quantises ? options.kept_bits : layout.mantissa_bits;
  const int least_bits = options.mode == Mode::paper && options.version == Version::derived ? options.least_bits : 0;
  const bool rounds =
      options.mode == Mode::uniform || (options.mode == Mode::paper && options.rounding == Rounding::nearest);
  const MessageCoding coding =
      coding_of(options.dtype, options.mode, kept_bits, least_bits, options.version, rounds, table);
  const auto encode_chunk = [&](std::size_t chunk, std::uint64_t offset, bool& nonfinite) {
    const std::size_t first = chunk * kChunkValues;
    const std::size_t n_values = std::min<std::uint64_t>(kChunkValues, n_elements - first);
    const auto encode_with = options.version == Version::levels ? encode_levels_chunk : encode_lanes_chunk;
    const std::size_t first_byte = first * bytes_of(options.dtype);
    ChunkHeader header = encode_with(
        coding, values.data() + first_byte, importance.empty() ? nullptr : importance.data() + first, n_values,
        out.data(), offset, {mean.values == nullptr ? nullptr : mean.values + first_byte, mean.divisor}, nonfinite);
    const std::uint64_t end = header.end_offset(options.version);
    header.checksum = crc32c({out.data() + offset, out.data() + end});
    store(out.data() + kFront.table_end(chunk), header);
    return end;
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
    parallel_for(n_chunks, std::cref(encode_into_slot));
    holds_nonfinite = any_nonfinite.load();
    for (std::size_t chunk = 0; chunk < n_chunks; ++chunk) {
      ChunkHeader header = load_chunk_header(out.data(), chunk);
      const std::uint64_t n_bytes = header.end_offset(options.version) - header.offset;
      std::memmove(out.data() + end, out.data() + header.offset, n_bytes);
      header.offset = end;
      store(out.data() + kFront.table_end(chunk), header);
      end += n_bytes;
    }
  }
  const BlockHeader header{.version = options.version,
                           .dtype = options.dtype,
                           .mode = options.mode,
                           .kept_bits = static_cast<std::uint8_t>(kept_bits),
                           .least_bits = static_cast<std::uint8_t>(least_bits),
                           .table_id = table.id(),
                           .n_elements = n_elements,
                           .message_bytes = end,
                           .n_chunks = static_cast<std::uint32_t>(n_chunks),
                           .flags = holds_nonfinite ? kFlagNonfinite : 0};
  write_header(kFront, header, out.data(), n_chunks);
  if (mean.values != nullptr && options.version == Version::levels)
    decode(out.first(end), options.dtype, table, importance, {nullptr, mean.divisor}, {mean.values, values.size()});
  return end;
}

const HuffmanTable& table_of(ConstBytes message, std::span<const HuffmanTable* const> known) {
  const std::uint64_t id = read_block_header(message).table_id;
  for (const HuffmanTable* table : known)
    if (table->id() == id) return *table;
  const auto name_of_id = [](std::uint64_t number) {
    char text[19];
    std::snprintf(text, sizeof text, "0x%016" PRIx64, number);
    return std::string(text);
  };
  std::string ids;
  for (const HuffmanTable* table : known) ids += (ids.empty() ? "" : ", ") + name_of_id(table->id());
  throw CorruptMessage("the message was written with Huffman table ", name_of_id(id), "; known here: ", ids,
                       ". Every rank has to add_table() a new table before any rank may use it");
}

void decode(ConstBytes message, Dtype dtype, const HuffmanTable& table, ConstBytes importance, const Finish& finish,
            Bytes values) {
  const BlockHeader block = read_block_header(message);
  const std::size_t value_bytes = bytes_of(dtype);
  expect_values(kName, dtype, values.size() / value_bytes, block.dtype, block.n_elements);
  if (block.table_id != table.id() || table.exponent_bits() != exponent_bits_of(dtype, block.version))
    fail_message(kName, "it was written with another Huffman table");
  const bool derives = block.version == Version::derived && block.mode == Mode::paper;
  if (derives && importance.size() != block.n_elements)
    throw InvalidArgument("decoding this message needs one importance byte a value: ", block.n_elements, ", got ",
                          importance.size());
  check_chunks_adjoin(message, block);
  const MessageCoding coding =
      coding_of(dtype, block.mode, block.kept_bits, block.least_bits, block.version, false, table);
  const auto decode_one = [&](std::size_t chunk) {
    const std::size_t first = chunk * kChunkValues, offset = first * value_bytes;
    decode_chunk(coding, message, block, chunk, derives ? importance.data() + first : nullptr,
                 {finish.addend == nullptr ? nullptr : finish.addend + offset, finish.divisor}, values.data() + offset);
  };
  parallel_for(block.n_chunks, std::cref(decode_one));
}

void count_exponents(ConstBytes values, Dtype dtype, Version version, std::span<std::int64_t> histogram) {
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

Description describe(ConstBytes message) {
  Description sums{read_block_header(message), 0, 0, 0, 0, 0};
  check_chunks_adjoin(message, sums.header);
  sums.header_bytes = kBlockHeaderBytes + std::uint64_t{sums.header.n_chunks} * kChunkHeaderBytes;
  for (std::size_t chunk = 0; chunk < sums.header.n_chunks; ++chunk) {
    const ChunkHeader header = load_chunk_header(message.data(), chunk);
    sums.exponent_bytes += header.exponent_bytes;
    sums.level_bytes += header.level_bytes(sums.header.version);
    sums.mantissa_bytes += header.mantissa_bytes();
    sums.n_raw_chunks += (header.flags & kFlagRawExponents) != 0;
  }
  return sums;
}

}  // namespace gradwire::gcomp
