// Views of memory of somebody else, the integers that lie in it, and the types of values: what every file of the core
// uses.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace gradwire {

using Bytes = std::span<std::uint8_t>;
using ConstBytes = std::span<const std::uint8_t>;
using Floats = std::span<float>;
using ConstFloats = std::span<const float>;
using Words = std::span<std::uint32_t>;
using ConstWords = std::span<const std::uint32_t>;

// Of an index, a bit an element.
constexpr std::size_t words_for(std::size_t n_elements) { return (n_elements + 31) / 32; }

}  // namespace gradwire

namespace gradwire::floats {

// The value types that float codecs take, by the codes that messages carry.
enum class Dtype : std::uint8_t { float32 = 0, bfloat16 = 1, float16 = 2 };

inline constexpr int kDtypes = 3;
// Of a float32 as a word.
inline constexpr std::uint32_t kSign = 0x80000000, kMagnitude = 0x7FFFFFFF, kInfinity = 0x7F800000;
constexpr std::size_t bytes_of(Dtype dtype) { return dtype == Dtype::float32 ? 4 : 2; }
constexpr const char* name_of(Dtype dtype) {
  constexpr const char* names[kDtypes] = {"float32", "bfloat16", "float16"};
  return names[static_cast<int>(dtype)];
}

}  // namespace gradwire::floats
