// The header that all quantisers' messages begin with (docs/format.md#quantised).
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace gradwire::quantisers {

enum class Kind : int { one_bit = 0, two_bit = 1, ternary = 2, qsgd = 3, thc = 4 };
inline constexpr int kKinds = 5;
const char* name_of(Kind kind);

inline constexpr std::size_t kHeaderBytes = 32;
inline constexpr int kVersion = 1;
inline constexpr int kGroupedVersion = 2;  // one-bit and two-bit with a scale for every group of values

struct Header {
  Kind kind;
  bool is_finite;       // if not, the header is the whole message, and every value of it is NaN
  int levels;           // qsgd: the largest level; with groups: scales to a group; 0 for others
  std::uint32_t block;  // qsgd: values to a norm; with groups: values to a group; 0 for others
  std::uint64_t n_elements;
  float first;   // one-bit: what stands for values from zero up; two-bit: threshold; ternary: scale; thc: clip
  float second;  // one-bit: what stands for values below zero, without its sign; 0 for others
  int version = block != 0 && (kind == Kind::one_bit || kind == Kind::two_bit) ? kGroupedVersion : kVersion;
};

// Writes the header in front of a payload that is complete.
void write_header(const Header& header, std::span<std::uint8_t> message);

// Checks magic, version, checksum and every field for itself; the length of the payload is the caller's to check.
// Throws CorruptMessage, IncompatibleVersion.
Header read_header(std::span<const std::uint8_t> message);

}  // namespace gradwire::quantisers
