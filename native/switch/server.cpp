#include "switch/server.hpp"

#include <algorithm>
#include <random>

namespace gradwire::innet {
namespace {

constexpr std::size_t kBufferBytes = 8 << 20;  // a switch takes what comes at line rate; a process must sleep at times

std::uint32_t draw_epoch() {
  std::random_device random;
  return static_cast<std::uint32_t>(random());
}

Clock::duration duration_of(double seconds) {
  return std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
}

}  // namespace

Server::Server(const std::string& address, std::uint16_t port, std::size_t n_slots, double lease_s)
    : pipeline_(n_slots, draw_epoch(), duration_of(lease_s)) {
  socket_.grow_buffers(kBufferBytes);
  socket_.bind(address, port);
}

void Server::run(double seconds) {
  const auto end = Clock::now() + duration_of(seconds);
  for (auto now = Clock::now(); now < end; now = Clock::now()) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(end - now).count();
    socket_.receive(
        static_cast<int>(std::clamp<std::int64_t>(left, 1, 1000)),
        [&](std::span<const std::uint8_t> datagram, const Endpoint& sender) { take(datagram, sender, now); });
    send_all();
  }
}

void Server::take(std::span<const std::uint8_t> datagram, const Endpoint& sender, Clock::time_point now) {
  bytes_received_ += datagram.size();
  Header header;
  const Check check = read_header(datagram, header);
  if (check != Check::good) {
    pipeline_.count_foreign();
    if (check == Check::other_version && header.kind == Kind::join) refuse_version(sender);
    return;
  }
  Reply reply = pipeline_.process(header, datagram.data() + kHeaderBytes, sender, now);
  if (reply.to == Reply::To::nobody) return;
  reply.header.checksum = checksum_of(reply.header, reply.values);
  if (reply.to == Reply::To::sender) {
    direct_.push_back({sender, reply.header, reply.values});
    return;
  }
  const std::uint16_t handle = reply.header.handle;
  if (results_[handle].empty()) waiting_.push_back(handle);
  results_[handle].push_back(reply.header);
  result_values_[handle].push_back(reply.values);
  // Sent at once when a burst is full: the workers go on while the rest of the batch is looked at.
  if (results_[handle].size() == kMaxBurst) send_results(handle);
}

void Server::refuse_version(const Endpoint& sender) {
  Header header;  // of this version: the reader sees which it is
  header.kind = Kind::refusal;
  header.checksum = checksum_of(header, nullptr);
  direct_.push_back({sender, header, nullptr});
}

void Server::send_results(std::uint16_t handle) {
  burst_.clear();
  for (std::size_t i = 0; i < results_[handle].size(); ++i)
    burst_.push_back({&results_[handle][i], result_values_[handle][i]});
  const auto workers = pipeline_.workers_of(handle);
  for (std::size_t worker = 0; worker < workers.endpoints.size(); ++worker)
    if (workers.joined >> worker & 1) send(workers.endpoints[worker], burst_);
  results_[handle].clear();
  result_values_[handle].clear();
}

void Server::send_all() {
  for (const std::uint16_t handle : waiting_)
    if (!results_[handle].empty()) send_results(handle);
  waiting_.clear();
  for (std::size_t i = 0; i < direct_.size();) {  // neighbours of one size for one worker go together
    burst_.clear();
    std::size_t end = i;
    while (end < direct_.size() && direct_[end].to == direct_[i].to && !direct_[end].payload == !direct_[i].payload) {
      burst_.push_back({&direct_[end].header, direct_[end].payload});
      ++end;
    }
    send(direct_[i].to, burst_);
    i = end;
  }
  direct_.clear();
}

void Server::send(const Endpoint& to, std::span<const Outgoing> packets) {
  const std::size_t n_sent = socket_.send(&to, packets);
  packets_dropped_ += packets.size() - n_sent;  // as at a switch's full port: the worker asks again
  bytes_sent_ += n_sent * (packets.empty() || !packets.front().payload ? kHeaderBytes : kPacketBytes);
}

}  // namespace gradwire::innet
