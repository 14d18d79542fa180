// Quantisers' messages: values in, one message out, and back; with error feedback in the same
// sweep. The same bytes for every thread count and instruction set.
#pragma once

#include <cstdint>
#include <span>

#include "quantisers/format.hpp"
#include "quantisers/kernels.hpp"
#include "random/counter.hpp"

namespace gradwire::quantisers {

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
  std::span<const std::uint32_t> cuts{};
};

// What is encoded: values + residual x residual_scale.
struct Source {
  std::span<const std::uint8_t> values;
  Dtype dtype;
  std::span<const float> residual;  // empty for none
  float residual_scale = 1;
  std::size_t n_elements() const { return values.size() / bytes_of(dtype); }
};

// Bytes that no message with up to `n_cuts` cuts exceeds. Throws InvalidArgument.
std::uint64_t max_message_bytes(const Options& options, std::uint64_t n_elements, std::uint64_t n_cuts = 0);

// Returns the bytes written. If `new_residual` is not empty, it gets (source - what the message decodes to) /
// residual_scale; it may be the source's residual itself. Where a value is not finite the message says only that, and
// `new_residual` gets the residual unchanged. Throws InvalidArgument, BufferTooSmall.
std::uint64_t encode(const Options& options, const Source& source, std::span<float> new_residual,
                     std::span<std::uint8_t> out);

// What `decode` does with the values, in the same pass: it divides them, and writes them or adds them to float32.
struct Use {
  float divisor = 1;
  bool adds = false;
};

// Throws CorruptMessage, IncompatibleVersion, InvalidArgument.
void decode(std::span<const std::uint8_t> message, Kind kind, Dtype dtype, std::span<std::uint8_t> out,
            const Use& use = {});

// Whether a message stands for values with Inf or NaN, by its length, which is the header's; `decode` checks the rest.
constexpr bool is_nonfinite(std::span<const std::uint8_t> message, std::uint64_t n_elements) {
  return message.size() == kHeaderBytes && n_elements > 0;
}

// ---- ternary values that are summed over ranks, by a scale that the ranks share

// The scale of these values alone: the smaller of the largest magnitude and `clip` standard deviations; infinity where
// a value is not finite.
float ternary_scale(const Source& source, float clip);

// One field a value: 0, 1, 2 for -, 0, +. `codes` has bytes_for(n, fields) bytes. Throws InvalidArgument.
void write_ternary_counts(const Source& source, float scale, const random::Stream& stream, Fields fields,
                          std::span<std::uint8_t> codes);

// Sums of n_ranks fields to their mean: (field - n_ranks) x (scale / n_ranks). Throws InvalidArgument.
void read_ternary_counts(std::span<const std::uint8_t> codes, Fields fields, int n_ranks, float scale, Dtype dtype,
                         std::span<std::uint8_t> out);

}  // namespace gradwire::quantisers
