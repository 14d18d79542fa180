// Integers, and single IEEE operations on normal numbers: all machines get the same bits. Conditions are spelt out as
// masks, or the compiler would branch around floating-point operations.
#include <bit>

#include "floats/word_loops.hpp"
#include "truncated_float/codec.hpp"

namespace gradwire::truncated_float {
namespace {

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
  load_words<dtype>(values, n, unscaled);
  const float divisor = as_float(scale);
  for (std::size_t i = 0; i < n; ++i) {
    const std::uint32_t word = unscaled[i];
    const std::uint32_t normal = word & choose((word & 0x7F800000) == 0, kSign, ~0u);
    words[i] = as_word(as_float(normal) / divisor);
  }
}

// What to add before a shift by one place or more, where `kept` is the code without it.
struct ToNearest {  // ties to even
  std::uint32_t addend(std::size_t, std::uint32_t kept, std::uint32_t shift) const {
    return (1u << (shift - 1)) - 1 + (kept & 1);
  }
  std::uint32_t number(std::size_t) const { return 1u << 31; }
};
struct AtRandom {
  const std::uint32_t* __restrict numbers;
  std::uint32_t addend(std::size_t i, std::uint32_t, std::uint32_t shift) const {
    return numbers[i] & ((1u << shift) - 1);
  }
  std::uint32_t number(std::size_t i) const { return numbers[i]; }
};

// The layout's exponent is cut, there is no mantissa: neighbours are a power of two apart, or several.
inline std::uint32_t round_exponent(std::uint32_t word, std::uint32_t cut, std::uint32_t rebias, std::uint32_t number) {
  const std::uint32_t exponent = word >> 23 & 0xFF;
  const std::uint32_t code = excess(exponent, rebias) >> cut;
  // Shares do not change where all three numbers are 2^64 times as large, and no difference is subnormal then.
  const std::uint32_t lift = choose(exponent < 64, 64u << 23, 0);
  // Code 0 is zero; above it, code c is 2^((c << cut) - bias).
  const std::uint32_t lower = choose(code == 0, 0, (((code << cut) + rebias) << 23) + lift);
  const std::uint32_t upper = ((((code + 1) << cut) + rebias) << 23) + lift;
  const std::uint32_t magnitude = choose(exponent == 0, 0, (word & kMagnitude) + lift);
  const float down = as_float(lower), x = as_float(magnitude), up = as_float(upper);
  // Less, not less or equal: a value on the grid stays where it is.
  const float share = static_cast<float>(static_cast<std::int32_t>(number >> 8)) * 0x1p-24f;
  return code + static_cast<std::uint32_t>(share * (up - down) < x - down);
}

// A float32 word's magnitude as a number of a layout: its smallest normal number has the exponent field
// `least_exponent`, and `cut` of the mantissa's bits are too many; further ones below that number.
template <class Rule>
std::uint32_t round_magnitude(std::uint32_t word, std::uint32_t least_exponent, std::uint32_t cut, std::size_t i,
                              const Rule& rule) {
  const std::uint32_t exponent = word >> 23 & 0xFF;
  const std::uint32_t full_shift = cut + excess(least_exponent, exponent);
  // A shift by more than 31 places is no shift: the rest is done to the significand, whose low bits lie below a
  // 2^-31 of the last place.
  const std::uint32_t before = smaller(excess(full_shift, 31), 31), shift = smaller(full_shift, 31);
  const std::uint32_t significand = ((word & 0x7FFFFF) | 0x800000) >> before;
  const std::uint32_t base = excess(exponent, least_exponent) << (23 - cut);
  return base + ((significand + rule.addend(i, base + (significand >> shift), shift)) >> shift);
}

// The kept bits of values / scale, rounded by the rule; or, to truncate them, first to the whole layout.
template <Dtype dtype, class Rule>
void encode(const void* values, std::size_t n, const Settings& settings, std::uint32_t scale, bool truncates,
            const Rule& rule, std::uint32_t* __restrict codes) {
  const Layout& layout = settings.layout();
  const bool is_native = settings.format == Format::native;
  const auto sign_shift = static_cast<std::uint32_t>(32 - settings.n_bits);
  const int cut = truncates ? 0 : layout.width - settings.n_bits;  // bits that are rounded off, and those cut off after
  const int cut_after = truncates ? layout.width - settings.n_bits : 0;
  const std::uint32_t sign_bit = 1u << (settings.n_bits - 1), largest = layout.largest >> cut;
  std::uint32_t words[kRun];
  const auto write = [&](const auto& magnitude_of) {
    for (std::size_t i = 0; i < n; ++i)
      codes[i] = smaller(magnitude_of(words[i], i), largest) >> cut_after | (words[i] >> sign_shift & sign_bit);
  };
  if (is_native && (truncates || cut <= layout.mantissa_bits)) {
    // Neighbours differ by one in the last kept bit.
    load_raw<dtype>(values, n, words);
    if (truncates) {
      for (std::size_t i = 0; i < n; ++i) codes[i] = words[i] >> sign_shift;
      return;
    }
    return write([&](std::uint32_t word, std::size_t i) {
      const std::uint32_t magnitude = word & kMagnitude;
      return (magnitude + rule.addend(i, magnitude >> sign_shift, sign_shift)) >> sign_shift;
    });
  }
  if (is_native)
    load_words<dtype>(values, n, words);
  else
    load_scaled<dtype>(values, n, scale, words);
  if (cut > layout.mantissa_bits) {
    const auto exponent_cut = static_cast<std::uint32_t>(cut - layout.mantissa_bits);
    const auto rebias = static_cast<std::uint32_t>(127 - layout.bias);
    return write(
        [&](std::uint32_t word, std::size_t i) { return round_exponent(word, exponent_cut, rebias, rule.number(i)); });
  }
  const auto least_exponent = static_cast<std::uint32_t>(128 - layout.bias);
  const auto mantissa_cut = static_cast<std::uint32_t>(23 - layout.mantissa_bits + cut);
  write(
      [&](std::uint32_t word, std::size_t i) { return round_magnitude(word, least_exponent, mantissa_cut, i, rule); });
}

template <Dtype dtype>
void to_codes(const void* values, std::size_t n, const Settings& settings, Rounding rounding, std::uint32_t scale,
              const std::uint32_t* numbers, std::uint32_t* codes) {
  if (rounding == Rounding::stochastic)
    encode<dtype>(values, n, settings, scale, false, AtRandom{numbers}, codes);
  else
    encode<dtype>(values, n, settings, scale, rounding == Rounding::truncate, ToNearest(), codes);
}

template <Dtype dtype>
void to_values(const std::uint32_t* __restrict codes, std::size_t n, const Settings& settings, std::uint32_t scale,
               void* __restrict values) {
  if (settings.format == Format::native) {
    const int shift = 32 - settings.n_bits;
    for (std::size_t i = 0; i < n; ++i) store_raw_word<dtype>(values, i, codes[i] << shift);
    return;
  }
  std::uint32_t words[kRun];
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
  store_words<dtype>(words, n, values);
}

template <Dtype dtype>
constexpr Kernels make_kernels() {
  return {largest_magnitude<dtype>, to_codes<dtype>, to_values<dtype>, fill_nan<dtype>, random::draw};
}

}  // namespace

const KernelsByDtype& kernels_at(Level<GW_LEVEL>) {
  static constexpr KernelsByDtype all = {make_kernels<Dtype::float32>(), make_kernels<Dtype::bfloat16>(),
                                         make_kernels<Dtype::float16>()};
  return all;
}

}  // namespace gradwire::truncated_float
