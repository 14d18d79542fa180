// The inner loops of low-rank compression: loops.cpp.
#pragma once

#include <cstddef>

#include "simd/dispatch.hpp"

namespace gradwire::low_rank {

struct Kernels {
  // What one call of the innermost loop sums: this many rows by this many columns, all in registers.
  std::size_t block_rows, panel_columns;
  // out[i][j] = sum over k of left[k][i] panel[k][j], k ascending, for `n_rows` up to block_rows; or out -= that sum.
  // left: (rank, block_rows), panels: (rank, panel_columns) each, padded; out: rows of n_columns.
  void (*multiply_block)(const float* left, const float* panels, std::size_t rank, std::size_t n_rows,
                         std::size_t n_columns, bool subtract, float* out);
  // Rows of `factor` (rank, n) become orthonormal and span what they spanned. magnitudes: at most about 1.
  void (*orthogonalise)(float* factor, std::size_t rank, std::size_t n);
};

const Kernels &kernels_at(Level<0>), &kernels_at(Level<1>), &kernels_at(Level<2>);
inline const Kernels& kernels() {
  return at_current_level<2>([](auto level) -> const Kernels& { return kernels_at(level); });
}

}  // namespace gradwire::low_rank
