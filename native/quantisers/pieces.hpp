// Neighbouring pieces of one buffer as one message: each piece's own message with its length before it, so that a scale
// belongs to one piece. A loop over encode and decode, for buffers of many small tensors.
#pragma once

#include <cstdint>
#include <span>

#include "quantisers/codec.hpp"

namespace gradwire::quantisers {

// Encodes values of `sizes` each, which together are the source; a negative size passes over so many values. The piece
// that begins at value k draws with step options.stream.step + k. `left_out` gets (source - decoded) / residual_scale.
// Returns the bytes written. Throws InvalidArgument, BufferTooSmall.
std::uint64_t encode_pieces(const Options& options, const Source& source, std::span<const std::int64_t> sizes,
                            std::span<float> left_out, std::span<std::uint8_t> out);

// Throws CorruptMessage, IncompatibleVersion, InvalidArgument.
void decode_pieces(std::span<const std::uint8_t> message, Kind kind, Dtype dtype, std::span<const std::int64_t> sizes,
                   const Use& use, std::span<std::uint8_t> out);

}  // namespace gradwire::quantisers
