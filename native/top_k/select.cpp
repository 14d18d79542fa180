#include "top_k/select.hpp"

#include <algorithm>
#include <bit>
#include <mutex>
#include <utility>

#include "errors.hpp"
#include "parallel/thread_pool.hpp"

namespace gradwire::top_k {
namespace {

constexpr std::size_t kTaskElements = std::size_t{1} << 20;  // 4 MiB: some 0.5 ms
// 12 leading bits of a magnitude, exponent and four of the mantissa: 4,096 counts of 4 bytes, two sets of them in L1.
// A bin is 6 % of its magnitude wide; what lies in the threshold's bin is ordered exactly afterwards.
constexpr int kLowBits = 19;
constexpr std::size_t kBins = std::size_t{1} << (31 - kLowBits);
constexpr std::size_t kLowBins = std::size_t{1} << kLowBits;
// Up to here the threshold's bin is worth gathering whole; beyond, a second histogram cuts it down.
constexpr std::size_t kFewElements = std::size_t{1} << 16;

std::uint32_t magnitude_of(float value) { return std::bit_cast<std::uint32_t>(value) & 0x7FFFFFFF; }

std::vector<std::size_t> count_leading_bits(ConstFloats values) {
  std::vector<std::size_t> counts(kBins);
  std::mutex merging;
  parallel_for_runs(values.size(), kTaskElements, [&](std::size_t begin, std::size_t n) {
    // Two sets, so that neighbours of the same bin do not wait for each other's increment.
    std::vector<std::uint32_t> even(kBins), odd(kBins);
    const float* const from = values.data() + begin;
    std::size_t i = 0;
    for (; i + 2 <= n; i += 2) {
      ++even[magnitude_of(from[i]) >> kLowBits];
      ++odd[magnitude_of(from[i + 1]) >> kLowBits];
    }
    if (i < n) ++even[magnitude_of(from[i]) >> kLowBits];
    const std::lock_guard lock(merging);
    for (std::size_t bin = 0; bin < kBins; ++bin) counts[bin] += even[bin] + odd[bin];
  });
  return counts;
}

std::vector<std::size_t> count_trailing_bits(ConstFloats values, std::size_t leading) {
  std::vector<std::size_t> counts(kLowBins);
  for (const float value : values) {
    const std::uint32_t magnitude = magnitude_of(value);
    if (magnitude >> kLowBits == leading) ++counts[magnitude & (kLowBins - 1)];
  }
  return counts;
}

// The bin that holds the k-th largest, and how many elements lie in the bins above it.
std::pair<std::size_t, std::size_t> find_threshold(const std::vector<std::size_t>& counts, std::size_t k) {
  std::size_t n_above = 0, bin = counts.size() - 1;
  while (n_above + counts[bin] < k) n_above += counts[bin--];
  return {bin, n_above};
}

std::vector<std::int32_t> gather(ConstFloats values, std::uint32_t lowest, std::size_t at_least) {
  Gather& gather_task = at_current_level<1>([](auto level) -> Gather& { return gather_at(level); });
  std::vector<std::vector<std::int32_t>> parts((values.size() + kTaskElements - 1) / kTaskElements);
  parallel_for_runs(values.size(), kTaskElements, [&](std::size_t begin, std::size_t n) {
    gather_task(values.data() + begin, n, lowest, static_cast<std::int32_t>(begin), parts[begin / kTaskElements]);
  });
  std::vector<std::int32_t> indices;
  indices.reserve(at_least);
  for (const auto& part : parts) indices.insert(indices.end(), part.begin(), part.end());
  return indices;
}

}  // namespace

std::size_t select_largest(ConstFloats values, std::span<std::int32_t> indices) {
  const std::size_t k = indices.size();
  if (values.size() >> 31 != 0) throw InvalidArgument("select_largest: at most 2^31 - 1 elements");
  const std::vector<std::size_t> counts = count_leading_bits(values);
  std::size_t n_nonfinite = 0;
  for (std::size_t bin = floats::kInfinity >> kLowBits; bin < kBins; ++bin) n_nonfinite += counts[bin];
  if (k == 0) return n_nonfinite;

  const auto [bin, n_above] = find_threshold(counts, k);
  const std::uint32_t bin_start = static_cast<std::uint32_t>(bin << kLowBits);
  if (counts[bin] <= std::max(kFewElements, 2 * k)) {
    std::vector<std::int32_t> found = gather(values, bin_start, n_above + counts[bin]);
    const auto is_larger = [&](std::int32_t a, std::int32_t b) {
      const std::uint32_t of_a = magnitude_of(values[a]), of_b = magnitude_of(values[b]);
      return of_a != of_b ? of_a > of_b : a < b;
    };
    if (k < found.size()) std::nth_element(found.begin(), found.begin() + k, found.end(), is_larger);
    std::sort(found.begin(), found.begin() + k);
    std::copy_n(found.begin(), k, indices.begin());
    return n_nonfinite;
  }
  const auto [low, n_above_in_bin] = find_threshold(count_trailing_bits(values, bin), k - n_above);
  const std::uint32_t threshold = bin_start | static_cast<std::uint32_t>(low);
  std::vector<std::int32_t> found = gather(values, threshold + 1, n_above + n_above_in_bin);
  // The rest has exactly the threshold's magnitude: the first of them.
  const std::size_t n_larger = found.size();
  for (std::size_t i = 0; found.size() < k; ++i)
    if (magnitude_of(values[i]) == threshold) found.push_back(static_cast<std::int32_t>(i));
  std::inplace_merge(found.begin(), found.begin() + n_larger, found.end());
  std::copy(found.begin(), found.end(), indices.begin());
  return n_nonfinite;
}

std::size_t select_from(ConstFloats values, float threshold, std::span<std::int32_t> indices) {
  if (values.size() >> 31 != 0) throw InvalidArgument("select_from: at most 2^31 - 1 elements");
  const std::vector<std::int32_t> found = gather(values, std::max(magnitude_of(threshold), 1u), indices.size());
  std::copy_n(found.begin(), std::min(found.size(), indices.size()), indices.begin());
  return found.size();
}

}  // namespace gradwire::top_k
