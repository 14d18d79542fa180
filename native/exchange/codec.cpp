#include "exchange/codec.hpp"

#include <bit>

#include "floats/word_loops.hpp"

namespace gradwire::exchange {
namespace {

// Unlike the converters of the codecs, these round to Inf, and keep Inf and NaN.
inline std::uint16_t round_to_bfloat16(float value) {
  const auto word = std::bit_cast<std::uint32_t>(value);
  const auto rounded = static_cast<std::uint16_t>((word + 0x7FFF + (word >> 16 & 1)) >> 16);
  return (word & floats::kMagnitude) > floats::kInfinity ? std::uint16_t{0x7FC0} : rounded;
}

inline std::uint16_t round_to_float16(float value) {
  const auto word = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t magnitude = word & floats::kMagnitude;
  const auto sign = static_cast<std::uint16_t>(word >> 16 & 0x8000u);
  if (magnitude > floats::kInfinity) return 0x7E00;
  if (magnitude >= 0x477FF000) return sign | 0x7C00;  // 65520, halfway between the largest value and the next
  return floats::narrow(word);
}

template <Dtype dtype>
float load(const std::uint8_t* data, std::size_t i) {
  if constexpr (dtype == Dtype::float32) {
    float value;
    std::memcpy(&value, data + 4 * i, 4);
    return value;
  } else {
    std::uint16_t half;
    std::memcpy(&half, data + 2 * i, 2);
    return std::bit_cast<float>(dtype == Dtype::bfloat16 ? static_cast<std::uint32_t>(half) << 16
                                                         : floats::widen(half));
  }
}

template <Dtype dtype>
void store(std::uint8_t* data, std::size_t i, float value) {
  if constexpr (dtype == Dtype::float32) {
    std::memcpy(data + 4 * i, &value, 4);
  } else {
    const std::uint16_t half = dtype == Dtype::bfloat16 ? round_to_bfloat16(value) : round_to_float16(value);
    std::memcpy(data + 2 * i, &half, 2);
  }
}

template <Dtype dtype, class Operation>
void apply(std::uint8_t* __restrict a, const std::uint8_t* __restrict b, std::size_t n, Operation operation) {
  for (std::size_t i = 0; i < n; ++i) store<dtype>(a, i, operation(load<dtype>(a, i), load<dtype>(b, i)));
}

template <class Operation>
void apply(const Values& a, const std::uint8_t* b, Operation operation) {
  switch (a.dtype) {
    case Dtype::float32:
      return apply<Dtype::float32>(a.data, b, a.n, operation);
    case Dtype::bfloat16:
      return apply<Dtype::bfloat16>(a.data, b, a.n, operation);
    case Dtype::float16:
      return apply<Dtype::float16>(a.data, b, a.n, operation);
  }
}

template <Dtype dtype>
void divide_all(std::uint8_t* a, std::size_t n, float divisor) {
  for (std::size_t i = 0; i < n; ++i) store<dtype>(a, i, load<dtype>(a, i) / divisor);
}

}  // namespace

void add(const Values& a, const Values& b) {
  apply(a, b.data, [](float x, float y) { return x + y; });
}

void subtract(const Values& a, const Values& b) {
  apply(a, b.data, [](float x, float y) { return x - y; });
}

void divide(const Values& a, std::size_t divisor) {
  const auto by = static_cast<float>(divisor);
  switch (a.dtype) {
    case Dtype::float32:
      return divide_all<Dtype::float32>(a.data, a.n, by);
    case Dtype::bfloat16:
      return divide_all<Dtype::bfloat16>(a.data, a.n, by);
    case Dtype::float16:
      return divide_all<Dtype::float16>(a.data, a.n, by);
  }
}

std::size_t Coder::encode(const Values& values, std::size_t first, std::span<std::uint8_t> out) {
  std::int64_t started = now_ns();
  if (codec_.weigh(first, values.n)) {
    account_.add(Kind::importance, started);
    started = account_.spans.back().end_ns;
  }
  const std::size_t n_bytes = codec_.encode(values, first, out);
  if (left_out_.data != nullptr) {
    const Values decoded = left_out_.slice(first, values.n);
    codec_.decode(out.first(n_bytes), decoded);
    // values - decoded, where decoded lies
    apply(decoded, values.data, [](float lost, float whole) { return whole - lost; });
  }
  account_.add(Kind::encode, started);
  return n_bytes;
}

void Coder::decode(std::span<const std::uint8_t> message, const Values& values) {
  const std::int64_t started = now_ns();
  codec_.decode(message, values);
  account_.add(Kind::decode, started);
}

void Coder::adopt(std::span<const std::uint8_t> message, const Values& values, std::size_t divisor) {
  const std::int64_t started = now_ns();
  codec_.decode(message, values);
  divide(values, divisor);
  account_.add(Kind::decode, started);
}

void Coder::decode_sum(std::span<const std::uint8_t> message, const Values& total, const Values& addend) {
  const std::int64_t started = now_ns();
  codec_.decode(message, total);
  add(total, addend);
  account_.add(Kind::decode, started);
}

}  // namespace gradwire::exchange
