// Importance bytes that the driver encodes by and the harness decodes by.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace gradwire::fuzz {

inline std::vector<std::uint8_t> importance_bytes(std::size_t n) {
  std::vector<std::uint8_t> bytes(n);
  for (std::size_t i = 0; i < n; ++i) bytes[i] = static_cast<std::uint8_t>(i * 37 + i / 251);
  return bytes;
}

}  // namespace gradwire::fuzz
