// Random numbers that are a function of (seed, step, index): no state, so every thread, rank and instruction set draws
// the same ones in any order. Philox4x32-10 (Salmon et al., SC 2011), checked against its published test vectors.
//
// Element i of a stream gets a uniform 32-bit number out of a group of 64 elements: elements 64 g + 8 q + l (q < 8,
// l < 8) share the eight counters 8 g + l, and take word q / 2 of them, with its halves exchanged where q is odd. The
// order is that of AVX2's lanes; two elements to a word halve the work, and each number alone is uniform: two elements
// that share a word could only show it in numbers whose halves tie.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace gradwire::random {

// Elements that are drawn for together.
inline constexpr std::size_t kGroup = 64;
inline constexpr int kRounds = 10;
inline constexpr std::uint32_t kMultiplier0 = 0xD2511F53, kMultiplier1 = 0xCD9E8D57;
inline constexpr std::uint32_t kWeyl0 = 0x9E3779B9, kWeyl1 = 0xBB67AE85;

// A stream of numbers: the seed is Philox's key, the step the upper half of its counter.
struct Stream {
  std::uint64_t seed, step;
};

using Words = std::array<std::uint32_t, 4>;

[[maybe_unused]] static inline Words philox(Words counter, std::uint64_t key) {
  std::uint32_t key0 = static_cast<std::uint32_t>(key), key1 = static_cast<std::uint32_t>(key >> 32);
  for (int round = 0; round < kRounds; ++round) {
    const std::uint64_t product0 = std::uint64_t{kMultiplier0} * counter[0];
    const std::uint64_t product1 = std::uint64_t{kMultiplier1} * counter[2];
    counter = {static_cast<std::uint32_t>(product1 >> 32) ^ counter[1] ^ key0, static_cast<std::uint32_t>(product1),
               static_cast<std::uint32_t>(product0 >> 32) ^ counter[3] ^ key1, static_cast<std::uint32_t>(product0)};
    key0 += kWeyl0;
    key1 += kWeyl1;
  }
  return counter;
}

[[maybe_unused]] static inline Words words_at(const Stream& stream, std::uint64_t counter) {
  return philox({static_cast<std::uint32_t>(counter), static_cast<std::uint32_t>(counter >> 32),
                 static_cast<std::uint32_t>(stream.step), static_cast<std::uint32_t>(stream.step >> 32)},
                stream.seed);
}

// The numbers of elements 64 group to 64 group + 63.
[[maybe_unused]] static inline void draw(const Stream& stream, std::uint64_t group, std::uint32_t* numbers) {
  for (std::size_t lane = 0; lane < 8; ++lane) {
    const Words words = words_at(stream, 8 * group + lane);
    for (std::size_t word = 0; word < 4; ++word) {
      numbers[16 * word + lane] = words[word];
      numbers[16 * word + 8 + lane] = words[word] << 16 | words[word] >> 16;
    }
  }
}

}  // namespace gradwire::random
