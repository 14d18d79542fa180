// The head that goes before every block's bits, or alone to say that blocks are complete. docs/format.md#broadcast
#pragma once

#include <array>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "embedded_float/codec.hpp"
#include "exchange/codec.hpp"
#include "exchange/means.hpp"

namespace gradwire::exchange {

inline constexpr std::uint8_t kHeadVersion = 4;
inline constexpr std::uint16_t kNoBlock = 0xFFFF;  // a head without a body
inline constexpr int kWordBits = 32;

// What a rank says with each body.
struct Head {
  std::uint16_t origin = 0;        // the rank whose gradient the body holds
  std::uint16_t block = kNoBlock;  // its block
  std::uint8_t first_bit = 0,
               n_bits = 0;  // which bits of each value the body holds; 0 and 32 also for a body of plain words
  bool is_plain = false;    // the body holds the words themselves, not a codec's message
  bool is_answer = false;   // of an owner: the body is of the sum of its part, or of what that lacks, as float32
  std::uint32_t body_bytes = 0;
  std::uint32_t sequence = 0;      // heads of this origin and step before this one
  std::uint16_t ceiling_bits = 0;  // of a value, that this origin's processors have time for
  std::vector<bool> ended{};       // by block: whether this origin sends no more of it in this step
  // By block: from the head's arrival until this origin's next forward pass needs it; empty if it cannot tell yet.
  std::vector<double> remaining_s{};
  // By rank: what this origin has received of its bodies since it was attached, and how long those transfers took.
  std::vector<std::uint64_t> received_bytes{}, receiving_us{};
  std::array<std::uint64_t, 2> hidden_us{};  // how long communication overlapped with computation, and was waited for
};

// Heads of one run: their size follows from the numbers of blocks and ranks.
class HeadFormat {
 public:
  // `configuration`, `blocks`: hashes that all ranks must share.
  HeadFormat(std::size_t n_blocks, std::size_t world_size, std::uint32_t configuration, std::uint32_t blocks);
  std::size_t n_bytes() const { return n_bytes_; }
  void pack(const Head& head, std::uint32_t step, Bytes out) const;
  // Reads and checks a head that `peer` sent. Throws CorruptMessage, IncompatibleVersion, RankMismatch.
  Head unpack(ConstBytes raw, std::uint32_t step, int peer) const;

 private:
  const std::size_t n_blocks_, world_size_;
  const std::uint32_t configuration_, blocks_;
  const std::size_t n_bytes_;
};

// Broadcast: every rank sends its blocks to every other one, some bits of each value at a time, and adds all ranks'
// copies in rank order, its own as the others have it. To all peers at once, or round a ring in which each passes on
// what comes from the left. When to send how much is the business of whoever calls.
// Through owners: every rank owns a part of each block, and is sent only that. It answers all ranks with planes of the
// sum once it has something of every rank, with as many bits as it has at most; and once all have ended the block, with
// planes of what the sum has come to differ by from that answer, if more came.
enum class Topology { fan_out, ring, owners };
struct BlockShape {
  std::string name;
  std::size_t n;
  Dtype dtype;
};

// What a head of a peer said, and what became of its body.
struct Heard {
  Head head;                 // remaining_s counts from decoded_ns
  std::int64_t duration_ns;  // of its transfer
  std::int64_t arrived_ns;   // decoding then began, and ended
  std::int64_t decoded_ns;
  std::vector<std::size_t> sent_bytes;   // to each receiver: messages passed on, or answers
  std::vector<std::size_t> newly_ended;  // blocks of which nothing more comes from its origin
};

struct Sent {
  std::vector<std::size_t> answers;  // bytes to each receiver
  std::vector<std::size_t> ended;    // blocks of which this rank sends no more
};

// One thread sends and one receives at a time.
class Broadcast {
 public:
  // The stream is open until this object is gone.
  Broadcast(wire::Mesh& mesh, std::uint32_t stream, Topology topology, std::vector<BlockShape> blocks,
            const embedded_float::Settings& settings, std::uint32_t configuration, std::uint32_t blocks_hash);
  ~Broadcast();
  Broadcast(const Broadcast&) = delete;
  Broadcast& operator=(const Broadcast&) = delete;

  // A new gradient begins, on all blocks; the step before is over.
  void begin(std::uint32_t step);

