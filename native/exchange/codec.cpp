#include "exchange/codec.hpp"

#include <algorithm>
#include <bit>

#include "errors.hpp"
#include "floats/word_loops.hpp"

namespace gradwire::exchange {
namespace {

template <Dtype dtype>
float load(const std::uint8_t* data, std::size_t i) {
  return std::bit_cast<float>(floats::load_word<dtype>(data, i));
}

template <Dtype dtype>
void store(std::uint8_t* data, std::size_t i, float value) {
  floats::store_word<dtype, floats::Specials::canonical>(data, i, std::bit_cast<std::uint32_t>(value));
}

template <class Operation>
void apply(const Values& a, const std::uint8_t* b, Operation operation) {
  floats::with_dtype(a.dtype, [&, to = a.data, n = a.n](auto dtype) {
    std::uint8_t* __restrict x = to;
    const std::uint8_t* __restrict y = b;
    for (std::size_t i = 0; i < n; ++i) store<dtype()>(x, i, operation(load<dtype()>(x, i), load<dtype()>(y, i)));
  });
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
  floats::with_dtype(a.dtype, [data = a.data, n = a.n, by](auto dtype) {
    for (std::size_t i = 0; i < n; ++i) store<dtype()>(data, i, load<dtype()>(data, i) / by);
  });
}

void add_to(Floats total, const Values& values) {
  floats::with_dtype(values.dtype, [n = total.size(), to = total.data(), from = values.data](auto dtype) {
    float* __restrict x = to;
    const std::uint8_t* __restrict y = from;
    for (std::size_t i = 0; i < n; ++i) x[i] += load<dtype()>(y, i);
  });
}

bool narrow(ConstFloats values, const Values& out) {
  return floats::with_dtype(out.dtype, [n = values.size(), from = values.data(), to = out.data](auto dtype) {
    const float* __restrict x = from;
    std::uint8_t* __restrict y = to;
    std::uint32_t largest = 0;
    for (std::size_t i = 0; i < n; ++i) {
      store<dtype()>(y, i, x[i]);
      largest = std::max(largest, std::bit_cast<std::uint32_t>(load<dtype()>(y, i)) & floats::kMagnitude);
    }
    return largest < floats::kInfinity;
  });
}

void widen(const Values& values, Floats out) {
  floats::with_dtype(values.dtype, [n = out.size(), to = out.data(), from = values.data](auto dtype) {
    float* __restrict x = to;
    const std::uint8_t* __restrict y = from;
    for (std::size_t i = 0; i < n; ++i) x[i] = load<dtype()>(y, i);
  });
}

std::size_t Codec::encode_with_feedback(const Values& values, std::size_t first, const Feedback& feedback, Bytes out) {
  if (!feedback.residual.empty()) throw InvalidArgument("this codec adds no residual");
  const std::size_t n_bytes = encode(values, first, out);
  const Values left_out = values_of(feedback.left_out);
  decode(out.first(n_bytes), first, left_out);
  apply(left_out, values.data, [](float decoded, float whole) { return whole - decoded; });
  return n_bytes;
}

std::size_t Codec::encode_mean(const Values& values, std::size_t first, std::size_t divisor, const Values& mean,
                               Bytes out) {
  const std::size_t n_bytes = encode(values, first, out);
  decode_mean(out.first(n_bytes), first, divisor, mean);
  return n_bytes;
}

void Codec::decode_add(ConstBytes message, std::size_t first, Floats total, Floats scratch) {
  const Values decoded = values_of(scratch.first(total.size()));
  decode(message, first, decoded);
  add(values_of(total), decoded);
}

void Codec::decode_sum(ConstBytes message, std::size_t first, const Values& addend, const Values& values) {
  decode(message, first, values);
  add(values, addend);
}

void Codec::decode_mean(ConstBytes message, std::size_t first, std::size_t divisor, const Values& values) {
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
  const Timed timed(account_, Kind::encode);
  divide(buffer, divided_by_);
}

std::size_t Coder::encode(const Values& values, std::size_t first, Bytes out) {
  const Timed timed(account_, Kind::encode, weigh(first, values.n));
  const std::size_t n_bytes = codec_.encode(values, first, out);
  if (left_out_.data != nullptr) {
    const Values decoded = left_out_.slice(first, values.n);
    codec_.decode(out.first(n_bytes), first, decoded);
    // (values - decoded) n, where decoded lies
    const auto n = static_cast<float>(divided_by_);
    apply(decoded, values.data, [n](float lost, float whole) { return (whole - lost) * n; });
  }
  return n_bytes;
}

std::size_t Coder::encode_mean(const Values& values, std::size_t first, const Values& mean, Bytes out) {
  if (left_out_.data != nullptr) {
    const std::size_t n_bytes = encode(values, first, out);
    adopt(out.first(n_bytes), first, mean);
    return n_bytes;
  }
  const Timed timed(account_, Kind::encode, weigh(first, values.n));
  return codec_.encode_mean(values, first, divisor_, mean, out);
}

void Coder::adopt(ConstBytes message, std::size_t first, const Values& values) {
  const Timed timed(account_, Kind::decode, weigh(first, values.n));
  codec_.decode_mean(message, first, divisor_, values);
}

void Coder::decode_sum(ConstBytes message, std::size_t first, const Values& addend, const Values& total) {
  const Timed timed(account_, Kind::decode, weigh(first, total.n));
  codec_.decode_sum(message, first, addend, total);
}

}  // namespace gradwire::exchange
