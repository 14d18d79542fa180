// The exponent segment of a chunk: four Huffman streams and the escaped exponents. docs/format.md#gcomp
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "huffman/table.hpp"
#include "simd/dispatch.hpp"

namespace gradwire {

inline constexpr std::size_t kStreams = 4;
inline constexpr std::size_t kMaxSegmentValues = 16384;
inline constexpr std::size_t kSegmentHeaderBytes = 2 * kStreams + 2;  // bytes of each stream, number of escapes

// Where stream j's codes begin, and where its values go.
struct StreamSpans {
  const std::uint8_t* in[kStreams];
  std::uint8_t* out[kStreams];
  std::uint8_t* out_end[kStreams];
};

// Values [begin, end) of stream j: consecutive quarters, rounded up.
struct ValueRange {
  std::size_t begin, end;
};
constexpr ValueRange stream_range(std::size_t n_values, std::size_t stream) {
  const std::size_t quarter = (n_values + kStreams - 1) / kStreams;
  const std::size_t begin = stream * quarter, end = begin + quarter;
  return {begin < n_values ? begin : n_values, end < n_values ? end : n_values};
}

// The most bytes that encode_exponents touches: 11 bits a value, a word of slack, or the raw exponents.
constexpr std::size_t max_segment_bytes(std::size_t n_values) {
  return kSegmentHeaderBytes + (n_values * kCodeLengthLimit + 7) / 8 + kStreams + 8;
}

// Writes the segment of at most kMaxSegmentValues exponents; returns its bytes, or 0 if it is not shorter than the
// exponents themselves (then `out` holds nothing of use).
std::size_t encode_exponents(const HuffmanTable& table, std::span<const std::uint8_t> exponents, std::uint8_t* out);

// Reads `segment` into `exponents`. Bytes up to `readable_end` may be loaded (never used) beyond the segment.
// Throws CorruptMessage.
void decode_exponents(const HuffmanTable& table, std::span<const std::uint8_t> segment,
                      const std::uint8_t* readable_end, std::span<std::uint8_t> exponents);

// The same by walking the code tree bit by bit: only to be compared with (Fig. 13b of the paper).
void decode_exponents_by_tree(const HuffmanTable& table, std::span<const std::uint8_t> segment,
                              std::span<std::uint8_t> exponents);

// stream_loops.cpp
struct StreamKernels {
  // Returns the byte after the stream; appends the exponents that have no code to `escapes`. Scribbles a word past the
  // stream.
  std::uint8_t* (*encode)(const std::uint8_t* exponents, std::size_t n_values, const HuffmanTable& table,
                          std::uint8_t* out, std::uint8_t*& escapes);
  void (*decode)(const HuffmanTable& table, const StreamSpans& streams,
                 std::array<std::uint64_t, kStreams>& n_bits_used);
};
const StreamKernels &stream_kernels_at(Level<0>), &stream_kernels_at(Level<1>), &stream_kernels_at(Level<2>);

}  // namespace gradwire
