// What sharded training exchanges: parts that all ranks gather, and sums that stay with the owner of their part.
#pragma once

#include "exchange/means.hpp"

namespace gradwire::exchange {

// Values bit for bit: the message of a codec that keeps all but some of them, and these beside it; or the values as
// they are, where that is shorter. docs/format.md#exact-values
class ExactCodec final : public Codec {
 public:
  // `codec` keeps what is neither subnormal nor a negative zero (of float16: nor a negative zero); used until this
  // goes.
  ExactCodec(Codec& codec, Dtype dtype) : codec_(codec), dtype_(dtype) {}
  std::size_t max_message_bytes(std::size_t n_values) const override;
  std::size_t encode(const Values& values, std::size_t first, Bytes out) override;
  void decode(ConstBytes message, std::size_t first, const Values& values) override;
  bool seals() const override { return false; }

 private:
  Codec& codec_;
  const Dtype dtype_;
};

// float32 rounded to bfloat16; 16-bit values as they are. Inf stays, NaN stays NaN.
class Bfloat16Codec final : public Codec {
 public:
  std::size_t max_message_bytes(std::size_t n_values) const override { return 2 * n_values; }
  std::size_t encode(const Values& values, std::size_t first, Bytes out) override;
  void decode(ConstBytes message, std::size_t first, const Values& values) override;
  bool seals() const override { return false; }
};

// Fills `all`, of which every rank has the part of its own number, equally long ones: each rank's messages go to all
// others as they are, n_chunks of them, encoded while others travel and are decoded. `adopts_own`: a rank reads its own
// messages too, so that all hold the same bits of what a codec loses some of.
void gather_parts(wire::Mesh& mesh, const Ticket& ticket, Codec& codec, const Values& all, bool adopts_own,
                  std::size_t n_chunks, Account& account);

// Replaces this rank's part of `all`, equally long ones, by the ranks' sum of it / divisor: each rank sends every other
// its values of that one's part, who adds them in float32 in rank order, its own unencoded. The other parts stay.
void scatter_sums(wire::Mesh& mesh, const Ticket& ticket, Codec& codec, const Values& all, std::size_t divisor,
                  std::size_t n_chunks, Account& account);

}  // namespace gradwire::exchange
