#include "signs/votes.hpp"

#include <algorithm>
#include <atomic>
#include <type_traits>

#include "errors.hpp"
#include "parallel/thread_pool.hpp"
#include "signs/kernels.hpp"
#include "simd/dispatch.hpp"

namespace gradwire::signs {
namespace {

constexpr std::size_t kTaskElements = std::size_t{1} << 17;  // 512 KiB of float32: some 50 us from memory

template <Dtype dtype>
struct Bits {
  using Word = std::conditional_t<dtype == Dtype::float32, std::uint32_t, std::uint16_t>;
  static constexpr Word kSign = dtype == Dtype::float32 ? Word(0x80000000) : Word(0x8000);
  static constexpr Word kInfinity = static_cast<Word>(dtype == Dtype::float32    ? 0x7F800000
                                                      : dtype == Dtype::bfloat16 ? 0x7F80
                                                                                 : 0x7C00);
};

template <Dtype dtype>
bool pack(const void* values, std::size_t n_elements, std::uint32_t* words) {
  using Word = typename Bits<dtype>::Word;
  const Word* const bits = static_cast<const Word*>(values);
  bool all_finite = true;
  for (std::size_t begin = 0; begin < n_elements; begin += 32) {
    const std::size_t n = std::min<std::size_t>(32, n_elements - begin);
    std::uint32_t word = 0;
    for (std::size_t i = 0; i < n; ++i) {
      const Word value = bits[begin + i];
      all_finite &= (value & Bits<dtype>::kInfinity) != Bits<dtype>::kInfinity;
      word |= std::uint32_t{value > Bits<dtype>::kSign} << i;
    }
    *words++ = word;
  }
  return all_finite;
}

template <Dtype dtype>
void vote(const Ballot& ballot, std::size_t n_elements, void* values) {
  using Word = typename Bits<dtype>::Word;
  Word* out = static_cast<Word*>(values);
  const Word positive = static_cast<Word>(ballot.scale_bits), negative = positive | Bits<dtype>::kSign;
  const Word tied = ballot.ties_are_positive ? positive : Word{0};
  for (std::size_t i = 0; i < n_elements; ++i) {
    std::size_t n_negative = 0;
    for (std::size_t rank = 0; rank < ballot.n_ranks; ++rank)
      n_negative += ballot.words[rank * ballot.rank_stride + i / 32] >> i % 32 & 1;
    out[i] = 2 * n_negative > ballot.n_ranks ? negative : 2 * n_negative == ballot.n_ranks ? tied : positive;
  }
}

const Kernels& kernels_for(Dtype dtype) {
#if defined(__x86_64__)
  if (simd_level() >= SimdLevel::avx2) return kAvx2[static_cast<int>(dtype)];
#endif
  return kPortable[static_cast<int>(dtype)];
}

template <typename Body>
void for_tasks(std::size_t n_elements, const Body& body) {
  parallel_for((n_elements + kTaskElements - 1) / kTaskElements, [&](std::size_t task) {
    const std::size_t begin = task * kTaskElements;
    body(begin, std::min(kTaskElements, n_elements - begin));
  });
}

}  // namespace

const Kernels kPortable[kDtypes] = {{pack<Dtype::float32>, vote<Dtype::float32>},
                                    {pack<Dtype::bfloat16>, vote<Dtype::bfloat16>},
                                    {pack<Dtype::float16>, vote<Dtype::float16>}};

bool pack_signs(std::span<const std::uint8_t> values, Dtype dtype, std::span<std::uint32_t> words) {
  const std::size_t n_elements = values.size() / bytes_of(dtype);
  if (values.size() != n_elements * bytes_of(dtype) || words.size() != words_for(n_elements))
    throw InvalidArgument("pack_signs: one word for every 32 elements");
  std::atomic<bool> all_finite{true};
  for_tasks(n_elements, [&](std::size_t begin, std::size_t n) {
    if (!kernels_for(dtype).pack(values.data() + begin * bytes_of(dtype), n, words.data() + begin / 32))
      all_finite.store(false, std::memory_order_relaxed);
  });
  return all_finite;
}

void write_majority(std::span<const std::uint32_t> words, std::size_t n_ranks, Dtype dtype, std::uint32_t scale_bits,
                    bool ties_are_positive, std::span<std::uint8_t> values) {
  const std::size_t n_elements = values.size() / bytes_of(dtype), n_words = words_for(n_elements);
  if (n_ranks < 1 || n_ranks > kMaxRanks) throw InvalidArgument("write_majority: 1 to 255 ranks");
  if (values.size() != n_elements * bytes_of(dtype) || words.size() != n_ranks * n_words)
    throw InvalidArgument("write_majority: one word for every 32 elements and rank");
  for_tasks(n_elements, [&](std::size_t begin, std::size_t n) {
    const Ballot ballot{words.data() + begin / 32, n_words, n_ranks, scale_bits, ties_are_positive};
    kernels_for(dtype).vote(ballot, n, values.data() + begin * bytes_of(dtype));
  });
}

}  // namespace gradwire::signs
