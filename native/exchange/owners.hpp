// Exchange through owners: every rank sends every other its values of the part that the other owns (push); the owner
// adds them up in rank order, itself included, and answers all with one result, which everyone adopts (pull). It moves
// the bytes of a reduce-scatter and an all-gather, in two hops whatever the number of ranks. This pattern moves
// messages and nothing else: what they hold is the business of `Ends`.
#pragma once

#include <memory>
#include <vector>

#include "exchange/channel.hpp"
#include "exchange/codec.hpp"
#include "exchange/ring.hpp"

namespace gradwire::exchange {

using Bytes = std::span<const std::uint8_t>;

// What a rank does with the messages. A group is what travels as one message.
class Ends {
 public:
  virtual ~Ends() = default;
  virtual std::size_t max_push_bytes() const = 0;  // of one group
  virtual std::size_t max_pull_bytes() const = 0;
  // Writes this rank's values of a group that another rank owns; returns the bytes written.
  virtual std::size_t encode_push(std::size_t part, std::size_t group, std::span<std::uint8_t> out) = 0;
  // Adds what `source` pushed, or this rank's own values, to a group of this rank's part; called in rank order.
  virtual void add_pushed(std::size_t source, std::size_t group, Bytes message) = 0;
  virtual void add_own(std::size_t group) = 0;
  // Writes the result of a group of this rank's part, of which all has been added.
  virtual std::size_t encode_pull(std::size_t group, std::span<std::uint8_t> out) = 0;
  // Takes over the owner's result of a group; the owner its own, by the same message.
  virtual void adopt(std::size_t part, std::size_t group, const wire::Message& message) = 0;
  // What a rank tells every other before its first group, and after its last result; empty: nothing.
  virtual Bytes opening() { return {}; }
  virtual void take_opening(std::size_t /*source*/, Bytes /*message*/) {}
  virtual Bytes closing() { return {}; }
  virtual void take_closing(std::size_t /*source*/, Bytes /*message*/) {}
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
  std::vector<int> peers_;  // each rank begins with its right neighbour, so that not all send to the same one at once
  std::unique_ptr<Channel> pushes_, pulls_;
  std::vector<wire::Message> results_;
};

// The mean over the ranks by a codec: rank r owns part r and adds the decoded parts of all ranks, its own unencoded.
// `left_out`: see Coder.
void direct_mean(wire::Mesh& mesh, const Ticket& ticket, Codec& codec, const Values& buffer, const Values& left_out,
                 std::size_t n_chunks, Account& account);

}  // namespace gradwire::exchange
