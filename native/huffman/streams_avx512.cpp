// AVX-512 with VBMI: the codes of 64 exponents are looked up in registers and joined, two, four, eight at a time,
// before anything depends on a bit position. Decoding is the scalar loop.
#include "huffman/stream_loops.hpp"

#if defined(__x86_64__)
#include <immintrin.h>

#include <bit>

namespace gradwire {
namespace {

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

}  // namespace

const StreamKernels kStreamKernelsAvx512 = {encode_stream, decode_streams_loop};

}  // namespace gradwire
#endif
