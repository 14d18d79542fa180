// How two ranks make sure of each other before the first message: both prove that they know the group's secret, which
// itself never travels. docs/format.md#handshake
#pragma once

#include <sys/types.h>

#include <array>
#include <chrono>
#include <functional>
#include <list>
#include <thread>
#include <vector>

#include "wire/socket.hpp"

namespace gradwire::wire {

// HMAC-SHA256 (RFC 2104, FIPS 180-4). Not constant-time in the length of its input; nothing secret has a length of its
// own here.
using Digest = std::array<std::uint8_t, 32>;
Digest hmac_sha256(ConstBytes key, ConstBytes data);

inline constexpr std::size_t kSecretBytes = 16;
using Secret = std::array<std::uint8_t, kSecretBytes>;
inline constexpr std::chrono::milliseconds kPatienceWithStrangers{800};  // so that they are closed within a second

// The side of the rank that connected. Throws PeerLost (no answer, refused, or an answer without the secret),
// IncompatibleVersion.
void introduce(const Descriptor& connection, int rank, int peer, const Secret& secret, Clock::time_point deadline);

// The side that is connected to: a thread that takes connections, hands over those of ranks and closes all others,
// within a second. It sleeps while nobody comes.
class Doorkeeper {
 public:
  // Sends the answer if it takes the connection, at once; else the connection closes.
  using Welcome = std::function<void(int peer, Descriptor connection, ConstBytes answer)>;

  Doorkeeper(std::vector<Descriptor> listeners, int rank, int world_size, const Secret& secret, Welcome welcome);
  ~Doorkeeper();
  Doorkeeper(const Doorkeeper&) = delete;
  Doorkeeper& operator=(const Doorkeeper&) = delete;
  // In a forked child, which has no such thread.
  void abandon();
  void close_descriptors();

 private:
  struct Visitor;
  void serve();
  void admit(const Descriptor& listener);
  // Whether the visitor may stay for now.
  bool hear(Visitor& visitor);

  std::vector<Descriptor> listeners_;
  Descriptor stop_;
  const int rank_, world_size_;
  const Secret secret_;
  const Welcome welcome_;
  std::list<Visitor> visitors_;
  std::thread thread_;
};

// Bytes that nobody can guess. Throws std::system_error.
void fill_random(Bytes out);

}  // namespace gradwire::wire
