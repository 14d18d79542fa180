// Bit by bit, with short cuts for words that are empty or full; compiled once per instruction set.
#pragma once

#include <algorithm>
#include <bit>
#include <cstring>

#include "packing/kernels.hpp"

namespace gradwire::packing {
namespace {

constexpr std::size_t kWordValues = 32;
constexpr std::uint32_t kFull = 0xFFFFFFFFu;

inline std::size_t count_bits(const std::uint32_t* words, std::size_t n_words) {
  std::size_t n = 0;
  for (std::size_t i = 0; i < n_words; ++i) n += static_cast<std::size_t>(std::popcount(words[i]));
  return n;
}

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

}  // namespace
}  // namespace gradwire::packing
