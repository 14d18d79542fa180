// The values at the set bits of an index, one after the other; docs/format.md#count-sketch
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace gradwire::packing {

// Writes the value of each set bit, in order. Values are of `item_bytes` bytes, 2 or 4; bit i % 32 of word i / 32
// stands for value i. Throws InvalidArgument (sizes), CorruptMessage (bits past the end).
void pack(std::span<const std::uint8_t> values, std::size_t item_bytes, std::span<const std::uint32_t> words,
          std::span<std::uint8_t> packed);

// The inverse: values without a bit become 0. Throws as `pack` does.
void unpack(std::span<const std::uint8_t> packed, std::size_t item_bytes, std::span<const std::uint32_t> words,
            std::span<std::uint8_t> values);

}  // namespace gradwire::packing
