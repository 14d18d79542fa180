// What an exchange asks of a codec, how a bucket is cut, and the arithmetic between two messages.
#pragma once

#include <chrono>
#include <vector>

#include "spans.hpp"

namespace gradwire::exchange {

enum class Kind : std::uint8_t { encode, decode, communicate, importance };

inline std::int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

struct Span {
  Kind kind;
  std::int64_t start_ns, end_ns;
};

// What an exchange did: bytes both ways, and when which kind of work was done. The times are those of
// time.perf_counter_ns in Python.
struct Account {
  std::uint64_t bytes_sent = 0, bytes_received = 0, n_messages = 0;
  std::vector<Span> spans;

  void add(Kind kind, std::int64_t start_ns) { spans.push_back({kind, start_ns, now_ns()}); }
  // Returns when what comes after begins.
  std::int64_t add_importance(std::int64_t start_ns, bool has_weighed) {
    if (!has_weighed) return start_ns;
    add(Kind::importance, start_ns);
    return spans.back().end_ns;
  }
};

// Adds the time until it goes.
class Timed {
 public:
  Timed(Account& account, Kind kind, std::int64_t start_ns = now_ns())
      : account_(account), kind_(kind), start_ns_(start_ns) {}
  ~Timed() { account_.add(kind_, start_ns_); }
  Timed(const Timed&) = delete;
  Timed& operator=(const Timed&) = delete;

 private:
  Account& account_;
  const Kind kind_;
  const std::int64_t start_ns_;
};

using floats::Dtype;

// Values of one dtype, in memory of somebody else.
struct Values {
  std::uint8_t* data;
  std::size_t n;
  Dtype dtype;
  std::size_t element_bytes() const { return floats::bytes_of(dtype); }
  Bytes bytes() const { return {data, n * element_bytes()}; }
  Values slice(std::size_t first, std::size_t count) const { return {data + first * element_bytes(), count, dtype}; }
};

inline Values values_of(Floats floats) {
  return {reinterpret_cast<std::uint8_t*>(floats.data()), floats.size(), Dtype::float32};
}

// Of float32 values that are encoded: what is added to them, and where what the message leaves out of the sum goes.
struct Feedback {
  ConstFloats residual;  // empty for none
  Floats left_out;
  std::uint64_t draw = 0;  // what random rounding draws by
};

// For one bucket; used by one thread at a time. What goes wrong is thrown.
class Codec {
 public:
  virtual ~Codec() = default;
  // Bytes that no message of so many values exceeds.
  virtual std::size_t max_message_bytes(std::size_t n_values) const = 0;
  // Whether its messages have checksums of their own.
  virtual bool seals() const { return true; }
  // Finds out what matters of values [first, first + n) of the bucket, which are encoded or decoded next; false if that
  // is nothing, or known already.
  virtual bool weigh(std::size_t /*first*/, std::size_t /*n*/) { return false; }
  // Writes one message of values that stand for those at `first` of the bucket; returns its bytes.
  virtual std::size_t encode(const Values& values, std::size_t first, Bytes out) = 0;
  // The same of float32 values, with error feedback. Only a codec that does it in one pass adds a residual.
  virtual std::size_t encode_with_feedback(const Values& values, std::size_t first, const Feedback& feedback,
                                           Bytes out);
  // The same, and mean = what the message decodes to / divisor, elsewhere: of the message that ends a sum.
  virtual std::size_t encode_mean(const Values& values, std::size_t first, std::size_t divisor, const Values& mean,
                                  Bytes out);
  // Reads a message of values that stand for those at `first` of the bucket.
  virtual void decode(ConstBytes message, std::size_t first, const Values& values) = 0;
  // values = decoded + addend, which lies elsewhere. Overridden, like the next, by a codec that needs one pass.
  virtual void decode_sum(ConstBytes message, std::size_t first, const Values& addend, const Values& values);
  // values = decoded / divisor.
  virtual void decode_mean(ConstBytes message, std::size_t first, std::size_t divisor, const Values& values);
  // total += decoded. `scratch`: as large as the total, or larger.
  virtual void decode_add(ConstBytes message, std::size_t first, Floats total, Floats scratch);
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
void add_to(Floats total, const Values& values);
// Rounds to the dtype of `out`, as large; whether all is finite then.
bool narrow(ConstFloats values, const Values& out);
void widen(const Values& values, Floats out);

// A codec at work on the chunks of one bucket, timed.
class Coder {
 public:
  // Of float16 the sum may overflow where the mean does not: `buffer` is divided by the number of ranks here, as DDP
  // does, and messages hold shares of the mean. left_out: of the bucket's size and dtype, or without data: where what
  // an encoding loses of the gradients' sum is written.
  Coder(Codec& codec, const Values& buffer, const Values& left_out, std::size_t n_ranks, Account& account);
  // `first`: which values of the bucket these stand for.
  std::size_t encode(const Values& values, std::size_t first, Bytes out);
  // The same of the message that ends a sum; `mean` as if it had been adopted.
  std::size_t encode_mean(const Values& values, std::size_t first, const Values& mean, Bytes out);
  // values = the mean of which the message is the last one: what every rank does with the same bytes.
  void adopt(ConstBytes message, std::size_t first, const Values& values);
  // total = decoded + addend, which lies elsewhere.
  void decode_sum(ConstBytes message, std::size_t first, const Values& addend, const Values& total);
  std::size_t max_message_bytes(std::size_t n_values) const { return codec_.max_message_bytes(n_values); }

 private:
  std::int64_t weigh(std::size_t first, std::size_t n) {
    const std::int64_t started = now_ns();
    return account_.add_importance(started, codec_.weigh(first, n));
  }

  Codec& codec_;
  const Values left_out_;
  const std::size_t divided_by_, divisor_;  // of the values before they are encoded, and of the sum
  Account& account_;
};

}  // namespace gradwire::exchange
