// Importance bytes: how many low mantissa bits of each gradient cannot matter to the optimizer.
#pragma once

#include <cstdint>
#include <optional>
#include <span>

#include "simd/dispatch.hpp"

namespace gradwire::gcomp {

// For each element S = |parameter (a sqrt(second_moment) + b) + c first_moment| in float32, every operation rounded on
// its own; out = clamp(code(S) - 348, 0, 255) with code(S) = bits(S) >> 21: exponent and two top mantissa bits, quarter
// octaves from 2^-40 to 2^24. NaN and S < 2^-40 give 0 (level 0, lossless), and so does second_moment <= 0: a step size
// that the history does not know yet.
//
// Without second_moment the factor is b alone, without first_moment the term c m is left out; all others are as long as
// `parameter`. Memory-bound: 4 to 12 bytes read and one written per element.
// Throws InvalidArgument if lengths differ.
void write_importance(std::span<const float> parameter, std::optional<std::span<const float>> second_moment,
                      std::optional<std::span<const float>> first_moment, float a, float b, float c,
                      std::span<std::uint8_t> out);

// ---- one tile of them: importance_loops.cpp

// code(2^-40), the largest value that still gives byte 0: 4 quarter octaves x (127 - 40).
inline constexpr int kImportanceOffset = 348;

// Null where the optimizer has no such state.
struct ImportanceTile {
  const float* parameter;
  const float* second_moment;
  const float* first_moment;
  std::uint8_t* out;
  std::size_t n_elements;
};

struct ImportanceTerms {
  float a, b, c;
};

using WriteTile = void(const ImportanceTile& tile, const ImportanceTerms& terms);
WriteTile &write_tile_at(Level<0>), &write_tile_at(Level<1>);

}  // namespace gradwire::gcomp
