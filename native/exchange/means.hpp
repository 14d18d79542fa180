// Means over the ranks through a codec: round a ring; through owners, of quantised parts, of groups of pieces.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "exchange/codec.hpp"
#include "quantisers/codec.hpp"
#include "wire/mesh.hpp"

namespace gradwire::exchange {

// One stream of messages of one exchange, accounted for.
class Channel {
 public:
  Channel(wire::Mesh& mesh, std::uint32_t stream, const wire::Facts& facts, std::uint64_t max_bytes,
          std::span<const int> peers, Account& account)
      : mesh_(mesh), stream_(stream), account_(account) {
    mesh.open(stream, facts, max_bytes, peers);
  }
  ~Channel() { mesh_.close(stream_); }
  Channel(const Channel&) = delete;
  Channel& operator=(const Channel&) = delete;

  wire::Message take(std::size_t n_bytes) { return mesh_.pool().take(n_bytes); }

  // Sends once at most n_ahead messages before it waits for this peer.
  void send(int peer, const wire::Message& message, std::size_t n_ahead) {
    const Timed timed(account_, Kind::communicate);
    mesh_.wait_until_sent(peer, n_ahead);
    mesh_.send(peer, stream_, message);
    account_.bytes_sent += wire::kHeaderBytes + message.n_bytes;
    ++account_.n_messages;
  }
  wire::Message receive(int peer) {
    const Timed timed(account_, Kind::communicate);
    wire::Message message = mesh_.receive(peer, stream_);
    account_.bytes_received += wire::kHeaderBytes + message.n_bytes;
    return message;
  }
  void finish() {
    const Timed timed(account_, Kind::communicate);
    mesh_.wait_until_all_sent();
  }
  // Messages that may be on their way while this rank works: on a LAN so few that they stay in the caches, else what
  // fills a long line. To be asked when the links are there.
  std::size_t messages_ahead(std::size_t on_a_lan) const {
    return mesh_.n_connections() > 1 ? kMessagesAheadOfLongLine : on_a_lan;
  }

 private:
  static constexpr std::size_t kMessagesAheadOfLongLine = 16;
  wire::Mesh& mesh_;
  const std::uint32_t stream_;
  Account& account_;
};

// Ring all-reduce of messages: N-1 hops that decode, add and encode, then N-1 hops that forward bytes verbatim.

// Which exchange it is, to the other ranks.
struct Ticket {
  std::uint32_t stream;  // the first of two numbers that are its own
  wire::Facts facts;
};

// Replaces `buffer` by the mean over the ranks. `left_out`: see Coder. `n_ahead`: messages on their way, on a LAN at
// most.
//
// Hop h < N-1 (reduce-scatter): send part rank-h, receive part rank-h-1, add this rank's share: so hop h+1 sends it.
// After them this rank owns the sum of part rank+1. Its final message goes round in the other N-1 hops (all-gather);
// the owner adopts the decoding of its own message, so that all ranks hold the same bits.
void ring_mean(wire::Mesh& mesh, const Ticket& ticket, Codec& codec, const Values& buffer, const Values& left_out,
               std::size_t n_chunks, std::size_t n_ahead, Account& account);

// Exchange through owners: every rank sends every other its values of the part that the other owns (push); the owner
// adds them up in rank order, itself included, and answers all with one result, which everyone adopts (pull). It moves
// the bytes of a reduce-scatter and an all-gather, in two hops whatever the number of ranks. This pattern moves
// messages and nothing else: what they hold is the business of `Ends`.

// What a rank does with the messages. A group is what travels as one message.
class Ends {
 public:
  virtual ~Ends() = default;
  virtual std::size_t max_push_bytes() const = 0;  // of one group
  virtual std::size_t max_pull_bytes() const = 0;
  // Writes this rank's values of a group that another rank owns; returns the bytes written.
  virtual std::size_t encode_push(std::size_t part, std::size_t group, Bytes out) = 0;
  // Adds what `source` pushed, or this rank's own values, to a group of this rank's part; called in rank order.
  virtual void add_pushed(std::size_t source, std::size_t group, ConstBytes message) = 0;
  virtual void add_own(std::size_t group) = 0;
  // Writes the result of a group of this rank's part, of which all has been added.
  virtual std::size_t encode_pull(std::size_t group, Bytes out) = 0;
  // Whether what is pushed, and a result, has a checksum of its own.
  virtual bool seals_push() const { return true; }
  virtual bool seals_pull() const { return true; }
  // Takes over the owner's result of a group; the owner its own, by the same message.
  virtual void adopt(std::size_t part, std::size_t group, const wire::Message& message) = 0;
  // What a rank tells every other before its first group, and after its last result; empty: nothing.
  virtual ConstBytes opening() { return {}; }
  virtual void take_opening(std::size_t /*source*/, ConstBytes /*message*/) {}
  virtual ConstBytes closing() { return {}; }
  virtual void take_closing(std::size_t /*source*/, ConstBytes /*message*/) {}
};

class OwnersExchange {
 public:
  // `n_groups`: of each part. `has_pull`: without, results stay with their owners.
  OwnersExchange(wire::Mesh& mesh, const Ticket& ticket, Ends& ends, std::vector<std::size_t> n_groups, bool has_pull,
                 std::size_t pull_bytes_ahead, Account& account);
  // Pushes everything and answers every group; the last results are on their way then. One other exchange may run
  // before `finish`.
  void run();
  // Adopts what is left.
  void finish();

 private:
  void push(std::size_t group);
  void answer(std::size_t group);
  void adopt(std::size_t group);

