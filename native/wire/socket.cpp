#include "wire/socket.hpp"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <linux/sockios.h>
#include <linux/tcp.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <memory>
#include <system_error>

#include "errors.hpp"

namespace gradwire::wire {
namespace {

// Unsent bytes that the kernel holds for a connection: 4 ms at 1 Gb/s, longer than a rank works before it comes back to
// its connections, and little for a small message to wait behind.
constexpr int kUnsentBytes = 512 << 10;
constexpr int kBacklog = 1024;

[[noreturn]] void fail(int error, const char* what) { throw std::system_error(error, std::generic_category(), what); }

using Addresses = std::unique_ptr<addrinfo, decltype(&freeaddrinfo)>;

Addresses resolve(const std::string& host, std::uint16_t port, int flags) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV | flags;
  addrinfo* found = nullptr;
  const int error = getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found);
  if (error != 0) throw InvalidArgument("'", host, "' is no numeric address: ", gai_strerror(error));
  return {found, &freeaddrinfo};
}

Descriptor open_socket(const addrinfo& address) {
  Descriptor socket(::socket(address.ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!socket) fail(errno, "socket");
  return socket;
}

// Waits until `events` or the deadline.
void wait_for(const Descriptor& connection, short events, Clock::time_point deadline) {
  pollfd entry{connection.get(), events, 0};
  for (;;) {
    const int n = poll(&entry, 1, milliseconds_until(deadline));
    if (n > 0) return;
    if (n == 0) fail(ETIMEDOUT, "poll");
    if (errno != EINTR) fail(errno, "poll");
  }
}

}  // namespace

void Descriptor::close() {
  if (number_ >= 0) ::close(std::exchange(number_, -1));
}

std::string interface_address(const std::string& name) {
  ifaddrs* found = nullptr;
  if (getifaddrs(&found) != 0) fail(errno, "getifaddrs");
  const std::unique_ptr<ifaddrs, decltype(&freeifaddrs)> interfaces(found, &freeifaddrs);
  std::string known;
  for (const int family : {AF_INET, AF_INET6})
    for (const ifaddrs* one = found; one != nullptr; one = one->ifa_next) {
      if (one->ifa_addr == nullptr || one->ifa_addr->sa_family != family) continue;
      if (family == AF_INET) known += (known.empty() ? "" : ", ") + std::string(one->ifa_name);
      if (name != one->ifa_name) continue;
      char host[NI_MAXHOST];
      const socklen_t length = family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
      if (getnameinfo(one->ifa_addr, length, host, sizeof host, nullptr, 0, NI_NUMERICHOST) == 0) return host;
    }
  throw InvalidArgument("there is no network interface '", name, "' with an address here; there are: ", known,
                        ". Set GRADWIRE_SOCKET_IFNAME to one of them");
}

Descriptor listen_at(const std::string& host, std::uint16_t& port) {
  const Addresses addresses = resolve(host, 0, AI_PASSIVE);
  Descriptor listener = open_socket(*addresses);
  sockaddr_storage bound{};
  socklen_t length = sizeof bound;
  if (bind(listener.get(), addresses->ai_addr, addresses->ai_addrlen) != 0 || listen(listener.get(), kBacklog) != 0 ||
      getsockname(listener.get(), reinterpret_cast<sockaddr*>(&bound), &length) != 0)
    throw InvalidArgument("cannot listen at ", host, ": ", std::generic_category().message(errno),
                          ". Set GRADWIRE_SOCKET_IFNAME to an interface of this host");
  port = ntohs(bound.ss_family == AF_INET6 ? reinterpret_cast<sockaddr_in6&>(bound).sin6_port
                                           : reinterpret_cast<sockaddr_in&>(bound).sin_port);
  return listener;
}

