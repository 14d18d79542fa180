// Embedded floats: one shared exponent a partition, signs and magnitudes in bit planes, the most significant first. Any
// first planes decode, any further ones refine, and after all 32 and the escapes every value is exact. The magnitudes
// are roots (format 2), so that small ones are known more finely, or as published (format 1) the values' own.
// docs/format.md#embedded-float
#pragma once

#include <array>

#include "bits/packing.hpp"
#include "messages/front.hpp"
#include "simd/dispatch.hpp"

namespace gradwire::embedded_float {

using namespace floats;

inline constexpr int kPlanes = 32;             // the sign, then 31 bits of magnitude
inline constexpr int kLinear = 1, kRoots = 2;  // formats: what the magnitudes of codes are
inline constexpr std::size_t kChunkEntryBytes = 8;
inline constexpr Front kFront{"embedded-float", "GWEF", kRoots, 40, kChunkEntryBytes};
inline constexpr std::size_t kEscapeBytes = 6;  // an index of 2 bytes, a word of 4

// What all messages of one gradient share.
struct Settings {
  std::size_t partition;
  int format;
};

struct Header {
  Settings settings;
  Dtype dtype;
  planes::Range range;
  std::uint16_t flags;
  std::uint64_t n_elements;

  bool holds_exponents() const { return range.first == 0; }
  bool is_last() const { return range.first + range.n == kPlanes; }
};

struct ChunkEntry {
  std::uint32_t checksum;  // CRC32C of the chunk's exponents and planes, then of its escapes
  std::uint32_t n_escapes;
};

// Throws InvalidArgument.
void check_range(planes::Range range);
// Bytes of the exponents and planes of n_values values that begin at a chunk.
std::uint64_t payload_bytes(std::uint64_t n_values, std::size_t partition, planes::Range range);
// Bytes that no message exceeds.
std::uint64_t max_message_bytes(std::uint64_t n_elements, std::size_t partition, planes::Range range);

ChunkEntry load_entry(const std::uint8_t* message, std::size_t chunk);
// Magic, version, lengths, known codes, numbers of escapes and the checksum over header and table are right. Throws
// CorruptMessage, IncompatibleVersion.
Header read_header(ConstBytes message);

// Writes planes [range.first, range.first + range.n) of `values` (raw bytes of `dtype`) as one message; returns its
// bytes. Throws InvalidArgument, BufferTooSmall (less than max_message_bytes).
std::uint64_t encode(ConstBytes values, Dtype dtype, const Settings& settings, planes::Range range, Bytes out);

// Reads a message that begins with plane 0. Throws CorruptMessage, IncompatibleVersion; `values` are undefined then.
void decode(ConstBytes message, Dtype dtype, Bytes values);

// What a receiver knows of a gradient: codes with their first n_known bits, and one exponent a partition. With all 32
// known, float32 words (raw partitions: the values' own bits at the top) in place of the codes.
struct Known {
  Words codes;
  Bytes exponents;
  Dtype dtype;
  Settings settings;
  int n_known;
};

// Takes in the message with the planes that follow the known ones; returns how many are known then. Throws
// CorruptMessage, IncompatibleVersion, and leaves everything as it was then.
int refine(ConstBytes message, const Known& known);

// Writes the values as they are known; at least one plane is.
void write(const Known& known, Bytes values);
// Adds them to float32 sums.
void add(const Known& known, Floats sums);

// Writes what a receiver of the first n_known planes of `values` has, which may be the same memory.
void quantise(ConstBytes values, Dtype dtype, const Settings& settings, int n_known, Bytes out);

// The work on one partition: loops.cpp.

// Shared exponents are at least that of 2^-96, so that 2^(exponent - 157), the weight of a code's lowest bit, is a
// normal float32.
inline constexpr std::uint32_t kMinExponent = 31;
inline constexpr std::uint32_t kRawExponent = 255;  // a partition with Inf or NaN: codes are the values' own bits

// One set a dtype and format. Codes are words: sign in bit 31, below it the magnitude in units of 2^(exponent - 157),
// or of formats with roots the root of it in units of 2^-31 (docs/format.md#embedded-float).
struct Kernels {
  // Writes the codes of n values, and zeros up to n_padded; returns the shared exponent.
  std::uint32_t (*to_codes)(const void* values, std::size_t n, std::size_t n_padded, std::uint32_t* codes);
  // The float32 words that codes stand for of which the `n_known` highest bits are known, 1 to 32; not for raw ones.
  void (*to_words)(const std::uint32_t* codes, std::size_t n, std::uint32_t exponent, int n_known,
                   std::uint32_t* words);
  // float32 words (raw: the values' own bits at the top) to values.
  void (*store)(const std::uint32_t* words, std::size_t n, bool is_raw, void* values);
  // sums += words, not for raw ones.
  void (*add)(const std::uint32_t* words, std::size_t n, float* sums);
  void (*fill_nan)(std::size_t n, void* values);
  // float32 words of n finite values.
  void (*load)(const void* values, std::size_t n, std::uint32_t* words);
};

using AllKernels = std::array<std::array<Kernels, kDtypes>, 2>;  // by format less 1, then dtype
GW_KERNELS(AllKernels, kernels, 1)
inline const Kernels& kernels_for(Dtype dtype, int format) { return kernels()[format - 1][static_cast<int>(dtype)]; }

}  // namespace gradwire::embedded_float
