// A worker's end: a window of slots, retransmission, and typed errors where the switch or a peer is gone.
#pragma once

#include <atomic>
#include <string>
#include <vector>

#include "switch/server.hpp"
#include "switch/udp_socket.hpp"

namespace gradwire::innet {

struct ClientCounters {
  std::uint64_t packets_sent = 0, packets_resent = 0;
  std::uint64_t results = 0, results_again = 0;
  std::uint64_t foreign = 0;  // datagrams that were no answer to this worker
  std::uint64_t bytes_sent = 0, bytes_received = 0;
};

class Client {
 public:
  // `wanted_slots`: a power of two; the switch may grant fewer. Throws InvalidArgument.
  Client(const std::string& address, std::uint16_t port, std::uint64_t job, std::size_t worker, std::size_t n_workers,
         std::size_t wanted_slots);

  // Asks for slots until the switch answers. Throws PeerLost (no answer), Unsupported (no slots left, or refused),
  // IncompatibleVersion.
  void join(double timeout_s);

  // Replaces `values` by their reduction over all workers, who make the same calls in the same order. Throws PeerLost
  // (nothing came for `timeout_s`; the switch was restarted; a worker left), RankMismatch (calls differ).
  void reduce(std::span<std::int32_t> values, Operation operation, double timeout_s);

  // Tells the switch that nothing more is needed; waits briefly for its answer, and does without.
  void leave();

  // From any thread: makes a running and every later call throw PeerLost.
  void stop() { is_stopped_ = true; }

  const ClientCounters& counters() const { return counters_; }
  std::size_t n_slots() const { return std::size_t{1} << log2_slots_; }
  std::size_t window() const { return static_cast<std::size_t>(window_); }
  double round_trip_s() const { return smoothed_s_; }

 private:
  struct Flight {
    std::uint32_t index = 0;  // packet of this call
    bool is_done = true;
    std::uint32_t n_sent = 0;
    double sent_at = 0;
    double due_at = 0;
  };
  struct Call {
    std::span<std::int32_t> values;
    Operation operation;
    std::uint32_t n_packets;
    std::uint32_t first_done = 0;  // all before are done
    std::uint32_t next = 0;        // the first that was never sent
    std::uint32_t highest = 0;     // one past the highest that is done
    double last_progress = 0;
    double moving_since = 0;           // the end of the last wait for a slow rank
    double last_answer = 0;            // of any kind
    std::uint32_t pending = 0;         // whose values the switch has for the oldest slot; 0 if it has not said
    std::vector<std::int32_t> tail{};  // the last packet, filled up with zeros
  };

  Header make(Kind kind) const;
  void send_one(const Header& header);
  void send_new(Call& call, double now);
  void send_due(Call& call, double now);
  void push(Call& call, std::uint32_t index, double now);
  void flush();
  void take(Call& call, ConstBytes datagram, double now);
  void take_result(Call& call, const Header& header, const std::uint8_t* payload, double now);
  void measure(double round_trip_s);
  void fail_if_late(const Call& call, double now, double timeout_s);
  [[noreturn]] void raise_refusal(const Header& header) const;
  std::string name() const;
  double timer_s(std::uint32_t n_sent) const;

  UdpSocket socket_;
  std::string address_;
  std::uint16_t port_;
  std::uint64_t job_;
  std::uint8_t worker_;
  std::size_t n_workers_;
  int log2_wanted_;
  std::size_t receive_packets_;  // what the socket's buffer holds of packets that come singly

  bool has_joined_ = false;
  int log2_slots_ = 0;
  std::uint32_t epoch_ = 0;
  std::uint16_t handle_ = 0;
  std::uint32_t next_sequence_ = 0;
  std::uint16_t collective_ = 0;

  double window_ = 0, smoothed_s_ = 0, deviation_s_ = 0, last_cut_ = 0;
  double refused_at_ = -1;
  std::vector<Flight> flights_;
  std::vector<Header> headers_;
  std::vector<Outgoing> burst_;
  ClientCounters counters_;
  std::atomic<bool> is_stopped_{false};
};

}  // namespace gradwire::innet
