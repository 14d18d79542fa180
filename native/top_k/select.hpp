// The k elements of largest magnitude, without sorting: a histogram of magnitudes finds the threshold in one pass.
#pragma once

#include <vector>

#include "simd/dispatch.hpp"
#include "spans.hpp"

namespace gradwire::top_k {

// Writes the indices of the indices.size() elements of largest magnitude in ascending order; of equal magnitudes the
// lowest indices. Returns how many of `values` are Inf or NaN (which count as larger than all numbers).
// Throws InvalidArgument if n >= 2^31.
// Cost: two passes over `values`, one more where very many share the threshold's leading bits (12 of 31).
std::size_t select_largest(ConstFloats values, std::span<std::int32_t> indices);

// The indices of all magnitudes from `threshold` up but zero, ascending, as far as `indices` has room for them; returns
// how many there are. NaN counts as larger than any threshold. Throws InvalidArgument.
std::size_t select_from(ConstFloats values, float threshold, std::span<std::int32_t> indices);

// Appends begin + i for every i < n with magnitude bits of values[i] >= lowest: loops.cpp.
using Gather = void(const float* values, std::size_t n, std::uint32_t lowest, std::int32_t begin,
                    std::vector<std::int32_t>& indices);
Gather &gather_at(Level<0>), &gather_at(Level<1>);

}  // namespace gradwire::top_k
