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

void Codec::decode_sum(std::span<const std::uint8_t> message, std::size_t first, const Values& addend,
                       const Values& values) {
  decode(message, first, values);
  add(values, addend);
}

void Codec::decode_mean(std::span<const std::uint8_t> message, std::size_t first, std::size_t divisor,
                        const Values& values) {
  decode(message, first, values);
  if (divisor != 1) divide(values, divisor);
}

Coder::Coder(Codec& codec, const Values& buffer, const Values& left_out, std::size_t n_ranks, Account& account)
    : codec_(codec),
      left_out_(left_out),
      divided_by_(buffer.dtype == Dtype::float16 ? n_ranks : 1),
      divisor_(n_ranks / divided_by_),
      account_(account) {
  if (divided_by_ == 1) return;
  const std::int64_t started = now_ns();
  divide(buffer, divided_by_);
  account_.add(Kind::encode, started);
}

std::int64_t Coder::weigh(std::size_t first, std::size_t n) {
  const std::int64_t started = now_ns();
  if (!codec_.weigh(first, n)) return started;
  account_.add(Kind::importance, started);
  return account_.spans.back().end_ns;
}

std::size_t Coder::encode(const Values& values, std::size_t first, std::span<std::uint8_t> out) {
  const std::int64_t started = weigh(first, values.n);
  const std::size_t n_bytes = codec_.encode(values, first, out);
  if (left_out_.data != nullptr) {
    const Values decoded = left_out_.slice(first, values.n);
    codec_.decode(out.first(n_bytes), first, decoded);
    // (values - decoded) n, where decoded lies
    const auto n = static_cast<float>(divided_by_);
    apply(decoded, values.data, [n](float lost, float whole) { return (whole - lost) * n; });
  }
  account_.add(Kind::encode, started);
  return n_bytes;
}

void Coder::adopt(std::span<const std::uint8_t> message, std::size_t first, const Values& values) {
  const std::int64_t started = weigh(first, values.n);
  codec_.decode_mean(message, first, divisor_, values);
  account_.add(Kind::decode, started);
}

void Coder::decode_sum(std::span<const std::uint8_t> message, std::size_t first, const Values& addend,
                       const Values& total) {
  const std::int64_t started = weigh(first, total.n);
  codec_.decode_sum(message, first, addend, total);
  account_.add(Kind::decode, started);
}

}  // namespace gradwire::exchange
