#include <cstring>
#include <utility>

#include "bits/bit_io.hpp"
#include "bits/packing.hpp"
#include "simd/lanes.hpp"

namespace gradwire::planes {
namespace {

#if defined(__AVX2__)

// Going out, bytes of equal significance of 32 words are brought together; each plane is then the sign bits of 32
// bytes. Coming in, the same backwards.

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

// One byte of the words of a group from `n` planes, the first one its highest bit; missing planes are zeros.
__m256i read_byte(const std::uint8_t* from, std::size_t stride_bytes, int n) {
  // Byte i of a vector takes byte i / 8 of the plane's word, and looks at bit i % 8 of it.
  const __m256i spread = _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
  const __m256i bit = _mm256_set1_epi64x(static_cast<long long>(0x8040201008040201));
  __m256i byte = _mm256_setzero_si256();
  for (int plane = 0; plane < n; ++plane, from += stride_bytes) {
    const __m256i word = _mm256_set1_epi32(static_cast<int>(load<std::uint32_t>(from)));
    const __m256i is_set = _mm256_cmpeq_epi8(_mm256_and_si256(_mm256_shuffle_epi8(word, spread), bit), bit);
    byte = _mm256_sub_epi8(_mm256_add_epi8(byte, byte), is_set);
  }
  // A shift of pairs of bytes, and what crossed over taken off.
  return _mm256_and_si256(_mm256_sll_epi16(byte, _mm_cvtsi32_si128(8 - n)),
                          _mm256_set1_epi8(static_cast<char>(0xFF << (8 - n))));
}

// In every 64 bits, bit i of byte j and bit j of byte i change places (Warren, Hacker's Delight, 7-3).
template <int shift>
__m256i swap_bits(__m256i lanes, long long mask) {
  const __m256i changed =
      _mm256_and_si256(_mm256_xor_si256(lanes, _mm256_srli_epi64(lanes, shift)), _mm256_set1_epi64x(mask));
  return _mm256_xor_si256(lanes, _mm256_xor_si256(changed, _mm256_slli_epi64(changed, shift)));
}
__m256i transpose_bits(__m256i lanes) {
  return swap_bits<28>(swap_bits<14>(swap_bits<7>(lanes, 0x00AA00AA00AA00AA), 0x0000CCCC0000CCCC), 0x00000000F0F0F0F0);
}

// The same as read_byte for four groups at once, in half the time where n is 8: the bytes that hold the same eight
// words' bits are brought together, then transposed.
void read_byte_of_four(const std::uint8_t* from, std::size_t stride_bytes, int n, __m256i* groups) {
  const auto row = [&](int plane) {
    return plane < n ? _mm_loadu_si128(
                           reinterpret_cast<const __m128i*>(from + static_cast<std::size_t>(plane) * stride_bytes))
                     : _mm_setzero_si128();
  };
  // Planes 7 - j in the lower halves, 3 - j in the upper ones: byte j of the eight becomes bit j.
  __m256i rows[4];
  for (int j = 0; j < 4; ++j) rows[j] = _mm256_set_m128i(row(3 - j), row(7 - j));
  const __m256i low01 = _mm256_unpacklo_epi8(rows[0], rows[1]), high01 = _mm256_unpackhi_epi8(rows[0], rows[1]);
  const __m256i low23 = _mm256_unpacklo_epi8(rows[2], rows[3]), high23 = _mm256_unpackhi_epi8(rows[2], rows[3]);
  const __m256i halves[4] = {_mm256_unpacklo_epi16(low01, low23), _mm256_unpackhi_epi16(low01, low23),
                             _mm256_unpacklo_epi16(high01, high23), _mm256_unpackhi_epi16(high01, high23)};
  const __m256i together = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  for (int group = 0; group < 4; ++group)
    groups[group] = transpose_bits(_mm256_permutevar8x32_epi32(halves[group], together));
}

// Words of a group from their bytes, bytes[0] the highest, shifted down to where the planes belong.
template <int n_bytes>
void join_bytes(const __m256i* bytes, __m128i shift, __m256i kept, std::uint32_t* words) {
  const __m256i zero = _mm256_setzero_si256();
  const __m256i second = n_bytes > 1 ? bytes[1] : zero;
  const __m256i third = n_bytes > 2 ? bytes[2] : zero, fourth = n_bytes > 3 ? bytes[3] : zero;
  const __m256i high_low = _mm256_unpacklo_epi8(second, bytes[0]), high_high = _mm256_unpackhi_epi8(second, bytes[0]);
  const __m256i low_low = _mm256_unpacklo_epi8(fourth, third), low_high = _mm256_unpackhi_epi8(fourth, third);
  // Words 0-3 16-19, 4-7 20-23, 8-11 24-27, 12-15 28-31.
  const __m256i parts[4] = {_mm256_unpacklo_epi16(low_low, high_low), _mm256_unpackhi_epi16(low_low, high_low),
                            _mm256_unpacklo_epi16(low_high, high_high), _mm256_unpackhi_epi16(low_high, high_high)};
  const auto put = [&](int index, __m256i lanes) {
    const __m256i old = _mm256_and_si256(load256(words + 8 * index), kept);
    store256(words + 8 * index, _mm256_or_si256(old, _mm256_srl_epi32(lanes, shift)));
  };
  put(0, _mm256_permute2x128_si256(parts[0], parts[1], 0x20));
  put(1, _mm256_permute2x128_si256(parts[2], parts[3], 0x20));
  put(2, _mm256_permute2x128_si256(parts[0], parts[1], 0x31));
  put(3, _mm256_permute2x128_si256(parts[2], parts[3], 0x31));
}

template <int n_bytes>
void unpack_bytes(const std::uint8_t* planes, std::size_t stride_bytes, std::size_t n_groups, Range range,
                  std::uint32_t keep, std::uint32_t* words) {
  const __m128i shift = _mm_cvtsi32_si128(range.first);
  const __m256i kept = _mm256_set1_epi32(static_cast<int>(keep));
  const auto n_planes = [&](int byte) { return byte < n_bytes - 1 ? 8 : range.n - 8 * (n_bytes - 1); };
  const std::size_t byte_stride = 8 * stride_bytes;
  std::size_t group = 0;
  for (; group + 4 <= n_groups; group += 4) {
    __m256i bytes[4][n_bytes];
    for (int byte = 0; byte < n_bytes; ++byte) {
      const std::uint8_t* const from = planes + static_cast<std::size_t>(byte) * byte_stride + 4 * group;
      const int n = n_planes(byte);
      if (n > 4) {
        __m256i four[4];
        read_byte_of_four(from, stride_bytes, n, four);
        for (int i = 0; i < 4; ++i) bytes[i][byte] = four[i];
      } else {
        for (int i = 0; i < 4; ++i) bytes[i][byte] = read_byte(from + 4 * i, stride_bytes, n);
      }
    }
    for (std::size_t i = 0; i < 4; ++i) join_bytes<n_bytes>(bytes[i], shift, kept, words + kGroup * (group + i));
  }
  for (; group < n_groups; ++group) {
    __m256i bytes[n_bytes];
    for (int byte = 0; byte < n_bytes; ++byte)
      bytes[byte] =
          read_byte(planes + static_cast<std::size_t>(byte) * byte_stride + 4 * group, stride_bytes, n_planes(byte));
    join_bytes<n_bytes>(bytes, shift, kept, words + kGroup * group);
  }
}

void unpack(const std::uint8_t* planes, std::size_t stride_bytes, std::size_t n_groups, Range range, std::uint32_t keep,
            std::uint32_t* words) {
  constexpr decltype(&unpack_bytes<1>) by_bytes[] = {unpack_bytes<1>, unpack_bytes<2>, unpack_bytes<3>,
                                                     unpack_bytes<4>};
  by_bytes[(range.n - 1) / 8](planes, stride_bytes, n_groups, range, keep, words);
}

#else

// The transpose of a 32 x 32 matrix of bits: bit i of word j becomes bit j of word i. Blocks of 16 x 16 bits change
// places, then blocks of 8 x 8 within them, and so on (Warren, Hacker's Delight, 7-3).
void transpose(std::uint32_t* words) {
  std::uint32_t mask = 0x0000FFFF;
  for (int width = 16; width != 0; width >>= 1, mask ^= mask << width) {
    for (int i = 0; i < 32; i = (i + width + 1) & ~width) {
      const std::uint32_t changed = ((words[i] >> width) ^ words[i + width]) & mask;
      words[i] ^= changed << width;
      words[i + width] ^= changed;
    }
  }
}

void pack(const std::uint32_t* words, std::size_t n_groups, Range range, std::uint8_t* out, std::size_t stride_bytes) {
  for (std::size_t group = 0; group < n_groups; ++group) {
    std::uint32_t block[kGroup];
    std::memcpy(block, words + kGroup * group, sizeof block);
    transpose(block);
    for (int plane = 0; plane < range.n; ++plane)
      store(out + static_cast<std::size_t>(plane) * stride_bytes + 4 * group, block[31 - range.first - plane]);
  }
}

void unpack(const std::uint8_t* planes, std::size_t stride_bytes, std::size_t n_groups, Range range, std::uint32_t keep,
            std::uint32_t* words) {
  for (std::size_t group = 0; group < n_groups; ++group) {
    std::uint32_t block[kGroup] = {};
    for (int plane = 0; plane < range.n; ++plane)
      block[31 - range.first - plane] =
          load<std::uint32_t>(planes + static_cast<std::size_t>(plane) * stride_bytes + 4 * group);
    transpose(block);
    for (std::size_t i = 0; i < kGroup; ++i) {
      std::uint32_t& word = words[kGroup * group + i];
      word = (word & keep) | block[i];
    }
  }
}

#endif

}  // namespace

const Kernels& kernels_at(Level<GW_LEVEL>) {
  static constexpr Kernels all = {pack, unpack};
  return all;
}

}  // namespace gradwire::planes

