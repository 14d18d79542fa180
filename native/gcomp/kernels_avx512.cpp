// AVX-512 with VBMI2, for float32 with whole mantissas or levels. Both make every field a whole number of sextets (24,
// 18, 12 or 6 bits), so that a value is four bytes of six bits each, of which the compress instruction keeps the
// highest ones; sixteen values at once, without a bit position anywhere. The rest is left to the AVX2 kernels.
#include "gcomp/kernels.hpp"

#if defined(__x86_64__)
#include <immintrin.h>

#include <algorithm>
#include <array>

#include "gcomp/value_loops.hpp"

namespace gradwire::gcomp {
namespace {

constexpr std::size_t kStep = 64;          // values: one vector of exponents and states
constexpr std::size_t kSextets = 4;        // of a value
constexpr std::size_t kStepSextets = 256;  // at most, of one step

__m512i load512(const void* data) { return _mm512_loadu_si512(data); }
void store512(void* data, __m512i vector) { _mm512_storeu_si512(data, vector); }

std::uint64_t first_n(std::size_t n) { return n >= 64 ? ~std::uint64_t{0} : (std::uint64_t{1} << n) - 1; }

template <class ByteOf>
constexpr std::array<std::uint8_t, 64> make_bytes(ByteOf byte_of) {
  std::array<std::uint8_t, 64> bytes{};
  for (std::size_t i = 0; i < 64; ++i) bytes[i] = static_cast<std::uint8_t>(byte_of(i));
  return bytes;
}

// In a word of two values, each with its sign above its mantissa: where each sextet begins.
constexpr auto kSextetShifts = make_bytes([](std::size_t i) { return i % 8 / 4 * 32 + i % 4 * 6; });
// In two bytes at the bottom of a word: where each 2-bit level begins.
constexpr auto kLevelShifts = make_bytes([](std::size_t i) { return i % 8 * 2; });
// 3 bytes of every 4, and back; bytes 2j and 2j + 1 to word j.
constexpr auto kClose3 = make_bytes([](std::size_t i) { return i < 48 ? i / 3 * 4 + i % 3 : 63; });
constexpr auto kSpread3 = make_bytes([](std::size_t i) { return i / 4 * 3 + i % 4; });
constexpr auto kSpread2 = make_bytes([](std::size_t i) { return i / 8 * 2 + i % 2; });
// Sextet i % 4 of a value travels if its state is below this: the lowest one at level 0 only.
constexpr auto kStateLimits = make_bytes([](std::size_t i) { return i % 4 + 1; });
// Lane 2i of two vectors of 16-bit lanes, and the state of the value that byte i belongs to.
constexpr auto kEvenLanes = make_bytes([](std::size_t i) { return i % 2 == 0 ? i : 0; });
constexpr auto kValueOfByte = make_bytes([](std::size_t i) { return i / 4; });

// Which sextets of values 16 v to 16 v + 15 travel.
std::uint64_t kept_sextets(__m512i states, int v) {
  const __m512i of_byte = _mm512_add_epi8(load512(kValueOfByte.data()), _mm512_set1_epi8(static_cast<char>(16 * v)));
  return _mm512_cmplt_epu8_mask(_mm512_permutexvar_epi8(of_byte, states), load512(kStateLimits.data()));
}

// Every value's four sextets together: 24 bits a 32-bit lane.
__m512i join_sextets(__m512i sextets) {
  const __m512i pairs = _mm512_maddubs_epi16(sextets, _mm512_set1_epi16(1 | 1 << 14));
  return _mm512_madd_epi16(pairs, _mm512_set1_epi32(1 | 1 << 28));
}

// States of 32 values by their importance: the levels.
__m256i levels_of(const std::uint8_t* values, const std::uint8_t* importance, std::uint64_t in_chunk) {
  const auto code = [&](int v) {
    const __m512i bits = _mm512_maskz_loadu_epi32(static_cast<__mmask16>(in_chunk >> (16 * v)), values + 64 * v);
    return _mm512_srli_epi32(_mm512_slli_epi32(bits, 1), 22);
  };
  const __m512i codes = _mm512_permutex2var_epi16(code(0), load512(kEvenLanes.data()), code(1));
  const __m512i scale = _mm512_cvtepu8_epi16(_mm256_maskz_loadu_epi8(static_cast<__mmask32>(in_chunk), importance));
  // Inf and NaN have codes above every importance: level 0.
  const __m512i margin = _mm512_maskz_sub_epi16(_mm512_test_epi16_mask(scale, scale),
                                                _mm512_add_epi16(scale, _mm512_set1_epi16(kImportanceOffset)), codes);
  __m512i level = _mm512_setzero_si512();
  for (int n = 1; n < 4; ++n) {
    const __m512i limit = _mm512_set1_epi16(static_cast<short>(4 * kLayouts[0].dropped_bits[n]));
    level =
        _mm512_mask_mov_epi16(level, _mm512_cmpgt_epi16_mask(margin, limit), _mm512_set1_epi16(static_cast<short>(n)));
  }
  return _mm512_cvtepi16_epi8(level);
}

// Gathers small fields, one a byte, and writes them as bits: 64 fields of 2 or 6 bits at a time.
template <int kFieldBits>
class FieldWriter {
 public:
  explicit FieldWriter(std::uint8_t* out) : out_(out) {}