  // Of a message with n_bits bits from first_bit on, to one receiver.
  std::size_t max_body_bytes(std::size_t block, int n_bits, int first_bit = 0) const;
  // Makes a body of the next n_bits of every value of a block, which is sent next; returns its bytes. All 32 bits at
  // once travel as the words that they are. Through owners the gradient must stay as it is until its mean is taken.
  std::size_t encode(std::size_t block, const Values& gradient, int n_bits);
  // Starts sending what was encoded, or a head alone. `ended`: blocks of which nothing follows. The others: see Head.
  // Throws PeerLost.
  Sent send(const std::vector<std::size_t>& ended, int ceiling_bits, std::vector<double> remaining_s,
            const std::array<std::uint64_t, 2>& hidden_us);
  std::size_t n_copies() const { return receivers_.size(); }
  // Of what was encoded, or of a head alone: to each receiver.
  std::vector<std::size_t> queued_bytes() const;

  // The next head, and its body taken in; nothing once all peers have ended all blocks of `step`. Throws PeerLost,
  // CorruptMessage, IncompatibleVersion, RankMismatch.
  std::optional<Heard> receive(std::uint32_t step);

  // Replaces the gradient of a block that all ranks have ended by the mean of all copies; what this rank's own lacks of
  // it goes to `left_out`, of its size and dtype, or without data. Throws CorruptMessage (a rank that ended the block
  // without having sent any of it).
  void mean(std::size_t block, const Values& gradient, const Values& left_out);

 private:
  // A block of a peer as far as it has come.
  struct Copy {
    std::unique_ptr<std::uint32_t[]> codes;
    std::vector<std::uint8_t> exponents;
    int n_known = 0;
    wire::Message words;  // all of them, plain
  };
  struct Source {
    int peer;
    std::vector<int> origins;  // whose heads come from there
  };
  // A block whose parts have owners.
  struct Shared {
    Values own{};             // this rank's gradient, once some of it was sent
    wire::Message sum;        // (n,) float32: what all ranks know of the sum
    std::vector<float> lost;  // of this rank's part: what the others do not
    int answered_bits = 0;    // of a value, that were known of every rank at the last answer; 0 before the first
    std::size_t n_known = 0;  // bits of all ranks together then
    bool is_final = false;
  };
  bool has_owners() const { return topology_ == Topology::owners; }
  // The values of a block that `rank` owns; all of them without owners.
  Cut::Range part_of(std::size_t block, std::size_t rank) const;
  std::size_t body_bytes(std::size_t n, Dtype dtype, int n_bits, int first_bit) const;
  std::size_t write_body(const Values& values, int n_bits, int first_bit, const Bytes& body) const;
  bool is_set(const std::vector<std::vector<bool>>& flags, std::size_t rank, std::size_t block);
  void post(Head& head, const std::vector<wire::Message>& messages);
  void check_body(const Head& head) const;
  void take(const Head& head, const wire::Message& message);
  void take_answer(const Head& head, const wire::Message& message);
  // Answers where that is due; whether it was the last time. Throws PeerLost, CorruptMessage.
  bool answer(std::size_t block, std::vector<std::size_t>& sent_bytes);
  void sum_copies(std::size_t block, const Values& own, Floats sums);
  void write_mean(Floats sums, const Values& mean) const;
  void add_copy(Copy& copy, std::size_t block, std::size_t rank, Floats sums);
  void mean_of_parts(std::size_t block, const Values& gradient, const Values& left_out);

  wire::Mesh& mesh_;
  const std::uint32_t stream_;
  const Topology topology_;
  const std::vector<BlockShape> blocks_;
  const embedded_float::Settings settings_;
  const std::size_t world_, rank_;
  const HeadFormat heads_;
  const std::size_t head_bytes_;  // with what it is filled up by
  std::vector<int> receivers_;
  std::vector<Source> sources_;

  std::mutex mutex_;  // of what both threads use, up to the next empty line
  std::uint32_t step_ = 0;
  std::vector<std::vector<bool>> ended_, answered_;  // by rank, then block: what it sends, and as an owner
  std::vector<std::uint64_t> received_bytes_, receiving_us_;

  std::mutex answer_mutex_;  // taken before the other: of what the sender's thread too answers from, and of the order
  std::uint32_t sequence_ = 0;
  std::uint16_t ceiling_bits_ = kWordBits;
  std::array<std::uint64_t, 2> hidden_us_{};
  std::vector<int> sent_bits_;  // by block
  std::vector<Shared> shared_;  // by block; with owners

  // The sender's.
  Head next_{};
  std::vector<wire::Message> messages_;  // one for all receivers, or one each

  // The receiver's.
  std::vector<std::uint32_t> expected_;    // by origin
  std::vector<std::vector<Copy>> copies_;  // by block, then rank

  std::mutex mean_mutex_;  // one at a time: its work space is as large as its block
};

}  // namespace gradwire::exchange
