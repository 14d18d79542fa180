// File descriptors that close themselves, and the few socket calls that connections are made with. IPv4 and IPv6.
#pragma once

#include <chrono>
#include <string>
#include <utility>
#include <vector>

#include "spans.hpp"

namespace gradwire::wire {

using Clock = std::chrono::steady_clock;

class Descriptor {
 public:
  Descriptor() = default;
  explicit Descriptor(int number) : number_(number) {}
  Descriptor(Descriptor&& other) noexcept : number_(std::exchange(other.number_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    if (this != &other) {
      close();
      number_ = std::exchange(other.number_, -1);
    }
    return *this;
  }
  ~Descriptor() { close(); }
  int get() const { return number_; }
  explicit operator bool() const { return number_ >= 0; }
  void close();

 private:
  int number_ = -1;
};

// Where a rank listens: a numeric IPv4 or IPv6 address (with a scope, "%eth0", where it needs one), and a port.
struct Endpoint {
  std::string host;
  std::uint16_t port = 0;
};
using Endpoints = std::vector<Endpoint>;  // of one rank, one for each network interface that it uses

// The first address of a network interface, IPv4 before IPv6. Throws InvalidArgument, which lists the interfaces.
std::string interface_address(const std::string& name);

// A socket that listens on `host` at a port of the system's choice, non-blocking, close-on-exec. Throws
// InvalidArgument.
Descriptor listen_at(const std::string& host, std::uint16_t& port);

// A connection to `endpoint`, non-blocking, close-on-exec; from the address `source` unless that is empty. Throws
// std::system_error.
Descriptor connect_to(const Endpoint& endpoint, Clock::time_point deadline, const std::string& source = "");

// What every connection of ours is set to: no delay of small messages, little queued in the kernel, an end when the
// other side no longer acknowledges.
void tune(const Descriptor& connection, double timeout_s);
// Whether the kernel has a congestion control of this name, and lets this process use it; the connection has it then.
bool set_congestion(const Descriptor& connection, const std::string& name);
// The shortest that TCP has seen, as others wait for processes that are busy; 0 before it has one.
std::chrono::microseconds round_trip(const Descriptor& connection);
// Written bytes that the peer's kernel has not acknowledged.
std::size_t n_unacknowledged(const Descriptor& connection);

// Sends or receives exactly n bytes on a non-blocking socket. Throws std::system_error; its code is timed_out at the
// deadline, connection_reset where the other side closed.
void send_all(const Descriptor& connection, const void* data, std::size_t n, Clock::time_point deadline);
void receive_all(const Descriptor& connection, void* data, std::size_t n, Clock::time_point deadline);

// Whether the kernel takes all of them now.
bool send_at_once(const Descriptor& connection, ConstBytes bytes);

// Milliseconds until `deadline` for poll and epoll: rounded up, never negative.
int milliseconds_until(Clock::time_point deadline);
// At most some years, which a deadline can hold.
Clock::duration seconds(double n);

}  // namespace gradwire::wire
