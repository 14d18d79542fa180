// The switch's ports: datagrams in, batches out. All decisions are the pipeline's.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "switch/pipeline.hpp"
#include "switch/udp_socket.hpp"

namespace gradwire::innet {

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
  void take(std::span<const std::uint8_t> datagram, const Endpoint& sender, Clock::time_point now);
  void refuse_version(const Endpoint& sender);
  void send_results(std::uint16_t handle);
  void send_all();
  void send(const Endpoint& to, std::span<const Outgoing> packets);

  UdpSocket socket_;
  Pipeline pipeline_;
  std::array<std::vector<Header>, Pipeline::kMaxJobs> results_;
  std::array<std::vector<const void*>, Pipeline::kMaxJobs> result_values_;
  std::vector<std::uint16_t> waiting_;  // jobs with results to send
  std::vector<Direct> direct_;
  std::vector<Outgoing> burst_;
  std::uint64_t bytes_received_ = 0, bytes_sent_ = 0, packets_dropped_ = 0;
};

}  // namespace gradwire::innet
