// A canonical, length-limited Huffman code of exponents with an escape; immutable once built.
// docs/format.md#huffman-table
#pragma once

#include <array>
#include <vector>

#include "simd/dispatch.hpp"
#include "spans.hpp"

namespace gradwire {

// 11 bits: a look-up table of 2,048 entries x 8 B = 16 KiB, a third of a 48 KiB L1d. Measured on the two dense
// reference gradients, exponent bits a value: limit 8 (which the paper's Table 1 implies) 3.145 and 3.548, limit
// 11 3.136 and 3.539, no limit 3.132 and 3.538. Eleven bits also hold 3 symbols on average, which one look-up then
// decodes together.
inline constexpr int kCodeLengthLimit = 11;
inline constexpr std::size_t kLookupEntries = std::size_t{1} << kCodeLengthLimit;

class HuffmanTable {
 public:
  // `exponent_bits` is 8 (float32, bfloat16) or 5 (float16); the histogram has 2^exponent_bits counts.
  static HuffmanTable from_histogram(std::span<const std::int64_t> histogram, int exponent_bits);
  // The code to start from, before any gradient has been seen.
  static HuffmanTable prior(int exponent_bits);
  static HuffmanTable from_bytes(ConstBytes bytes);
  std::vector<std::uint8_t> to_bytes() const;

  std::uint64_t id() const { return id_; }  // FNV-1a, 64 bits, of to_bytes()
  int exponent_bits() const { return exponent_bits_; }
  std::size_t n_symbols() const { return std::size_t{1} << exponent_bits_; }
  const std::vector<std::uint8_t>& lengths() const { return lengths_; }
  bool has_escape() const { return lengths_.back() != 0; }
  bool is_escaped(std::uint8_t exponent) const { return lengths_[exponent] == 0; }
  // What an escape code decodes to before its raw byte is put in: the lowest exponent that has no code.
  std::uint8_t placeholder() const { return placeholder_; }

  // Encoder: by exponent, the code in the highest bits, its length in bits 0-5, and kEscapeFlag if it is the escape's.
  // So shifting a word right by the entry and or-ing the entry in appends the code (Collet's trick in zstd's
  // huf_compress).
  static constexpr std::uint64_t kEscapeFlag = 1u << 8;
  const std::uint64_t* codes() const { return codes_.data(); }
  // The same for look-ups by permutation: 256 low bytes of the codes, 256 high bytes, 256 lengths (128 added: the
  // escape).
  const std::uint8_t* code_planes() const { return code_planes_.data(); }

  // Decoder: by the next 11 bits of the stream, as many symbols as they hold whole (at most 6). Bits 0-7: bits used up;
  // 8-15: number of symbols; 16-63: the symbols, first in the lowest byte.
  const std::uint64_t* lookup() const { return lookup_.data(); }
  // The same for one symbol: bits 0-7 its length, 8-15 the symbol.
  const std::uint16_t* lookup_single() const { return lookup_single_.data(); }

 private:
  // 2^exponent_bits lengths, then the escape's: a complete code with an escape exactly where one is needed.
  HuffmanTable(ConstBytes lengths, int exponent_bits);

  int exponent_bits_;
  std::uint8_t placeholder_ = 0;
  std::uint64_t id_;
  std::vector<std::uint8_t> lengths_;
  std::array<std::uint64_t, 256> codes_{};
  std::array<std::uint8_t, 3 * 256> code_planes_{};
  alignas(64) std::array<std::uint64_t, kLookupEntries> lookup_{};
  alignas(64) std::array<std::uint16_t, kLookupEntries> lookup_single_{};
};

// Huffman's own code, without limit or escape: symbols of weight 0 get length 0. For comparison (Fig. 12 of the paper).
std::vector<int> native_code_lengths(std::span<const std::uint64_t> weights);

// The exponent segment of a chunk: four Huffman streams and the escaped exponents. docs/format.md#gcomp
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
std::size_t encode_exponents(const HuffmanTable& table, ConstBytes exponents, std::uint8_t* out);

// Reads `segment` into `exponents`. Bytes up to `readable_end` may be loaded (never used) beyond the segment.
// Throws CorruptMessage.
void decode_exponents(const HuffmanTable& table, ConstBytes segment, const std::uint8_t* readable_end, Bytes exponents);

// The same by walking the code tree bit by bit: only to be compared with (Fig. 13b of the paper).
void decode_exponents_by_tree(const HuffmanTable& table, ConstBytes segment, Bytes exponents);

// stream_loops.cpp
struct StreamKernels {
  // Returns the byte after the stream; appends the exponents that have no code to `escapes`. Scribbles a word past the
  // stream.
  std::uint8_t* (*encode)(const std::uint8_t* exponents, std::size_t n_values, const HuffmanTable& table,
                          std::uint8_t* out, std::uint8_t*& escapes);
  void (*decode)(const HuffmanTable& table, const StreamSpans& streams,
                 std::array<std::uint64_t, kStreams>& n_bits_used);
};
GW_KERNELS(StreamKernels, stream_kernels, 2)

}  // namespace gradwire
