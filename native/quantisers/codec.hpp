// Quantisers' messages: values in, one message out, and back; with error feedback in the same
// sweep. The same bytes for every thread count and instruction set. docs/format.md#quantised
#pragma once

#include "messages/front.hpp"
#include "quantisers/kernels.hpp"
#include "random/counter.hpp"

namespace gradwire::quantisers {

enum class Kind : std::uint8_t { one_bit = 0, two_bit = 1, ternary = 2, qsgd = 3, thc = 4 };
inline constexpr int kKinds = 5;
const char* name_of(Kind kind);

inline constexpr std::size_t kHeaderBytes = 32;
inline constexpr std::uint8_t kVersion = 1;
inline constexpr std::uint8_t kGroupedVersion = 2;  // one-bit and two-bit with a scale for every group of values

inline constexpr std::uint8_t kFlagNonfinite = 1;
inline constexpr Front kFront{"quantised", "GWQT", kGroupedVersion, kHeaderBytes, 0};

struct Header {
  char letters[4]{};
  std::uint8_t version = kVersion;
  Kind kind;
  std::uint8_t flags = 0;   // 1: not finite; the header is the whole message, and every value of it is NaN
  std::uint8_t levels = 0;  // qsgd: the largest level; with groups: scales to a group
  std::uint64_t n_elements;
  std::uint32_t block = 0;  // qsgd: values to a norm; with groups: values to a group
  float first = 0;   // one-bit: what stands for values from zero up; two-bit: threshold; ternary: scale; thc: clip
  float second = 0;  // one-bit: what stands for values below zero, without its sign
  std::uint32_t checksum = 0;

