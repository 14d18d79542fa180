// Truncated floats: the first bits of every value, after a conversion to a smaller format where few are kept.
// docs/format.md#truncated-float
#pragma once

#include <array>

#include "bits/packing.hpp"
#include "messages/front.hpp"
#include "random/counter.hpp"
#include "simd/dispatch.hpp"

namespace gradwire::truncated_float {

using namespace floats;

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

// Bytes of the scales and codes of n_values values that begin at a chunk.
std::uint64_t payload_bytes(std::uint64_t n_values, const Settings& settings);
// Bytes that no message exceeds: with marks.
std::uint64_t max_message_bytes(std::uint64_t n_elements, const Settings& settings);

// Magic, version, lengths, known codes and the checksum over header, table and marks are right. Throws CorruptMessage,
// IncompatibleVersion.
Header read_header(ConstBytes message);

// Writes `values` (raw bytes of settings.dtype) as one message; returns its bytes. Element i of the stream rounds value
// i up or down where rounding is stochastic; otherwise it is not read. Throws BufferTooSmall (less than
// max_message_bytes).
std::uint64_t encode(ConstBytes values, const Settings& settings, Rounding rounding, const random::Stream& stream,
                     Bytes out);

// Throws CorruptMessage, IncompatibleVersion; `values` are undefined then.
void decode(ConstBytes message, Dtype dtype, Bytes values);

// The work on runs of at most 256 values: loops.cpp.
inline constexpr std::uint32_t kUnitScale = 0x3F800000;  // 1.0

struct Kernels {
  // float32 word of the largest magnitude; at least that of Inf if any value is Inf or NaN.
  std::uint32_t (*find_largest)(const void* values, std::size_t n);
  // Codes of n_bits. truncate: the first ones, towards zero; compact formats round to their full width first. nearest:
  // ties to even, between powers of two downwards. stochastic: each number decides for one value.
  void (*to_codes)(const void* values, std::size_t n, const Settings& settings, Rounding rounding, std::uint32_t scale,
                   const std::uint32_t* numbers, std::uint32_t* codes);
  void (*to_values)(const std::uint32_t* codes, std::size_t n, const Settings& settings, std::uint32_t scale,
                    void* values);
  void (*fill_nan)(std::size_t n, void* values);
  // Random numbers of 64 elements.
  void (*draw)(const random::Stream& stream, std::uint64_t group, std::uint32_t* numbers);
};

using KernelsByDtype = std::array<Kernels, kDtypes>;
GW_KERNELS(KernelsByDtype, kernels, 1)
inline const Kernels& kernels_for(Dtype dtype) { return kernels()[static_cast<int>(dtype)]; }

}  // namespace gradwire::truncated_float
