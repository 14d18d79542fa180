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

inline Values values_of(std::span<float> floats) {
  return {reinterpret_cast<std::uint8_t*>(floats.data()), floats.size(), Dtype::float32};
}

// Of float32 values that are encoded: what is added to them, and where what the message leaves out of the sum goes.
struct Feedback {
  std::span<const float> residual;  // empty for none
  std::span<float> left_out;
  std::uint64_t draw = 0;  // what random rounding draws by
};

// For one bucket; used by one thread at a time. What goes wrong is thrown.
class Codec {
 public:
  virtual ~Codec() = default;
  // Bytes that no message of so many values exceeds.
  virtual std::size_t max_message_bytes(std::size_t n_values) const = 0;
  // Finds out what matters of values [first, first + n) of the bucket, which are encoded or decoded next; false if that
  // is nothing, or known already.
  virtual bool weigh(std::size_t /*first*/, std::size_t /*n*/) { return false; }
  // Writes one message of values that stand for those at `first` of the bucket; returns its bytes.
  virtual std::size_t encode(const Values& values, std::size_t first, std::span<std::uint8_t> out) = 0;
  // The same of float32 values, with error feedback. Only a codec that does it in one pass adds a residual.
  virtual std::size_t encode_with_feedback(const Values& values, std::size_t first, const Feedback& feedback,
                                           std::span<std::uint8_t> out);
  // The same, and mean = what the message decodes to / divisor, elsewhere: of the message that ends a sum.
  virtual std::size_t encode_mean(const Values& values, std::size_t first, std::size_t divisor, const Values& mean,
                                  std::span<std::uint8_t> out);
  // Reads a message of values that stand for those at `first` of the bucket.
  virtual void decode(std::span<const std::uint8_t> message, std::size_t first, const Values& values) = 0;
  // values = decoded + addend, which lies elsewhere. Overridden, like the next, by a codec that needs one pass.
  virtual void decode_sum(std::span<const std::uint8_t> message, std::size_t first, const Values& addend,
                          const Values& values);
  // values = decoded / divisor.
  virtual void decode_mean(std::span<const std::uint8_t> message, std::size_t first, std::size_t divisor,
                           const Values& values);
  // total += decoded. `scratch`: as large as the total, or larger.
  virtual void decode_add(std::span<const std::uint8_t> message, std::size_t first, std::span<float> total,
                          std::span<float> scratch);
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

// total += values, as float32.
void add_to(std::span<float> total, const Values& values);
// Rounds to the dtype of `out`, as large; whether all is finite then.
bool narrow(std::span<const float> values, const Values& out);
void widen(const Values& values, std::span<float> out);

// A codec at work on the chunks of one bucket, timed.
class Coder {
 public:
  // Of float16 the sum may overflow where the mean does not: `buffer` is divided by the number of ranks here, as DDP
  // does, and messages hold shares of the mean. left_out: of the bucket's size and dtype, or without data: where what
  // an encoding loses of the gradients' sum is written.
  Coder(Codec& codec, const Values& buffer, const Values& left_out, std::size_t n_ranks, Account& account);
  // `first`: which values of the bucket these stand for.
  std::size_t encode(const Values& values, std::size_t first, std::span<std::uint8_t> out);
  // The same of the message that ends a sum; `mean` as if it had been adopted.
  std::size_t encode_mean(const Values& values, std::size_t first, const Values& mean, std::span<std::uint8_t> out);
  // values = the mean of which the message is the last one: what every rank does with the same bytes.
  void adopt(std::span<const std::uint8_t> message, std::size_t first, const Values& values);
  // total = decoded + addend, which lies elsewhere.
  void decode_sum(std::span<const std::uint8_t> message, std::size_t first, const Values& addend, const Values& total);
  std::size_t max_message_bytes(std::size_t n_values) const { return codec_.max_message_bytes(n_values); }

 private:
  // Returns when what comes after begins.
  std::int64_t weigh(std::size_t first, std::size_t n);

  Codec& codec_;
  const Values left_out_;
  const std::size_t divided_by_, divisor_;  // of the values before they are encoded, and of the sum
  Account& account_;
};

}  // namespace gradwire::exchange
