// Integer arithmetic, exact conversions and one exact product, so that all machines get the same bits.
#include <bit>
#include <cstring>

#include "embedded_float/codec.hpp"
#include "floats/word_loops.hpp"

namespace gradwire::embedded_float {
namespace {

using floats::kMagnitude;
using floats::kSign;

template <Dtype dtype>
std::uint32_t to_codes(const void* values, std::size_t n, std::size_t n_padded, std::uint32_t* __restrict codes) {
  std::uint32_t exponent = floats::largest_magnitude<dtype>(values, n) >> 23;
  exponent = exponent > kMinExponent ? exponent : kMinExponent;
  if (n_padded > n) std::memset(codes + n, 0, 4 * (n_padded - n));
  if (exponent == kRawExponent) {
    floats::load_raw<dtype>(values, n, codes);
    return exponent;
  }
  std::uint32_t buffer[kMaxPartition];
  const std::uint32_t* __restrict words = buffer;
  if constexpr (dtype == Dtype::float32)
    words = static_cast<const std::uint32_t*>(values);
  else
    floats::load_words<dtype>(values, n, buffer);
  for (std::size_t i = 0; i < n; ++i) {
    const std::uint32_t word = words[i], distance = exponent - (word >> 23 & 0xFF);
    // 24 bits of significand below bit 31. Zeros and subnormals have no hidden bit, but are 31 places away or more.
    const std::uint32_t significand = ((word & 0x7FFFFF) | 0x800000) << 7;
    codes[i] = (word & kSign) | significand >> (distance < 31 ? distance : 31);
  }
  return exponent;
}

void to_words(const std::uint32_t* __restrict codes, std::size_t n, std::uint32_t exponent, int n_known,
              std::uint32_t* __restrict words) {
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
    floats::store_raw<dtype>(words, n, values);
  else
    floats::store_words<dtype>(words, n, values);
}

void add(const std::uint32_t* __restrict words, std::size_t n, float* __restrict sums) {
  for (std::size_t i = 0; i < n; ++i) sums[i] += std::bit_cast<float>(words[i]);
}

template <Dtype dtype>
constexpr Kernels make_kernels() {
  return {to_codes<dtype>, to_words, store<dtype>, add, floats::fill_nan<dtype>, floats::load_words<dtype>};
}

}  // namespace

const KernelsByDtype& kernels_at(Level<GW_LEVEL>) {
  static constexpr KernelsByDtype all = {make_kernels<Dtype::float32>(), make_kernels<Dtype::bfloat16>(),
                                         make_kernels<Dtype::float16>()};
  return all;
}

}  // namespace gradwire::embedded_float
