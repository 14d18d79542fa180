// The Bloom filter of section 3.3, batched like the sketch (section 3.4): a filter is a table of rows of 1,024 bits,
// and the non-zeros of a batch, as 1,024 bits, are ORed into one row per hash, each time rotated by another number of
// bits.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace gradwire::sketch {

inline constexpr std::size_t kBloomRowWords = 32;
inline constexpr int kMaxBloomHashes = 64;

// Writes the filter of the index `words`; filter.size() is a multiple of kBloomRowWords, at least one row.
// Throws InvalidArgument if sizes do not fit.
void insert_bloom(std::span<const std::uint32_t> words, std::size_t n_elements, int n_hashes, std::uint64_t seed,
                  std::span<std::uint32_t> filter);

// Writes the index of everything that the filter may hold; returns how many that are.
std::size_t query_bloom(std::span<const std::uint32_t> filter, std::size_t n_elements, int n_hashes, std::uint64_t seed,
                        std::span<std::uint32_t> words);

}  // namespace gradwire::sketch
