// libFuzzer harness of what the scheme homomorphic makes of the words that it is sent: an index, packed values, a Bloom
// filter, the cells of a sketch. None of them has a checksum, so every input reaches all of it.
// The first byte chooses among them and the values' size, the second the instruction set; then 13 bits say how many
// values there are, and 2 how many words of what follows are the index. Run: fuzz/run SECONDS sums_decode
#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <span>
#include <vector>

#include "errors.hpp"
#include "packing/packing.hpp"
#include "simd/dispatch.hpp"
#include "sketch/plan.hpp"

namespace packing = gradwire::packing;
namespace sketch = gradwire::sketch;

namespace {

using Bytes = std::vector<std::uint8_t>;
using Words = std::vector<std::uint32_t>;

void require(bool holds) {
  if (!holds) std::abort();
}

bool is_set(const Words& words, std::size_t i) { return (words[i / 32] >> (i % 32) & 1) != 0; }

std::size_t bits_set(const Words& words) {
  std::size_t n = 0;
  for (const std::uint32_t word : words) n += static_cast<std::size_t>(std::popcount(word));
  return n;
}

// The values that were sent lie where the index says, nothing lies elsewhere, and packing gives them back.
void check_packed(const Words& words, const Bytes& packed, std::size_t item_bytes, const Bytes& values) {
  const Bytes zero(item_bytes, 0);
  std::size_t taken = 0;
  for (std::size_t i = 0; i < values.size() / item_bytes; ++i) {
    const std::uint8_t* const expected = is_set(words, i) ? packed.data() + item_bytes * taken++ : zero.data();
    require(std::equal(expected, expected + item_bytes, values.data() + i * item_bytes));
  }
  require(item_bytes * taken == packed.size());
  Bytes again(packed.size());
  packing::pack(values, item_bytes, words, again);
  require(again == packed);
}

// Whatever bits are in a filter beside those of an index: the query finds the whole index.
void check_bloom(const Words& words, std::size_t n_values, std::span<const std::uint8_t> rest, std::uint64_t seed) {
  const int n_hashes = 1 + static_cast<int>(seed % sketch::kMaxBloomHashes);
  const std::size_t n_rows = 1 + rest.size() / (4 * sketch::kBloomRowWords);
  Words filter(n_rows * sketch::kBloomRowWords), found(words.size());
  sketch::insert_bloom(words, n_values, n_hashes, seed, filter);
  for (std::size_t i = 0; i < rest.size(); ++i) filter[i / 4] |= std::uint32_t{rest[i]} << (8 * (i % 4));
  const std::size_t n_found = sketch::query_bloom(filter, n_values, n_hashes, seed, found);
  require(n_found == bits_set(found) && n_found <= n_values);
  for (std::size_t i = 0; i < words.size(); ++i) require((words[i] & ~found[i]) == 0);
}

// Any cells: an outcome, and never a value where the index has none.
void check_sketch(const Words& words, std::size_t n_values, std::span<const std::uint8_t> rest, std::uint64_t seed) {
  const auto kind = static_cast<sketch::Cells>(seed % sketch::kCellKinds);
  const auto dtype = static_cast<sketch::Dtype>(seed / 4 % sketch::kDtypes);
  const std::size_t max_cells = seed % 7 == 0 ? 256 : 0;
  sketch::Plan plan;
  plan.prepare(words, n_values, {std::size_t{16} << seed % 7, 1.3, seed, seed % 3, max_cells});
  const std::size_t n_core = plan.peel(words);
  require(plan.n_nonzeros() == bits_set(words) && n_core <= plan.n_nonzeros());
  std::vector<std::int64_t> core(n_core);
  plan.write_core(core);
  for (const std::int64_t position : core) require(is_set(words, static_cast<std::size_t>(position)));
  Bytes cells(plan.n_cells() * sketch::bytes_of(kind)), values(n_values * gradwire::floats::bytes_of(dtype));
  for (std::size_t i = 0; i < cells.size(); ++i) cells[i] = rest.empty() ? 0 : rest[i % rest.size()];
  const bool estimate = seed % 2 == 0;
  if (plan.recover(cells, kind, 0.25, estimate, 1e30f, values, dtype) == sketch::Outcome::nonfinite) return;
  const std::size_t item_bytes = gradwire::floats::bytes_of(dtype);
  for (std::size_t i = 0; i < n_values; ++i)
    for (std::size_t byte = 0; byte < item_bytes && !is_set(words, i); ++byte)
      require(values[i * item_bytes + byte] == 0);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size < 6) return 0;
  gradwire::limit_simd_level(static_cast<gradwire::SimdLevel>(data[1] % 3));
  const bool is_large = data[0] == 255;  // the index over and over: beyond one chunk of packing
  const std::size_t n_values = (data[2] | std::size_t{data[3]} % 32 << 8) * (is_large ? 20 : 1);
  const std::span<const std::uint8_t> body(data + 6, size - 6);
  const std::size_t n_sent = std::min<std::size_t>(data[4] | std::size_t{data[5]} << 8, body.size() / 4);
  Words sent(n_sent);
  if (n_sent > 0) std::memcpy(sent.data(), body.data(), 4 * n_sent);
  const std::span<const std::uint8_t> rest = body.subspan(4 * n_sent);
  Words words = sent;
  if (is_large || data[1] >= 64) {  // as long as it should be
    words.assign((n_values + 31) / 32, 0);
    for (std::size_t i = 0; i < words.size() && n_sent > 0; ++i) words[i] = sent[i % n_sent];
    if (n_values % 32 != 0 && data[1] >= 96) words.back() &= (std::uint32_t{1} << (n_values % 32)) - 1;
  }
  const bool has_length = words.size() == (n_values + 31) / 32;
  const bool is_right = has_length && (n_values % 32 == 0 || words.back() >> (n_values % 32) == 0);
  bool is_refused = true, is_corrupt = false;
  try {
    require(sketch::count_index(words, n_values) == bits_set(words));
    is_refused = false;
  } catch (const gradwire::InvalidArgument&) {
  } catch (const gradwire::CorruptMessage&) {
    is_corrupt = true;
  }
  require(is_refused == !is_right && is_corrupt == (has_length && !is_right));

  const std::size_t item_bytes = data[0] / 4 % 2 == 0 ? 2 : 4;
  Bytes packed(rest.begin(), rest.end());  // exactly as long as it is, in whole values: overreads show
  packed.resize(packed.size() / item_bytes * item_bytes);
  if (data[0] / 8 % 4 != 0) packed.resize(item_bytes * bits_set(words), 0xA5);
  Bytes values(n_values * item_bytes);
  const bool fits = is_right && packed.size() == item_bytes * bits_set(words);
  try {
    packing::unpack(packed, item_bytes, words, values);
    require(fits);
    check_packed(words, packed, item_bytes, values);
  } catch (const gradwire::InvalidArgument&) {
    require(!fits);
  } catch (const gradwire::CorruptMessage&) {
    require(!is_right);
  }
  if (!is_right || n_values == 0) return 0;
  const std::uint64_t seed = data[0] * 0x9E3779B97F4A7C15u ^ data[1];
  if (data[0] % 4 == 1) check_bloom(words, n_values, rest, seed);
  if (data[0] % 4 == 2) check_sketch(words, n_values, rest, seed);
  return 0;
}
