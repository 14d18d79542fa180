// What an exchange asks of a codec, how a bucket is cut, and the arithmetic between two messages.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "exchange/account.hpp"
#include "floats/dtypes.hpp"

namespace gradwire::exchange {

using floats::Dtype;

// Values of one dtype, in memory of somebody else.
struct Values {
  std::uint8_t* data;
  std::size_t n;
  Dtype dtype;
  std::size_t element_bytes() const { return floats::bytes_of(dtype); }
  Values slice(std::size_t first, std::size_t count) const { return {data + first * element_bytes(), count, dtype}; }
};

// For one bucket; used by one thread at a time. What goes wrong is thrown.
class Codec {
 public:
  virtual ~Codec() = default;
  // Bytes that no message of so many values exceeds.
  virtual std::size_t max_message_bytes(std::size_t n_values) const = 0;
  // Finds out what matters of values [first, first + n) of the bucket, which are encoded next; false if that is
  // nothing.
  virtual bool weigh(std::size_t /*first*/, std::size_t /*n*/) { return false; }
  // Writes one message of values that stand for those at `first` of the bucket; returns its bytes.
  virtual std::size_t encode(const Values& values, std::size_t first, std::span<std::uint8_t> out) = 0;
  virtual void decode(std::span<const std::uint8_t> message, const Values& values) = 0;
};

// `n_parts` parts, one for each rank, each of `n_chunks` chunks; sizes differ by one value at most.
struct Cut {
  std::size_t n, n_parts, n_chunks;
  struct Range {
    std::size_t first, count;
  };
  Range chunk(std::size_t part, std::size_t index) const {
    const std::size_t begin = n * part / n_parts, size = n * (part + 1) / n_parts - begin;
    const std::size_t first = begin + size * index / n_chunks;
    return {first, begin + size * (index + 1) / n_chunks - first};
  }
  std::size_t largest() const {
    const std::size_t part = (n + n_parts - 1) / n_parts;
    return (part + n_chunks - 1) / n_chunks;
  }
};

// a += b, a -= b, a /= divisor: each value in float32, then rounded to its dtype to nearest, ties to even; the bits of
// torch, but for the payloads of NaN.
void add(const Values& a, const Values& b);
void subtract(const Values& a, const Values& b);
void divide(const Values& a, std::size_t divisor);

// A codec at work on the chunks of one bucket, timed.
class Coder {
 public:
  // left_out: of the bucket's size and dtype, or without data: where what an encoding loses is written.
  Coder(Codec& codec, const Values& left_out, Account& account)
      : codec_(codec), left_out_(left_out), account_(account) {}
  std::size_t encode(const Values& values, std::size_t first, std::span<std::uint8_t> out);
  void decode(std::span<const std::uint8_t> message, const Values& values);
  // values = decoded / divisor: what every rank does with the same bytes.
  void adopt(std::span<const std::uint8_t> message, const Values& values, std::size_t divisor);
  // total = decoded + addend.
  void decode_sum(std::span<const std::uint8_t> message, const Values& total, const Values& addend);
  std::size_t max_message_bytes(std::size_t n_values) const { return codec_.max_message_bytes(n_values); }

 private:
  Codec& codec_;
  const Values left_out_;
  Account& account_;
};

}  // namespace gradwire::exchange
