// Groups of neighbouring pieces of a float32 bucket, each group one message: each piece's own message with its length
// before it, so that whatever a codec derives from its values (a scale) belongs to one piece, and many small tensors
// travel together (docs/format.md#slimgc-group). And the mean of such groups through owners.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "exchange/owners.hpp"

namespace gradwire::exchange {

// Values to a piece, in order, which together are the group. A negative size passes over so many values: they are
// neither read nor written.
using Sizes = std::span<const std::int64_t>;

std::size_t max_group_bytes(const Codec& codec, Sizes sizes);

// The codec has to know already what matters of the pieces (Codec::weigh).

// Writes the values from `first` of the bucket on as one message; returns its bytes. The piece that begins at value k
// of the group draws by feedback.draw + k. Throws InvalidArgument, BufferTooSmall, and whatever the codec throws.
std::size_t encode_group(Codec& codec, std::span<float> values, std::size_t first, Sizes sizes,
                         const Feedback& feedback, std::span<std::uint8_t> out);
// values = decoded / divisor. Throws CorruptMessage, and whatever the codec throws.
void decode_group(Codec& codec, Bytes message, std::size_t first, Sizes sizes, std::size_t divisor,
                  std::span<float> values);
// total += decoded; `scratch` as large.
void add_group(Codec& codec, Bytes message, std::size_t first, Sizes sizes, std::span<float> total,
               std::span<float> scratch);

struct Group {
  std::size_t start, end;  // of the bucket
  std::vector<std::int64_t> sizes;
};
using Groups = std::vector<std::vector<Group>>;  // by part, in order

// What one rank brings in; all are of one size.
struct PieceBucket {
  std::span<float> values;          // the gradient, over which the mean is written
  std::span<const float> residual;  // empty for none
  std::span<float> left_out;        // what this rank's messages lost of gradient + residual
  std::uint64_t first_draw;
  // Without, only this rank's part of `values` is replaced, and nothing of it is left out.
  bool has_pull;
};

// A rank as a worker, which pushes and pulls, and as the server of its own part.
// N x mean + the sum of all ranks' left_out = the sum of their gradients and residuals, to rounding.
class PieceEnds final : public Ends {
 public:
  // Both codecs and `groups` are used until the exchange is over.
  PieceEnds(wire::Mesh& mesh, Codec& push, Codec& pull, const Groups& groups, PieceBucket bucket, Account& account);
  std::size_t max_push_bytes() const override { return max_push_bytes_; }
  std::size_t max_pull_bytes() const override { return max_pull_bytes_; }
  std::size_t encode_push(std::size_t part, std::size_t group, std::span<std::uint8_t> out) override;
  void add_pushed(std::size_t source, std::size_t group, Bytes message) override;
  void add_own(std::size_t group) override;
  std::size_t encode_pull(std::size_t group, std::span<std::uint8_t> out) override;
  void adopt(std::size_t part, std::size_t group, const wire::Message& message) override;

 private:
  // Returns when what comes after begins.
  std::int64_t weigh(Codec& codec, const Group& group);
  std::span<float> total_of(const Group& group) const;
  std::span<float> scratch_of(const Group& group) const;
  Feedback feedback_of(const Group& group, bool has_residual) const;

  Codec &push_, &pull_;
  const Groups& groups_;
  const PieceBucket bucket_;
  const std::size_t world_, rank_;
  std::size_t max_push_bytes_ = 0, max_pull_bytes_ = 0;
  wire::Message total_, scratch_;
  Account& account_;
};

}  // namespace gradwire::exchange