  Ends& ends_;
  const std::vector<std::size_t> n_groups_;
  const std::size_t world_, rank_, n_rounds_, n_own_;
  std::size_t ahead_ = 0, n_pulled_ahead_ = 0, n_adopted_ = 0;
  std::vector<int> peers_;
  std::unique_ptr<Channel> pushes_, pulls_;
  std::vector<wire::Message> results_;
};

// All of an exchange at once, with as many groups of each part.
void exchange_groups(wire::Mesh& mesh, const Ticket& ticket, Ends& ends, std::size_t n_groups, bool has_pull,
                     Account& account);

// The mean over the ranks by a codec: rank r owns part r and adds the decoded parts of all ranks, its own unencoded.
// `left_out`: see Coder.
void direct_mean(wire::Mesh& mesh, const Ticket& ticket, Codec& codec, const Values& buffer, const Values& left_out,
                 std::size_t n_chunks, Account& account);

// The mean of quantised parts with error feedback, through owners. Unlike in direct_mean, sums are float32 whatever the
// bucket's dtype; what the owner's message leaves out of a sum goes into the owner's own residual, where it weighs
// exactly what it lacks: a rank's residual is a part of the sum; and all ranks learn whether everything was finite. A
// message that was not becomes NaN.
//
// Each stream begins with an opening (which parameters the sender used) and ends with a closing (whether all that it
// pushed, was pushed and answered was finite).

// What one rank brings to the reduction of one bucket.
struct QuantisedBucket {
  Values gradient;       // the mean is written over it
  ConstFloats residual;  // empty for none
  Floats unsent;         // the new residual; another place than the old one, which stays; empty for none
  float residual_scale;  // what the gradient is multiplied by and the residuals are not
  std::vector<std::pair<std::size_t, std::size_t>> spans;  // where each parameter lies; those of all ranks are alike
  // For each parameter, whether this rank has a gradient of it. What is not used counts as zero, exactly.
  std::vector<bool> is_used;
  std::size_t n_chunks;              // of a part; each is a message
  std::vector<std::uint64_t> draws;  // by part, then chunk: what this rank's message of it draws by
  bool pulls_raw;                    // the owners' sums travel in the gradient's dtype instead of through the codec
  int pull_levels;                   // of qsgd, on the way back
};

// The same on all ranks.
struct QuantisedResult {
  std::vector<bool> is_used_by_any;  // for each parameter; where none did, the mean is zero
  bool is_finite;                    // all values of all ranks, and their sums
};

// Replaces the gradient by the mean over at least two ranks.
QuantisedResult quantised_mean(wire::Mesh& mesh, const Ticket& ticket, const quantisers::Options& options,
                               const QuantisedBucket& bucket, Account& account);

// Groups of neighbouring pieces of a float32 bucket, each group one message: each piece's own message with its length
// before it, so that whatever a codec derives from its values (a scale) belongs to one piece, and many small tensors
// travel together (docs/format.md#slimgc-group). And the mean of such groups through owners.

// Values to a piece, in order, which together are the group. A negative size passes over so many values: they are
// neither read nor written.
using Sizes = std::span<const std::int64_t>;

std::size_t max_group_bytes(const Codec& codec, Sizes sizes);

// The codec has to know already what matters of the pieces (Codec::weigh).

// Writes the values from `first` of the bucket on as one message; returns its bytes. The piece that begins at value k
// of the group draws by feedback.draw + k. Throws InvalidArgument, BufferTooSmall, and whatever the codec throws.
std::size_t encode_group(Codec& codec, Floats values, std::size_t first, Sizes sizes, const Feedback& feedback,
                         Bytes out);
// values = decoded / divisor. Throws CorruptMessage, and whatever the codec throws.
void decode_group(Codec& codec, ConstBytes message, std::size_t first, Sizes sizes, std::size_t divisor, Floats values);
// total += decoded; `scratch` as large.
void add_group(Codec& codec, ConstBytes message, std::size_t first, Sizes sizes, Floats total, Floats scratch);

struct Group {
  std::size_t start, end;  // of the bucket
  std::vector<std::int64_t> sizes;
  std::size_t n() const { return end - start; }
};
using Groups = std::vector<std::vector<Group>>;  // by part, in order

// What one rank brings in; all are of one size.
struct PieceBucket {
  Floats values;         // the gradient, over which the mean is written
  ConstFloats residual;  // empty for none
  Floats left_out;       // what this rank's messages lost of gradient + residual
  std::uint64_t first_draw;
};

// A rank as a worker, which pushes and pulls, and as the server of its own part.
// N x mean + the sum of all ranks' left_out = the sum of their gradients and residuals, to rounding.
class PieceEnds final : public Ends {
 public:
  // Both codecs and `groups` are used until the exchange is over.
  PieceEnds(wire::Mesh& mesh, Codec& push, Codec& pull, const Groups& groups, PieceBucket bucket, Account& account);
  std::size_t max_push_bytes() const override { return max_push_bytes_; }
  std::size_t max_pull_bytes() const override { return max_pull_bytes_; }
  std::size_t encode_push(std::size_t part, std::size_t group, Bytes out) override;
  void add_pushed(std::size_t source, std::size_t group, ConstBytes message) override;
  void add_own(std::size_t group) override;
  std::size_t encode_pull(std::size_t group, Bytes out) override;
  void adopt(std::size_t part, std::size_t group, const wire::Message& message) override;

 private:
  // Returns when what comes after begins.
  std::int64_t weigh(Codec& codec, const Group& group);
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
