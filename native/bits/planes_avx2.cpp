// The AVX2 twin of planes.cpp. Going out, bytes of equal significance of 32 words are brought together; each plane is
// then the sign bits of 32 bytes. Coming in, the same backwards.
#if defined(__AVX2__)
#include <immintrin.h>

#include "bits/bit_io.hpp"
#include "bits/planes.hpp"

namespace gradwire::planes {
namespace {

__m256i load256(const void* from) { return _mm256_loadu_si256(static_cast<const __m256i*>(from)); }
void store256(void* to, __m256i lanes) { _mm256_storeu_si256(static_cast<__m256i*>(to), lanes); }

// Bytes 3 (the most significant) to 4 - n_bytes of 32 words, each as a vector in the order of the words.
template <int n_bytes>
void split_bytes(const std::uint32_t* words, __m128i shift, __m256i* bytes) {
  __m256i lanes[4];
  for (int part = 0; part < 4; ++part) lanes[part] = _mm256_sll_epi32(load256(words + 8 * part), shift);
  // After packing, halves of four bytes each come from words 0 8 16 24 | 4 12 20 28.
  const __m256i in_order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  if constexpr (n_bytes == 1) {
    for (__m256i& part : lanes) part = _mm256_srli_epi32(part, 24);
    const __m256i low = _mm256_packus_epi32(lanes[0], lanes[1]), high = _mm256_packus_epi32(lanes[2], lanes[3]);
    bytes[0] = _mm256_permutevar8x32_epi32(_mm256_packus_epi16(low, high), in_order);
  } else {
    const __m256i by_significance = _mm256_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15, 0, 4, 8, 12,
                                                     1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    for (__m256i& part : lanes) part = _mm256_shuffle_epi8(part, by_significance);
    // Four words of four bytes in each half: transpose them.
    const __m256i low01 = _mm256_unpacklo_epi32(lanes[0], lanes[1]), low23 = _mm256_unpacklo_epi32(lanes[2], lanes[3]);
    const __m256i high01 = _mm256_unpackhi_epi32(lanes[0], lanes[1]),
                  high23 = _mm256_unpackhi_epi32(lanes[2], lanes[3]);
    const __m256i by_byte[4] = {_mm256_unpackhi_epi64(high01, high23), _mm256_unpacklo_epi64(high01, high23),
                                _mm256_unpackhi_epi64(low01, low23), _mm256_unpacklo_epi64(low01, low23)};
    for (int byte = 0; byte < n_bytes; ++byte) bytes[byte] = _mm256_permutevar8x32_epi32(by_byte[byte], in_order);
  }
}

template <int n_bytes>
void pack_bytes(const std::uint32_t* words, std::size_t n_groups, Range range, std::uint8_t* out,
                std::size_t stride_bytes) {
  const __m128i shift = _mm_cvtsi32_si128(range.first);
  const int n_last = range.n - 8 * (n_bytes - 1);  // planes of the last byte
  for (std::size_t group = 0; group < n_groups; ++group) {
    __m256i bytes[n_bytes];
    split_bytes<n_bytes>(words + kGroup * group, shift, bytes);
    std::uint8_t* to = out + 4 * group;
    const auto write = [&](__m256i& byte) {
      store(to, static_cast<std::uint32_t>(_mm256_movemask_epi8(byte)));
      byte = _mm256_add_epi8(byte, byte);
      to += stride_bytes;
    };
    for (int byte = 0; byte < n_bytes - 1; ++byte)
      for (int plane = 0; plane < 8; ++plane) write(bytes[byte]);
    for (int plane = 0; plane < n_last; ++plane) write(bytes[n_bytes - 1]);
  }
}

void pack(const std::uint32_t* words, std::size_t n_groups, Range range, std::uint8_t* out, std::size_t stride_bytes) {
  constexpr decltype(&pack_bytes<1>) by_bytes[] = {pack_bytes<1>, pack_bytes<2>, pack_bytes<3>, pack_bytes<4>};
  by_bytes[(range.n - 1) / 8](words, n_groups, range, out, stride_bytes);
}

template <int n_bytes>
void unpack_bytes(const std::uint8_t* planes, std::size_t stride_bytes, std::size_t n_groups, Range range,
                  std::uint32_t keep, std::uint32_t* words) {
  const __m128i shift = _mm_cvtsi32_si128(range.first);
  const __m256i kept = _mm256_set1_epi32(static_cast<int>(keep));
  const int n_last = range.n - 8 * (n_bytes - 1);
  const __m128i fill = _mm_cvtsi32_si128(8 - n_last);
  // Byte i of a vector takes byte i / 8 of the plane's word, and looks at bit i % 8 of it.
  const __m256i spread = _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
  const __m256i bit = _mm256_set1_epi64x(static_cast<long long>(0x8040201008040201));
  for (std::size_t group = 0; group < n_groups; ++group) {
    const std::uint8_t* from = planes + 4 * group;
    const auto read = [&](__m256i& byte) {
      const __m256i word = _mm256_set1_epi32(static_cast<int>(load<std::uint32_t>(from)));
      const __m256i is_set = _mm256_cmpeq_epi8(_mm256_and_si256(_mm256_shuffle_epi8(word, spread), bit), bit);
      byte = _mm256_sub_epi8(_mm256_add_epi8(byte, byte), is_set);
      from += stride_bytes;
    };
    __m256i bytes[4] = {_mm256_setzero_si256(), _mm256_setzero_si256(), _mm256_setzero_si256(), _mm256_setzero_si256()};
    for (int byte = 0; byte < n_bytes - 1; ++byte)
      for (int plane = 0; plane < 8; ++plane) read(bytes[byte]);
    __m256i& last = bytes[n_bytes - 1];
    for (int plane = 0; plane < n_last; ++plane) read(last);
    // Missing planes are zeros at the bottom of each byte: a shift of pairs of bytes, and what crossed over taken off.
    last = _mm256_and_si256(_mm256_sll_epi16(last, fill), _mm256_set1_epi8(static_cast<char>(0xFF << (8 - n_last))));

    __m256i parts[4];  // words 0-3 16-19, 4-7 20-23, 8-11 24-27, 12-15 28-31
    const __m256i high_low = _mm256_unpacklo_epi8(bytes[1], bytes[0]),
                  high_high = _mm256_unpackhi_epi8(bytes[1], bytes[0]);
    if constexpr (n_bytes <= 2) {
      const __m256i zero = _mm256_setzero_si256();
      parts[0] = _mm256_unpacklo_epi16(zero, high_low);
      parts[1] = _mm256_unpackhi_epi16(zero, high_low);
      parts[2] = _mm256_unpacklo_epi16(zero, high_high);
      parts[3] = _mm256_unpackhi_epi16(zero, high_high);
    } else {
      const __m256i low_low = _mm256_unpacklo_epi8(bytes[3], bytes[2]),
                    low_high = _mm256_unpackhi_epi8(bytes[3], bytes[2]);
      parts[0] = _mm256_unpacklo_epi16(low_low, high_low);
      parts[1] = _mm256_unpackhi_epi16(low_low, high_low);
      parts[2] = _mm256_unpacklo_epi16(low_high, high_high);
      parts[3] = _mm256_unpackhi_epi16(low_high, high_high);
    }
    std::uint32_t* const to = words + kGroup * group;
    const auto put = [&](int index, __m256i lanes) {
      const __m256i old = _mm256_and_si256(load256(to + 8 * index), kept);
      store256(to + 8 * index, _mm256_or_si256(old, _mm256_srl_epi32(lanes, shift)));
    };
    put(0, _mm256_permute2x128_si256(parts[0], parts[1], 0x20));
    put(1, _mm256_permute2x128_si256(parts[2], parts[3], 0x20));
    put(2, _mm256_permute2x128_si256(parts[0], parts[1], 0x31));
    put(3, _mm256_permute2x128_si256(parts[2], parts[3], 0x31));
  }
}

void unpack(const std::uint8_t* planes, std::size_t stride_bytes, std::size_t n_groups, Range range, std::uint32_t keep,
            std::uint32_t* words) {
  constexpr decltype(&unpack_bytes<1>) by_bytes[] = {unpack_bytes<1>, unpack_bytes<2>, unpack_bytes<3>,
                                                     unpack_bytes<4>};
  by_bytes[(range.n - 1) / 8](planes, stride_bytes, n_groups, range, keep, words);
}

}  // namespace

const Kernels kAvx2 = {pack, unpack};

}  // namespace gradwire::planes
#endif
