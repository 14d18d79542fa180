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
#include <vector>

#include "simd/dispatch.hpp"
#include "spans.hpp"

namespace gradwire::sketch {

inline constexpr std::size_t kGranuleValues = 16;  // 64 bytes of float32: a cache line
inline constexpr std::size_t kMinBatchValues = kGranuleValues, kMaxBatchValues = 1024;
inline constexpr int kRows = 3;  // rows a value is added to

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

// A count sketch of one gradient: its size from the OR-ed index, the sums, the order of peeling, and the recovery.

using namespace floats;
inline constexpr int kDtypes = 2;  // float16 is not sketched
enum class Cells : int { float32 = 0, int32 = 1, int64 = 2 };
inline constexpr int kCellKinds = 3;

constexpr std::size_t bytes_of(Cells cells) { return cells == Cells::int64 ? 8 : 4; }

// What one pass over a gradient finds.
struct IndexFacts {
  std::size_t n_nonzeros;
  std::uint32_t max_magnitude;  // bits of the largest |value| as float32; 0x7F800000 and above: Inf or NaN
};

// Bit i % 32 of word i / 32 is 1 where value i is not zero; -0.0 is zero, NaN is not. Bits past the end are 0.
// Throws InvalidArgument if sizes do not fit.
IndexFacts write_index(ConstBytes values, Dtype dtype, Words words);

// How many bits are set. Throws CorruptMessage if a bit past n_elements is.
std::size_t count_index(ConstWords words, std::size_t n_elements);

// One value on its way out of the sketch. Bit 31 of a cell: the value is subtracted there.
struct Entry {
  std::uint32_t cell[kRows];  // of a peeled value, the first is where it stands alone
  std::uint32_t position;     // in the gradient
};
inline constexpr std::uint32_t kNegative = 0x80000000u;

// A range of batches with a table of its own: one thread peels it within its second-level cache.
struct Block {
  std::size_t first_batch, end_batch;
  std::uint32_t first_row, n_rows;
  std::size_t first_entry, n_entries;
  std::size_t n_peeled;
  int n_rounds;
};

struct Options {
  std::size_t max_batch_values;
  double gamma;
  std::uint64_t seed, salt;
  std::size_t max_cells;  // 0: as many as gamma asks for; less is lossy
};

enum class Outcome : int { complete = 0, nonfinite = 1, foreign = 2 };

class Plan {
 public:
  // Sizes the sketch for the union `words`, which all ranks hold. Throws InvalidArgument, CorruptMessage.
  void prepare(ConstWords words, std::size_t n_elements, const Options& options);

  // Sizes the sketch before the union is known: block k of batches of `batch_values` gets rows[k] rows. `adopt` takes
  // the union, once it is there, and comes before `peel`. Throws as `prepare`.
  void assume(std::size_t n_elements, std::size_t batch_values, ConstWords rows, std::uint64_t seed,
              std::uint64_t salt);
  void adopt(ConstWords words);

  // Non-zeros of the union in each block.
  std::vector<std::size_t> block_nonzeros() const;

  std::size_t n_nonzeros() const { return n_nonzeros_; }
  std::size_t n_cells() const { return n_cells_; }
  std::size_t batch_values() const { return geometry_.batch_values; }
  std::size_t n_blocks() const { return blocks_.size(); }
  int n_rounds() const;

  // Adds up this rank's gradient: cells are overwritten. `own_words` is the index that `write_index` gave for `values`.
  // Integers: a value is rint(value x 2^shift), at most `limit` in magnitude, and sums wrap around.
  // Throws InvalidArgument (sizes; a value beyond the limit).
  void add(ConstBytes values, Dtype dtype, ConstWords own_words, Cells kind, int shift, std::int64_t limit,
           Bytes cells) const;

  // Finds the order in which the values of the union can be peeled; returns how many cannot: the core.
  // `words` are those given to `prepare`.
  std::size_t peel(ConstWords words);

  // Positions of the core in the gradient, in an order that is the same on all ranks.
  void write_core(std::span<std::int64_t> positions) const;

  // Writes sum x `scale` of every value, zeros where the index has none, into `values`; `cells`, the sum of all ranks'
  // cells, is used up. The core is estimated by the median of its three cells if `estimate`, else it is 0. `bound`: the
  // ranks' largest magnitudes add up to no more; in floats, it says how much rounding may leave in a cell.
  Outcome recover(Bytes cells, Cells kind, double scale, bool estimate, float bound, Bytes values, Dtype dtype) const;

 private:
  void begin(std::size_t n_elements, std::size_t batch_values, std::uint64_t key);
  void make_blocks(std::size_t n_blocks);
  void set_cells(std::size_t n_rows);
  // Counts every block's non-zeros.
  void fill_blocks(ConstWords words);

  Geometry geometry_;
  std::uint64_t key_ = 0;
  std::size_t n_nonzeros_ = 0, n_cells_ = 0;
  std::vector<Block> blocks_;
  std::vector<Entry> entries_;
};

// The Bloom filter of section 3.3, batched like the sketch (section 3.4): a filter is a table of rows of 1,024 bits,
// and the non-zeros of a batch, as 1,024 bits, are ORed into one row per hash, each time rotated by another number of
// bits.
inline constexpr std::size_t kBloomRowWords = 32;
inline constexpr int kMaxBloomHashes = 64;

// Writes the filter of the index `words`; filter.size() is a multiple of kBloomRowWords, at least one row.
// Throws InvalidArgument if sizes do not fit.
void insert_bloom(ConstWords words, std::size_t n_elements, int n_hashes, std::uint64_t seed, Words filter);

// Writes the index of everything that the filter may hold; returns how many that are.
std::size_t query_bloom(ConstWords filter, std::size_t n_elements, int n_hashes, std::uint64_t seed, Words words);

// Writes the bits of `words` at the set bits of `among`, in order, to `packed`: as many words as they take.
// Throws InvalidArgument if sizes do not fit.
void pack_bits(ConstWords words, ConstWords among, Words packed);

// Clears those set bits of `words` whose bit in `packed` is 0.
void keep_bits(ConstWords packed, Words words);

// The loops of the sketch: loops.cpp.

// One gradient and its index, as a kernel sees it.
struct Source {
  const void* values;
  const std::uint16_t* granule_bits;  // bit i of granule g: value 16 g + i is not zero
};

struct Quantiser {
  double scale;
  std::int64_t limit;
};

struct Kernels {
  // Values [first, end) of one gradient, first a multiple of 32; the words of that range.
  IndexFacts (*index[kDtypes])(const void* values, std::size_t first, std::size_t end, std::uint32_t* words);
  // False if a value is beyond the limit.
  bool (*add[kCellKinds][kDtypes])(const Geometry& geometry, const Block& block, std::uint64_t key,
                                   const Source& source, const Quantiser& quantiser, void* cells);
  // Fills the block's entries, peeled ones first, and its n_peeled and n_rounds.
  void (*peel)(const Geometry& geometry, Block& block, std::uint64_t key, const std::uint16_t* granule_bits,
               Entry* entries);
  Outcome (*recover[kCellKinds][kDtypes])(const Geometry& geometry, const Block& block, const Entry* entries,
                                          double scale, bool estimate, float bound, void* cells, void* values);
};

GW_KERNELS(Kernels, kernels, 1)

}  // namespace gradwire::sketch
