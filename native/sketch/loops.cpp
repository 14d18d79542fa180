// The sketch's loops: the same source in the same order of operations at every level, without fused multiply-add, so
// the same bytes.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <type_traits>
#include <vector>

#include "floats/word_loops.hpp"
#include "simd/lanes.hpp"
#include "sketch/plan.hpp"

namespace gradwire::sketch {
namespace {

// ---- the non-zeros of one batch

template <Dtype dtype>
float value_at(const void* values, std::size_t i) {
  return std::bit_cast<float>(load_word<dtype>(values, i));
}

// The granules of one batch that hold non-zeros.
struct Occupied {
  std::uint16_t slot[kMaxBatchValues / kGranuleValues];
  std::uint16_t bits[kMaxBatchValues / kGranuleValues];
  int n_granules;
  int n_nonzeros;
};

class Batches {
 public:
  Batches(const Geometry& geometry, const std::uint16_t* granule_bits)
      : geometry_(geometry), granule_bits_(granule_bits), full_slots_(geometry.n_granules / geometry.n_batches) {}

  void find(std::size_t batch, Occupied& found) const {
    int n = 0, n_nonzeros = 0;
    const auto look = [&](std::size_t slot, std::size_t granule) {
      const std::uint16_t bits = granule_bits_[granule];
      found.slot[n] = static_cast<std::uint16_t>(slot);
      found.bits[n] = bits;
      n += bits != 0;
      n_nonzeros += std::popcount(bits);
    };
    for (std::size_t slot = 0; slot < full_slots_; ++slot) look(slot, geometry_.granule(batch, slot));
    if (full_slots_ < geometry_.slots()) {  // the last stretch may end early
      const std::size_t last = geometry_.granule(batch, full_slots_);
      if (last < geometry_.n_granules) look(full_slots_, last);
    }
    found.n_granules = n;
    found.n_nonzeros = n_nonzeros;
  }

  std::size_t granule(std::size_t batch, std::size_t slot) const { return geometry_.granule(batch, slot); }

  // visit(position in the batch, index in the gradient) for every non-zero, in order.
  template <typename Visit>
  void for_each(std::size_t batch, const Occupied& found, Visit&& visit) const {
    for (int i = 0; i < found.n_granules; ++i) {
      const std::uint32_t start = static_cast<std::uint32_t>(found.slot[i] * kGranuleValues);
      const std::size_t first = granule(batch, found.slot[i]) * kGranuleValues;
      for (std::uint32_t bits = found.bits[i]; bits != 0; bits &= bits - 1) {
        const auto lane = static_cast<std::uint32_t>(std::countr_zero(bits));
        visit(start + lane, first + lane);
      }
    }
  }

