#include "packing/packing.hpp"

#include <algorithm>
#include <vector>

#include "errors.hpp"
#include "parallel/thread_pool.hpp"

namespace gradwire::packing {
namespace {

constexpr std::size_t kChunkWords = 1 << 12;
constexpr std::size_t kChunkValues = 32 * kChunkWords;

// Calls body(first value, values, first packed value) for every chunk.
template <typename Body>
void for_each_chunk(std::size_t n_values, std::size_t n_packed, ConstWords words, Body&& body) {
  check_index(words, n_values);
  const std::size_t n_chunks = (words.size() + kChunkWords - 1) / kChunkWords;
  std::vector<std::size_t> starts(n_chunks + 1, 0);
  const auto count = kernels().count;
  parallel_for(n_chunks, [&](std::size_t chunk) {
    const std::size_t first = chunk * kChunkWords;
    starts[chunk + 1] = count(reinterpret_cast<const std::uint16_t*>(words.data() + first),
                              2 * std::min(kChunkWords, words.size() - first));
  });
  for (std::size_t chunk = 0; chunk < n_chunks; ++chunk) starts[chunk + 1] += starts[chunk];
  if (starts.back() != n_packed)
    throw InvalidArgument("the index has ", starts.back(), " bits set, but there are ", n_packed, " packed values");
  parallel_for(n_chunks, [&](std::size_t chunk) {
    const std::size_t first = chunk * kChunkValues;
    body(first, std::min(kChunkValues, n_values - first), starts[chunk]);
  });
}

}  // namespace

void check_index_size(ConstWords words, std::size_t n_values) {
  if (words.size() != words_for(n_values))
    throw InvalidArgument("the index of ", n_values, " values has ", words_for(n_values), " words, not ", words.size());
}

void check_index(ConstWords words, std::size_t n_values) {
  check_index_size(words, n_values);
  if (n_values % 32 != 0 && words.back() >> (n_values % 32) != 0)
    throw CorruptMessage("the index has bits set past its ", n_values,
                         " values: it is of another gradient, or was altered on its way");
}

void pack(ConstBytes values, std::size_t item_bytes, ConstWords words, Bytes packed) {
  const auto pack_chunk = kernels().pack[item_bytes == 4];
  for_each_chunk(values.size() / item_bytes, packed.size() / item_bytes, words,
                 [&](std::size_t first, std::size_t n, std::size_t start) {
                   pack_chunk(values.data() + first * item_bytes, words.data() + first / 32, n,
                              packed.data() + start * item_bytes);
                 });
}

void unpack(ConstBytes packed, std::size_t item_bytes, ConstWords words, Bytes values) {
  const auto unpack_chunk = kernels().unpack[item_bytes == 4];
  for_each_chunk(values.size() / item_bytes, packed.size() / item_bytes, words,
                 [&](std::size_t first, std::size_t n, std::size_t start) {
                   unpack_chunk(packed.data() + start * item_bytes, words.data() + first / 32, n,
                                values.data() + first * item_bytes);
                 });
}

}  // namespace gradwire::packing