  void append(std::uint64_t keep, __m512i fields) {
    store512(buffer_ + n_, _mm512_maskz_compress_epi8(keep, fields));
    n_ += static_cast<std::size_t>(_mm_popcnt_u64(keep));
  }
  // To be called at least every kStepSextets fields. Waits for many, so that they are loaded long after their store.
  void flush_full() {
    if (n_ >= kCapacity) flush(n_ / 64);
  }
  std::uint64_t finish() {
    store512(buffer_ + n_, _mm512_setzero_si512());
    const std::uint64_t n_fields = n_written_ + n_;
    flush((n_ + 63) / 64);
    return kFieldBits * n_fields;
  }

 private:
  void flush(std::size_t n_groups) {
    for (std::size_t group = 0; group < n_groups; ++group) {
      const __m512i fields = load512(buffer_ + 64 * group);
      if constexpr (kFieldBits == 6) {
        store512(out_, _mm512_permutexvar_epi8(load512(kClose3.data()), join_sextets(fields)));
      } else {
        const __m512i pairs = _mm512_maddubs_epi16(fields, _mm512_set1_epi16(1 | 4 << 8));
        const __m512i bytes = _mm512_madd_epi16(pairs, _mm512_set1_epi32(1 | 16 << 16));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(out_), _mm512_cvtepi32_epi8(bytes));
      }
      out_ += 8 * kFieldBits;
    }
    const std::size_t n_taken = std::min(n_, 64 * n_groups);
    store512(buffer_, load512(buffer_ + 64 * n_groups));
    n_ -= n_taken;
    n_written_ += n_taken;
  }

  static constexpr std::size_t kCapacity = 1024;
  std::uint8_t* out_;
  std::size_t n_ = 0;
  std::uint64_t n_written_ = 0;
  std::uint8_t buffer_[kCapacity + kStepSextets + 128];
};

// Reads such fields back to bytes, a stretch ahead of their use. Never loads beyond the readable bytes: zeros follow.
template <int kFieldBits>
class FieldReader {
 public:
  explicit FieldReader(const SegmentSpan& segment)
      : in_(segment.data), n_readable_(static_cast<std::size_t>(segment.readable_end - segment.data)) {}

