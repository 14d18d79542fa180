// THC (Li et al., NSDI 2024): values are rotated block by block, clamped to a multiple of the largest norm of any rank,
// and rounded by chance to 16 levels whose table values can be summed as integers.
#pragma once

#include <cstdint>
#include <span>

#include "quantisers/codec.hpp"
#include "quantisers/rotation.hpp"

namespace gradwire::quantisers {

// Apart from the draws' seed, so that a rank's rounding never repeats the bits of its signs.
inline constexpr std::uint64_t kSignSeed = 0x9D8A5C1743E10B6F;

struct Rotation {
  random::Stream signs;  // shared by all ranks
  random::Stream draws;  // of one rank
  float clip;            // rotated values beyond clip standard deviations are clamped
};

// The Euclidean norm of each block of 1,024 values; infinity where a value is not finite or the norm is beyond float32.
void write_norms(const Source& source, std::span<float> norms);

// The table's value of each rotated value, one byte each, padded_elements(n) of them, by norms that all ranks share.
// `new_residual`, if not empty, gets (source - what these codes stand for) / residual_scale. Throws InvalidArgument.
void write_codes(const Source& source, std::span<const float> norms, const Rotation& rotation,
                 std::span<float> new_residual, std::span<std::uint8_t> codes);

// Sums over n_ranks of such codes, one byte or (wide) two bytes each, to the mean of what they stand for. Throws
// InvalidArgument.
void read_code_sums(std::span<const std::uint8_t> sums, bool wide, int n_ranks, std::span<const float> norms,
                    const Rotation& rotation, Dtype dtype, std::span<std::uint8_t> out);

// One rank's values as a message, four bits each: header, seed and step of the signs, norms, codes. What `encode` and
// `decode` (codec.hpp) do for this kind.
std::uint64_t max_thc_bytes(std::uint64_t n_elements);
std::uint64_t encode_thc(const Source& source, const Rotation& rotation, std::span<float> new_residual,
                         std::span<std::uint8_t> out);
// The header has been read, and its kind and number of values are right.
void decode_thc(const Header& header, std::span<const std::uint8_t> message, Dtype dtype, std::span<std::uint8_t> out,
                const Use& use);

}  // namespace gradwire::quantisers
