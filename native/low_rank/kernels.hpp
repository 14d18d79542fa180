// The inner loops of low-rank compression; portable.cpp and avx2.cpp compile the same source (loops.hpp) to the same
// bits.
#pragma once

#include <cstddef>

namespace gradwire::low_rank {

inline constexpr std::size_t kBlockRows = 4;      // 4 x 16 sums: 8 of AVX2's 16 registers, the rest for operands
inline constexpr std::size_t kPanelColumns = 16;  // a cache line of float32

struct Kernels {
  // out[i][j] = sum over k of left[k][i] panel[k][j], k ascending, for kBlockRows rows and one panel's columns; or
  // out -= that sum. left: (rank, kBlockRows), panels: (rank, kPanelColumns) each, padded; out: rows of n_columns.
  void (*multiply_block)(const float* left, const float* panels, std::size_t rank, std::size_t n_rows,
                         std::size_t n_columns, bool subtract, float* out);
  // Rows of `factor` (rank, n) become orthonormal and span what they spanned. magnitudes: at most about 1.
  void (*orthogonalise)(float* factor, std::size_t rank, std::size_t n);
};

extern const Kernels kPortable;
extern const Kernels kAvx2;

}  // namespace gradwire::low_rank
