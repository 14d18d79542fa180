// The switch itself, without sockets: what a packet does to the registers, and what goes back. An EMULATION of a
// programmable switch that keeps to what one can do (docs/switch.md): one pass over a packet, each register array read
// and written once in it, 32-bit integer add, or and maximum, no division, no floats, no memory of packets.
#pragma once

#include <array>
#include <chrono>
#include <string>
#include <utility>
#include <vector>

#include "switch/udp_socket.hpp"

namespace gradwire::innet {

using Clock = std::chrono::steady_clock;

// What a packet calls forth.
struct Reply {
  enum class To { nobody, sender, everyone };
  To to = To::nobody;
  Header header{};                       // without checksum
  const std::int32_t* values = nullptr;  // kLanes in the registers, or null
};

struct PipelineCounters {
  std::uint64_t values = 0;      // packets that were added, or'ed, or maximised
  std::uint64_t results = 0;     // slots that became complete
  std::uint64_t duplicates = 0;  // values that a worker had sent before
  std::uint64_t stale = 0;       // of a round that is over
  std::uint64_t foreign = 0;     // not ours, damaged, or not from whom they claim
  std::uint64_t refusals = 0, jobs_admitted = 0, jobs_evicted = 0;
};

class Pipeline {
 public:
  static constexpr std::size_t kMaxJobs = 64;

  // `n_slots`: a power of two, 1 to 2^20; each has two versions of kLanes values. `lease`: how long a job may send
  // nothing before another that finds no slots may have its.
  Pipeline(std::size_t n_slots, std::uint32_t epoch, Clock::duration lease);

  // One packet. `payload`: kPayloadBytes where the header's kind carries values.
  Reply process(const Header& header, const std::uint8_t* payload, const Endpoint& sender, Clock::time_point now);

  // A datagram that is no packet of ours.
  void count_foreign() { ++counters_.foreign; }

  const PipelineCounters& counters() const { return counters_; }
  std::uint32_t epoch() const { return epoch_; }
  std::size_t n_slots() const { return values_.size() / (2 * kLanes); }
  std::size_t n_free_slots() const;
  std::size_t n_jobs() const;

  // For replies to everyone: the workers of the job, as far as they have joined.
  struct Workers {
    std::span<const Endpoint> endpoints;
    std::uint32_t joined;
  };
  Workers workers_of(std::uint16_t handle) const;

 private:
  // A row of the match table, written by the control plane.
  struct Job {
    bool is_used = false;
    std::uint64_t id = 0;
    std::uint8_t n_workers = 0;
    std::uint32_t first_slot = 0;
    int log2_slots = 0;
    std::uint32_t joined = 0;
    std::uint32_t left = 0;
    std::array<Endpoint, kMaxWorkers> workers{};
    Clock::time_point last_packet{};
  };

  Reply aggregate(const Header& header, const std::uint8_t* payload, const Endpoint& sender, Clock::time_point now);
  Reply join(const Header& header, const Endpoint& sender, Clock::time_point now);
  Reply leave(const Header& header, const Endpoint& sender);
  Reply refuse(const Header& header, Reason reason, std::uint32_t who = 0);
  Reply answer(const Header& header, Kind kind) const;
  Job* find(const Header& header);
  Job* admit(const Header& header, int log2_slots, Clock::time_point now);
  bool find_free_slots(std::uint32_t n_slots, std::uint32_t& first) const;
  std::uint16_t handle_of(const Job& job) const { return static_cast<std::uint16_t>(&job - jobs_.data()); }

  std::uint32_t epoch_;
  Clock::duration lease_;
  std::array<Job, kMaxJobs> jobs_{};
  // Register arrays, an entry a version of a slot: 2 * slot + version.
  std::vector<std::uint32_t> sequences_;
  std::vector<std::uint32_t> contents_;  // operation and collective
  std::vector<std::uint32_t> seen_;      // a bit a worker
  std::vector<std::int32_t> values_;     // kLanes arrays in a switch, one behind the other here
  PipelineCounters counters_;
};

// The switch's ports: datagrams in, batches out. All decisions are the pipeline's.
class Server {
 public:
  // Throws InvalidArgument: no such address here, port taken, slots out of range. Port 0 takes a free one.
  Server(const std::string& address, std::uint16_t port, std::size_t n_slots, double lease_s);

  // Serves for so long. One thread at a time.
  void run(double seconds);

  std::uint16_t port() const { return socket_.port(); }
  const Pipeline& pipeline() const { return pipeline_; }
  std::uint64_t bytes_received() const { return bytes_received_; }
  std::uint64_t bytes_sent() const { return bytes_sent_; }
  std::uint64_t packets_dropped() const { return packets_dropped_; }

 private:
  struct Direct {
    Endpoint to;
    Header header;
    const void* payload;
  };
  void take(ConstBytes datagram, const Endpoint& sender, Clock::time_point now);
  void refuse_version(const Endpoint& sender);
  void send_results(std::uint16_t handle);
  void send_all();
  void send(const Endpoint& to, std::span<const Outgoing> packets);

  UdpSocket socket_;
  Pipeline pipeline_;
  std::array<std::vector<std::pair<Header, const void*>>, Pipeline::kMaxJobs> results_;
  std::vector<std::uint16_t> waiting_;  // jobs with results to send
  std::vector<Direct> direct_;
  std::vector<Outgoing> burst_;
  std::uint64_t bytes_received_ = 0, bytes_sent_ = 0, packets_dropped_ = 0;
};

}  // namespace gradwire::innet
