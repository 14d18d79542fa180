// Truncated floats: the first bits of every value, after a conversion to a smaller format where few are kept.
// docs/format.md#truncated-float
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "random/counter.hpp"
#include "truncated_float/format.hpp"

namespace gradwire::truncated_float {

// Writes `values` (raw bytes of settings.dtype) as one message; returns its bytes. Element i of the stream rounds value
// i up or down where rounding is stochastic; otherwise it is not read. Throws InvalidArgument, BufferTooSmall (less
// than max_message_bytes).
std::uint64_t encode(std::span<const std::uint8_t> values, const Settings& settings, Rounding rounding,
                     const random::Stream& stream, std::span<std::uint8_t> out);

// Throws CorruptMessage, IncompatibleVersion; `values` are undefined then.
void decode(std::span<const std::uint8_t> message, Dtype dtype, std::span<std::uint8_t> values);

}  // namespace gradwire::truncated_float
