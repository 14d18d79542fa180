// Integer arithmetic, exact conversions and one exact product, so that all machines get the same bits. The root is the
// one that halves a float's exponent and lets what is left of it begin the mantissa: straight lines between powers of
// two, which integers follow both ways.
#include <bit>
#include <cstring>

#include "embedded_float/codec.hpp"
#include "floats/word_loops.hpp"

namespace gradwire::embedded_float {
namespace {

template <Dtype dtype, int format>
std::uint32_t to_codes(const void* values, std::size_t n, std::size_t n_padded, std::uint32_t* __restrict codes) {
  std::uint32_t exponent = largest_magnitude<dtype>(values, n) >> 23;
  exponent = exponent > kMinExponent ? exponent : kMinExponent;
  if (n_padded > n) std::memset(codes + n, 0, 4 * (n_padded - n));
  if (exponent == kRawExponent) {
    load_raw<dtype>(values, n, codes);
    return exponent;
  }
  std::uint32_t buffer[kMaxPartition];
  const std::uint32_t* __restrict words = buffer;
  if constexpr (dtype == Dtype::float32)
    words = static_cast<const std::uint32_t*>(values);
  else
    load_words<dtype>(values, n, buffer);
  const std::uint32_t odd = (~exponent & 1) << 23;
  for (std::size_t i = 0; i < n; ++i) {
    const std::uint32_t word = words[i], own = word >> 23 & 0xFF, distance = exponent - own;
    std::uint32_t significand, n_places;
    if constexpr (format == kLinear) {
      // 24 bits of significand below bit 31. Zeros and subnormals have no hidden bit, but are 31 places away or more.
      significand = ((word & 0x7FFFFF) | 0x800000) << 7;
      n_places = distance;
    } else {
      // Its first bit after the hidden one tells which of two powers of two: 1 for the shared exponent's own.
      significand = ((word + odd) & 0xFFFFFF) << 6 | 1u << 30;
      n_places = own == 0 ? 31 : distance >> 1;
    }
    codes[i] = (word & kSign) | significand >> (n_places < 31 ? n_places : 31);
  }
  return exponent;
}

// The float32 words of magnitudes that are roots, centred. `is_exact`: with more than 24 bits.
template <bool is_exact>
void square(const std::uint32_t* __restrict codes, std::size_t n, std::uint32_t exponent, int n_known,
            std::uint32_t* __restrict words) {
  const std::uint32_t n_unknown = 32 - static_cast<std::uint32_t>(n_known);
  const std::uint32_t middle = n_unknown == 0 ? 0 : 1u << (n_unknown - 1);
  for (std::size_t i = 0; i < n; ++i) {
    const std::uint32_t known = codes[i] & kMagnitude;
    const std::uint32_t if_any = 0u - static_cast<std::uint32_t>(known != 0), root = known + (middle & if_any);
    // The conversion finds the highest bit, and must not round up to the next.
    const std::uint32_t converted = is_exact ? root & ~(root >> 1) : root;
    const auto word = std::bit_cast<std::uint32_t>(static_cast<float>(static_cast<std::int32_t>(converted)));
    // A word's exponent twice, 2^0 for roots of bit 30 and the shared exponent for values: less 2 (127 + 30), and 1.
    std::uint32_t squared;
    if constexpr (is_exact) {
      const std::uint32_t highest = (word >> 23) - 127, n_places = 30 - highest;
      squared = (((exponent - 61 + 2 * highest) << 23) + (root << (n_places < 31 ? n_places : 31) >> 6 & 0xFFFFFF));
    } else {
      squared = 2 * word + ((exponent - 315) << 23);
    }
    const bool is_normal = static_cast<std::int32_t>(squared) >= 0x800000;
    words[i] = (codes[i] & kSign) | (squared & if_any & (0u - static_cast<std::uint32_t>(is_normal)));
  }
}

template <int format>
void to_words(const std::uint32_t* __restrict codes, std::size_t n, std::uint32_t exponent, int n_known,
              std::uint32_t* __restrict words) {
  if constexpr (format == kRoots)
    return n_known > 24 ? square<true>(codes, n, exponent, n_known, words)
                        : square<false>(codes, n, exponent, n_known, words);
  // 2^(exponent - 157), a normal number: exponent is at least 31.
  const float weight = std::bit_cast<float>((exponent - kMinExponent + 1) << 23);
  // A magnitude stands for all that share its known bits: half of the unknown ones are added. One less, so that
  // rounding to 24 bits never carries past the largest finite value.
  const std::uint32_t n_unknown = 32 - static_cast<std::uint32_t>(n_known);
  const std::uint32_t middle = n_unknown == 0 ? 0 : (1u << (n_unknown - 1)) - 1;
  constexpr std::uint32_t kLargest = 0x7FFFFF80;  // 24 ones: no encoder writes more
  for (std::size_t i = 0; i < n; ++i) {
    const std::uint32_t known = codes[i] & kMagnitude;
    const std::uint32_t centred = known + (middle & (0u - static_cast<std::uint32_t>(known != 0)));
    const auto magnitude = static_cast<std::int32_t>(centred < kLargest ? centred : kLargest);
    words[i] = (codes[i] & kSign) | std::bit_cast<std::uint32_t>(static_cast<float>(magnitude) * weight);
  }
}

template <Dtype dtype>
void store(const std::uint32_t* words, std::size_t n, bool is_raw, void* values) {
  if (is_raw)
    store_raw<dtype>(words, n, values);
  else
    store_words<dtype>(words, n, values);
}

void add(const std::uint32_t* __restrict words, std::size_t n, float* __restrict sums) {
  for (std::size_t i = 0; i < n; ++i) sums[i] += std::bit_cast<float>(words[i]);
}

template <Dtype dtype, int format>
constexpr Kernels make_kernels() {
  return {to_codes<dtype, format>, to_words<format>, store<dtype>, add, fill_nan<dtype>, load_words<dtype>};
}

template <int format>
constexpr AllKernels::value_type make_all() {
  return {make_kernels<Dtype::float32, format>(), make_kernels<Dtype::bfloat16, format>(),
          make_kernels<Dtype::float16, format>()};
}

}  // namespace

const AllKernels& kernels_at(Level<GW_LEVEL>) {
  static constexpr AllKernels all = {make_all<kLinear>(), make_all<kRoots>()};
  return all;
}

}  // namespace gradwire::embedded_float
