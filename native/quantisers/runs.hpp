// What the quantisers' loops share; for files that are compiled for each instruction set.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "quantisers/kernels.hpp"
#include "random/counter.hpp"
#include "simd/lanes.hpp"

namespace gradwire::quantisers {
namespace {

// body(lanes, first, n) for every run of `size` values, n a constant but for the last one.
template <std::size_t size, class Body>
[[gnu::always_inline]] inline void for_runs(std::size_t n, Body body) {
  std::size_t first = 0;
  for (; first + size <= n; first += size) body(Lanes(), first, std::integral_constant<std::size_t, size>());
  if (first < n) body(One(), first, n - first);
}

// body(lanes, first, n, numbers)
template <class Body>
void for_drawn(std::size_t n, const random::Stream& stream, std::uint64_t group, Body body) {
  for_runs<kGroup>(n, [&](auto lanes, std::size_t first, auto count) {
    alignas(32) std::uint32_t numbers[kGroup];
    random::draw(stream, group++, numbers);
    body(lanes, first, count, numbers);
  });
}

// A group of fields, of which those past the end are zero.
inline void write_group(const std::int32_t* fields_of, Fields fields, std::uint8_t* to) {
  alignas(32) std::uint8_t bytes[kGroup];
  for (std::size_t half : {0, 32}) write_bytes(fields_of + half, bytes + half);
  if (fields == Fields::bytes)
    std::memcpy(to, bytes, kGroup);
  else
    for (std::size_t i = 0; i < kGroup / 2; ++i) to[i] = static_cast<std::uint8_t>(bytes[i] | bytes[32 + i] << 4);
}

// A group of fields a byte each: where they lie, or in `room`.
inline const std::uint8_t* read_group(const std::uint8_t* from, Fields fields, std::uint8_t* room) {
  if (fields == Fields::bytes) return from;
  for (std::size_t i = 0; i < kGroup / 2; ++i) {
    room[i] = from[i] & 15;
    room[kGroup / 2 + i] = from[i] >> 4;
  }
  return room;
}

}  // namespace
}  // namespace gradwire::quantisers
