#include <algorithm>
#include <bit>
#include <cstring>

#include "bits/bit_io.hpp"
#include "packing/packing.hpp"

#if defined(__AVX512VBMI2__)
#include <immintrin.h>
#endif

namespace gradwire::packing {
namespace {

constexpr std::size_t kWordValues = 32;
constexpr std::uint32_t kFull = 0xFFFFFFFFu;

std::size_t count_bits(const std::uint16_t* granules, std::size_t n_granules) {
  std::size_t n = 0, i = 0;
  for (; i + 4 <= n_granules; i += 4) n += static_cast<std::size_t>(std::popcount(load<std::uint64_t>(granules + i)));
  for (; i < n_granules; ++i) n += static_cast<std::size_t>(std::popcount(granules[i]));
  return n;
}

#if defined(__AVX512VBMI2__)

// By compress and expand: a vector at a time, whatever its bits. Masked loads and stores touch nothing past the end.

std::uint32_t lowest(std::size_t n) { return _bzhi_u32(kFull, static_cast<unsigned>(n)); }

// The operations of each size, of as many values as a vector holds.
template <typename Item>
struct Vector {
  static constexpr std::size_t n = 32;
  static __m512i load(std::uint32_t mask, const Item* from) { return _mm512_maskz_loadu_epi16(mask, from); }
  static void store(Item* to, std::uint32_t mask, __m512i some) { _mm512_mask_storeu_epi16(to, mask, some); }
  static __m512i compress(std::uint32_t mask, __m512i some) { return _mm512_maskz_compress_epi16(mask, some); }
  static __m512i expand(std::uint32_t mask, __m512i some) { return _mm512_maskz_expand_epi16(mask, some); }
};
template <>
struct Vector<std::uint32_t> {
  using Mask = __mmask16;
  static constexpr std::size_t n = 16;
  static __m512i load(Mask mask, const std::uint32_t* from) { return _mm512_maskz_loadu_epi32(mask, from); }
  static void store(std::uint32_t* to, Mask mask, __m512i some) { _mm512_mask_storeu_epi32(to, mask, some); }
  static __m512i compress(Mask mask, __m512i some) { return _mm512_maskz_compress_epi32(mask, some); }
  static __m512i expand(Mask mask, __m512i some) { return _mm512_maskz_expand_epi32(mask, some); }
};

// Compressing into a register and storing it under a mask is faster than the compressing store, which is microcode on
// Zen 4.
template <typename Item>
void pack_bits(const void* values, const std::uint32_t* words, std::size_t n, void* packed) {
  using V = Vector<Item>;
  const Item* from = static_cast<const Item*>(values);
  Item* to = static_cast<Item*>(packed);
  for (std::size_t i = 0; i < n; i += kWordValues) {
    const std::uint32_t bits = *words++;
    if (bits != 0)
      for (std::size_t at = 0; at < kWordValues; at += V::n) {
        const std::uint32_t mask = bits >> at & lowest(V::n);
        const auto n_bits = static_cast<std::size_t>(std::popcount(mask));
        V::store(to, lowest(n_bits), V::compress(mask, V::load(mask, from + i + at)));
        to += n_bits;
      }
  }
}

template <typename Item>
void unpack_bits(const void* packed, const std::uint32_t* words, std::size_t n, void* values) {
  using V = Vector<Item>;
  const Item* from = static_cast<const Item*>(packed);
  Item* to = static_cast<Item*>(values);
  for (std::size_t i = 0; i < n; i += kWordValues) {
    const std::uint32_t bits = *words++, room = lowest(std::min(kWordValues, n - i));
    for (std::size_t at = 0; at < kWordValues; at += V::n) {
      const std::uint32_t mask = bits >> at & lowest(V::n);
      const auto n_bits = static_cast<std::size_t>(std::popcount(mask));
      V::store(to + i + at, room >> at & lowest(V::n), V::expand(mask, V::load(lowest(n_bits), from)));
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
  static constexpr Kernels all = {count_bits,
                                  {pack_bits<std::uint16_t>, pack_bits<std::uint32_t>},
                                  {unpack_bits<std::uint16_t>, unpack_bits<std::uint32_t>}};
  return all;
}

}  // namespace gradwire::packing
