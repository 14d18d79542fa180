// A UDP socket (IPv4) that sends and receives many packets a system call: the kernel cuts one large buffer into equal
// datagrams (UDP_SEGMENT) and joins them again (UDP_GRO); where it cannot, sendmmsg and recvmmsg do.
#pragma once

#include <netinet/in.h>
#include <sys/socket.h>

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "switch/packet.hpp"

namespace gradwire::innet {

struct Endpoint {
  std::uint32_t address = 0;  // network byte order, as is the port
  std::uint16_t port = 0;
  bool operator==(const Endpoint&) const = default;
};

// A packet to send; both must live until it is sent.
struct Outgoing {
  const Header* header;
  const void* payload;  // kPayloadBytes, or null
};

// 61 packets are 64,904 bytes: the most that fits a datagram's 65,507. Kernels cut into at most 64.
constexpr std::size_t kMaxBurst = 61;

class UdpSocket {
 public:
  UdpSocket();
  ~UdpSocket();
  UdpSocket(const UdpSocket&) = delete;
  UdpSocket& operator=(const UdpSocket&) = delete;

  // Throw InvalidArgument: not an IPv4 address, a port that is taken, an address that is not this host's.
  void bind(const std::string& address, std::uint16_t port);
  void connect(const std::string& address, std::uint16_t port);

  std::uint16_t port() const;
  // Asks for buffers of this size; returns what the kernel grants for receiving.
  std::size_t grow_buffers(std::size_t n_bytes);

  // Sends packets of one size, to `to` or, where that is null, to the peer that it is connected to. Returns how many
  // left; the others found the queue full (or nobody there: `was_refused`).
  std::size_t send(const Endpoint* to, std::span<const Outgoing> packets);

  // Waits up to `timeout_ms` for something to arrive, then hands over all that is there, a datagram at a time, in at
  // most `kBatch` calls' worth. Returns the number of datagrams.
  using Handler = std::function<void(std::span<const std::uint8_t>, const Endpoint&)>;
  std::size_t receive(int timeout_ms, const Handler& handle);

  // Whether the peer's host said since the last call that nobody listens there.
  bool was_refused();

 private:
  std::size_t send_joined(sockaddr_in* to, std::span<const Outgoing> packets);
  std::size_t send_singly(sockaddr_in* to, std::span<const Outgoing> packets);
  bool note_error(int error);

  static constexpr std::size_t kBatch = 16;
  static constexpr std::size_t kBufferBytes = 1 << 16;

  int descriptor_;
  bool joins_ = true;
  bool was_refused_ = false;
  std::vector<std::uint8_t> buffers_;
  std::vector<iovec> pieces_;
};

}  // namespace gradwire::innet
