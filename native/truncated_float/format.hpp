// The bytes of a truncated-float message: number formats, header, chunk table, and the checks that every reader makes
// first. docs/format.md#truncated-float
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "bits/word_packing.hpp"
#include "floats/dtypes.hpp"
#include "messages/front.hpp"

namespace gradwire::truncated_float {

using floats::chunks_of;
using floats::Dtype;
using floats::kChunkValues;
using floats::kFlagNonfinite;
using floats::kMinPartition;
using floats::partitions_of;

// What a value becomes before its first bits are kept. All but native have a scale a partition.
enum class Format : std::uint8_t { native = 0, fp16 = 1, fp8_e4m3 = 2, fp8_e5m2 = 3, fp4_e2m1 = 4, fp6_e3m2 = 5 };
inline constexpr int kFormats = 6;
const char* name_of(Format format);

// How a value becomes one with fewer bits. truncate: its format's nearest, then the first bits of it. nearest: the
// nearest number that the kept bits can tell, ties to even. stochastic: one of its two neighbours at random.
enum class Rounding : std::uint8_t { truncate = 0, nearest = 1, stochastic = 2 };
inline constexpr int kRoundings = 3;

// Sign, exponent, mantissa, from the most significant bit down. Exponent field 0 holds zero and subnormals; all others
// are numbers (no Inf, no NaN), the greatest magnitude written is `largest`.
struct Layout {
  int width, exponent_bits, mantissa_bits, bias;
  std::uint32_t largest;
};
const Layout& layout_of(Format format, Dtype dtype);

inline constexpr std::size_t kChunkEntryBytes = 4;
inline constexpr Front kFront{"truncated-float", "GWTF", 1, 40, kChunkEntryBytes};
inline constexpr std::size_t kScaleBytes = 2;           // a bfloat16
inline constexpr std::uint32_t kMinScale = 0x0D800000;  // 2^-100: no product below meets subnormals

struct Settings {
  Dtype dtype;
  Format format;
  int n_bits;  // 2 to the format's width
  std::size_t partition;

  const Layout& layout() const { return layout_of(format, dtype); }
  bool has_scales() const { return format != Format::native; }
  bool is_exact() const { return format == Format::native && n_bits == layout().width; }
};

struct Header {
  Settings settings;
  std::uint16_t flags;
  std::uint64_t n_elements;

  bool holds_nonfinite() const { return (flags & kFlagNonfinite) != 0; }
};

// One bit for every partition, 1 where it holds Inf or NaN.
constexpr std::uint64_t marks_bytes(std::uint64_t n_elements, std::size_t partition) {
  return (partitions_of(n_elements, partition) + 7) / 8;
}

// Throws InvalidArgument where bits or partition are out of range.
void check_settings(const Settings& settings);
// Bytes of the scales and codes of n_values values that begin at a chunk.
std::uint64_t payload_bytes(std::uint64_t n_values, const Settings& settings);
// Where payloads begin and end; marks follow where there are any.
std::uint64_t payload_end(std::uint64_t n_elements, const Settings& settings);
// Bytes that no message exceeds: with marks.
std::uint64_t max_message_bytes(std::uint64_t n_elements, const Settings& settings);

// Writes header and checksum; chunk table and marks are in place. Returns the message's bytes.
std::uint64_t write_header(const Header& header, std::uint8_t* message);
// Magic, version, lengths, known codes and the checksum over header, table and marks are right. Throws CorruptMessage,
// IncompatibleVersion.
Header read_header(std::span<const std::uint8_t> message);

}  // namespace gradwire::truncated_float
