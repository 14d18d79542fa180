#include <algorithm>
#include <type_traits>

#include "signs/votes.hpp"
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

#if defined(__AVX2__)

// Whole words of 32 elements here, in four vectors of 32 bits or two of 16; the rest as above.
template <Dtype dtype>
constexpr bool kWide = dtype == Dtype::float32;
template <Dtype dtype>
__m256i set(typename Bits<dtype>::Word value) {
  return kWide<dtype> ? _mm256_set1_epi32(static_cast<int>(value)) : _mm256_set1_epi16(static_cast<short>(value));
}
template <Dtype dtype>
__m256i equal(__m256i a, __m256i b) {
  return kWide<dtype> ? _mm256_cmpeq_epi32(a, b) : _mm256_cmpeq_epi16(a, b);
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

// 32 bytes to the lanes of one of the vectors, with their signs.
template <Dtype dtype>
__m256i widen(__m256i bytes, std::size_t part) {
  alignas(32) std::uint8_t all[32];
  store256(all, bytes);
  if constexpr (kWide<dtype>)
    return _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(all + 8 * part)));
  return _mm256_cvtepi8_epi16(_mm_load_si128(reinterpret_cast<const __m128i*>(all + 16 * part)));
}

#endif

template <Dtype dtype>
bool pack(const void* values, std::size_t n_elements, std::uint32_t* words) {
  using Word = typename Bits<dtype>::Word;
  const Word* const bits = static_cast<const Word*>(values);
  bool all_finite = true;
  std::size_t begin = 0;
#if defined(__AVX2__)
  constexpr std::size_t kVectors = kWide<dtype> ? 4 : 2;
  const __m256i infinity = set<dtype>(Bits<dtype>::kInfinity), minus_zero = set<dtype>(Bits<dtype>::kSign);
  __m256i nonfinite = _mm256_setzero_si256();
  for (; begin + 32 <= n_elements; begin += 32) {
    __m256i below[kVectors];
    for (std::size_t part = 0; part < kVectors; ++part) {
      const __m256i some = load256(bits + begin + 32 / kVectors * part);
      nonfinite = _mm256_or_si256(nonfinite, equal<dtype>(_mm256_and_si256(some, infinity), infinity));
      if constexpr (kWide<dtype>)
        below[part] = _mm256_castps_si256(_mm256_cmp_ps(_mm256_castsi256_ps(some), _mm256_setzero_ps(), _CMP_LT_OQ));
      else
        below[part] = _mm256_andnot_si256(equal<dtype>(some, minus_zero), _mm256_srai_epi16(some, 15));
    }
    *words++ = mask_of(below);
  }
  all_finite = _mm256_testz_si256(nonfinite, nonfinite);
#endif
  for (; begin < n_elements; begin += 32) {
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
  Word* const out = static_cast<Word*>(values);
  const Word positive = static_cast<Word>(ballot.scale_bits), negative = positive | Bits<dtype>::kSign;
  const Word tied = ballot.ties_are_positive ? positive : Word{0};
  std::size_t begin = 0;
#if defined(__AVX2__)
  const __m256i all_positive = set<dtype>(positive), sign = set<dtype>(Bits<dtype>::kSign);
  for (; begin + 32 <= n_elements; begin += 32) {
    const Votes votes = count(ballot, begin / 32);
    for (std::size_t part = 0; part < sizeof(Word); ++part) {
      const __m256i is_negative = widen<dtype>(votes.negative, part), is_tied = widen<dtype>(votes.tied, part);
      const __m256i voted = _mm256_or_si256(all_positive, _mm256_and_si256(is_negative, sign));
      store256(out + begin + 32 / sizeof(Word) * part, _mm256_andnot_si256(is_tied, voted));
    }
  }
#endif
  for (std::size_t i = begin; i < n_elements; ++i) {
    std::size_t n_negative = 0;
    for (std::size_t rank = 0; rank < ballot.n_ranks; ++rank)
      n_negative += ballot.words[rank * ballot.rank_stride + i / 32] >> i % 32 & 1;
    out[i] = 2 * n_negative > ballot.n_ranks ? negative : 2 * n_negative == ballot.n_ranks ? tied : positive;
  }
}

}  // namespace

const KernelsByDtype& kernels_at(Level<GW_LEVEL>) {
  constexpr Dtype f = Dtype::float32, b = Dtype::bfloat16, h = Dtype::float16;
  static constexpr KernelsByDtype all = {Kernels{pack<f>, vote<f>}, {pack<b>, vote<b>}, {pack<h>, vote<h>}};
  return all;
}

}  // namespace gradwire::signs
