#include <algorithm>
#include <type_traits>

#include "signs/kernels.hpp"
#include "simd/lanes.hpp"

namespace gradwire::signs {
namespace {

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

#if defined(__AVX2__)

// Whole words of 32 elements here, the rest as above.

bool pack_float32(const void* values, std::size_t n_elements, std::uint32_t* words) {
  const float* const from = static_cast<const float*>(values);
  const __m256i infinity = _mm256_set1_epi32(0x7F800000);
  __m256i nonfinite = _mm256_setzero_si256();
  std::size_t i = 0;
  for (; i + 32 <= n_elements; i += 32) {
    std::uint32_t word = 0;
    for (int part = 0; part < 4; ++part) {
      const __m256i bits = load256(from + i + 8 * part);
      nonfinite = _mm256_or_si256(nonfinite, _mm256_cmpeq_epi32(_mm256_and_si256(bits, infinity), infinity));
      const __m256 below = _mm256_cmp_ps(_mm256_castsi256_ps(bits), _mm256_setzero_ps(), _CMP_LT_OQ);
      word |= static_cast<std::uint32_t>(_mm256_movemask_ps(below)) << (8 * part);
    }
    *words++ = word;
  }
  const bool tail_finite = pack<Dtype::float32>(from + i, n_elements - i, words);
  return tail_finite && _mm256_testz_si256(nonfinite, nonfinite);
}

template <Dtype dtype>
bool pack_16(const void* values, std::size_t n_elements, std::uint32_t* words) {
  const std::uint16_t* const from = static_cast<const std::uint16_t*>(values);
  const __m256i infinity = _mm256_set1_epi16(dtype == Dtype::bfloat16 ? 0x7F80 : 0x7C00);
  const __m256i minus_zero = _mm256_set1_epi16(static_cast<short>(0x8000));
  __m256i nonfinite = _mm256_setzero_si256();
  std::size_t i = 0;
  for (; i + 32 <= n_elements; i += 32) {
    __m256i below[2];
    for (int part = 0; part < 2; ++part) {
      const __m256i bits = load256(from + i + 16 * part);
      nonfinite = _mm256_or_si256(nonfinite, _mm256_cmpeq_epi16(_mm256_and_si256(bits, infinity), infinity));
      below[part] = _mm256_andnot_si256(_mm256_cmpeq_epi16(bits, minus_zero), _mm256_srai_epi16(bits, 15));
    }
    const __m256i bytes = _mm256_permute4x64_epi64(_mm256_packs_epi16(below[0], below[1]), 0xD8);
    *words++ = static_cast<std::uint32_t>(_mm256_movemask_epi8(bytes));
  }
  const bool tail_finite = pack<dtype>(from + i, n_elements - i, words);
  return tail_finite && _mm256_testz_si256(nonfinite, nonfinite);
}

struct Votes {
  __m256i negative, tied;  // 32 bytes, 0xFF where it is so
};

Votes count(const Ballot& ballot, std::size_t word) {
  // Byte j of the vector gets byte j / 8 of the word, and keeps bit j % 8 of it.
  const __m256i spread = _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
  const __m256i bit = _mm256_set1_epi64x(static_cast<long long>(0x8040201008040201));
  __m256i n_negative = _mm256_setzero_si256();
  for (std::size_t rank = 0; rank < ballot.n_ranks; ++rank) {
    const __m256i bits = _mm256_set1_epi32(static_cast<int>(ballot.words[rank * ballot.rank_stride + word]));
    const __m256i own_bit = _mm256_and_si256(_mm256_shuffle_epi8(bits, spread), bit);
    n_negative = _mm256_sub_epi8(n_negative, _mm256_cmpeq_epi8(own_bit, bit));
  }
  const __m256i half = _mm256_set1_epi8(static_cast<char>(ballot.n_ranks / 2));
  const __m256i at_most_half = _mm256_cmpeq_epi8(_mm256_max_epu8(n_negative, half), half);
  const bool can_tie = ballot.n_ranks % 2 == 0 && !ballot.ties_are_positive;
  return {_mm256_andnot_si256(at_most_half, _mm256_set1_epi8(-1)),
          can_tie ? _mm256_cmpeq_epi8(n_negative, half) : _mm256_setzero_si256()};
}

__m128i eight_bytes(__m256i bytes, int part) {
  alignas(32) std::uint8_t all[32];
  _mm256_store_si256(reinterpret_cast<__m256i*>(all), bytes);
  return _mm_loadl_epi64(reinterpret_cast<const __m128i*>(all + 8 * part));
}

void vote_float32(const Ballot& ballot, std::size_t n_elements, void* values) {
  const __m256i positive = _mm256_set1_epi32(static_cast<int>(ballot.scale_bits));
  const __m256i sign = _mm256_set1_epi32(static_cast<int>(0x80000000));
  std::uint32_t* const out = static_cast<std::uint32_t*>(values);
  std::size_t word = 0;
  for (; 32 * (word + 1) <= n_elements; ++word) {
    const Votes votes = count(ballot, word);
    for (int part = 0; part < 4; ++part) {
      const __m256i negative = _mm256_cvtepi8_epi32(eight_bytes(votes.negative, part));
      const __m256i tied = _mm256_cvtepi8_epi32(eight_bytes(votes.tied, part));
      const __m256i value = _mm256_andnot_si256(tied, _mm256_or_si256(positive, _mm256_and_si256(negative, sign)));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + 32 * word + 8 * part), value);
    }
  }
  Ballot rest = ballot;
  rest.words += word;
  vote<Dtype::float32>(rest, n_elements - 32 * word, out + 32 * word);
}

