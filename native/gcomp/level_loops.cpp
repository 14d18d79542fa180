// Format 1, as published: one value at a time.
#include <algorithm>
#include <array>
#include <cstring>
#include <type_traits>

#include "bits/bit_io.hpp"
#include "gcomp/importance.hpp"
#include "gcomp/kernels.hpp"

namespace gradwire::gcomp {
namespace {

template <Dtype kDtype>
struct Float {
  using Word = std::conditional_t<kDtype == Dtype::float32, std::uint32_t, std::uint16_t>;
  static constexpr DtypeLayout kLayout = kLayouts[static_cast<int>(kDtype)];
  static constexpr int kMantissaBits = kLayout.mantissa_bits;
  static constexpr Word kSign = static_cast<Word>(Word{1} << (8 * sizeof(Word) - 1));
  static constexpr Word kMantissa = static_cast<Word>((Word{1} << kMantissaBits) - 1);
  static constexpr Word kMaxExponent = static_cast<Word>((1 << kLayout.exponent_bits) - 1);
  static constexpr Word kExponent = static_cast<Word>(kMaxExponent << kMantissaBits);
  // |x| >> kCodeShift is the value's quarter octave, plus kCodeBias that of the same float32.
  static constexpr int kCodeShift = kMantissaBits - 2, kCodeBias = 4 * (127 - kMaxExponent / 2);
};

// How many of the dtype's steps of mantissa bits the importance lets go of.
template <Dtype kDtype>
inline int level_of(typename Float<kDtype>::Word bits, int importance) {
  using F = Float<kDtype>;
  if (importance == 0 || (bits & F::kExponent) == F::kExponent) return 0;
  const int code = ((bits & static_cast<typename F::Word>(~F::kSign)) >> F::kCodeShift) + F::kCodeBias;
  const int margin = importance + kImportanceOffset - code;
  return (margin > 4 * F::kLayout.dropped_bits[1]) + (margin > 4 * F::kLayout.dropped_bits[2]) +
         (margin > 4 * F::kLayout.dropped_bits[3]);
}

// Values rounded to what will be sent of them: to their level (mode paper), or to packing's bits (mode uniform). The
// level of a rounded value drops no more bits than it was rounded to: magnitudes that grow have lower levels, and the
// others keep the bits that their level is taken from.
template <Dtype kDtype>
void round(const void* values, const std::uint8_t* importance, std::size_t n, const Packing& packing, void* rounded) {
  using F = Float<kDtype>;
  using Word = typename F::Word;
  const auto* const bytes = static_cast<const std::uint8_t*>(values);
  auto* __restrict const out = static_cast<std::uint8_t*>(rounded);
  for (std::size_t i = 0; i < n; ++i) {
    const Word word = load<Word>(bytes + i * sizeof(Word));
    const std::uint32_t bits = word, field = bits & F::kExponent;
    const int dropped = packing.mode == Mode::paper ? F::kLayout.dropped_bits[level_of<kDtype>(word, importance[i])]
                                                    : packing.dropped_bits;
    const std::uint32_t last_kept = (bits >> dropped) & 1, half = (std::uint32_t{1} << dropped) >> 1;
    const std::uint32_t nearest =
        (bits + (dropped > 0 ? half - 1 + last_kept : 0)) & ~((std::uint32_t{1} << dropped) - 1);
    const bool overflows = (nearest & F::kExponent) == F::kExponent;
    const std::uint32_t largest = (bits & F::kSign) | (F::kExponent - 1u);
    const bool stays = field == 0 || field == F::kExponent;
    store(out + i * sizeof(Word), static_cast<Word>(stays ? bits : overflows ? largest : nearest));
  }
}

template <Dtype kDtype>
ExponentSummary split_exponents(const void* values, std::size_t n, std::uint8_t* __restrict exponents) {
  using F = Float<kDtype>;
  using Word = typename F::Word;
  const auto* const bytes = static_cast<const std::uint8_t*>(values);
  for (std::size_t i = 0; i < n; ++i)
    exponents[i] = static_cast<std::uint8_t>((load<Word>(bytes + i * sizeof(Word)) & F::kExponent) >> F::kMantissaBits);
  std::uint32_t n_nonzero = 0, n_nonfinite = 0;
  for (std::size_t i = 0; i < n; ++i) {
    n_nonzero += exponents[i] != 0;
    n_nonfinite += exponents[i] == F::kMaxExponent;
  }
  return {n_nonzero, n_nonfinite != 0};
}

template <Dtype kDtype>
SegmentBits pack(const void* values, const std::uint8_t* exponents, const std::uint8_t* importance, std::size_t n,
                 const Packing& packing, std::uint8_t* levels, std::uint8_t* mantissas) {
  using F = Float<kDtype>;
  using Word = typename F::Word;
  const auto* const bytes = static_cast<const std::uint8_t*>(values);
  BitWriter level_writer{levels}, mantissa_writer{mantissas};
  for (std::size_t i = 0; i < n; ++i) {
    if (exponents[i] == 0) continue;
    const Word bits = load<Word>(bytes + i * sizeof(Word));
    int dropped = exponents[i] == F::kMaxExponent ? 0 : packing.dropped_bits;
    if (packing.mode == Mode::paper) {
      const int level = level_of<kDtype>(bits, importance[i]);
      write_bits(level_writer, static_cast<std::uint64_t>(level), 2);
      dropped = F::kLayout.dropped_bits[level];
    }
    const std::uint64_t sign = (bits & F::kSign) != 0;
    const std::uint64_t kept = static_cast<std::uint64_t>(bits & F::kMantissa) >> dropped;
    write_bits(mantissa_writer, kept | sign << (F::kMantissaBits - dropped),
               static_cast<std::uint64_t>(1 + F::kMantissaBits - dropped));
  }
  finish(level_writer);
  finish(mantissa_writer);
  return {8 * static_cast<std::uint64_t>(level_writer.data - levels) + level_writer.n_pending,
          8 * static_cast<std::uint64_t>(mantissa_writer.data - mantissas) + mantissa_writer.n_pending};
}

template <Dtype kDtype>
void unpack_block(const std::uint8_t* exponents, std::size_t n, const Packing& packing, BitReader& levels,
                  BitReader& mantissas, void* values) {
  using F = Float<kDtype>;
  using Word = typename F::Word;
  auto* const bytes = static_cast<std::uint8_t*>(values);
  for (std::size_t i = 0; i < n; ++i) {
    Word bits = 0;
    if (exponents[i] != 0) {
      int dropped = exponents[i] == F::kMaxExponent ? 0 : packing.dropped_bits;
      if (packing.mode == Mode::paper) {
        dropped = F::kLayout.dropped_bits[peek_bits(levels) & 3];
        levels.position += 2;
      }
      const std::uint64_t field = peek_bits(mantissas);
      const int n_kept = F::kMantissaBits - dropped;
      mantissas.position += static_cast<std::uint64_t>(1 + n_kept);
      const std::uint64_t kept = field & ((std::uint64_t{1} << n_kept) - 1), sign = (field >> n_kept) & 1;
      bits = static_cast<Word>(kept << dropped | std::uint64_t{exponents[i]} << F::kMantissaBits |
                               sign << (8 * sizeof(Word) - 1));
    }
    store(bytes + i * sizeof(Word), bits);
  }
}

// Values that are read at a time.
inline constexpr std::size_t kBlockValues = 512;
inline constexpr std::size_t kMaxValueBits = 24;  // sign and mantissa of a float32
inline constexpr std::size_t kTailBytes = kBlockValues * kMaxValueBits / 8 + 1 + kBitSlackBytes;  // one block's loads

// A reader that may load what a block of values can have at most: `reader`, or a copy of what is left in the message.
inline BitReader with_room(const BitReader& reader, std::size_t max_bits, const std::uint8_t* readable_end,
                           std::array<std::uint8_t, kTailBytes>& tail) {
  const std::uint8_t* const at = reader.data + (reader.position >> 3);
  const std::size_t reach = bytes_of_bits(max_bits) + 1 + kBitSlackBytes;
  const auto n_left = static_cast<std::size_t>(readable_end - at);
  if (n_left >= reach) return reader;
  std::memcpy(tail.data(), at, n_left);
  std::memset(tail.data() + n_left, 0, reach - n_left);
  return {tail.data(), reader.position & 7};
}

// Ends early where a segment does, so that no reader starts beyond it.
template <Dtype kDtype>
SegmentBits unpack(const std::uint8_t* exponents, std::size_t n, const Packing& packing, const SegmentSpan& levels,
                   const SegmentSpan& mantissas, void* values) {
  auto* const bytes = static_cast<std::uint8_t*>(values);
  std::array<std::uint8_t, kTailBytes> level_tail, mantissa_tail;
  BitReader level_reader{levels.data}, mantissa_reader{mantissas.data};
  for (std::size_t i = 0; i < n; i += kBlockValues) {
    const std::size_t n_block = std::min(kBlockValues, n - i);
    const BitReader level_start = with_room(level_reader, 2 * n_block, levels.readable_end, level_tail);
    const BitReader mantissa_start =
        with_room(mantissa_reader, n_block * kMaxValueBits, mantissas.readable_end, mantissa_tail);
    BitReader level_block = level_start, mantissa_block = mantissa_start;
    unpack_block<kDtype>(exponents + i, n_block, packing, level_block, mantissa_block,
                         bytes + i * sizeof(typename Float<kDtype>::Word));
    level_reader.position += level_block.position - level_start.position;
    mantissa_reader.position += mantissa_block.position - mantissa_start.position;
    if (level_reader.position > levels.n_bits || mantissa_reader.position > mantissas.n_bits) break;
  }
  return {level_reader.position, mantissa_reader.position};
}

template <Dtype kDtype>
constexpr Kernels make_kernels() {
  return {round<kDtype>, split_exponents<kDtype>, pack<kDtype>, unpack<kDtype>};
}

}  // namespace

const KernelsByDtype& kernels_at(Level<GW_LEVEL>) {
  static constexpr KernelsByDtype all = {make_kernels<Dtype::float32>(), make_kernels<Dtype::bfloat16>(),
                                         make_kernels<Dtype::float16>()};
  return all;
}

}  // namespace gradwire::gcomp