namespace gradwire::word_packing {
namespace {

// Eight words; without AVX2 the compiler splits them.
using Lanes = std::uint32_t __attribute__((vector_size(32)));

template <int n_bits, int i>
inline void pack_one(const std::uint32_t* codes, std::uint8_t* out, Lanes& word) {
  constexpr int shift = i * n_bits % 32, index = i * n_bits / 32;
  Lanes lanes;
  std::memcpy(&lanes, codes + 8 * i, sizeof lanes);
  if constexpr (shift == 0)
    word = lanes;
  else
    word |= lanes << shift;
  if constexpr (shift + n_bits >= 32) std::memcpy(out + 32 * index, &word, sizeof word);
  if constexpr (shift + n_bits > 32) word = lanes >> (32 - shift);
}

template <int n_bits, int i>
inline void unpack_one(const std::uint8_t* data, std::uint32_t* codes) {
  constexpr int shift = i * n_bits % 32, index = i * n_bits / 32;
  Lanes lanes;
  std::memcpy(&lanes, data + 32 * index, sizeof lanes);
  lanes >>= shift;
  if constexpr (shift + n_bits > 32) {
    Lanes next;
    std::memcpy(&next, data + 32 * (index + 1), sizeof next);
    lanes |= next << (32 - shift);
  }
  if constexpr (n_bits < 32) lanes &= (std::uint32_t{1} << n_bits) - 1;
  std::memcpy(codes + 8 * i, &lanes, sizeof lanes);
}

template <int n_bits>
void pack_block(const std::uint32_t* codes, std::uint8_t* out) {
  Lanes word{};
  [&]<int... i>(std::integer_sequence<int, i...>) {
    (pack_one<n_bits, i>(codes, out, word), ...);
  }(std::make_integer_sequence<int, 32>());
}

template <int n_bits>
void unpack_block(const std::uint8_t* data, std::uint32_t* codes) {
  [&]<int... i>(std::integer_sequence<int, i...>) {
    (unpack_one<n_bits, i>(data, codes), ...);
  }(std::make_integer_sequence<int, 32>());
}

template <int... n>
constexpr KernelsByBits make_kernels(std::integer_sequence<int, n...>) {
  return {Kernel{pack_block<n + 1>, unpack_block<n + 1>}...};
}

}  // namespace

const KernelsByBits& kernels_at(Level<GW_LEVEL>) {
  static constexpr auto all = make_kernels(std::make_integer_sequence<int, kMaxBits>());
  return all;
}

}  // namespace gradwire::word_packing
