#include "bits/planes.hpp"

#include "bits/bit_io.hpp"
#include "simd/dispatch.hpp"

namespace gradwire::planes {
namespace {

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

}  // namespace

const Kernels kPortable = {pack, unpack};

const Kernels& kernels() {
#if defined(__x86_64__)
  if (simd_level() >= SimdLevel::avx2) return kAvx2;
#endif
  return kPortable;
}

}  // namespace gradwire::planes
