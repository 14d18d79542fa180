// The sketch's loops, compiled once for the baseline and once for AVX2 (portable.cpp, sketch_avx2.cpp): the same source
// in the same order of operations, without fused multiply-add, so the same bytes. Everything has internal linkage.
#pragma once

#include <algorithm>
#include <cmath>
#include <type_traits>
#include <vector>

#include "sketch/batches.hpp"

namespace gradwire::sketch {
namespace {

// From so many non-zeros in a batch of 1,024 on, adding whole rows beats adding value by value (measured: 5 % density).
constexpr std::size_t kDenseShare = 20;
// How many batches ahead the gradient's cache lines are asked for: 64 streams are more than the prefetcher follows.
constexpr std::size_t kBatchesAhead = 4;
constexpr std::size_t kEntriesAhead = 24;

// Sums that wrap around instead of overflowing; floats as they are.
template <typename T>
T plus(T a, T b) {
  if constexpr (std::is_integral_v<T>) {
    using Unsigned = std::make_unsigned_t<T>;
    return static_cast<T>(static_cast<Unsigned>(a) + static_cast<Unsigned>(b));
  } else {
    return a + b;
  }
}

template <typename T>
T minus(T a, T b) {
  if constexpr (std::is_integral_v<T>) {
    using Unsigned = std::make_unsigned_t<T>;
    return static_cast<T>(static_cast<Unsigned>(a) - static_cast<Unsigned>(b));
  } else {
    return a - b;
  }
}

// -value where bit 31 of `cell` (kNegative) is set; without a branch, which would be mispredicted every other time.
template <typename T>
T signed_by(T value, std::uint32_t cell) {
  if constexpr (std::is_same_v<T, float>) {
    return std::bit_cast<float>(std::bit_cast<std::uint32_t>(value) ^ (cell & kNegative));
  } else {
    const T all_ones_if_negative = static_cast<T>(-static_cast<T>(cell >> 31));
    return minus(static_cast<T>(value ^ all_ones_if_negative), all_ones_if_negative);
  }
}

inline std::size_t count_granule_bits(const std::uint16_t* granule_bits, std::size_t n_granules) {
  std::size_t n = 0, i = 0;
  for (; i + 4 <= n_granules; i += 4) {
    std::uint64_t four;
    std::memcpy(&four, granule_bits + i, 8);
    n += static_cast<std::size_t>(std::popcount(four));
  }
  for (; i < n_granules; ++i) n += static_cast<std::size_t>(std::popcount(granule_bits[i]));
  return n;
}

template <typename T>
struct Fixed {
  Quantiser quantiser;
  bool fits = true;

