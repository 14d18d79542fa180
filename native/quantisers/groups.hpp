// One-bit and two-bit messages with a scale for every group of values (docs/format.md#scales-by-group).
#pragma once

#include <cstdint>
#include <span>

#include "quantisers/codec.hpp"

namespace gradwire::quantisers {

// Whether these options ask for a scale a group, and not for one a message.
bool has_groups(const Options& options);

// Bytes that no message of `n_elements` finite values with up to `n_cuts` cuts exceeds. Throws InvalidArgument.
std::uint64_t max_grouped_bytes(const Options& options, std::uint64_t n_elements, std::uint64_t n_cuts);

// As `encode` of codec.hpp.
std::uint64_t encode_groups(const Options& options, const Source& source, std::span<float> new_residual,
                            std::span<std::uint8_t> out);

// As `decode` of codec.hpp, of a message whose header has been read and whose kind and number of values are right.
void decode_groups(const Header& header, std::span<const std::uint8_t> message, Dtype dtype,
                   std::span<std::uint8_t> out, const Use& use);

}  // namespace gradwire::quantisers
