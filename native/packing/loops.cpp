#include <algorithm>
#include <bit>
#include <cstring>

#include "packing/packing.hpp"

#if defined(__AVX512VBMI2__)
#include <immintrin.h>
#endif

namespace gradwire::packing {
namespace {

constexpr std::size_t kWordValues = 32;
constexpr std::uint32_t kFull = 0xFFFFFFFFu;

inline std::size_t count_bits(const std::uint32_t* words, std::size_t n_words) {
  std::size_t n = 0;
  for (std::size_t i = 0; i < n_words; ++i) n += static_cast<std::size_t>(std::popcount(words[i]));
  return n;
}

#if defined(__AVX512VBMI2__)

// By compress and expand: a vector at a time, whatever its bits. Masked loads and stores touch nothing past the end.

__mmask32 lowest32(int n) { return static_cast<__mmask32>(_bzhi_u32(kFull, static_cast<unsigned>(n))); }
__mmask16 lowest16(int n) { return static_cast<__mmask16>(lowest32(n)); }

// Compressing into a register and storing it under a mask is faster than the compressing store, which is microcode on
// Zen 4.
void pack16(const void* values, const std::uint32_t* words, std::size_t n, void* packed) {
  const std::uint16_t* from = static_cast<const std::uint16_t*>(values);
  std::uint16_t* to = static_cast<std::uint16_t*>(packed);
  for (std::size_t i = 0; i < n; i += kWordValues, from += kWordValues) {
    const std::uint32_t bits = *words++;
    if (bits == 0) continue;
    const int n_bits = std::popcount(bits);
    _mm512_mask_storeu_epi16(to, lowest32(n_bits),
                             _mm512_maskz_compress_epi16(bits, _mm512_maskz_loadu_epi16(bits, from)));
    to += n_bits;
  }
}

void pack32(const void* values, const std::uint32_t* words, std::size_t n, void* packed) {
  const std::uint32_t* from = static_cast<const std::uint32_t*>(values);
  std::uint32_t* to = static_cast<std::uint32_t*>(packed);
  for (std::size_t i = 0; i < n; i += kWordValues, from += kWordValues) {
    const std::uint32_t bits = *words++;
    if (bits == 0) continue;
    for (int half = 0; half < 2; ++half) {
      const __mmask16 mask = static_cast<__mmask16>(bits >> (16 * half));
      const int n_bits = std::popcount(static_cast<std::uint32_t>(mask));
      const __m512i some = _mm512_maskz_loadu_epi32(mask, from + 16 * half);
      _mm512_mask_storeu_epi32(to, lowest16(n_bits), _mm512_maskz_compress_epi32(mask, some));
      to += n_bits;
    }
  }
}

void unpack16(const void* packed, const std::uint32_t* words, std::size_t n, void* values) {
  const std::uint16_t* from = static_cast<const std::uint16_t*>(packed);
  std::uint16_t* to = static_cast<std::uint16_t*>(values);
  for (std::size_t i = 0; i < n; i += kWordValues, to += kWordValues) {
    const std::uint32_t bits = *words++;
    const int n_bits = std::popcount(bits);
    const __m512i some = _mm512_maskz_loadu_epi16(lowest32(n_bits), from);
    _mm512_mask_storeu_epi16(to, lowest32(static_cast<int>(std::min(kWordValues, n - i))),
                             _mm512_maskz_expand_epi16(bits, some));
    from += n_bits;
  }
}

void unpack32(const void* packed, const std::uint32_t* words, std::size_t n, void* values) {
  const std::uint32_t* from = static_cast<const std::uint32_t*>(packed);
  std::uint32_t* to = static_cast<std::uint32_t*>(values);
  for (std::size_t i = 0; i < n; i += kWordValues, to += kWordValues) {
    const std::uint32_t bits = *words++;
    const std::uint32_t room = lowest32(static_cast<int>(std::min(kWordValues, n - i)));
    for (int half = 0; half < 2; ++half) {
      const __mmask16 mask = static_cast<__mmask16>(bits >> (16 * half));
      const int n_bits = std::popcount(static_cast<std::uint32_t>(mask));
      const __m512i some = _mm512_maskz_loadu_epi32(lowest16(n_bits), from);
      _mm512_mask_storeu_epi32(to + 16 * half, static_cast<__mmask16>(room >> (16 * half)),
                               _mm512_maskz_expand_epi32(mask, some));
      from += n_bits;
    }
  }
}

#else

// Bit by bit, with short cuts for words that are empty or full.

template <typename Item>
void pack_bits(const void* values, const std::uint32_t* words, std::size_t n, void* packed) {
  const Item* from = static_cast<const Item*>(values);
  Item* to = static_cast<Item*>(packed);
  for (std::size_t i = 0; i < n; i += kWordValues, from += kWordValues) {
    std::uint32_t bits = *words++;
    if (bits == kFull) {
      std::memcpy(to, from, kWordValues * sizeof(Item));
      to += kWordValues;
      continue;
    }
    for (; bits != 0; bits &= bits - 1) *to++ = from[std::countr_zero(bits)];
  }
}

template <typename Item>
void unpack_bits(const void* packed, const std::uint32_t* words, std::size_t n, void* values) {
  const Item* from = static_cast<const Item*>(packed);
  Item* to = static_cast<Item*>(values);
  for (std::size_t i = 0; i < n; i += kWordValues, to += kWordValues) {
    std::uint32_t bits = *words++;
    if (bits == kFull) {
      std::memcpy(to, from, kWordValues * sizeof(Item));
      from += kWordValues;
      continue;
    }
    std::memset(to, 0, std::min(kWordValues, n - i) * sizeof(Item));
    for (; bits != 0; bits &= bits - 1) to[std::countr_zero(bits)] = *from++;
  }
}

#endif

}  // namespace

const Kernels& kernels_at(Level<GW_LEVEL>) {
#if defined(__AVX512VBMI2__)
  static constexpr Kernels all = {count_bits, {pack16, pack32}, {unpack16, unpack32}};
#else
  static constexpr Kernels all = {count_bits,
                                  {pack_bits<std::uint16_t>, pack_bits<std::uint32_t>},
                                  {unpack_bits<std::uint16_t>, unpack_bits<std::uint32_t>}};
#endif
  return all;
}

}  // namespace gradwire::packing
