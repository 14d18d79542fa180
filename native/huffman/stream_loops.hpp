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

// Returns the byte after the stream; ors the code entries together in `seen`, so that the escape flag shows if any is.
[[maybe_unused]] static inline std::uint8_t* encode_stream_loop(const std::uint8_t* exponents, std::size_t n_values,
                                                                const std::uint32_t* codes, std::uint8_t* out,
                                                                std::uint32_t& seen) {
  BitWriter writer{out};
  std::uint32_t flags = 0;
  std::size_t i = 0;
  for (; i + 5 <= n_values; i += 5) {  // 5 codes of at most 11 bits and 7 pending bits fit a word
    const std::uint32_t a = codes[exponents[i]], b = codes[exponents[i + 1]], c = codes[exponents[i + 2]];
    const std::uint32_t d = codes[exponents[i + 3]], e = codes[exponents[i + 4]];
    flags |= a | b | c | d | e;
    const std::uint64_t n_a = (a >> 16) & 0xFF, n_b = (b >> 16) & 0xFF, n_c = (c >> 16) & 0xFF;
    const std::uint64_t n_d = (d >> 16) & 0xFF, n_e = (e >> 16) & 0xFF;
    // Joined as a tree, not a chain: only the writer's own update depends on the group before.
    const std::uint64_t ab = (a & 0xFFFF) | std::uint64_t{b & 0xFFFF} << n_a;
    const std::uint64_t cd = (c & 0xFFFF) | std::uint64_t{d & 0xFFFF} << n_c;
    const std::uint64_t n_ab = n_a + n_b, n_abcd = n_ab + n_c + n_d;
    write_bits(writer, ab | cd << n_ab | std::uint64_t{e & 0xFFFF} << n_abcd, n_abcd + n_e);
  }
  for (; i < n_values; ++i) {
    const std::uint32_t entry = codes[exponents[i]];
    flags |= entry;
    write_bits(writer, entry & 0xFFFF, (entry >> 16) & 0xFF);
  }
  seen |= flags;
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

inline constexpr std::ptrdiff_t kRoundBytes = 5 * 6 + 2;  // five look-ups: what one round may store at stream.out

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
