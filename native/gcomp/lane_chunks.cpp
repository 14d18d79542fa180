// Chunks of format 2: words of signs and mantissas, then the exponents. docs/format.md#gcomp-format-2
#include <algorithm>
#include <bit>
#include <string>

#include "bits/bit_io.hpp"
#include "checksum/crc32c.hpp"
#include "errors.hpp"
#include "gcomp/chunks.hpp"

namespace gradwire::gcomp {
namespace {

constexpr int kLowestOfHalf = 103, kHighestOfHalf = 142;  // 2^-24 and 2^15 as exponents of float32

void check_importance(const ChunkHeader& header, std::size_t chunk, const std::uint8_t* importance) {
  if (crc32c({importance, header.n_values}) != header.importance_checksum)
    throw RankMismatch(
        "GComp message: chunk " + std::to_string(chunk) +
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

void check_half_exponents(std::span<const std::uint8_t> exponents, std::size_t chunk) {
  unsigned bad = 0;
  for (const std::uint8_t exponent : exponents)
    bad |=
        (exponent != 0) & (exponent != kWordMaxExponent) & ((exponent < kLowestOfHalf) | (exponent > kHighestOfHalf));
  if (bad != 0) fail_in_chunk(kName, chunk, "an exponent is out of range");
}

}  // namespace

KeepRule keep_rule(Dtype dtype, Mode mode, int kept_bits) {
  const bool is_half = dtype == Dtype::float16;
  return {mode == Mode::paper, layout_of(dtype).mantissa_bits, kept_bits, is_half ? kLowestOfHalf : -kWordMantissa,
          is_half ? kHighestOfHalf : kWordMaxExponent - 1};
}

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
  if (importance != nullptr) header.importance_checksum = crc32c({importance, n_values});
  write_exponents(coding.table, {buffers.exponents, n_values}, at, header);
  return header;
}

void decode_lanes_chunk(const MessageCoding& coding, std::span<const std::uint8_t> message, const ChunkHeader& header,
                        std::size_t chunk, const std::uint8_t* importance, const Finish& finish, std::uint8_t* values) {
  if (importance != nullptr) check_importance(header, chunk, importance);
  Scratch& buffers = scratch();
  const std::uint8_t* const begin = message.data() + header.offset;
  const std::uint8_t* const end = begin + header.mantissa_bits / 8;
  const std::span<std::uint8_t> exponents(buffers.exponents, header.n_values);
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

}  // namespace gradwire::gcomp
