// One tile of importance bytes; what importance.cpp and its AVX2 twin share.
#pragma once

#include <cstddef>
#include <cstdint>

namespace gradwire::gcomp {

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

void write_importance_tile_portable(const ImportanceTile& tile, const ImportanceTerms& terms);
void write_importance_tile_avx2(const ImportanceTile& tile, const ImportanceTerms& terms);

}  // namespace gradwire::gcomp
