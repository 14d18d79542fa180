#include "switch/udp_socket.hpp"

#include <arpa/inet.h>
#include <netinet/udp.h>
#include <poll.h>
#include <sys/time.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <utility>

#include "errors.hpp"

#ifndef UDP_SEGMENT
#define UDP_SEGMENT 103  // since Linux 4.18; the C library's header is older than the kernel
#endif
#ifndef UDP_GRO
#define UDP_GRO 104  // since Linux 5.0
#endif

namespace gradwire::innet {
namespace {

constexpr int kSendTimeoutUs = 20'000;  // a full queue is waited for this long; then the packet is as good as lost

sockaddr_in address_of(const std::string& address, std::uint16_t port) {
  sockaddr_in result{};
  result.sin_family = AF_INET;
  result.sin_port = htons(port);
  if (inet_pton(AF_INET, address.c_str(), &result.sin_addr) != 1)
    throw InvalidArgument("'", address, "' is no IPv4 address; write it as 10.0.0.1");
  return result;
}

std::string describe(const std::string& address, std::uint16_t port, int error) {
  return address + ":" + std::to_string(port) + ": " + std::strerror(error);
}

std::size_t bytes_of(const Outgoing& packet) { return packet.payload ? kPacketBytes : kHeaderBytes; }

}  // namespace

UdpSocket::UdpSocket() : descriptor_(::socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0)), buffers_(kBatch * kBufferBytes) {
  if (descriptor_ < 0) throw InvalidArgument("no UDP socket: ", std::strerror(errno));
  const int on = 1;
  setsockopt(descriptor_, IPPROTO_UDP, UDP_GRO, &on, sizeof on);  // refused by old kernels: packets come singly
  const timeval patience{0, kSendTimeoutUs};
  setsockopt(descriptor_, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof patience);
}

UdpSocket::~UdpSocket() { ::close(descriptor_); }

void UdpSocket::bind(const std::string& address, std::uint16_t port) {
  const sockaddr_in local = address_of(address, port);
  if (::bind(descriptor_, reinterpret_cast<const sockaddr*>(&local), sizeof local) != 0)
    throw InvalidArgument("cannot listen on ", describe(address, port, errno), "; give another address or port");
}

void UdpSocket::connect(const std::string& address, std::uint16_t port) {
  const sockaddr_in peer = address_of(address, port);
  if (::connect(descriptor_, reinterpret_cast<const sockaddr*>(&peer), sizeof peer) != 0)
    throw InvalidArgument("no way to ", describe(address, port, errno));
}

std::uint16_t UdpSocket::port() const {
  sockaddr_in local{};
  socklen_t n_bytes = sizeof local;
  getsockname(descriptor_, reinterpret_cast<sockaddr*>(&local), &n_bytes);
  return ntohs(local.sin_port);
}

std::size_t UdpSocket::grow_buffers(std::size_t n_bytes) {
  const int wanted = static_cast<int>(n_bytes);
  // With the right to (CAP_NET_ADMIN) beyond the system's limit, else up to it.
  if (setsockopt(descriptor_, SOL_SOCKET, SO_RCVBUFFORCE, &wanted, sizeof wanted) != 0)
    setsockopt(descriptor_, SOL_SOCKET, SO_RCVBUF, &wanted, sizeof wanted);
  int granted = 0;
  socklen_t n = sizeof granted;
  getsockopt(descriptor_, SOL_SOCKET, SO_RCVBUF, &granted, &n);
  return static_cast<std::size_t>(std::max(granted, 0));
}

bool UdpSocket::was_refused() { return std::exchange(was_refused_, false); }

// Whether to try the same call again.
bool UdpSocket::note_error(int error) {
  if (error == ECONNREFUSED) was_refused_ = true;  // told of an earlier packet; this one has not been sent
  return error == EINTR || error == ECONNREFUSED;
}

std::size_t UdpSocket::send(const Endpoint* to, std::span<const Outgoing> packets) {
  sockaddr_in address{};
  if (to) {
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = to->address;
    address.sin_port = to->port;
  }
  sockaddr_in* name = to ? &address : nullptr;
  std::size_t n_sent = 0;
  while (n_sent < packets.size()) {
    const auto burst = packets.subspan(n_sent, std::min(kMaxBurst, packets.size() - n_sent));
    const std::size_t n = joins_ && burst.size() > 1 ? send_joined(name, burst) : send_singly(name, burst);
    n_sent += n;
    if (n < burst.size()) break;
  }
  return n_sent;
}