  // So that at least n_fields <= kMaxAhead can be taken.
  void read_ahead(std::size_t n_fields) {
    n_dropped_ += n_used_;
    const std::size_t n_left = n_ - n_used_;
    for (std::size_t i = 0; i < n_left; i += 64) store512(buffer_ + i, load512(buffer_ + n_used_ + i));
    n_used_ = 0;
    for (n_ = n_left; n_ < n_fields; n_ += 64) {
      const std::size_t n_bytes = std::min<std::size_t>(8 * kFieldBits, n_readable_);
      const __m512i bytes = _mm512_maskz_loadu_epi8(first_n(n_bytes), in_);
      const __m512i fields =
          kFieldBits == 6 ? _mm512_multishift_epi64_epi8(load512(kSextetShifts.data()),
                                                         _mm512_permutexvar_epi8(load512(kSpread3.data()), bytes))
                          : _mm512_multishift_epi64_epi8(load512(kLevelShifts.data()),
                                                         _mm512_permutexvar_epi8(load512(kSpread2.data()), bytes));
      store512(buffer_ + n_, _mm512_and_si512(fields, _mm512_set1_epi8((1 << kFieldBits) - 1)));
      in_ += n_bytes;
      n_readable_ -= n_bytes;
    }
  }
  __m512i take(std::uint64_t keep) {
    const __m512i fields = _mm512_maskz_expand_epi8(keep, load512(buffer_ + n_used_));
    n_used_ += static_cast<std::size_t>(_mm_popcnt_u64(keep));
    return fields;
  }
  std::uint64_t n_bits_used() const { return kFieldBits * static_cast<std::uint64_t>(n_dropped_ + n_used_); }

  static constexpr std::size_t kMaxAhead = kBlockValues * kSextets;

 private:
  const std::uint8_t* in_;
  std::size_t n_readable_;
  std::size_t n_ = 0, n_used_ = 0, n_dropped_ = 0;  // fields in the buffer, taken of them, and taken before them
  std::uint8_t buffer_[2 * kMaxAhead + 128];        // what is left is below kMaxAhead + 64, and moves in whole vectors
};

template <bool kLevels>
SegmentBits pack_sextets(const std::uint8_t* values, const std::uint8_t* exponents, const std::uint8_t* importance,
                         std::size_t n, std::uint8_t* levels, std::uint8_t* mantissas) {
  FieldWriter<2> level_writer(levels);
  FieldWriter<6> sextet_writer(mantissas);
  for (std::size_t i = 0; i < n; i += kStep) {
    const std::uint64_t in_chunk = first_n(n - i);
    const __m512i exponent = _mm512_maskz_loadu_epi8(in_chunk, exponents + i);
    const std::uint64_t nonzero = _mm512_test_epi8_mask(exponent, exponent);
    __m512i states = _mm512_setzero_si512();
    if constexpr (kLevels) {
      const __m256i low = levels_of(values + 4 * i, importance + i, in_chunk);
      const __m256i high = levels_of(values + 4 * i + 128, importance + i + 32, in_chunk >> 32);
      states = _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
      level_writer.append(nonzero, states);
      level_writer.flush_full();
    }
    states = _mm512_mask_mov_epi8(_mm512_set1_epi8(kStateZero), nonzero, states);
    for (int v = 0; v < 4; ++v) {
      const __m512i bits =
          _mm512_maskz_loadu_epi32(static_cast<__mmask16>(in_chunk >> (16 * v)), values + 4 * i + 64 * v);
      // The sign moves from bit 31 to bit 23, above the mantissa: (bits & m) | (bits >> 8 & ~m).
      const __m512i sign_mantissa =
          _mm512_ternarylogic_epi32(_mm512_set1_epi32(0x7FFFFF), bits, _mm512_srli_epi32(bits, 8), 0xCA);
      const __m512i sextets = _mm512_and_si512(
          _mm512_multishift_epi64_epi8(load512(kSextetShifts.data()), sign_mantissa), _mm512_set1_epi8(0x3F));
      sextet_writer.append(kept_sextets(states, v), sextets);
    }
    sextet_writer.flush_full();
  }
  return {level_writer.finish(), sextet_writer.finish()};
}

template <bool kLevels>
SegmentBits unpack_sextets(const std::uint8_t* exponents, std::size_t n, const SegmentSpan& levels,
                           const SegmentSpan& mantissas, std::uint8_t* values) {
  FieldReader<2> level_reader(levels);
  FieldReader<6> sextet_reader(mantissas);
  for (std::size_t i = 0; i < n; i += kStep) {
    if (i % kBlockValues == 0) {
      if constexpr (kLevels) level_reader.read_ahead(kBlockValues);
      sextet_reader.read_ahead(kBlockValues * kSextets);
    }
    const std::uint64_t in_chunk = first_n(n - i);
    const __m512i exponent = _mm512_maskz_loadu_epi8(in_chunk, exponents + i);
    const std::uint64_t nonzero = _mm512_test_epi8_mask(exponent, exponent);
    __m512i states = _mm512_setzero_si512();
    if constexpr (kLevels) states = level_reader.take(nonzero);
    states = _mm512_mask_mov_epi8(_mm512_set1_epi8(kStateZero), nonzero, states);
    for (int v = 0; v < 4; ++v) {
      const __m512i sign_mantissa = join_sextets(sextet_reader.take(kept_sextets(states, v)));
      const auto lanes = static_cast<__mmask16>(in_chunk >> (16 * v));
      const __m512i field =
          _mm512_slli_epi32(_mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(lanes, exponents + i + 16 * v)), 23);
      const __m512i sign = _mm512_and_si512(_mm512_slli_epi32(sign_mantissa, 8), _mm512_set1_epi32(1 << 31));
      const __m512i mantissa = _mm512_and_si512(sign_mantissa, _mm512_set1_epi32(0x7FFFFF));
      _mm512_mask_storeu_epi32(values + 4 * i + 64 * v, lanes, _mm512_ternarylogic_epi32(field, sign, mantissa, 0xFE));
    }
  }
  return {level_reader.n_bits_used(), sextet_reader.n_bits_used()};
}

