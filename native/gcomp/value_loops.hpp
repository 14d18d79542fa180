// One value at a time: the portable kernels, and the ends of the vector kernels' loops. Internal linkage throughout,
// because files compiled for different instruction sets include it.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "bits/bit_io.hpp"
#include "gcomp/kernels.hpp"

namespace gradwire::gcomp {

// Importance bytes count quarter octaves (exponent and two mantissa bits of a float32) from 2^-40 on.
inline constexpr int kImportanceOffset = 4 * (127 - 40);

template <Dtype kDtype>
struct Traits;

// kCodeShift, kCodeBias: |x| >> kCodeShift is the value's quarter octave, plus kCodeBias that of the same float32.
template <>
struct Traits<Dtype::float32> {
  using Word = std::uint32_t;
  static constexpr int kCodeShift = 21, kCodeBias = 0;
};
template <>
struct Traits<Dtype::bfloat16> {
  using Word = std::uint16_t;
  static constexpr int kCodeShift = 5, kCodeBias = 0;
};
template <>
struct Traits<Dtype::float16> {
  using Word = std::uint16_t;
  static constexpr int kCodeShift = 8, kCodeBias = 4 * (127 - 15);
};

template <Dtype kDtype>
struct Float : Traits<kDtype> {
  using Word = typename Traits<kDtype>::Word;
  static constexpr DtypeLayout kLayout = kLayouts[static_cast<int>(kDtype)];
  static constexpr int kMantissaBits = kLayout.mantissa_bits;
  static constexpr Word kSign = static_cast<Word>(Word{1} << (8 * sizeof(Word) - 1));
  static constexpr Word kMantissa = static_cast<Word>((Word{1} << kMantissaBits) - 1);
  static constexpr Word kMaxExponent = static_cast<Word>((1 << kLayout.exponent_bits) - 1);
  static constexpr Word kExponent = static_cast<Word>(kMaxExponent << kMantissaBits);
};

template <Dtype kDtype>
[[maybe_unused]] static inline int level_of(typename Float<kDtype>::Word bits, int importance) {
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
[[maybe_unused]] static void round_loop(const void* values, const std::uint8_t* importance, std::size_t n,
                                        const Packing& packing, void* rounded) {
  using F = Float<kDtype>;
  using Word = typename F::Word;
  const auto* const bytes = static_cast<const std::uint8_t*>(values);
  auto* __restrict const out = static_cast<std::uint8_t*>(rounded);
  const bool by_level = packing.mode == Mode::paper;
  const int fixed = packing.dropped_bits;
  const auto round_one = [&](std::size_t i, int dropped) {
    const std::uint32_t bits = load<Word>(bytes + i * sizeof(Word));
    const std::uint32_t field = bits & F::kExponent;
    const std::uint32_t last_kept = (bits >> dropped) & 1, half = (std::uint32_t{1} << dropped) >> 1;
    const std::uint32_t nearest =
        (bits + (dropped > 0 ? half - 1 + last_kept : 0)) & ~((std::uint32_t{1} << dropped) - 1);
    const bool overflows = (nearest & F::kExponent) == F::kExponent;
    const bool stays = field == 0 || field == F::kExponent;
    const std::uint32_t largest = (bits & F::kSign) | (F::kExponent - 1u);
    const std::uint32_t finite = overflows ? largest : nearest;
    store(out + i * sizeof(Word), static_cast<Word>(stays ? bits : finite));
  };
  if (by_level)
    for (std::size_t i = 0; i < n; ++i) {
      const Word bits = load<Word>(bytes + i * sizeof(Word));
      const int code = ((bits & static_cast<Word>(~F::kSign)) >> F::kCodeShift) + F::kCodeBias;
      const int margin = importance[i] == 0 ? 0 : importance[i] + kImportanceOffset - code;
      const DtypeLayout& layout = F::kLayout;
      int dropped = margin > 4 * layout.dropped_bits[1] ? layout.dropped_bits[1] : 0;
      dropped = margin > 4 * layout.dropped_bits[2] ? layout.dropped_bits[2] : dropped;
      dropped = margin > 4 * layout.dropped_bits[3] ? layout.dropped_bits[3] : dropped;
      round_one(i, dropped);
    }
  else
    for (std::size_t i = 0; i < n; ++i) round_one(i, fixed);
}

template <Dtype kDtype>
[[maybe_unused]] static ExponentSummary split_exponents_loop(const void* values, std::size_t begin, std::size_t n,
                                                             std::uint8_t* exponents) {
  using F = Float<kDtype>;
  using Word = typename F::Word;
  ExponentSummary summary{0, false};
  const auto* const bytes = static_cast<const std::uint8_t*>(values);
  for (std::size_t i = begin; i < n; ++i) {
    const Word bits = load<Word>(bytes + i * sizeof(Word));
    const auto exponent = static_cast<std::uint8_t>((bits & F::kExponent) >> F::kMantissaBits);
    exponents[i] = exponent;
    summary.n_nonzero += exponent != 0;
    summary.holds_nonfinite |= exponent == F::kMaxExponent;
  }
  return summary;
}

template <Dtype kDtype>
[[maybe_unused]] static void pack_loop(const void* values, const std::uint8_t* exponents,
                                       const std::uint8_t* importance, std::size_t begin, std::size_t n,
                                       const Packing& packing, BitWriter& levels, BitWriter& mantissas) {
  using F = Float<kDtype>;
  using Word = typename F::Word;
  const auto* const bytes = static_cast<const std::uint8_t*>(values);
  for (std::size_t i = begin; i < n; ++i) {
    if (exponents[i] == 0) continue;
    const Word bits = load<Word>(bytes + i * sizeof(Word));
    int dropped = exponents[i] == F::kMaxExponent ? 0 : packing.dropped_bits;
    if (packing.mode == Mode::paper) {
      const int level = level_of<kDtype>(bits, importance[i]);
      write_bits(levels, static_cast<std::uint64_t>(level), 2);
      dropped = F::kLayout.dropped_bits[level];
    }
    const std::uint64_t sign = (bits & F::kSign) != 0;
    const std::uint64_t kept = static_cast<std::uint64_t>(bits & F::kMantissa) >> dropped;
    write_bits(mantissas, kept | sign << (F::kMantissaBits - dropped),
               static_cast<std::uint64_t>(1 + F::kMantissaBits - dropped));
  }
}

template <Dtype kDtype>
[[maybe_unused]] static void unpack_loop(const std::uint8_t* exponents, std::size_t begin, std::size_t n,
                                         const Packing& packing, BitReader& levels, BitReader& mantissas,
                                         void* values) {
  using F = Float<kDtype>;
  using Word = typename F::Word;
  auto* const bytes = static_cast<std::uint8_t*>(values);
  for (std::size_t i = begin; i < n; ++i) {
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

// Values that the kernels above and their like take at a time: what they keep beside the values stays in L1.
inline constexpr std::size_t kBlockValues = 512;
inline constexpr std::size_t kMaxValueBits = 24;  // sign and mantissa of a float32
inline constexpr std::size_t kTailBytes = kBlockValues * kMaxValueBits / 8 + 1 + kBitSlackBytes;  // one block's loads

// A reader that may load what a block of values can have at most: `reader`, or a copy of what is left in the message.
[[maybe_unused]] static inline BitReader with_room(const BitReader& reader, std::size_t max_bits,
                                                   const std::uint8_t* readable_end,
                                                   std::array<std::uint8_t, kTailBytes>& tail) {
  const std::uint8_t* const at = reader.data + (reader.position >> 3);
  const std::size_t reach = bytes_of_bits(max_bits) + 1 + kBitSlackBytes;
  const auto n_left = static_cast<std::size_t>(readable_end - at);
  if (n_left >= reach) return reader;
  std::memcpy(tail.data(), at, n_left);
  std::memset(tail.data() + n_left, 0, reach - n_left);
  return {tail.data(), reader.position & 7};
}

// Packs a chunk block by block: pack_block(first value, n, levels, mantissas).
template <class PackBlock>
[[maybe_unused]] static SegmentBits pack_blocks(std::size_t n, std::uint8_t* levels, std::uint8_t* mantissas,
                                                const PackBlock& pack_block) {
  BitWriter level_writer{levels}, mantissa_writer{mantissas};
  for (std::size_t i = 0; i < n; i += kBlockValues)
    pack_block(i, std::min(kBlockValues, n - i), level_writer, mantissa_writer);
  finish(level_writer);
  finish(mantissa_writer);
  return {8 * static_cast<std::uint64_t>(level_writer.data - levels) + level_writer.n_pending,
          8 * static_cast<std::uint64_t>(mantissa_writer.data - mantissas) + mantissa_writer.n_pending};
}

// Unpacks a chunk block by block: unpack_block(first value, n, levels, mantissas). Ends early where a segment does, so
// that no reader starts beyond it.
template <class UnpackBlock>
[[maybe_unused]] static SegmentBits unpack_blocks(std::size_t n, const SegmentSpan& levels,
                                                  const SegmentSpan& mantissas, const UnpackBlock& unpack_block) {
  std::array<std::uint8_t, kTailBytes> level_tail, mantissa_tail;
  BitReader level_reader{levels.data}, mantissa_reader{mantissas.data};
  for (std::size_t i = 0; i < n; i += kBlockValues) {
    const std::size_t n_block = std::min(kBlockValues, n - i);
    const BitReader level_start = with_room(level_reader, 2 * n_block, levels.readable_end, level_tail);
    const BitReader mantissa_start =
        with_room(mantissa_reader, n_block * kMaxValueBits, mantissas.readable_end, mantissa_tail);
    BitReader level_block = level_start, mantissa_block = mantissa_start;
    unpack_block(i, n_block, level_block, mantissa_block);
    level_reader.position += level_block.position - level_start.position;
    mantissa_reader.position += mantissa_block.position - mantissa_start.position;
    if (level_reader.position > levels.n_bits || mantissa_reader.position > mantissas.n_bits) break;
  }
  return {level_reader.position, mantissa_reader.position};
}

}  // namespace gradwire::gcomp