 private:
  const Geometry& geometry_;
  const std::uint16_t* granule_bits_;
  std::size_t full_slots_;
};

// ---- one pass over a gradient: which values are not zero, how many, and how large the largest is

template <Dtype dtype>
IndexFacts index_values(const void* values, std::size_t first, std::size_t end, std::uint32_t* words) {
  IndexFacts facts{0, 0};
  std::size_t i = first;
#if defined(__AVX2__)
  constexpr bool kWide = dtype == Dtype::float32;
  constexpr std::size_t kVectors = kWide ? 4 : 2;  // to a word
  const auto* const from = static_cast<const std::uint8_t*>(values);
  const __m256i magnitude_bits = kWide ? _mm256_set1_epi32(0x7FFFFFFF) : _mm256_set1_epi16(0x7FFF);
  __m256i largest = _mm256_setzero_si256();
  for (; i + 32 <= end; i += 32) {
    __m256i is_zero[kVectors];
    for (std::size_t part = 0; part < kVectors; ++part) {
      const __m256i bits = load256(from + i * bytes_of(dtype) + 32 * part);
      const __m256i magnitude = _mm256_and_si256(bits, magnitude_bits), zero = _mm256_setzero_si256();
      largest = kWide ? _mm256_max_epi32(largest, magnitude) : _mm256_max_epi16(largest, magnitude);
      is_zero[part] = kWide ? _mm256_cmpeq_epi32(magnitude, zero) : _mm256_cmpeq_epi16(magnitude, zero);
    }
    *words = ~mask_of(is_zero);
    facts.n_nonzeros += static_cast<std::size_t>(std::popcount(*words++));
  }
  if (!kWide)
    largest = _mm256_max_epi32(_mm256_slli_epi32(largest, 16), _mm256_and_si256(largest, _mm256_set1_epi32(-65536)));
  facts.max_magnitude = largest_of(largest);
#endif
  for (; i < end; ++words) {
    std::uint32_t word = 0;
    for (std::uint32_t bit = 0; bit < 32 && i < end; ++bit, ++i) {
      const std::uint32_t magnitude = std::bit_cast<std::uint32_t>(value_at<dtype>(values, i)) & 0x7FFFFFFFu;
      word |= static_cast<std::uint32_t>(magnitude != 0) << bit;
      facts.max_magnitude = std::max(facts.max_magnitude, magnitude);
    }
    *words = word;
    facts.n_nonzeros += static_cast<std::size_t>(std::popcount(word));
  }
  return facts;
}

// ---- adding up and recovering

// From so many non-zeros in a batch of 1,024 on, adding whole rows beats adding value by value (measured: 5 % density).
constexpr std::size_t kDenseShare = 20;
// How many batches ahead the gradient's cache lines are asked for: 64 streams are more than the prefetcher follows.
constexpr std::size_t kBatchesAhead = 4;
constexpr std::size_t kEntriesAhead = 24;

// Sums that wrap around instead of overflowing; floats as they are.
template <typename T>
using Wrapping = std::conditional_t<std::is_same_v<T, float>, float,
                                    std::make_unsigned_t<std::conditional_t<std::is_same_v<T, float>, int, T>>>;

template <typename T>
T plus(T a, T b) {
  return static_cast<T>(static_cast<Wrapping<T>>(a) + static_cast<Wrapping<T>>(b));
}
template <typename T>
T minus(T a, T b) {
  return static_cast<T>(static_cast<Wrapping<T>>(a) - static_cast<Wrapping<T>>(b));
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
    const auto value = static_cast<float>(static_cast<double>(sum) * scale);
    store_word<dtype, Specials::quiet>(values, position, std::bit_cast<std::uint32_t>(value));
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

// ---- structural peeling of one block: which value stands alone in which cell, round by round, before any value is
// known (Jiang, Mitzenmacher, Thaler 2017; section 3.2 of the paper)

// A cell while peeling: the sum over the values in it of kOne + key, where a key (the value's place in the block) has
// 32 bits. Sums are exact modulo 2^64, so a cell with one value left holds kOne + its key, whatever went through it,
// and a cell with m > 1 values has a count field of at least m (m < 2^24).
constexpr std::uint64_t kOne = std::uint64_t{1} << 40;

inline bool stands_alone(std::uint64_t cell) { return cell >> 40 == 1; }

// Work space that a thread keeps.
struct PeelSpace {
  std::vector<std::uint64_t> cells;
  std::vector<Place> places;
  std::vector<std::uint32_t> now, next;
  std::vector<std::uint16_t> left;
};

class Peeling {
 public:
  Peeling(const Geometry& geometry, Block& block, std::uint64_t key, const std::uint16_t* granule_bits, Entry* entries,
          PeelSpace& space)
      : block_(block),
        batches_(geometry, granule_bits),
        geometry_(geometry),
        c_(static_cast<std::uint32_t>(geometry.batch_values)),
        c_bits_(std::countr_zero(c_)),
        first_cell_(block.first_row * c_),
        entries_(entries),
        space_(space) {
    const std::size_t n_here = block.end_batch - block.first_batch;
    space_.places.resize(n_here);
    if (block.n_rows == 0) return;
    for (std::size_t i = 0; i < n_here; ++i)
      space_.places[i] = place_of(key, block.first_batch + i, 0, block.n_rows, c_);
  }

  void run() {
    block_.n_peeled = 0;
    block_.n_rounds = 0;
    if (block_.n_rows != 0) {
      insert_all();
      for (std::size_t n = find_singles(); n != 0; n = peel_round(n)) ++block_.n_rounds;
    }
    if (block_.n_peeled < block_.n_entries) list_core();
  }

 private:
  void insert_all() {
    space_.cells.assign(std::size_t{block_.n_rows} * c_, 0);
    std::uint64_t* const cells = space_.cells.data();
    const std::uint32_t mask = c_ - 1;
    Occupied found;
    for (std::size_t batch = block_.first_batch; batch < block_.end_batch; ++batch) {
      batches_.find(batch, found);
      const Place place = space_.places[batch - block_.first_batch];
      const std::uint64_t first_key = kOne + ((batch - block_.first_batch) << c_bits_);
      batches_.for_each(batch, found, [&](std::uint32_t position, std::size_t) {
        for (int j = 0; j < kRows; ++j) cells[place.cell(j, position, mask)] += first_key + position;
      });
    }
  }

  std::size_t find_singles() {
    const std::size_t n_cells = space_.cells.size();
    space_.now.resize(n_cells + kRows);  // one is written before it is known whether it counts
    space_.next.resize(n_cells + kRows);
    std::size_t n = 0;
    for (std::size_t cell = 0; cell < n_cells; ++cell) {
      space_.now[n] = static_cast<std::uint32_t>(cell);
      n += stands_alone(space_.cells[cell]);
    }
    return n;
  }

  // Takes out every value that stands alone in one of the first `n` cells of `now`; those that are alone afterwards are
  // the next round's. A value may be alone in two of them: the first one in the list takes it.
  std::size_t peel_round(std::size_t n) {
    std::uint64_t* const cells = space_.cells.data();
    const std::uint32_t* const now = space_.now.data();
    std::uint32_t* const next = space_.next.data();
    const std::uint32_t mask = c_ - 1;
    std::size_t n_next = 0;
    Entry* entry = entries_ + block_.n_peeled;
    constexpr std::size_t kAhead = 8;
    for (std::size_t i = 0; i < n; ++i) {
      if (i + 2 * kAhead < n) __builtin_prefetch(cells + now[i + 2 * kAhead]);
      if (i + kAhead < n) {
        const auto later = static_cast<std::uint32_t>(cells[now[i + kAhead]]);
        if ((later >> c_bits_) < space_.places.size()) {
          const Place& place = space_.places[later >> c_bits_];
          for (int j = 0; j < kRows; ++j) __builtin_prefetch(cells + place.cell(j, later & mask, mask), 1);
        }
      }
      const std::uint32_t cell = now[i];
      const std::uint64_t content = cells[cell];
      if (!stands_alone(content)) continue;
      const auto key = static_cast<std::uint32_t>(content);
      const std::uint32_t in_block = key >> c_bits_, position = key & mask;
      const Place& place = space_.places[in_block];
      // Which of the three this is, is as good as random: no branches on it. Its own cell becomes 0 like the others.
      std::uint32_t places[kRows], written[kRows];
      for (int j = 0; j < kRows; ++j) {
        places[j] = place.cell(j, position, mask);
        written[j] = (first_cell_ + places[j]) | place.sign(j);
        const std::uint64_t rest = cells[places[j]] - content;
        cells[places[j]] = rest;
        next[n_next] = places[j];
        n_next += stands_alone(rest);
      }
      const bool is_second = places[1] == cell, is_third = places[2] == cell;
      entry->cell[0] = is_third ? written[2] : is_second ? written[1] : written[0];
      entry->cell[1] = is_second || is_third ? written[0] : written[1];
      entry->cell[2] = is_third ? written[1] : written[2];
      entry->position = position_of(block_.first_batch + in_block, position);
      ++entry;
    }
    block_.n_peeled = static_cast<std::size_t>(entry - entries_);
    space_.now.swap(space_.next);
    return n_next;
  }

  std::uint32_t position_of(std::size_t batch, std::uint32_t position) const {
    return static_cast<std::uint32_t>(geometry_.granule(batch, position / kGranuleValues) * kGranuleValues +
                                      position % kGranuleValues);
  }

  // What is left: all values of the block but those peeled.
  void list_core() {
    const std::size_t slots = c_ / kGranuleValues;
    const std::size_t n_here = block_.end_batch - block_.first_batch;
    std::vector<std::uint16_t>& gone = space_.left;
    gone.assign(n_here * slots, 0);
    for (std::size_t i = 0; i < block_.n_peeled; ++i) {
      const std::size_t granule = entries_[i].position / kGranuleValues;
      const std::size_t in_block = geometry_.batch_of(granule) - block_.first_batch;
      gone[in_block * slots + geometry_.slot_of(granule)] |=
          static_cast<std::uint16_t>(1u << (entries_[i].position % kGranuleValues));
    }
    Entry* entry = entries_ + block_.n_peeled;
    Occupied found;
    for (std::size_t batch = block_.first_batch; batch < block_.end_batch; ++batch) {
      batches_.find(batch, found);
      const std::size_t in_block = batch - block_.first_batch;
      const Place& place = space_.places[in_block];
      for (int i = 0; i < found.n_granules; ++i)
        found.bits[i] = static_cast<std::uint16_t>(found.bits[i] & ~gone[in_block * slots + found.slot[i]]);
      batches_.for_each(batch, found, [&](std::uint32_t position, std::size_t index) {
        for (int j = 0; j < kRows; ++j)
          entry->cell[j] = block_.n_rows == 0 ? 0 : (first_cell_ + place.cell(j, position, c_ - 1)) | place.sign(j);
        entry->position = static_cast<std::uint32_t>(index);
        ++entry;
      });
    }
  }

  Block& block_;
  Batches batches_;
  const Geometry& geometry_;
  std::uint32_t c_;
  int c_bits_;
  std::uint32_t first_cell_;
  Entry* entries_;
  PeelSpace& space_;
};

inline void peel_block(const Geometry& geometry, Block& block, std::uint64_t key, const std::uint16_t* granule_bits,
                       Entry* entries) {
  static thread_local PeelSpace space;
  Peeling(geometry, block, key, granule_bits, entries, space).run();
}

}  // namespace

const Kernels& kernels_at(Level<GW_LEVEL>) {
  constexpr Dtype f = Dtype::float32, b = Dtype::bfloat16;
  static constexpr Kernels all = {{index_values<f>, index_values<b>},
                                  {{add_block<float, f>, add_block<float, b>},
                                   {add_block<std::int32_t, f>, add_block<std::int32_t, b>},
                                   {add_block<std::int64_t, f>, add_block<std::int64_t, b>}},
                                  peel_block,
                                  {{recover_block<float, f>, recover_block<float, b>},
                                   {recover_block<std::int32_t, f>, recover_block<std::int32_t, b>},
                                   {recover_block<std::int64_t, f>, recover_block<std::int64_t, b>}}};
  return all;
}

}  // namespace gradwire::sketch