Descriptor connect_to(const Endpoint& endpoint, Clock::time_point deadline, const std::string& source) {
  const Addresses addresses = resolve(endpoint.host, endpoint.port, 0);
  Descriptor connection = open_socket(*addresses);
  if (!source.empty()) {
    const Addresses from = resolve(source, 0, AI_PASSIVE);
    if (from->ai_family == addresses->ai_family && bind(connection.get(), from->ai_addr, from->ai_addrlen) != 0)
      fail(errno, "bind");
  }
  if (connect(connection.get(), addresses->ai_addr, addresses->ai_addrlen) == 0) return connection;
  if (errno != EINPROGRESS) fail(errno, "connect");
  wait_for(connection, POLLOUT, deadline);
  int error = 0;
  socklen_t length = sizeof error;
  if (getsockopt(connection.get(), SOL_SOCKET, SO_ERROR, &error, &length) != 0) error = errno;
  if (error != 0) fail(error, "connect");
  return connection;
}

void tune(const Descriptor& connection, double timeout_s) {
  const int yes = 1, unsent = kUnsentBytes;
  const auto unacknowledged_ms = static_cast<unsigned>(std::min(timeout_s * 1e3, 2e9));
  setsockopt(connection.get(), IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
  setsockopt(connection.get(), IPPROTO_TCP, TCP_NOTSENT_LOWAT, &unsent, sizeof unsent);
  setsockopt(connection.get(), IPPROTO_TCP, TCP_USER_TIMEOUT, &unacknowledged_ms, sizeof unacknowledged_ms);
  setsockopt(connection.get(), SOL_SOCKET, SO_KEEPALIVE, &yes, sizeof yes);
}

bool set_congestion(const Descriptor& connection, const std::string& name) {
  return setsockopt(connection.get(), IPPROTO_TCP, TCP_CONGESTION, name.data(), static_cast<socklen_t>(name.size())) ==
         0;
}

std::chrono::microseconds round_trip(const Descriptor& connection) {
  tcp_info info{};
  socklen_t length = sizeof info;
  if (getsockopt(connection.get(), IPPROTO_TCP, TCP_INFO, &info, &length) != 0) return {};
  return std::chrono::microseconds(info.tcpi_min_rtt == UINT32_MAX ? 0 : info.tcpi_min_rtt);
}

std::size_t n_unacknowledged(const Descriptor& connection) {
  int n = 0;
  return ioctl(connection.get(), SIOCOUTQ, &n) == 0 && n > 0 ? static_cast<std::size_t>(n) : 0;
}

void send_all(const Descriptor& connection, const void* data, std::size_t n, Clock::time_point deadline) {
  const auto* at = static_cast<const std::uint8_t*>(data);
  while (n > 0) {
    const ssize_t sent = send(connection.get(), at, n, MSG_NOSIGNAL);
    if (sent >= 0) {
      at += sent;
      n -= static_cast<std::size_t>(sent);
    } else if (errno == EAGAIN) {
      wait_for(connection, POLLOUT, deadline);
    } else if (errno != EINTR) {
      fail(errno, "send");
    }
  }
}

void receive_all(const Descriptor& connection, void* data, std::size_t n, Clock::time_point deadline) {
  auto* at = static_cast<std::uint8_t*>(data);
  while (n > 0) {
    const ssize_t received = recv(connection.get(), at, n, 0);
    if (received > 0) {
      at += received;
      n -= static_cast<std::size_t>(received);
    } else if (received == 0) {
      fail(ECONNRESET, "recv");
    } else if (errno == EAGAIN) {
      wait_for(connection, POLLIN, deadline);
    } else if (errno != EINTR) {
      fail(errno, "recv");
    }
  }
}

bool send_at_once(const Descriptor& connection, ConstBytes bytes) {
  return send(connection.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL) == static_cast<ssize_t>(bytes.size());
}

Clock::duration seconds(double n) {
  return std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(std::min(n, 1e8)));
}

int milliseconds_until(Clock::time_point deadline) {
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now()).count();
  return static_cast<int>(std::clamp<std::int64_t>(left, 0, 1'000'000'000));
}

}  // namespace gradwire::wire
