#include <algorithm>
#include <array>
#include <bit>

#include "bits/bit_io.hpp"
#include "huffman/table.hpp"

#if defined(__AVX512VBMI2__)
#include <immintrin.h>
#endif

namespace gradwire {
namespace {

// Appends the codes of exponents [begin, n_values), and those without one of their own to the escapes.
inline void encode_loop(const std::uint8_t* exponents, std::size_t begin, std::size_t n_values,
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

#if defined(__AVX512VBMI2__)

// The codes of 64 exponents are looked up in registers and joined, two, four, eight at a time, before anything depends
// on a bit position.

constexpr std::size_t kStep = 64;

// One byte for each exponent: four registers.
struct Plane {
  __m512i parts[4];
  explicit Plane(const std::uint8_t* bytes) {
    for (int part = 0; part < 4; ++part) parts[part] = _mm512_loadu_si512(bytes + 64 * part);
  }
  __m512i look_up(__m512i exponents, __mmask64 upper_half) const {
    return _mm512_mask_blend_epi8(upper_half, _mm512_permutex2var_epi8(parts[0], exponents, parts[1]),
                                  _mm512_permutex2var_epi8(parts[2], exponents, parts[3]));
  }
};

// Codes and their lengths in the lanes of two vectors.
struct Codes {
  __m512i bits, n_bits;
};

// 16-bit lanes to 64-bit lanes: four codes joined, the first one lowest.
Codes join_four(Codes codes) {
  const __m512i low_16 = _mm512_set1_epi32(0xFFFF), low_32 = _mm512_set1_epi64(0xFFFFFFFF);
  const __m512i n_first = _mm512_and_si512(codes.n_bits, low_16);
  const __m512i pairs = _mm512_or_si512(_mm512_and_si512(codes.bits, low_16),
                                        _mm512_sllv_epi32(_mm512_srli_epi32(codes.bits, 16), n_first));
  const __m512i n_pairs = _mm512_add_epi32(n_first, _mm512_srli_epi32(codes.n_bits, 16));
  const __m512i n_first_pair = _mm512_and_si512(n_pairs, low_32);
  return {
      _mm512_or_si512(_mm512_and_si512(pairs, low_32), _mm512_sllv_epi64(_mm512_srli_epi64(pairs, 32), n_first_pair)),
      _mm512_add_epi64(n_first_pair, _mm512_srli_epi64(n_pairs, 32))};
}

std::uint8_t* encode_stream(const std::uint8_t* exponents, std::size_t n_values, const HuffmanTable& table,
                            std::uint8_t* out, std::uint8_t*& escapes) {
  const Plane low(table.code_planes()), high(table.code_planes() + 256), length(table.code_planes() + 512);
  BitWriter writer{out};
  std::size_t i = 0;
  for (; i + kStep <= n_values; i += kStep) {
    const __m512i exponent = _mm512_loadu_si512(exponents + i);
    const __mmask64 upper = _mm512_movepi8_mask(exponent);
    const __m512i flagged = length.look_up(exponent, upper);
    for (std::uint64_t escaped = _mm512_movepi8_mask(flagged); escaped != 0; escaped &= escaped - 1)
      *escapes++ = exponents[i + static_cast<std::size_t>(std::countr_zero(escaped))];
    const __m512i n_bits = _mm512_and_si512(flagged, _mm512_set1_epi8(0x7F));
    const __m512i code_low = low.look_up(exponent, upper), code_high = high.look_up(exponent, upper);
    const __m512i zero = _mm512_setzero_si512();
    // Of each 16 exponents, unpacklo takes the first eight and unpackhi the others: so `first` and `second` hold the
    // first and the second four of every eight, in order.
    const Codes a = join_four({_mm512_unpacklo_epi8(code_low, code_high), _mm512_unpacklo_epi8(n_bits, zero)});
    const Codes b = join_four({_mm512_unpackhi_epi8(code_low, code_high), _mm512_unpackhi_epi8(n_bits, zero)});
    const Codes first{_mm512_unpacklo_epi64(a.bits, b.bits), _mm512_unpacklo_epi64(a.n_bits, b.n_bits)};
    const Codes second{_mm512_unpackhi_epi64(a.bits, b.bits), _mm512_unpackhi_epi64(a.n_bits, b.n_bits)};
    const __m512i n_both = _mm512_add_epi64(first.n_bits, second.n_bits);
    alignas(64) std::uint64_t bits[8], n[8];
    if (_mm512_cmpgt_epu64_mask(n_both, _mm512_set1_epi64(kMaxWriteBits)) == 0) {
      _mm512_store_si512(bits, _mm512_or_si512(first.bits, _mm512_sllv_epi64(second.bits, first.n_bits)));
      _mm512_store_si512(n, n_both);
      for (int j = 0; j < 8; ++j) write_bits(writer, bits[j], n[j]);
    } else {  // eight long codes in a row do not fit a word
      alignas(64) std::uint64_t more_bits[8], n_more[8];
      _mm512_store_si512(bits, first.bits);
      _mm512_store_si512(n, first.n_bits);
      _mm512_store_si512(more_bits, second.bits);
      _mm512_store_si512(n_more, second.n_bits);
      for (int j = 0; j < 8; ++j) {
        write_bits(writer, bits[j], n[j]);
        write_bits(writer, more_bits[j], n_more[j]);
      }
    }
  }
  encode_loop(exponents, i, n_values, table.codes(), writer, escapes);
  return finish(writer);
}

#else

std::uint8_t* encode_stream(const std::uint8_t* exponents, std::size_t n_values, const HuffmanTable& table,
                            std::uint8_t* out, std::uint8_t*& escapes) {
  BitWriter writer{out};
  encode_loop(exponents, 0, n_values, table.codes(), writer, escapes);
  return finish(writer);
}

#endif

// One stream while it is decoded. The window holds the next bits under a marker: bit 63 is set when it is loaded, so
// that its leading zeros count the bits used since.
struct StreamDecoder {
  const std::uint8_t* in;
  std::uint64_t n_skip;  // bits of in[0] used before
  std::uint64_t window;
  std::uint8_t* out;
};

inline void fill_window(StreamDecoder& stream) {
  stream.window = load<std::uint64_t>(stream.in) >> stream.n_skip | std::uint64_t{1} << 63;  // >= 57 bits are valid
}

inline void refill_window(StreamDecoder& stream) {
  const std::uint64_t n_used = stream.n_skip + static_cast<std::uint64_t>(std::countl_zero(stream.window));
  stream.in += n_used >> 3;
  stream.n_skip = n_used & 7;
  fill_window(stream);
}

inline void decode_several(StreamDecoder& stream, const std::uint64_t* lookup) {
  const std::uint64_t entry = lookup[stream.window & (kLookupEntries - 1)];
  store(stream.out, entry >> 16);  // 6 symbols, of which only the first few count, and two bytes of nothing
  stream.out += (entry >> 8) & 0xFF;
  stream.window >>= entry & 63;
}

// What one look-up may store at stream.out, and what a round of five may.
inline constexpr std::ptrdiff_t kLookUpBytes = 8, kRoundBytes = 5 * 6 + 2;

// Decodes the streams side by side: a look-up waits 7 cycles for the one before it in its own stream, four streams fill
// that wait. Reads at most 11 bits a value and a word beyond each stream's start.
inline void decode_streams(const HuffmanTable& table, const StreamSpans& streams,
                           std::array<std::uint64_t, kStreams>& n_bits_used) {
  const std::uint64_t* lookup = table.lookup();
  std::uint8_t* const* end = streams.out_end;
  StreamDecoder all[kStreams];
  for (std::size_t j = 0; j < kStreams; ++j) {
    all[j] = {streams.in[j], 0, 0, streams.out[j]};
    fill_window(all[j]);
  }
  const auto decode_round = [lookup](auto&... several) {
    for (int look_up = 0; look_up < 5; ++look_up) (decode_several(several, lookup), ...);
    (refill_window(several), ...);
  };
  auto& [a, b, c, d] = all;
  while (end[0] - a.out >= kRoundBytes && end[1] - b.out >= kRoundBytes && end[2] - c.out >= kRoundBytes &&
         end[3] - d.out >= kRoundBytes)
    decode_round(a, b, c, d);
  for (std::size_t j = 0; j < kStreams; ++j) {
    StreamDecoder& stream = all[j];
    while (end[j] - stream.out >= kRoundBytes) decode_round(stream);
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

}  // namespace

const StreamKernels& stream_kernels_at(Level<GW_LEVEL>) {
  static constexpr StreamKernels all = {encode_stream, decode_streams};
  return all;
}

}  // namespace gradwire
