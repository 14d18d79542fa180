#include "sketch/bloom.hpp"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstring>
#include <string>

#include "errors.hpp"
#include "parallel/thread_pool.hpp"
#include "sketch/geometry.hpp"
#include "sketch/plan.hpp"

namespace gradwire::sketch {
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

Hashes checked(std::span<const std::uint32_t> filter, std::span<const std::uint32_t> words, std::size_t n_elements,
               int n_hashes, std::uint64_t seed) {
  if (words.size() != words_for(n_elements)) throw InvalidArgument("the index has another length");
  if (n_hashes < 1 || n_hashes > kMaxBloomHashes) throw InvalidArgument("a Bloom filter has 1 to 64 hashes");
  if (filter.empty() || filter.size() % kBloomRowWords != 0)
    throw InvalidArgument("a Bloom filter has rows of 32 words, not " + std::to_string(filter.size()) + " words");
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

}  // namespace

void insert_bloom(std::span<const std::uint32_t> words, std::size_t n_elements, int n_hashes, std::uint64_t seed,
                  std::span<std::uint32_t> filter) {
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

std::size_t query_bloom(std::span<const std::uint32_t> filter, std::size_t n_elements, int n_hashes, std::uint64_t seed,
                        std::span<std::uint32_t> words) {
  const Hashes hashes = checked(filter, words, n_elements, n_hashes, seed);
  std::memset(words.data(), 0, words.size_bytes());
  const Geometry geometry(n_elements, kMaxBatchValues);
  auto* const granules = reinterpret_cast<std::uint16_t*>(words.data());
  const std::size_t n_tasks = (geometry.n_batches + kTaskBatches - 1) / kTaskBatches;
  parallel_for(n_tasks, [&](std::size_t task) {
    const std::size_t end = std::min(geometry.n_batches, (task + 1) * kTaskBatches);
    for (std::size_t batch = task * kTaskBatches; batch < end; ++batch) {
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

}  // namespace gradwire::sketch
