// From symbol frequencies to Huffman code lengths.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace gradwire {

// Optimal code lengths under a limit (package-merge: Larmore and Hirschberg, JACM 1990). `weights` are all positive, at
// least two and at most 2^limit of them, with a sum below 2^57. Ties are broken by position: the same weights give the
// same lengths everywhere. The code is complete: the sum of 2^-length is 1.
std::vector<int> limited_code_lengths(std::span<const std::uint64_t> weights, int limit);

// Huffman's own code, without limit or escape: symbols of weight 0 get length 0. For comparison (Fig. 12 of the paper).
std::vector<int> native_code_lengths(std::span<const std::uint64_t> weights);

// Code lengths of every symbol of `histogram`, with the escape's appended as the last entry; 0: no code, escape it.
// Which of the rare symbols are escaped (escape code + 8 raw bits) is chosen so that the coded histogram is shortest.
// The escape has a code if and only if some symbol has none. The histogram's sum is in [1, 2^56).
std::vector<int> escaped_code_lengths(std::span<const std::uint64_t> histogram, int limit);

}  // namespace gradwire