template <Dtype dtype>
void vote_16(const Ballot& ballot, std::size_t n_elements, void* values) {
  const __m256i positive = _mm256_set1_epi16(static_cast<short>(ballot.scale_bits));
  const __m256i sign = _mm256_set1_epi16(static_cast<short>(0x8000));
  std::uint16_t* const out = static_cast<std::uint16_t*>(values);
  std::size_t word = 0;
  for (; 32 * (word + 1) <= n_elements; ++word) {
    const Votes votes = count(ballot, word);
    const auto write = [&](__m128i negative_bytes, __m128i tied_bytes, std::uint16_t* to) {
      const __m256i negative = _mm256_cvtepi8_epi16(negative_bytes), tied = _mm256_cvtepi8_epi16(tied_bytes);
      const __m256i value = _mm256_andnot_si256(tied, _mm256_or_si256(positive, _mm256_and_si256(negative, sign)));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), value);
    };
    write(_mm256_castsi256_si128(votes.negative), _mm256_castsi256_si128(votes.tied), out + 32 * word);
    write(_mm256_extracti128_si256(votes.negative, 1), _mm256_extracti128_si256(votes.tied, 1), out + 32 * word + 16);
  }
  Ballot rest = ballot;
  rest.words += word;
  vote<dtype>(rest, n_elements - 32 * word, out + 32 * word);
}

#endif

}  // namespace

const KernelsByDtype& kernels_at(Level<GW_LEVEL>) {
#if defined(__AVX2__)
  static constexpr KernelsByDtype all = {Kernels{pack_float32, vote_float32},
                                         {pack_16<Dtype::bfloat16>, vote_16<Dtype::bfloat16>},
                                         {pack_16<Dtype::float16>, vote_16<Dtype::float16>}};
#else
  static constexpr KernelsByDtype all = {Kernels{pack<Dtype::float32>, vote<Dtype::float32>},
                                         {pack<Dtype::bfloat16>, vote<Dtype::bfloat16>},
                                         {pack<Dtype::float16>, vote<Dtype::float16>}};
#endif
  return all;
}

}  // namespace gradwire::signs