SegmentBits pack(const void* values, const std::uint8_t* exponents, const std::uint8_t* importance, std::size_t n,
                 const Packing& packing, const WordMasks& masks, std::uint8_t* levels, std::uint8_t* mantissas) {
  const auto* const bytes = static_cast<const std::uint8_t*>(values);
  if (packing.mode == Mode::paper) return pack_sextets<true>(bytes, exponents, importance, n, levels, mantissas);
  if (packing.mode == Mode::none) return pack_sextets<false>(bytes, exponents, importance, n, levels, mantissas);
  return kKernelsAvx2[0].pack(values, exponents, importance, n, packing, masks, levels, mantissas);
}

SegmentBits unpack(const std::uint8_t* exponents, std::size_t n, const Packing& packing, const WordMasks& masks,
                   const SegmentSpan& levels, const SegmentSpan& mantissas, void* values) {
  auto* const bytes = static_cast<std::uint8_t*>(values);
  if (packing.mode == Mode::paper) return unpack_sextets<true>(exponents, n, levels, mantissas, bytes);
  if (packing.mode == Mode::none) return unpack_sextets<false>(exponents, n, levels, mantissas, bytes);
  return kKernelsAvx2[0].unpack(exponents, n, packing, masks, levels, mantissas, values);
}

void fill_masks(const Packing& packing, WordMasks& masks) { kKernelsAvx2[0].fill_masks(packing, masks); }

ExponentSummary split_exponents(const void* values, std::size_t n, std::uint8_t* exponents) {
  return kKernelsAvx2[0].split_exponents(values, n, exponents);
}

template <int kDtype>
constexpr Kernels kForward = {
    [](const Packing& packing, WordMasks& masks) { kKernelsAvx2[kDtype].fill_masks(packing, masks); },
    round_loop<static_cast<Dtype>(kDtype)>,
    [](const void* values, std::size_t n, std::uint8_t* exponents) {
      return kKernelsAvx2[kDtype].split_exponents(values, n, exponents);
    },
    [](const void* values, const std::uint8_t* exponents, const std::uint8_t* importance, std::size_t n,
       const Packing& packing, const WordMasks& masks, std::uint8_t* levels, std::uint8_t* mantissas) {
      return kKernelsAvx2[kDtype].pack(values, exponents, importance, n, packing, masks, levels, mantissas);
    },
    [](const std::uint8_t* exponents, std::size_t n, const Packing& packing, const WordMasks& masks,
       const SegmentSpan& levels, const SegmentSpan& mantissas,
       void* values) { return kKernelsAvx2[kDtype].unpack(exponents, n, packing, masks, levels, mantissas, values); }};

}  // namespace

const Kernels kKernelsAvx512[kDtypes] = {
    {fill_masks, round_loop<Dtype::float32>, split_exponents, pack, unpack}, kForward<1>, kForward<2>};

}  // namespace gradwire::gcomp
#endif
