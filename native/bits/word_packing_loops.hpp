// Included by word_packing.cpp and word_packing_avx2.cpp, which differ in the instruction set alone.
#include <cstring>
#include <utility>

#include "bits/word_packing.hpp"

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

}  // namespace
}  // namespace gradwire::word_packing

// One row a width; the row of 0 is never used.
#define GRADWIRE_KERNEL(n) {pack_block<n>, unpack_block<n>}
#define GRADWIRE_EIGHT_KERNELS(n)                                                                                     \
  GRADWIRE_KERNEL(n), GRADWIRE_KERNEL(n + 1), GRADWIRE_KERNEL(n + 2), GRADWIRE_KERNEL(n + 3), GRADWIRE_KERNEL(n + 4), \
      GRADWIRE_KERNEL(n + 5), GRADWIRE_KERNEL(n + 6), GRADWIRE_KERNEL(n + 7)
#define GRADWIRE_KERNELS       \
  {{nullptr, nullptr},         \
   GRADWIRE_EIGHT_KERNELS(1),  \
   GRADWIRE_EIGHT_KERNELS(9),  \
   GRADWIRE_EIGHT_KERNELS(17), \
   GRADWIRE_EIGHT_KERNELS(25)}
