// Low-rank matrices with the same bits on every machine: what each rank computes again for itself from summed factors.
// Factors are stored transposed, one component a row: (rank, n).
#pragma once

#include <cstddef>
#include <span>

namespace gradwire::low_rank {

// matrix (n_rows x n_columns, row after row) = left^T right, or matrix -= left^T right, with left (rank, n_rows) and
// right (rank, n_columns). Each element is summed over the components in ascending order, products and sums rounded to
// float32, for every thread count and instruction set. Throws InvalidArgument if sizes do not fit.
void multiply_factors(std::span<const float> left, std::span<const float> right, std::size_t rank, bool subtract,
                      std::span<float> matrix);

// Makes the rows of each of `n_factors` factors (rank, n) orthonormal by Householder reflections, in place; they span
// what they spanned, where that has `rank` dimensions. A zero factor gives the first `rank` unit vectors.
// Throws InvalidArgument if sizes do not fit or rank > n. Values must be finite.
void orthogonalise_factors(std::span<float> factors, std::size_t n_factors, std::size_t rank);

}  // namespace gradwire::low_rank
