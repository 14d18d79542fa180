#include "sketch/plan.hpp"

#include <atomic>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "errors.hpp"
#include "packing/packing.hpp"
#include "parallel/thread_pool.hpp"

namespace gradwire::sketch {
namespace {

// A block of so many non-zeros has 42,600 cells of 8 bytes while it is peeled, and lists of 4: within a second-level
// cache of 1 MiB, as one core here has.
constexpr std::size_t kBlockNonzeros = 1 << 15;
// Fewer batches share too few rows: below 1,024 of them a block loses recoveries (docs/results.md, count sketch).
constexpr std::size_t kMinBlockBatches = 1024;
// Batches are smaller where a table would have fewer rows than this.
constexpr std::size_t kMinTableRows = 32;
// So few are sent densely, without a table.
constexpr std::size_t kMaxDenseNonzeros = 64;
constexpr std::size_t kIndexChunk = 1 << 18;

// The index as granules of 16 bits: halves of words, in order on little-endian machines, which gradwire requires.
const std::uint16_t* granules_of(ConstWords words) { return reinterpret_cast<const std::uint16_t*>(words.data()); }

}  // namespace

IndexFacts write_index(ConstBytes values, Dtype dtype, Words words) {
  const std::size_t n = values.size() / bytes_of(dtype);
  packing::check_index_size(words, n);
  std::atomic<std::size_t> n_nonzeros{0};
  std::atomic<std::uint32_t> max_magnitude{0};
  const auto index = kernels().index[static_cast<int>(dtype)];
  parallel_for_runs(n, kIndexChunk, [&](std::size_t first, std::size_t count) {
    const IndexFacts facts = index(values.data(), first, first + count, words.data() + first / 32);
    n_nonzeros += facts.n_nonzeros;
    std::uint32_t seen = max_magnitude.load();
    while (seen < facts.max_magnitude && !max_magnitude.compare_exchange_weak(seen, facts.max_magnitude)) {
    }
  });
  return {n_nonzeros.load(), max_magnitude.load()};
}

std::size_t count_index(ConstWords words, std::size_t n_elements) {
  packing::check_index(words, n_elements);
  return packing::kernels().count(granules_of(words), 2 * words.size());
}

void Plan::begin(std::size_t n_elements, std::size_t batch_values, std::uint64_t key) {
  if (n_elements > std::numeric_limits<std::uint32_t>::max())
    throw InvalidArgument("a sketch takes up to 2^32 - 1 values; reduce the bucket size");
  key_ = key;
  geometry_ = Geometry(n_elements, batch_values);
  if (n_elements != 0) geometry_.rotate(key_);
  n_cells_ = 0;
  blocks_.clear();
  entries_.clear();
}

void Plan::make_blocks(std::size_t n_blocks) {
  blocks_.resize(n_blocks);
  for (std::size_t k = 0; k < n_blocks; ++k)
    blocks_[k] = {geometry_.n_batches * k / n_blocks, geometry_.n_batches * (k + 1) / n_blocks, 0, 0, 0, 0, 0, 0};
}

void Plan::fill_blocks(ConstWords words) {
  const std::uint16_t* const granules = granules_of(words);
  const auto count_bits = packing::kernels().count;
  std::size_t n_entries = 0;
  for (Block& block : blocks_) {
    block.first_entry = n_entries;
    block.n_entries = 0;
    for (std::size_t slot = 0; slot < geometry_.slots(); ++slot)
      geometry_.for_each_run(block.first_batch, block.end_batch, slot, [&](std::size_t first, std::size_t end) {
        block.n_entries += count_bits(granules + first, end - first);
      });
    n_entries += block.n_entries;
  }
}

void Plan::prepare(ConstWords words, std::size_t n_elements, const Options& options) {
  n_nonzeros_ = count_index(words, n_elements);

  double wanted = options.gamma * static_cast<double>(n_nonzeros_);
  if (options.max_cells != 0) wanted = std::min(wanted, static_cast<double>(options.max_cells));
  std::size_t c = options.max_batch_values;
  while (c > kMinBatchValues && wanted < static_cast<double>(kMinTableRows * c)) c /= 2;
  begin(n_elements, c, key_of(options.seed, options.salt));
  if (n_nonzeros_ == 0) return;
  make_blocks(std::max<std::size_t>(1, std::min(n_nonzeros_ / kBlockNonzeros, geometry_.n_batches / kMinBlockBatches)));
  fill_blocks(words);
  if (n_nonzeros_ <= kMaxDenseNonzeros || wanted < kRows * kMinBatchValues) return;
  std::size_t n_rows = 0;
  for (Block& block : blocks_) {
    if (block.n_entries == 0) continue;
    const double share = wanted * static_cast<double>(block.n_entries) / static_cast<double>(n_nonzeros_);
    block.first_row = static_cast<std::uint32_t>(n_rows);
    block.n_rows = static_cast<std::uint32_t>(std::max(3.0, std::ceil(share / static_cast<double>(c))));
    n_rows += block.n_rows;
  }
  set_cells(n_rows);
}

void Plan::assume(std::size_t n_elements, std::size_t batch_values, ConstWords rows, std::uint64_t seed,
                  std::uint64_t salt) {
  if (!std::has_single_bit(batch_values) || batch_values < kMinBatchValues || batch_values > kMaxBatchValues)
    throw InvalidArgument("a batch has 16 to 1,024 values, a power of two");
  n_nonzeros_ = 0;
  begin(n_elements, batch_values, key_of(seed, salt));
  if (rows.empty() || rows.size() > std::max<std::size_t>(1, geometry_.n_batches))
    throw InvalidArgument("a sketch has a block at least, and no more than batches");
  make_blocks(rows.size());
  std::size_t n_rows = 0;
  for (std::size_t k = 0; k < rows.size(); ++k) {
    if (rows[k] != 0 && rows[k] < kRows) throw InvalidArgument("a block has three rows at least, or none");
    blocks_[k].first_row = static_cast<std::uint32_t>(n_rows);
    blocks_[k].n_rows = rows[k];
    n_rows += rows[k];
    if (n_rows >= kNegative) break;
  }
  set_cells(n_rows);
}

void Plan::adopt(ConstWords words) {
  n_nonzeros_ = count_index(words, geometry_.n_elements);
  fill_blocks(words);
}

void Plan::set_cells(std::size_t n_rows) {
  n_cells_ = n_rows * geometry_.batch_values;
  if (n_cells_ >= kNegative) throw InvalidArgument("a sketch has fewer than 2^31 cells; reduce the bucket size");
}

std::vector<std::size_t> Plan::block_nonzeros() const {
  std::vector<std::size_t> counts;
  for (const Block& block : blocks_) counts.push_back(block.n_entries);
  return counts;
}

int Plan::n_rounds() const {
  int most = 0;
  for (const Block& block : blocks_) most = std::max(most, block.n_rounds);
  return most;
}

void Plan::add(ConstBytes values, Dtype dtype, ConstWords own_words, Cells kind, int shift, std::int64_t limit,
               Bytes cells) const {
  if (values.size() != geometry_.n_elements * bytes_of(dtype)) throw InvalidArgument("the plan is of another length");
  packing::check_index_size(own_words, geometry_.n_elements);
  if (cells.size() != n_cells_ * bytes_of(kind)) throw InvalidArgument("the cells do not fit the plan");
  const Source source{values.data(), granules_of(own_words)};
  const Quantiser quantiser{std::ldexp(1.0, shift), limit};
  const auto add_block = kernels().add[static_cast<int>(kind)][static_cast<int>(dtype)];
  std::atomic<bool> fits{true};
  parallel_for(blocks_.size(), [&](std::size_t k) {
    if (blocks_[k].n_rows != 0 && !add_block(geometry_, blocks_[k], key_, source, quantiser, cells.data()))
      fits = false;
  });
  if (!fits)
    throw InvalidArgument(
        "a value does not fit the fixed point: the exponent is not that of the largest value of all ranks");
}

std::size_t Plan::peel(ConstWords words) {
  if (count_index(words, geometry_.n_elements) != n_nonzeros_)
    throw InvalidArgument("this is not the index that the sketch was planned for");
  entries_.resize(n_nonzeros_);
  const auto peel_block = kernels().peel;
  parallel_for(blocks_.size(), [&](std::size_t k) {
    peel_block(geometry_, blocks_[k], key_, granules_of(words), entries_.data() + blocks_[k].first_entry);
  });
  std::size_t n_core = 0;
  for (const Block& block : blocks_) n_core += block.n_entries - block.n_peeled;
  return n_core;
}

void Plan::write_core(std::span<std::int64_t> positions) const {
  std::size_t n = 0;
  for (const Block& block : blocks_)
    for (std::size_t i = block.n_peeled; i < block.n_entries; ++i, ++n)
      if (n < positions.size()) positions[n] = entries_[block.first_entry + i].position;
}

Outcome Plan::recover(Bytes cells, Cells kind, double scale, bool estimate, float bound, Bytes values,
                      Dtype dtype) const {
  if (values.size() != geometry_.n_elements * bytes_of(dtype)) throw InvalidArgument("the plan is of another length");
  if (cells.size() != n_cells_ * bytes_of(kind))
    throw CorruptMessage("the sketch has ", cells.size() / bytes_of(kind), " cells, its index asks for ", n_cells_,
                         ": they do not belong together");
  if (blocks_.empty()) {
    std::fill(values.begin(), values.end(), std::uint8_t{0});
    return Outcome::complete;
  }
  const auto recover_block = kernels().recover[static_cast<int>(kind)][static_cast<int>(dtype)];
  std::atomic<int> worst{0};
  parallel_for(blocks_.size(), [&](std::size_t k) {
    const int outcome = static_cast<int>(recover_block(geometry_, blocks_[k], entries_.data() + blocks_[k].first_entry,
                                                       scale, estimate, bound, cells.data(), values.data()));
    int seen = worst.load();
    // "Not finite" comes before "foreign": sums that overflowed leave nothing that could be compared.
    while ((seen == 0 || outcome == 1) && outcome != 0 && !worst.compare_exchange_weak(seen, outcome)) {
    }
  });
  return static_cast<Outcome>(worst.load());
}

// ---- the Bloom filter

namespace {

constexpr std::size_t kRowLongs = kMaxBatchValues / 64;
constexpr std::uint64_t kBloomSalt = 0xB100;  // apart from every salt of a sketch, which count from 0
constexpr std::size_t kTaskBatches = 1024;

struct Row {
  std::uint64_t bits[kRowLongs];

