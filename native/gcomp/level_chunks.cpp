// Chunks of format 1: exponents, two-bit levels, signs and mantissas. docs/format.md#gcomp
#include <cstring>

#include "bits/bit_io.hpp"
#include "gcomp/chunks.hpp"

namespace gradwire::gcomp {

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
  if (coding.packing.mode == Mode::paper) header.level_bits = static_cast<std::uint32_t>(2 * summary.n_nonzero);

  // Levels are few: they go to scratch first, because packing scribbles past their end.
  std::uint8_t* const mantissa_begin = message + header.mantissa_offset();
  const SegmentBits bits = coding.kernels.pack(values, exponents, importance, n_values, coding.packing, coding.masks,
                                               buffers.levels, mantissa_begin);
  header.mantissa_bits = static_cast<std::uint32_t>(bits.mantissas);
  std::memcpy(message + header.level_offset(), buffers.levels, bytes_of_bits(bits.levels));
  return header;
}

void decode_levels_chunk(const MessageCoding& coding, std::span<const std::uint8_t> message, const ChunkHeader& header,
                         std::size_t chunk, const std::uint8_t*, const Finish& finish, std::uint8_t* values) {
  Scratch& buffers = scratch();
  const std::uint8_t* const end = message.data() + message.size();
  const std::span<std::uint8_t> exponents(buffers.exponents, header.n_values);
  read_exponents(coding.table, message.subspan(header.offset, header.exponent_bytes), chunk,
                 (header.flags & kFlagRawExponents) != 0, end, exponents);
  const bool is_done = finish.addend == nullptr && finish.divisor == 1;
  const SegmentSpan levels{message.data() + header.level_offset(), header.level_bits, end};
  const SegmentSpan mantissas{message.data() + header.mantissa_offset(), header.mantissa_bits, end};
  const SegmentBits asked = coding.kernels.unpack(exponents.data(), exponents.size(), coding.packing, coding.masks,
                                                  levels, mantissas, is_done ? values : buffers.words);
  if (asked.levels != header.level_bits || asked.mantissas != header.mantissa_bits)
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

}  // namespace gradwire::gcomp
