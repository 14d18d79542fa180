#include "signs/votes.hpp"

#include <atomic>

#include "parallel/thread_pool.hpp"

namespace gradwire::signs {
namespace {

constexpr std::size_t kTaskElements = std::size_t{1} << 17;  // 512 KiB of float32: some 50 us from memory

}  // namespace

bool pack_signs(ConstBytes values, Dtype dtype, Words words) {
  const std::size_t n_elements = values.size() / bytes_of(dtype);
  std::atomic<bool> all_finite{true};
  parallel_for_runs(n_elements, kTaskElements, [&](std::size_t begin, std::size_t n) {
    if (!kernels_for(dtype).pack(values.data() + begin * bytes_of(dtype), n, words.data() + begin / 32))
      all_finite.store(false, std::memory_order_relaxed);
  });
  return all_finite;
}

void write_majority(ConstWords words, std::size_t n_ranks, Dtype dtype, std::uint32_t scale_bits,
                    bool ties_are_positive, Bytes values) {
  const std::size_t n_elements = values.size() / bytes_of(dtype), n_words = words_for(n_elements);
  parallel_for_runs(n_elements, kTaskElements, [&](std::size_t begin, std::size_t n) {
    const Ballot ballot{words.data() + begin / 32, n_words, n_ranks, scale_bits, ties_are_positive};
    kernels_for(dtype).vote(ballot, n, values.data() + begin * bytes_of(dtype));
  });
}

}  // namespace gradwire::signs