  T of(float value) {
    if constexpr (std::is_same_v<T, float>) {
      return value;
    } else {
      const double scaled = static_cast<double>(value) * quantiser.scale;
      const double limit = static_cast<double>(quantiser.limit);
      if (!(std::abs(scaled) <= limit + 1)) {
        fits = false;
        return 0;
      }
      const std::int64_t rounded = std::llrint(scaled);
      return static_cast<T>(std::clamp(rounded, -quantiser.limit, quantiser.limit));
    }
  }
};

// row[(i + rotation) % c] += or -= values[i]
template <typename T>
void add_rotated(T* row, const T* values, std::size_t c, std::size_t rotation, bool is_negative) {
  const auto add_run = [is_negative](T* to, const T* from, std::size_t n) {
    if (is_negative)
      for (std::size_t i = 0; i < n; ++i) to[i] = minus(to[i], from[i]);
    else
      for (std::size_t i = 0; i < n; ++i) to[i] = plus(to[i], from[i]);
  };
  add_run(row + rotation, values, c - rotation);
  add_run(row, values + c - rotation, rotation);
}

template <typename T, Dtype dtype>
bool add_block(const Geometry& geometry, const Block& block, std::uint64_t key, const Source& source,
               const Quantiser& quantiser, void* all_cells) {
  T* const cells = static_cast<T*>(all_cells);
  const auto c = static_cast<std::uint32_t>(geometry.batch_values);
  std::fill_n(cells + std::size_t{block.first_row} * c, std::size_t{block.n_rows} * c, T{0});
  const Batches batches(geometry, source.granule_bits);
  const std::size_t dense_from = geometry.batch_values / kDenseShare;
  Fixed<T> fixed{quantiser};
  Occupied ahead[kBatchesAhead];
  const auto look_at = [&](std::size_t batch) {
    Occupied& found = ahead[batch % kBatchesAhead];
    batches.find(batch, found);
    const char* const bytes = static_cast<const char*>(source.values);
    for (int i = 0; i < found.n_granules; ++i)
      __builtin_prefetch(bytes + batches.granule(batch, found.slot[i]) * kGranuleValues * bytes_of(dtype));
  };
  for (std::size_t batch = block.first_batch; batch < std::min(block.end_batch, block.first_batch + kBatchesAhead - 1);
       ++batch)
    look_at(batch);
  alignas(64) T dense[kMaxBatchValues];
  for (std::size_t batch = block.first_batch; batch < block.end_batch; ++batch) {
    if (batch + kBatchesAhead - 1 < block.end_batch) look_at(batch + kBatchesAhead - 1);
    const Occupied& found = ahead[batch % kBatchesAhead];
    if (found.n_nonzeros == 0) continue;
    const Place place = place_of(key, batch, block.first_row, block.n_rows, c);
    if (c >= 64 && static_cast<std::size_t>(found.n_nonzeros) >= dense_from) {
      std::fill_n(dense, c, T{0});
      batches.for_each(batch, found, [&](std::uint32_t position, std::size_t index) {
        dense[position] = fixed.of(value_at<dtype>(source.values, index));
      });
      for (int j = 0; j < kRows; ++j)
        add_rotated(cells + place.row_start[j], dense, c, place.rotation[j], place.sign(j) != 0);
      continue;
    }
    batches.for_each(batch, found, [&](std::uint32_t position, std::size_t index) {
      const T value = fixed.of(value_at<dtype>(source.values, index));
      for (int j = 0; j < kRows; ++j) {
        T& cell = cells[place.cell(j, position, c - 1)];
        cell = plus(cell, signed_by(value, place.sign(j)));
      }
    });
  }
  return fixed.fits;
}

// What rounding may leave in a cell of floats, as a share of the bound on all ranks' values: 256 units of 2^-24.
constexpr float kResidue = 0x1p-16f;

template <typename T>
T median(T a, T b, T c) {
  return std::max(std::min(a, b), std::min(std::max(a, b), c));
}

template <typename T>
bool is_finite(T value) {
  if constexpr (std::is_same_v<T, float>) return (std::bit_cast<std::uint32_t>(value) & 0x7F800000u) != 0x7F800000u;
  return true;
}

template <typename T, Dtype dtype>
Outcome recover_block(const Geometry& geometry, const Block& block, const Entry* entries, double scale, bool estimate,
                      float bound, void* all_cells, void* all_values) {
  T* const cells = static_cast<T*>(all_cells);
  using Value = std::conditional_t<dtype == Dtype::float32, float, std::uint16_t>;
  Value* const values = static_cast<Value*>(all_values);
  for (std::size_t slot = 0; slot < geometry.slots(); ++slot)
    geometry.for_each_run(block.first_batch, block.end_batch, slot, [&](std::size_t first, std::size_t end) {
      first *= kGranuleValues, end = std::min(geometry.n_elements, end * kGranuleValues);
      std::memset(values + first, 0, (end - first) * sizeof(Value));
    });
  const auto write = [&](std::uint32_t position, T sum) {
    const float value = static_cast<float>(static_cast<double>(sum) * scale);
    if constexpr (dtype == Dtype::float32)
      values[position] = value;
    else
      values[position] = bfloat16_of(value);
  };
  const auto signed_cell = [&](std::uint32_t cell) { return signed_by(cells[cell & ~kNegative], cell); };
  bool all_finite = true;
  for (std::size_t i = 0; i < block.n_peeled; ++i) {
    if (i + kEntriesAhead < block.n_peeled) {
      const Entry& later = entries[i + kEntriesAhead];
      for (const std::uint32_t cell : later.cell) __builtin_prefetch(cells + (cell & ~kNegative), 1);
      __builtin_prefetch(values + later.position, 1);
    }
    const Entry& entry = entries[i];
    const T sum = signed_cell(entry.cell[0]);
    write(entry.position, sum);
    cells[entry.cell[0] & ~kNegative] = 0;
    for (int j = 1; j < kRows; ++j) {
      T& cell = cells[entry.cell[j] & ~kNegative];
      cell = minus(cell, signed_by(sum, entry.cell[j]));
    }
    if constexpr (std::is_same_v<T, float>) all_finite = all_finite && is_finite(sum);
  }
  for (std::size_t i = block.n_peeled; i < block.n_entries; ++i) {
    T sum = 0;
    if (estimate && block.n_rows != 0)
      sum = median(signed_cell(entries[i].cell[0]), signed_cell(entries[i].cell[1]), signed_cell(entries[i].cell[2]));
    all_finite = all_finite && is_finite(sum);
    write(entries[i].position, sum);
  }
  if (!all_finite) return Outcome::nonfinite;
  if (block.n_peeled < block.n_entries) return Outcome::complete;  // a core stays in its cells
  // Everything has been taken out again. What is left in a cell is rounding, or did not come from these batches.
  const T* const rest = cells + std::size_t{block.first_row} * geometry.batch_values;
  const std::size_t n_cells = std::size_t{block.n_rows} * geometry.batch_values;
  if constexpr (std::is_same_v<T, float>) {
    const std::uint32_t tolerance = std::bit_cast<std::uint32_t>(bound * kResidue);
    std::uint32_t most = 0;
    for (std::size_t i = 0; i < n_cells; ++i)
      most = std::max(most, std::bit_cast<std::uint32_t>(rest[i]) & 0x7FFFFFFFu);
    if (most >= 0x7F800000u) return Outcome::nonfinite;
    return most <= tolerance ? Outcome::complete : Outcome::foreign;
  } else {
    T any = 0;
    for (std::size_t i = 0; i < n_cells; ++i) any |= rest[i];
    return any == 0 ? Outcome::complete : Outcome::foreign;
  }
}

}  // namespace
}  // namespace gradwire::sketch
