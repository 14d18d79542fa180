#include "bits/word_packing.hpp"

#include "bits/bit_io.hpp"

namespace gradwire::word_packing {

void pack_rest(const std::uint32_t* codes, std::size_t n, int n_bits, std::uint8_t* out) {
  std::uint8_t buffer[4 * kBlock + kBitSlackBytes];
  BitWriter writer{buffer};
  for (std::size_t i = 0; i < n; ++i) write_bits(writer, codes[i], static_cast<std::uint64_t>(n_bits));
  finish(writer);
  std::memcpy(out, buffer, packed_bytes(n, n_bits));
}

void unpack_rest(const std::uint8_t* data, std::size_t n, int n_bits, std::uint32_t* codes) {
  std::uint8_t buffer[4 * kBlock + kBitSlackBytes] = {};
  std::memcpy(buffer, data, packed_bytes(n, n_bits));
  const std::uint64_t mask = ~std::uint64_t{0} >> (64 - n_bits);
  BitReader reader{buffer};
  for (std::size_t i = 0; i < n; ++i) {
    codes[i] = static_cast<std::uint32_t>(peek_bits(reader) & mask);
    reader.position += static_cast<std::uint64_t>(n_bits);
  }
}

}  // namespace gradwire::word_packing
