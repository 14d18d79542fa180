// The second pass of select.cpp and its AVX2 twin.
#pragma once

#include <cstdint>
#include <vector>

namespace gradwire::top_k {

// Appends begin + i for every i < n with magnitude bits of values[i] >= lowest.
void gather_portable(const float* values, std::size_t n, std::uint32_t lowest, std::int32_t begin,
                     std::vector<std::int32_t>& indices);
void gather_avx2(const float* values, std::size_t n, std::uint32_t lowest, std::int32_t begin,
                 std::vector<std::int32_t>& indices);

}  // namespace gradwire::top_k
