// The value types that float codecs take, by the codes that messages carry.
#pragma once

#include <cstddef>
#include <cstdint>

namespace gradwire::floats {

enum class Dtype : std::uint8_t { float32 = 0, bfloat16 = 1, float16 = 2 };

inline constexpr int kDtypes = 3;
constexpr std::size_t bytes_of(Dtype dtype) { return dtype == Dtype::float32 ? 4 : 2; }
constexpr const char* name_of(Dtype dtype) {
  constexpr const char* names[kDtypes] = {"float32", "bfloat16", "float16"};
  return names[static_cast<int>(dtype)];
}

}  // namespace gradwire::floats