  bool any() const {
    std::uint64_t all = 0;
    for (const std::uint64_t part : bits) all |= part;
    return all != 0;
  }
};

// Bit i of the result is bit (i - rotation) % 1,024.
Row rotated(const Row& row, std::uint32_t rotation) {
  const std::size_t longs = rotation / 64;
  const int bits = static_cast<int>(rotation % 64);
  std::uint64_t twice[2 * kRowLongs];
  std::memcpy(twice, row.bits, sizeof row.bits);
  std::memcpy(twice + kRowLongs, row.bits, sizeof row.bits);
  Row result;
  const std::uint64_t* const from = twice + kRowLongs - longs - 1;  // of the long before: kRowLongs > longs
  if (bits == 0)
    std::memcpy(result.bits, from + 1, sizeof result.bits);
  else
    for (std::size_t i = 0; i < kRowLongs; ++i) result.bits[i] = (from[i + 1] << bits) | (from[i] >> (64 - bits));
  return result;
}

struct Hashes {
  std::uint64_t key;
  std::uint32_t n_rows;

  struct At {
    std::size_t row;
    std::uint32_t rotation;
  };
  At at(std::size_t batch, int hash) const {
    const std::uint64_t drawn = mix(key + (kMaxBloomHashes * batch + static_cast<std::uint64_t>(hash) + 1) * kGolden);
    return {below(n_rows, drawn >> 32), static_cast<std::uint32_t>(drawn % kMaxBatchValues)};
  }
};

Hashes checked(ConstWords filter, ConstWords words, std::size_t n_elements, int n_hashes, std::uint64_t seed) {
  if (words.size() != words_for(n_elements)) throw InvalidArgument("the index has another length");
  if (n_hashes < 1 || n_hashes > kMaxBloomHashes) throw InvalidArgument("a Bloom filter has 1 to 64 hashes");
  if (filter.empty() || filter.size() % kBloomRowWords != 0)
    throw InvalidArgument("a Bloom filter has rows of 32 words, not ", filter.size(), " words");
  return {key_of(seed, kBloomSalt), static_cast<std::uint32_t>(filter.size() / kBloomRowWords)};
}

// Granules of a batch as the bits of one row, and back.
template <typename Granule, typename Visit>
void visit_granules(const Geometry& geometry, std::size_t batch, Granule* granules, Visit&& visit) {
  for (std::size_t slot = 0; slot < geometry.slots(); ++slot) {
    const std::size_t granule = geometry.granule(batch, slot);
    if (granule >= geometry.n_granules) break;
    visit(slot, granules[granule]);
  }
}

// Calls visit(word, bit, place in `packed`) for every set bit of `among`.
template <typename Visit>
void visit_bits(ConstWords among, ConstWords packed, Visit&& visit) {
  const std::size_t n = packing::kernels().count(granules_of(among), 2 * among.size());
  if (packed.size() != words_for(n)) throw InvalidArgument(n, " bits take ", words_for(n), " words");
  std::size_t place = 0;
  for (std::size_t i = 0; i < among.size(); ++i)
    for (std::uint32_t left = among[i]; left != 0; left &= left - 1, ++place) visit(i, left & -left, place);
}

}  // namespace

void insert_bloom(ConstWords words, std::size_t n_elements, int n_hashes, std::uint64_t seed, Words filter) {
  const Hashes hashes = checked(filter, words, n_elements, n_hashes, seed);
  std::fill(filter.begin(), filter.end(), 0u);
  const Geometry geometry(n_elements, kMaxBatchValues);
  const auto* const granules = reinterpret_cast<const std::uint16_t*>(words.data());
  for (std::size_t batch = 0; batch < geometry.n_batches; ++batch) {
    Row row{};
    visit_granules(geometry, batch, granules, [&](std::size_t slot, std::uint16_t bits) {
      row.bits[slot / 4] |= static_cast<std::uint64_t>(bits) << (16 * (slot % 4));
    });
    if (!row.any()) continue;
    for (int hash = 0; hash < n_hashes; ++hash) {
      const auto at = hashes.at(batch, hash);
      const Row turned = rotated(row, at.rotation);
      Row stored;
      std::uint32_t* const to = filter.data() + at.row * kBloomRowWords;
      std::memcpy(&stored, to, sizeof stored);
      for (std::size_t i = 0; i < kRowLongs; ++i) stored.bits[i] |= turned.bits[i];
      std::memcpy(to, &stored, sizeof stored);
    }
  }
}

std::size_t query_bloom(ConstWords filter, std::size_t n_elements, int n_hashes, std::uint64_t seed, Words words) {
  const Hashes hashes = checked(filter, words, n_elements, n_hashes, seed);
  std::memset(words.data(), 0, words.size_bytes());
  const Geometry geometry(n_elements, kMaxBatchValues);
  auto* const granules = reinterpret_cast<std::uint16_t*>(words.data());
  parallel_for_runs(geometry.n_batches, kTaskBatches, [&](std::size_t begin, std::size_t n) {
    for (std::size_t batch = begin; batch < begin + n; ++batch) {
      Row row;
      std::fill_n(row.bits, kRowLongs, ~std::uint64_t{0});
      for (int hash = 0; hash < n_hashes && row.any(); ++hash) {
        const auto at = hashes.at(batch, hash);
        Row stored;
        std::memcpy(&stored, filter.data() + at.row * kBloomRowWords, sizeof stored);
        const Row turned = rotated(stored, (kMaxBatchValues - at.rotation) % kMaxBatchValues);
        for (std::size_t i = 0; i < kRowLongs; ++i) row.bits[i] &= turned.bits[i];
      }
      if (!row.any()) continue;
      visit_granules(geometry, batch, granules, [&](std::size_t slot, std::uint16_t& bits) {
        bits = static_cast<std::uint16_t>(row.bits[slot / 4] >> (16 * (slot % 4)));
      });
    }
  });
  if (n_elements % 32 != 0) {  // the last granule's bits past the end; as bytes, since they were written as granules
    std::uint32_t last;
    std::memcpy(&last, &words.back(), sizeof last);
    last &= (std::uint32_t{1} << (n_elements % 32)) - 1;
    std::memcpy(&words.back(), &last, sizeof last);
  }
  return count_index(words, n_elements);
}

void pack_bits(ConstWords words, ConstWords among, Words packed) {
  if (words.size() != among.size()) throw InvalidArgument("the index has another length");
  std::fill(packed.begin(), packed.end(), 0u);
  visit_bits(among, packed, [&](std::size_t i, std::uint32_t bit, std::size_t place) {
    if (words[i] & bit) packed[place / 32] |= 1u << (place % 32);
  });
}

void keep_bits(ConstWords packed, Words words) {
  visit_bits(words, packed, [&](std::size_t i, std::uint32_t bit, std::size_t place) {
    if (!(packed[place / 32] >> (place % 32) & 1)) words[i] &= ~bit;
  });
}

}  // namespace gradwire::sketch