  bool is_finite() const { return flags == 0; }
};
static_assert(sizeof(Header) == kHeaderBytes);

// Writes the header in front of a payload that is complete.
inline void write_message(const Header& header, Bytes message) {
  write_header(kFront, header, message.data(), 0, message.subspan(kHeaderBytes));
}

// Checks magic, version, checksum and every field for itself; the length of the payload is the caller's to check.
// Throws CorruptMessage, IncompatibleVersion.
Header read_header(ConstBytes message);

// What of a codec's options the message is made by; a field that a kind does not use is ignored.
struct Options {
  Kind kind;
  // two_means: one-bit, the means above and below zero; two-bit in groups, four levels by the mean magnitude.
  enum class Rule : int { fixed, mean, two_means } rule = Rule::mean;
  // one-bit, fixed: the scale. two-bit: the threshold, in units of the mean magnitude unless the rule is fixed.
  // ternary: the clip in standard deviations, or with rule fixed the scale itself. thc: the clip.
  float parameter = 0;
  int levels = 0;           // qsgd: up to 7 take four bits a value, up to 127 eight
  std::uint32_t block = 0;  // qsgd: values to a norm; one-bit, two-bit: values to a scale, 0 for one scale a message
  random::Stream stream{};  // ternary, qsgd, thc
  // Where tensors begin among the values, ascending, without 0: no group of values with a scale reaches over these.
  ConstWords cuts{};
};

// What is encoded: values + residual x residual_scale.
struct Source {
  ConstBytes values;
  Dtype dtype;
  ConstFloats residual;  // empty for none
  float residual_scale = 1;
  std::size_t n_elements() const { return values.size() / bytes_of(dtype); }
};

// Bytes that no message with up to `n_cuts` cuts exceeds.
std::uint64_t max_message_bytes(const Options& options, std::uint64_t n_elements, std::uint64_t n_cuts = 0);

// Returns the bytes written. If `new_residual` is not empty, it gets (source - what the message decodes to) /
// residual_scale; it may be the source's residual itself. Where a value is not finite the message says only that, and
// `new_residual` gets the residual unchanged. Throws BufferTooSmall.
std::uint64_t encode(const Options& options, const Source& source, Floats new_residual, Bytes out);

// What `decode` does with the values, in the same pass: it divides them, and writes them or adds them to float32.
struct Use {
  float divisor = 1;
  bool adds = false;
};

// Throws CorruptMessage, IncompatibleVersion.
void decode(ConstBytes message, Kind kind, Dtype dtype, Bytes out, const Use& use = {});

// Whether a message stands for values with Inf or NaN, by its length, which is the header's; `decode` checks the rest.
constexpr bool is_nonfinite(ConstBytes message, std::uint64_t n_elements) {
  return message.size() == kHeaderBytes && n_elements > 0;
}

// ---- ternary values that are summed over ranks, by a scale that the ranks share

// The scale of these values alone: the smaller of the largest magnitude and `clip` standard deviations; infinity where
// a value is not finite.
float ternary_scale(const Source& source, float clip);

// One field a value: 0, 1, 2 for -, 0, +. `codes` has bytes_for(n, fields) bytes. Throws InvalidArgument.
void write_ternary_counts(const Source& source, float scale, const random::Stream& stream, Fields fields, Bytes codes);

// Sums of n_ranks fields to their mean: (field - n_ranks) x (scale / n_ranks). Throws InvalidArgument.
void read_ternary_counts(ConstBytes codes, Fields fields, int n_ranks, float scale, Dtype dtype, Bytes out);

// One-bit and two-bit messages with a scale for every group of values (docs/format.md#scales-by-group).

// Whether these options ask for a scale a group, and not for one a message.
bool has_groups(const Options& options);

// Bytes that no message of `n_elements` finite values with up to `n_cuts` cuts exceeds. Throws InvalidArgument.
std::uint64_t max_grouped_bytes(const Options& options, std::uint64_t n_elements, std::uint64_t n_cuts);

// As `encode` of codec.hpp.
std::uint64_t encode_groups(const Options& options, const Source& source, Floats new_residual, Bytes out);

// As `decode` of codec.hpp, of a message whose header has been read and whose kind and number of values are right.
void decode_groups(const Header& header, ConstBytes message, Dtype dtype, Bytes out, const Use& use);

// THC (Li et al., NSDI 2024): values are rotated block by block, clamped to a multiple of the largest norm of any rank,
// and rounded by chance to 16 levels whose table values can be summed as integers.

// Apart from the draws' seed, so that a rank's rounding never repeats the bits of its signs.
inline constexpr std::uint64_t kSignSeed = 0x9D8A5C1743E10B6F;

struct Rotation {
  random::Stream signs;  // shared by all ranks
  random::Stream draws;  // of one rank
  float clip;            // rotated values beyond clip standard deviations are clamped
};

// The Euclidean norm of each block of 1,024 values; infinity where a value is not finite or the norm is beyond float32.
void write_norms(const Source& source, Floats norms);

// The table's value of each rotated value, one byte each, padded_elements(n) of them, by norms that all ranks share.
// `new_residual`, if not empty, gets (source - what these codes stand for) / residual_scale. Throws InvalidArgument.
void write_codes(const Source& source, ConstFloats norms, const Rotation& rotation, Floats new_residual, Bytes codes);

// Sums over n_ranks of such codes, one byte or (wide) two bytes each, to the mean of what they stand for. Throws
// InvalidArgument.
void read_code_sums(ConstBytes sums, bool wide, int n_ranks, ConstFloats norms, const Rotation& rotation, Dtype dtype,
                    Bytes out);

// One rank's values as a message, four bits each: header, seed and step of the signs, norms, codes. What `encode` and
// `decode` (codec.hpp) do for this kind.
std::uint64_t max_thc_bytes(std::uint64_t n_elements);
std::uint64_t encode_thc(const Source& source, const Rotation& rotation, Floats new_residual, Bytes out);
// The header has been read, and its kind and number of values are right.
void decode_thc(const Header& header, ConstBytes message, Dtype dtype, Bytes out, const Use& use);

}  // namespace gradwire::quantisers
