// Structural peeling of one block: which value stands alone in which cell, round by round, before any value is known
// (Jiang, Mitzenmacher, Thaler 2017; section 3.2 of the paper). Part of the loops, compiled once per instruction set.
#pragma once

#include <vector>

#include "sketch/batches.hpp"

namespace gradwire::sketch {
namespace {

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
}  // namespace gradwire::sketch