std::size_t UdpSocket::send_joined(sockaddr_in* to, std::span<const Outgoing> packets) {
  pieces_.clear();
  for (const Outgoing& packet : packets) {
    pieces_.push_back({const_cast<Header*>(packet.header), kHeaderBytes});
    if (packet.payload) pieces_.push_back({const_cast<void*>(packet.payload), kPayloadBytes});
  }
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(std::uint16_t))> control{};
  msghdr message{};
  message.msg_name = to;
  message.msg_namelen = to ? sizeof *to : 0;
  message.msg_iov = pieces_.data();
  message.msg_iovlen = pieces_.size();
  message.msg_control = control.data();
  message.msg_controllen = control.size();
  cmsghdr* segment = CMSG_FIRSTHDR(&message);
  segment->cmsg_level = IPPROTO_UDP;
  segment->cmsg_type = UDP_SEGMENT;
  segment->cmsg_len = CMSG_LEN(sizeof(std::uint16_t));
  const auto segment_bytes = static_cast<std::uint16_t>(bytes_of(packets.front()));
  std::memcpy(CMSG_DATA(segment), &segment_bytes, sizeof segment_bytes);
  for (int attempt = 0; attempt < 4; ++attempt) {
    if (sendmsg(descriptor_, &message, MSG_NOSIGNAL) >= 0) return packets.size();
    const int error = errno;
    if (error == EIO || error == EINVAL || error == ENOPROTOOPT || error == EOPNOTSUPP || error == EMSGSIZE) {
      joins_ = false;  // this kernel or card does not cut
      return send_singly(to, packets);
    }
    if (!note_error(error)) break;
  }
  return 0;
}

std::size_t UdpSocket::send_singly(sockaddr_in* to, std::span<const Outgoing> packets) {
  std::array<mmsghdr, kMaxBurst> messages{};
  pieces_.clear();
  for (const Outgoing& packet : packets) {
    pieces_.push_back({const_cast<Header*>(packet.header), kHeaderBytes});
    pieces_.push_back({const_cast<void*>(packet.payload), packet.payload ? kPayloadBytes : 0});
  }
  for (std::size_t i = 0; i < packets.size(); ++i) {
    msghdr& message = messages[i].msg_hdr;
    message.msg_name = to;
    message.msg_namelen = to ? sizeof *to : 0;
    message.msg_iov = &pieces_[2 * i];
    message.msg_iovlen = packets[i].payload ? 2 : 1;
  }
  std::size_t n_sent = 0;
  for (int failures = 0; n_sent < packets.size() && failures < 4;) {
    const int n =
        sendmmsg(descriptor_, &messages[n_sent], static_cast<unsigned>(packets.size() - n_sent), MSG_NOSIGNAL);
    if (n > 0)
      n_sent += static_cast<std::size_t>(n);
    else if (note_error(errno))
      ++failures;
    else
      break;
  }
  return n_sent;
}

std::size_t UdpSocket::receive(int timeout_ms, const Handler& handle) {
  pollfd waited{descriptor_, POLLIN, 0};
  if (poll(&waited, 1, timeout_ms) <= 0) return 0;
  std::array<mmsghdr, kBatch> messages{};
  std::array<iovec, kBatch> pieces{};
  std::array<sockaddr_in, kBatch> senders{};
  using Control = std::array<char, CMSG_SPACE(sizeof(int))>;
  alignas(cmsghdr) std::array<Control, kBatch> controls{};
  for (std::size_t i = 0; i < kBatch; ++i) {
    pieces[i] = {buffers_.data() + i * kBufferBytes, kBufferBytes};
    msghdr& message = messages[i].msg_hdr;
    message.msg_name = &senders[i];
    message.msg_namelen = sizeof senders[i];
    message.msg_iov = &pieces[i];
    message.msg_iovlen = 1;
    message.msg_control = controls[i].data();
    message.msg_controllen = controls[i].size();
  }
  const int n_messages = recvmmsg(descriptor_, messages.data(), kBatch, MSG_DONTWAIT, nullptr);
  if (n_messages < 0) {
    note_error(errno);
    return 0;
  }
  std::size_t n_datagrams = 0;
  for (int i = 0; i < n_messages; ++i) {
    const ConstBytes joined(buffers_.data() + i * kBufferBytes, messages[i].msg_len);
    std::size_t segment_bytes = joined.size();
    msghdr& message = messages[i].msg_hdr;
    for (cmsghdr* control = CMSG_FIRSTHDR(&message); control; control = CMSG_NXTHDR(&message, control))
      if (control->cmsg_level == IPPROTO_UDP && control->cmsg_type == UDP_GRO) {
        int told = 0;
        std::memcpy(&told, CMSG_DATA(control), sizeof told);
        if (told > 0) segment_bytes = static_cast<std::size_t>(told);
      }
    const Endpoint sender{senders[i].sin_addr.s_addr, senders[i].sin_port};
    if (joined.empty()) handle(joined, sender);
    for (std::size_t at = 0; at < joined.size(); at += segment_bytes) {
      handle(joined.subspan(at, std::min(segment_bytes, joined.size() - at)), sender);
      ++n_datagrams;
    }
  }
  return n_datagrams;
}

}  // namespace gradwire::innet
