// Where every value of a gradient lies in a count sketch (Li et al., ICML 2024, section 3.4).
// docs/format.md#count-sketch
//
// A batch of c values shares three rows, three signs and three rotations. It is made of granules of 16 values, one from
// each stretch of n_batches granules, so that a cluster of non-zeros (an embedding row, a dense layer) falls into as
// many batches as it has granules: batches of consecutive values would peel or fail as one (docs/results.md, count
// sketch). Each stretch is rotated by a hash, so that columns of a matrix, which return after as many granules as a row
// has, do not fall into one batch either.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>

namespace gradwire::sketch {

inline constexpr std::size_t kGranuleValues = 16;  // 64 bytes of float32: a cache line
inline constexpr std::size_t kMinBatchValues = kGranuleValues, kMaxBatchValues = 1024;
inline constexpr int kRows = 3;  // rows a value is added to

constexpr std::size_t words_for(std::size_t n_elements) { return (n_elements + 31) / 32; }

// How a gradient is cut into batches.
struct Geometry {
  std::size_t n_elements = 0;
  std::size_t batch_values = kMaxBatchValues;  // c, a power of two
  std::size_t n_granules = 0;
  std::size_t n_batches = 0;

  Geometry() = default;
  Geometry(std::size_t n, std::size_t c)
      : n_elements(n),
        batch_values(c),
        n_granules((n + kGranuleValues - 1) / kGranuleValues),
        n_batches((n_granules + c / kGranuleValues - 1) / (c / kGranuleValues)) {}

  std::size_t slots() const { return batch_values / kGranuleValues; }
  // The granule in `slot` of a batch; past the end of the gradient if not below n_granules.
  std::size_t granule(std::size_t batch, std::size_t slot) const {
    const std::size_t rotated = batch + rotation[slot];
    return slot * n_batches + (rotated < n_batches ? rotated : rotated - n_batches);
  }
  // The inverse.
  std::size_t slot_of(std::size_t granule) const { return granule / n_batches; }
  std::size_t batch_of(std::size_t granule) const {
    const std::size_t rotated = granule % n_batches, by = rotation[slot_of(granule)];
    return rotated < by ? rotated + n_batches - by : rotated - by;
  }
  // visit(first, end) for the runs of granules, one or two, that `slot` of the batches [first_batch, end_batch) holds.
  template <typename Visit>
  void for_each_run(std::size_t first_batch, std::size_t end_batch, std::size_t slot, Visit&& visit) const {
    const std::size_t start = slot * n_batches, by = rotation[slot];
    const auto clamped = [&](std::size_t first, std::size_t end) {
      first = std::min(n_granules, start + first), end = std::min(n_granules, start + end);
      if (first < end) visit(first, end);
    };
    clamped(std::min(n_batches, first_batch + by), std::min(n_batches, end_batch + by));
    clamped(std::max(n_batches, first_batch + by) - n_batches, std::max(n_batches, end_batch + by) - n_batches);
  }

  // Of each slot's stretch of granules; 0 unless `rotate` has drawn them.
  std::array<std::size_t, kMaxBatchValues / kGranuleValues> rotation{};
  void rotate(std::uint64_t key);
};

// splitmix64's finaliser (Steele, Lea, Flood 2014): every bit of the result depends on every bit of `x`.
constexpr std::uint64_t mix(std::uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

inline constexpr std::uint64_t kGolden = 0x9E3779B97F4A7C15u;

// All hashes of one table come from this key: draw number i of batch b is mix(key + (8 b + i + 1) golden).
constexpr std::uint64_t key_of(std::uint64_t seed, std::uint64_t salt) { return mix(mix(seed + kGolden) + salt); }
constexpr std::uint64_t draw(std::uint64_t key, std::uint64_t batch, std::uint64_t i) {
  return mix(key + (8 * batch + i + 1) * kGolden);
}

// floor(n x fraction / 2^32): a number below n, evenly.
constexpr std::uint32_t below(std::uint32_t n, std::uint64_t fraction) {
  return static_cast<std::uint32_t>((static_cast<std::uint64_t>(n) * (fraction & 0xFFFFFFFFu)) >> 32);
}

// By draw 7 of batch `slot`: rows and rotations of batches take 0 and 1.
inline void Geometry::rotate(std::uint64_t key) {
  for (std::size_t slot = 0; slot < slots(); ++slot)
    rotation[slot] = below(static_cast<std::uint32_t>(n_batches), draw(key, slot, 7) >> 32);
}

// Three rows, rotations and signs of one batch.
struct Place {
  std::uint32_t row_start[kRows];  // first cell of the row
  std::uint16_t rotation[kRows];
  std::uint16_t negative;  // bit j: subtracted from, not added to, row j

  // kNegative of an Entry's cell, or 0.
  std::uint32_t sign(int j) const { return static_cast<std::uint32_t>(negative >> j & 1) << 31; }

  std::uint32_t cell(int j, std::uint32_t position, std::uint32_t mask) const {
    return row_start[j] + ((position + rotation[j]) & mask);
  }
};

// The place of `batch` among `n_rows` rows, at least three, that begin at row `first_row`. Rows are distinct: draws
// without replacement, from three fractions of two 64-bit draws; the lowest bits, which move a row by less than
// 2^-29 of the table, give the signs.
inline Place place_of(std::uint64_t key, std::size_t batch, std::uint32_t first_row, std::uint32_t n_rows,
                      std::uint32_t batch_values) {
  const std::uint64_t a = draw(key, batch, 0), b = draw(key, batch, 1);
  const std::uint32_t r0 = below(n_rows, a >> 32);
  std::uint32_t r1 = below(n_rows - 1, a);
  r1 += r1 >= r0;
  const std::uint32_t low = r0 < r1 ? r0 : r1, high = r0 < r1 ? r1 : r0;
  std::uint32_t r2 = below(n_rows - 2, b >> 32);
  r2 += r2 >= low;
  r2 += r2 >= high;
  const std::uint32_t mask = batch_values - 1;
  Place place;
  const std::uint32_t rows[kRows] = {r0, r1, r2};
  for (int j = 0; j < kRows; ++j) {
    place.row_start[j] = (first_row + rows[j]) * batch_values;
    place.rotation[j] = static_cast<std::uint16_t>((b >> (10 * j)) & mask);
  }
  place.negative = static_cast<std::uint16_t>(a & 7);
  return place;
}

}  // namespace gradwire::sketch
