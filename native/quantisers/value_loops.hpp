// Loops that the compiler turns into vectors by itself; included once for each instruction set.
#pragma once

#include <bit>
#include <cstring>

#include "quantisers/kernels.hpp"

namespace gradwire::quantisers {
namespace {

inline float float_of_half(std::uint16_t half) {
  // The exponent is rebased by a product, which is exact and takes care of subnormals.
  const std::uint32_t magnitude = std::uint32_t{half & 0x7FFFu} << 13;
  const float rebased = std::bit_cast<float>(magnitude) * 0x1p112f;
  std::uint32_t bits = std::bit_cast<std::uint32_t>(rebased);
  if (magnitude >= 0x0F800000) bits |= kInfinity;
  return std::bit_cast<float>(bits | std::uint32_t{half & 0x8000u} << 16);
}

// Rounds to nearest even, as the hardware does.
inline std::uint16_t half_of_float(float value) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(value), magnitude = bits & kMagnitude;
  const std::uint32_t sign = bits >> 16 & 0x8000;
  if (magnitude > kInfinity) return static_cast<std::uint16_t>(sign | 0x7E00);
  if (magnitude >= 0x477FF000) return static_cast<std::uint16_t>(sign | 0x7C00);  // rounds past 65,504
  if (magnitude < 0x38800000) {  // subnormal: the addition rounds at the last bit that a half has
    const float shifted = std::bit_cast<float>(magnitude) + 0.5f;
    return static_cast<std::uint16_t>(sign | (std::bit_cast<std::uint32_t>(shifted) - 0x3F000000));
  }
  const std::uint32_t rounded = magnitude - 0x38000000 + 0xFFF + (magnitude >> 13 & 1);
  return static_cast<std::uint16_t>(sign | rounded >> 13);
}

inline std::uint16_t bfloat16_of_float(float value) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
  if ((bits & kMagnitude) > kInfinity) return static_cast<std::uint16_t>(bits >> 16 | 0x40);
  return static_cast<std::uint16_t>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

void widen(const void* values, Dtype dtype, std::size_t n, float* out) {
  if (dtype == Dtype::float32) {
    std::memcpy(out, values, 4 * n);
    return;
  }
  const auto* const halves = static_cast<const std::uint16_t*>(values);
  if (dtype == Dtype::bfloat16)
    for (std::size_t i = 0; i < n; ++i) out[i] = std::bit_cast<float>(std::uint32_t{halves[i]} << 16);
  else
    for (std::size_t i = 0; i < n; ++i) out[i] = float_of_half(halves[i]);
}

void narrow(const float* values, Dtype dtype, std::size_t n, void* out) {
  if (dtype == Dtype::float32) {
    std::memcpy(out, values, 4 * n);
    return;
  }
  auto* const halves = static_cast<std::uint16_t*>(out);
  if (dtype == Dtype::bfloat16)
    for (std::size_t i = 0; i < n; ++i) halves[i] = bfloat16_of_float(values[i]);
  else
    for (std::size_t i = 0; i < n; ++i) halves[i] = half_of_float(values[i]);
}

void add(const float* values, const float* residual, float scale, std::size_t n, float* out) {
  for (std::size_t i = 0; i < n; ++i) out[i] = values[i] + residual[i] * scale;
}

void subtract(const float* values, const float* decoded, float inverse_scale, std::size_t n, float* out) {
  for (std::size_t i = 0; i < n; ++i) out[i] = (values[i] - decoded[i]) * inverse_scale;
}

void divide(float* values, float divisor, std::size_t n) {
  for (std::size_t i = 0; i < n; ++i) values[i] /= divisor;
}

// The order in which both instruction sets add their eight lanes.
inline double fold(const double* lanes) {
  return ((lanes[0] + lanes[1]) + (lanes[2] + lanes[3])) + ((lanes[4] + lanes[5]) + (lanes[6] + lanes[7]));
}

inline std::uint32_t bits_of(float value) { return std::bit_cast<std::uint32_t>(value); }

// From which magnitude on `outer` is the nearer of two levels.
inline float boundary(float inner, float outer) { return 0.5f * inner + 0.5f * outer; }

struct MagnitudeLanes {
  alignas(32) double positive[8] = {}, negative[8] = {};
  std::uint64_t n_negative = 0;
  std::uint32_t largest = 0;

  void add(const Terms& terms, std::size_t n) {
    for (std::size_t i = 0; i < n; ++i) {
      const float value = terms[i];
      positive[i % 8] += value > 0 ? value : 0.0f;
      negative[i % 8] += value < 0 ? -value : 0.0f;
      n_negative += value < 0;
      const std::uint32_t magnitude = bits_of(value) & kMagnitude;
      if (magnitude > largest) largest = magnitude;
    }
  }
  Magnitudes result() const { return {fold(positive), fold(negative), n_negative, largest}; }
};

struct SquareLanes {
  alignas(32) double squares[8] = {};
  std::uint32_t largest = 0;

  void add(const float* values, std::size_t n) {
    for (std::size_t i = 0; i < n; ++i) {
      const double value = values[i];
      squares[i % 8] += value * value;
      const std::uint32_t magnitude = bits_of(values[i]) & kMagnitude;
      if (magnitude > largest) largest = magnitude;
    }
  }
  Squares result() const { return {fold(squares), largest}; }
};

}  // namespace
}  // namespace gradwire::quantisers
