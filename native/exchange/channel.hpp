// One stream of messages of one exchange, accounted for.
#pragma once

#include <span>

#include "exchange/account.hpp"
#include "wire/mesh.hpp"

namespace gradwire::exchange {

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

  // Sends once at most n_ahead messages before it wait for this peer.
  void send(int peer, const wire::Message& message, std::size_t n_ahead) {
    const std::int64_t started = now_ns();
    mesh_.wait_until_sent(peer, n_ahead);
    mesh_.send(peer, stream_, message);
    account_.add(Kind::communicate, started);
    account_.bytes_sent += wire::kHeaderBytes + message.n_bytes;
    ++account_.n_messages;
  }
  wire::Message receive(int peer) {
    const std::int64_t started = now_ns();
    wire::Message message = mesh_.receive(peer, stream_);
    account_.add(Kind::communicate, started);
    account_.bytes_received += wire::kHeaderBytes + message.n_bytes;
    return message;
  }
  void finish() {
    const std::int64_t started = now_ns();
    mesh_.wait_until_all_sent();
    account_.add(Kind::communicate, started);
  }

 private:
  wire::Mesh& mesh_;
  const std::uint32_t stream_;
  Account& account_;
};

}  // namespace gradwire::exchange
