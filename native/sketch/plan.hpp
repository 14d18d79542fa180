// A count sketch of one gradient: its size from the OR-ed index, the sums, the order of peeling, and the recovery.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "floats/dtypes.hpp"
#include "sketch/geometry.hpp"

namespace gradwire::sketch {

using floats::bytes_of;
using floats::Dtype;
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
IndexFacts write_index(std::span<const std::uint8_t> values, Dtype dtype, std::span<std::uint32_t> words);

// How many bits are set. Throws CorruptMessage if a bit past n_elements is.
std::size_t count_index(std::span<const std::uint32_t> words, std::size_t n_elements);

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
  void prepare(std::span<const std::uint32_t> words, std::size_t n_elements, const Options& options);

  // Sizes the sketch before the union is known: block k of batches of `batch_values` gets rows[k] rows. `adopt` takes
  // the union, once it is there, and comes before `peel`. Throws as `prepare`.
  void assume(std::size_t n_elements, std::size_t batch_values, std::span<const std::uint32_t> rows, std::uint64_t seed,
              std::uint64_t salt);
  void adopt(std::span<const std::uint32_t> words);

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
  void add(std::span<const std::uint8_t> values, Dtype dtype, std::span<const std::uint32_t> own_words, Cells kind,
           int shift, std::int64_t limit, std::span<std::uint8_t> cells) const;

  // Finds the order in which the values of the union can be peeled; returns how many cannot: the core.
  // `words` are those given to `prepare`.
  std::size_t peel(std::span<const std::uint32_t> words);

  // Positions of the core in the gradient, in an order that is the same on all ranks.
  void write_core(std::span<std::int64_t> positions) const;

  // Writes sum x `scale` of every value, zeros where the index has none, into `values`; `cells`, the sum of all ranks'
  // cells, is used up. The core is estimated by the median of its three cells if `estimate`, else it is 0. `bound`: the
  // ranks' largest magnitudes add up to no more; in floats, it says how much rounding may leave in a cell.
  Outcome recover(std::span<std::uint8_t> cells, Cells kind, double scale, bool estimate, float bound,
                  std::span<std::uint8_t> values, Dtype dtype) const;

 private:
  void begin(std::size_t n_elements, std::size_t batch_values, std::uint64_t key);
  void make_blocks(std::size_t n_blocks);
  void set_cells(std::size_t n_rows);
  // Counts every block's non-zeros.
  void fill_blocks(std::span<const std::uint32_t> words);

  Geometry geometry_;
  std::uint64_t key_ = 0;
  std::size_t n_nonzeros_ = 0, n_cells_ = 0;
  bool is_peeled_ = false;
  std::vector<Block> blocks_;
  std::vector<Entry> entries_;
};

}  // namespace gradwire::sketch
