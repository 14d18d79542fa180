// Integers, and single IEEE operations on normal numbers: all machines get the same bits. Conditions are spelt out as
// masks, or the compiler would branch around floating-point operations.
#include <bit>
#include <cstring>

#include "floats/word_loops.hpp"
#include "truncated_float/kernels.hpp"

namespace gradwire::truncated_float {
namespace {

using floats::choose;
using floats::kMagnitude;
using floats::kSign;

constexpr std::size_t kRun = word_packing::kBlock;

inline std::uint32_t smaller(std::uint32_t a, std::uint32_t b) { return a < b ? a : b; }
inline std::uint32_t larger(std::uint32_t a, std::uint32_t b) { return a > b ? a : b; }
// max(a - b, 0)
inline std::uint32_t excess(std::uint32_t a, std::uint32_t b) { return larger(a, b) - b; }
inline float as_float(std::uint32_t word) { return std::bit_cast<float>(word); }
inline std::uint32_t as_word(float value) { return std::bit_cast<std::uint32_t>(value); }

// Values / scale as float32 words. Subnormals count as zero, with their sign: some processes flush them.
template <Dtype dtype>
void load_scaled(const void* values, std::size_t n, std::uint32_t scale, std::uint32_t* __restrict words) {
  std::uint32_t unscaled[kRun];
  floats::load_words<dtype>(values, n, unscaled);
  const float divisor = as_float(scale);
  for (std::size_t i = 0; i < n; ++i) {
    const std::uint32_t word = unscaled[i];
    const std::uint32_t normal = word & choose((word & 0x7F800000) == 0, kSign, ~0u);
    words[i] = as_word(as_float(normal) / divisor);
  }
}

// Where the numbers of a layout with `mantissa_bits` lie among float32's.
struct Target {
  std::uint32_t min_exponent;  // float32's exponent field of the smallest normal number
  std::uint32_t shift;         // mantissa bits of float32 that are too many
  std::uint32_t largest;       // magnitude
};

// The magnitude of |x| in the target's layout, as a number: `bias_bits` below the last kept bit are added first, at
// normal numbers and, further up, at subnormal ones. rounding(code of the kept bits, shift) returns what to add.
template <class Rounding>
inline std::uint32_t round_magnitude(std::uint32_t word, const Target& target, const Rounding& rounding) {
  const std::uint32_t exponent = word >> 23 & 0xFF;
  const std::uint32_t full_shift = target.shift + excess(target.min_exponent, exponent);
  // A shift by more than 31 places is no shift: the rest is done to the significand, whose low bits lie below a
  // 2^-31 of the last place.
  const std::uint32_t before = smaller(excess(full_shift, 31), 31), shift = smaller(full_shift, 31);
  const std::uint32_t significand = ((word & 0x7FFFFF) | 0x800000) >> before;
  const std::uint32_t base = excess(exponent, target.min_exponent) << (23 - target.shift);
  return smaller(base + ((significand + rounding(base + (significand >> shift), shift)) >> shift), target.largest);
}

inline Target target_of(const Layout& layout, int mantissa_bits) {
  return {static_cast<std::uint32_t>(128 - layout.bias), static_cast<std::uint32_t>(23 - mantissa_bits),
          layout.largest >> (layout.mantissa_bits - mantissa_bits)};
}

// What to add before a shift, so that it rounds to the nearest, ties to even. shift >= 1.
// `kept`: the code without it.
inline std::uint32_t half_to_even(std::uint32_t kept, std::uint32_t shift) {
  return (1u << (shift - 1)) - 1 + (kept & 1);
}

template <Dtype dtype>
void truncate(const void* values, std::size_t n, const Settings& settings, std::uint32_t scale,
              std::uint32_t* __restrict codes) {
  std::uint32_t words[kRun];
  if (settings.format == Format::native) {
    floats::load_raw<dtype>(values, n, words);
    const int shift = 32 - settings.n_bits;
    for (std::size_t i = 0; i < n; ++i) codes[i] = words[i] >> shift;
    return;
  }
  load_scaled<dtype>(values, n, scale, words);
  const Layout& layout = settings.layout();
  const Target target = target_of(layout, layout.mantissa_bits);
  const int cut = layout.width - settings.n_bits, sign_shift = 32 - settings.n_bits;
  const std::uint32_t sign_bit = 1u << (settings.n_bits - 1);
  for (std::size_t i = 0; i < n; ++i) {
    const std::uint32_t magnitude = round_magnitude(words[i], target, half_to_even);
    codes[i] = magnitude >> cut | (words[i] >> sign_shift & sign_bit);
  }
}

// The layout's exponent is cut, there is no mantissa: neighbours are a power of two apart, or several.
void round_exponents(const std::uint32_t* __restrict words, std::size_t n, const Settings& settings,
                     const std::uint32_t* __restrict numbers, std::uint32_t* __restrict codes) {
  const Layout& layout = settings.layout();
  const auto cut = static_cast<std::uint32_t>(layout.exponent_bits - (settings.n_bits - 1));
  const auto rebias = static_cast<std::uint32_t>(127 - layout.bias);
  const std::uint32_t largest = layout.largest >> (layout.width - settings.n_bits);
  const int sign_shift = 32 - settings.n_bits;
  const std::uint32_t sign_bit = 1u << (settings.n_bits - 1);
  for (std::size_t i = 0; i < n; ++i) {
    const std::uint32_t word = words[i], exponent = word >> 23 & 0xFF;
    const std::uint32_t code = excess(exponent, rebias) >> cut;
    // Shares do not change where all three numbers are 2^64 times as large, and no difference is subnormal then.
    const std::uint32_t lift = choose(exponent < 64, 64u << 23, 0);
    // Code 0 is zero; above it, code c is 2^((c << cut) - bias).
    const std::uint32_t lower = choose(code == 0, 0, (((code << cut) + rebias) << 23) + lift);
    const std::uint32_t upper = ((((code + 1) << cut) + rebias) << 23) + lift;
    const std::uint32_t magnitude = choose(exponent == 0, 0, (word & kMagnitude) + lift);
    const float down = as_float(lower), x = as_float(magnitude), up = as_float(upper);
    // Less, not less or equal: a value on the grid stays where it is.
    const float number = static_cast<float>(static_cast<std::int32_t>(numbers[i] >> 8)) * 0x1p-24f;
    const auto is_up = static_cast<std::uint32_t>(number * (up - down) < x - down);
    codes[i] = smaller(code + is_up, largest) | (word >> sign_shift & sign_bit);
  }
}

template <Dtype dtype>
void round_to_nearest(const void* values, std::size_t n, const Settings& settings, std::uint32_t scale,
                      std::uint32_t* __restrict codes) {
  std::uint32_t words[kRun];
  const Layout& layout = settings.layout();
  const int mantissa_bits = settings.n_bits - 1 - layout.exponent_bits;
  const bool is_native = settings.format == Format::native;
  if (is_native && mantissa_bits >= 0) {
    floats::load_raw<dtype>(values, n, words);
    const auto shift = static_cast<std::uint32_t>(32 - settings.n_bits);
    const std::uint32_t largest = layout.largest >> (layout.width - settings.n_bits);
    for (std::size_t i = 0; i < n; ++i) {
      const std::uint32_t magnitude = words[i] & kMagnitude;
      codes[i] = smaller((magnitude + half_to_even(magnitude >> shift, shift)) >> shift, largest) |
                 (words[i] & kSign) >> shift;
    }
    return;
  }
  if (is_native)
    floats::load_words<dtype>(values, n, words);
  else
    load_scaled<dtype>(values, n, scale, words);
  if (mantissa_bits < 0) {
    std::uint32_t halves[kRun];
    for (std::size_t i = 0; i < n; ++i) halves[i] = 1u << 31;
    round_exponents(words, n, settings, halves, codes);
    return;
  }
  const Target target = target_of(layout, mantissa_bits);
  const int sign_shift = 32 - settings.n_bits;
  const std::uint32_t sign_bit = 1u << (settings.n_bits - 1);
  for (std::size_t i = 0; i < n; ++i)
    codes[i] = round_magnitude(words[i], target, half_to_even) | (words[i] >> sign_shift & sign_bit);
}

template <Dtype dtype>
void round(const void* values, std::size_t n, const Settings& settings, std::uint32_t scale,
           const std::uint32_t* __restrict numbers, std::uint32_t* __restrict codes) {
  std::uint32_t words[kRun];
  const Layout& layout = settings.layout();
  const int mantissa_bits = settings.n_bits - 1 - layout.exponent_bits;
  const bool is_native = settings.format == Format::native;
  if (is_native && mantissa_bits >= 0) {
    // Neighbours differ by one in the last kept bit, whose share the cut bits are.
    floats::load_raw<dtype>(values, n, words);
    const int shift = 32 - settings.n_bits;
    const std::uint32_t cut_bits = (1u << shift) - 1, largest = layout.largest >> (layout.width - settings.n_bits);
    for (std::size_t i = 0; i < n; ++i) {
      const std::uint32_t magnitude = ((words[i] & kMagnitude) + (numbers[i] & cut_bits)) >> shift;
      codes[i] = smaller(magnitude, largest) | (words[i] & kSign) >> shift;
    }
    return;
  }
  if (is_native)
    floats::load_words<dtype>(values, n, words);
  else
    load_scaled<dtype>(values, n, scale, words);
  if (mantissa_bits < 0) {
    round_exponents(words, n, settings, numbers, codes);
    return;
  }
  const Target target = target_of(layout, mantissa_bits);
  const int sign_shift = 32 - settings.n_bits;
  const std::uint32_t sign_bit = 1u << (settings.n_bits - 1);
  for (std::size_t i = 0; i < n; ++i) {
    const std::uint32_t number = numbers[i];
    const std::uint32_t magnitude = round_magnitude(
        words[i], target, [number](std::uint32_t, std::uint32_t shift) { return number & ((1u << shift) - 1); });
    codes[i] = magnitude | (words[i] >> sign_shift & sign_bit);
  }
}

template <Dtype dtype>
void to_values(const std::uint32_t* __restrict codes, std::size_t n, const Settings& settings, std::uint32_t scale,
               void* values) {
  std::uint32_t words[kRun];
  if (settings.format == Format::native) {
    const int shift = 32 - settings.n_bits;
    for (std::size_t i = 0; i < n; ++i) words[i] = codes[i] << shift;
    floats::store_raw<dtype>(words, n, values);
    return;
  }
  const Layout& layout = settings.layout();
  const int cut = layout.width - settings.n_bits, sign_shift = 32 - settings.n_bits;
  const std::uint32_t sign_bit = 1u << (settings.n_bits - 1);
  const auto mantissa_shift = static_cast<std::uint32_t>(23 - layout.mantissa_bits);
  const std::uint32_t rebias = static_cast<std::uint32_t>(127 - layout.bias) << 23;
  // 2^(1 - bias - mantissa_bits), the smallest subnormal number.
  const float unit = as_float(static_cast<std::uint32_t>(128 - layout.bias - layout.mantissa_bits) << 23);
  const float factor = as_float(scale);
  for (std::size_t i = 0; i < n; ++i) {
    const std::uint32_t magnitude = (codes[i] & (sign_bit - 1)) << cut;
    const std::uint32_t normal = (magnitude << mantissa_shift) + rebias;
    const std::uint32_t subnormal = as_word(static_cast<float>(static_cast<std::int32_t>(magnitude)) * unit);
    const std::uint32_t word = choose(magnitude >> layout.mantissa_bits == 0, subnormal, normal);
    const std::uint32_t scaled = as_word(as_float(word) * factor);
    words[i] = smaller(scaled, 0x7F7FFFFF) | (codes[i] & sign_bit) << sign_shift;
  }
  floats::store_words<dtype>(words, n, values);
}

template <Dtype dtype>
constexpr Kernels make_kernels() {
  return {floats::largest_magnitude<dtype>, truncate<dtype>, round_to_nearest<dtype>, round<dtype>, to_values<dtype>,
          floats::fill_nan<dtype>,          random::draw};
}

}  // namespace

const KernelsByDtype& kernels_at(Level<GW_LEVEL>) {
  static constexpr KernelsByDtype all = {make_kernels<Dtype::float32>(), make_kernels<Dtype::bfloat16>(),
                                         make_kernels<Dtype::float16>()};
  return all;
}

}  // namespace gradwire::truncated_float
