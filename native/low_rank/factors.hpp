// Low-rank matrices with the same bits on every machine: what each rank computes again for itself from summed factors.
// Factors are stored transposed, one component a row: (rank, n).
#pragma once

#include "simd/dispatch.hpp"
#include "spans.hpp"

namespace gradwire::low_rank {

// matrix (n_rows x n_columns, row after row) = left^T right, or matrix -= left^T right, with left (rank, n_rows) and
// right (rank, n_columns). Each element is summed over the components in ascending order, products and sums rounded to
// float32, for every thread count and instruction set.
void multiply_factors(ConstFloats left, ConstFloats right, std::size_t rank, bool subtract, Floats matrix);

// Makes the rows of each of `n_factors` factors (rank, n) orthonormal by Householder reflections, in place; they span
// what they spanned, where that has `rank` dimensions. A zero factor gives the first `rank` unit vectors.
// 1 <= rank <= n. Values must be finite.
void orthogonalise_factors(Floats factors, std::size_t n_factors, std::size_t rank);

// The inner loops of low-rank compression: loops.cpp.
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

GW_KERNELS(Kernels, kernels, 2)

}  // namespace gradwire::low_rank
