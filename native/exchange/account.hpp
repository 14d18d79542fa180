// What an exchange did: bytes both ways, and when which kind of work was done. The times are those of
// time.perf_counter_ns in Python.
#pragma once

#include <chrono>
#include <cstdint>
#include <vector>

namespace gradwire::exchange {

enum class Kind : std::uint8_t { encode, decode, communicate, importance };

inline std::int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

struct Span {
  Kind kind;
  std::int64_t start_ns, end_ns;
};

struct Account {
  std::uint64_t bytes_sent = 0, bytes_received = 0, n_messages = 0;
  std::vector<Span> spans;

  void add(Kind kind, std::int64_t start_ns) { spans.push_back({kind, start_ns, now_ns()}); }
};

}  // namespace gradwire::exchange
