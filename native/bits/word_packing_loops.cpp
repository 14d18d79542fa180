#include <array>
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

template <int... n>
constexpr std::array<Kernel, kMaxBits> make_kernels(std::integer_sequence<int, n...>) {
  return {Kernel{pack_block<n + 1>, unpack_block<n + 1>}...};
}

}  // namespace

const Kernel& kernel_at(Level<GW_LEVEL>, int n_bits) {
  static constexpr auto all = make_kernels(std::make_integer_sequence<int, kMaxBits>());
  return all[static_cast<std::size_t>(n_bits - 1)];
}

}  // namespace gradwire::word_packing
