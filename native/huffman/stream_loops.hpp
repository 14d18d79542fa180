// The two inner loops of the exponent code. Included by one file an instruction set, hence internal linkage throughout.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>

#include "bits/bit_io.hpp"
#include "huffman/streams.hpp"
#include "huffman/table.hpp"

namespace gradwire {

// Appends the codes of exponents [begin, n_values), and those without one of their own to the escapes.
[[maybe_unused]] static inline void encode_loop(const std::uint8_t* exponents, std::size_t begin, std::size_t n_values,
                                                const std::uint64_t* codes, BitWriter& out, std::uint8_t*& escapes) {
  BitWriter writer = out;
  const auto keep_escapes = [&](std::size_t first, std::size_t n) {
    for (std::size_t j = first; j < first + n; ++j)
      if (codes[exponents[j]] & HuffmanTable::kEscapeFlag) *escapes++ = exponents[j];
  };
  std::size_t i = begin;
  // Five codes at a time: at most 55 bits, so that the entries' low 9 bits, which the or-ing leaves in the word, stay
  // below them, and with 7 pending bits the writer's word is not full. Every group starts from nothing: only the
  // writer's own update waits for the group before.
  constexpr std::size_t kGroup = 5;
  for (; i + kGroup <= n_values; i += kGroup) {
    std::uint64_t word = 0, sum = 0;
    for (std::size_t j = 0; j < kGroup; ++j) {
      const std::uint64_t entry = codes[exponents[i + j]];
      word = word >> (entry & 63) | entry;
      sum += entry;
    }
    if (sum & 7 * HuffmanTable::kEscapeFlag) keep_escapes(i, kGroup);  // the sum of up to five flags
    const std::uint64_t n_bits = sum & 63;
    write_bits(writer, word >> (64 - n_bits), n_bits);
  }
  for (; i < n_values; ++i) {
    const std::uint64_t entry = codes[exponents[i]];
    keep_escapes(i, 1);
    write_bits(writer, entry >> (64 - (entry & 63)), entry & 63);
  }
  out = writer;
}

[[maybe_unused]] static inline std::uint8_t* encode_stream_loop(const std::uint8_t* exponents, std::size_t n_values,
                                                                const HuffmanTable& table, std::uint8_t* out,
                                                                std::uint8_t*& escapes) {
  BitWriter writer{out};
  encode_loop(exponents, 0, n_values, table.codes(), writer, escapes);
  return finish(writer);
}

// One stream while it is decoded. The window holds the next bits under a marker: bit 63 is set when it is loaded, so
// that its leading zeros count the bits used since.
struct StreamDecoder {
  const std::uint8_t* in;
  std::uint64_t n_skip;  // bits of in[0] used before
  std::uint64_t window;
  std::uint8_t* out;
};

[[maybe_unused]] static inline void fill_window(StreamDecoder& stream) {
  stream.window = load<std::uint64_t>(stream.in) >> stream.n_skip | std::uint64_t{1} << 63;  // >= 57 bits are valid
}

[[maybe_unused]] static inline void refill_window(StreamDecoder& stream) {
  const std::uint64_t n_used = stream.n_skip + static_cast<std::uint64_t>(std::countl_zero(stream.window));
  stream.in += n_used >> 3;
  stream.n_skip = n_used & 7;
  fill_window(stream);
}

[[maybe_unused]] static inline void decode_several(StreamDecoder& stream, const std::uint64_t* lookup) {
  const std::uint64_t entry = lookup[stream.window & (kLookupEntries - 1)];
  store(stream.out, entry >> 16);  // 6 symbols, of which only the first few count, and two bytes of nothing
  stream.out += (entry >> 8) & 0xFF;
  stream.window >>= entry & 63;
}

// What one look-up may store at stream.out, and what a round of five may.
inline constexpr std::ptrdiff_t kLookUpBytes = 8, kRoundBytes = 5 * 6 + 2;

[[maybe_unused]] static inline void decode_round(StreamDecoder& stream, const std::uint64_t* lookup) {
  for (int look_up = 0; look_up < 5; ++look_up) decode_several(stream, lookup);
  refill_window(stream);
}

// Decodes the streams side by side: a look-up waits 7 cycles for the one before it in its own stream, four streams fill
// that wait. Reads at most 11 bits a value and a word beyond each stream's start.
[[maybe_unused]] static inline void decode_streams_loop(const HuffmanTable& table, const StreamSpans& streams,
                                                        std::array<std::uint64_t, kStreams>& n_bits_used) {
  const std::uint64_t* lookup = table.lookup();
  StreamDecoder a{streams.in[0], 0, 0, streams.out[0]}, b{streams.in[1], 0, 0, streams.out[1]};
  StreamDecoder c{streams.in[2], 0, 0, streams.out[2]}, d{streams.in[3], 0, 0, streams.out[3]};
  fill_window(a), fill_window(b), fill_window(c), fill_window(d);
  std::uint8_t* const* end = streams.out_end;
  while (end[0] - a.out >= kRoundBytes && end[1] - b.out >= kRoundBytes && end[2] - c.out >= kRoundBytes &&
         end[3] - d.out >= kRoundBytes) {
    for (int look_up = 0; look_up < 5; ++look_up) {
      decode_several(a, lookup);
      decode_several(b, lookup);
      decode_several(c, lookup);
      decode_several(d, lookup);
    }
    refill_window(a), refill_window(b), refill_window(c), refill_window(d);
  }
  std::array<StreamDecoder*, kStreams> all = {&a, &b, &c, &d};
  for (std::size_t j = 0; j < kStreams; ++j) {
    StreamDecoder& stream = *all[j];
    while (end[j] - stream.out >= kRoundBytes) decode_round(stream, lookup);
    for (; end[j] - stream.out >= kLookUpBytes; refill_window(stream)) decode_several(stream, lookup);
    while (stream.out < end[j]) {
      const std::uint16_t entry = table.lookup_single()[stream.window & (kLookupEntries - 1)];
      *stream.out++ = static_cast<std::uint8_t>(entry >> 8);
      stream.window >>= entry & 63;
      refill_window(stream);
    }
    n_bits_used[j] = 8 * static_cast<std::uint64_t>(stream.in - streams.in[j]) + stream.n_skip;
  }
}

}  // namespace gradwire
