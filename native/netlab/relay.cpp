#include "netlab/relay.hpp"

#include <poll.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <map>
#include <memory>
#include <queue>
#include <random>
#include <vector>

namespace gradwire::netlab {
namespace {

constexpr std::size_t kLargest = 65536, kDestination = 16;  // of a packet; where its address to is
constexpr int kPacketsAtOnce = 64;

double now_s() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

struct Packet {
  double due_s;
  std::uint64_t number;  // of equally due ones the first comes first
  std::size_t from, to;
  bool is_across;  // it has crossed, and waits for the receiver's line
  std::vector<std::uint8_t> bytes;
};

struct Later {
  bool operator()(const std::unique_ptr<Packet>& a, const std::unique_ptr<Packet>& b) const {
    return a->due_s != b->due_s ? a->due_s > b->due_s : a->number > b->number;
  }
};

class Relay {
 public:
  Relay(std::span<const int> devices, std::span<Line> lines)
      : devices_(devices), lines_(lines), up_free_s_(lines.size()), down_free_s_(lines.size()) {}

  void run(int stop) {
    std::vector<pollfd> polled{{stop, POLLIN, 0}};
    for (const int device : devices_) polled.push_back({device, POLLIN, 0});
    for (;;) {
      const double wait_s = waiting_.empty() ? 1.0 : std::clamp(waiting_.top()->due_s - now_s(), 0.0, 1.0);
      const timespec wait{static_cast<time_t>(wait_s), static_cast<long>(1e9 * (wait_s - static_cast<int>(wait_s)))};
      if (ppoll(polled.data(), polled.size(), &wait, nullptr) > 0) {
        if (polled[0].revents != 0) return;
        for (std::size_t host = 0; host < devices_.size(); ++host)
          if (polled[host + 1].revents != 0) read(host);
      }
      while (!waiting_.empty() && waiting_.top()->due_s <= now_s()) pass();
    }
  }

 private:
  void read(std::size_t host) {
    for (int i = 0; i < kPacketsAtOnce; ++i) {
      const ssize_t n = ::read(devices_[host], room_.data(), room_.size());
      if (n < static_cast<ssize_t>(kDestination + 4)) return;
      const std::size_t to = (std::size_t{room_[kDestination + 2]} << 8 | room_[kDestination + 3]) - 1;
      if (room_[0] >> 4 != 4 || to >= lines_.size()) continue;  // no IPv4, or nobody's
      auto packet =
          std::make_unique<Packet>(Packet{now_s(), ++n_packets_, host, to, false, {room_.begin(), room_.begin() + n}});
      Line& line = lines_[host];
      if (!admit(line, *packet, line.up_bps, line.up_loss, up_free_s_[host], line.sent)) continue;
      const Line& other = lines_[to];
      double delay_s = (line.delay_s + other.delay_s) / 2;
      if (line.site != other.site) delay_s += (line.site_delay_s + other.site_delay_s) / 2;
      delay_s += (line.jitter_s + other.jitter_s) / 2 * (2 * uniform_(random_) - 1);
      double& last_s = last_s_[{host, to}];
      last_s = packet->due_s = std::max(last_s, packet->due_s + std::max(0.0, delay_s));
      waiting_.push(std::move(packet));
    }
  }

  // The packet goes on when the line has sent it; false: it is lost, or finds the queue full.
  bool admit(const Line& line, Packet& packet, double bps, double loss, double& free_s, std::int64_t* counts) {
    const double start_s = std::max(packet.due_s, free_s);
    if (line.is_up == 0 || (loss > 0 && uniform_(random_) < loss) ||
        (bps > 0 && start_s - packet.due_s > line.queue_s)) {
      ++counts[2];
      return false;
    }
    packet.due_s = free_s = start_s + (bps > 0 ? 8 * static_cast<double>(packet.bytes.size()) / bps : 0);
    counts[0] += static_cast<std::int64_t>(packet.bytes.size());
    ++counts[1];
    return true;
  }

  void pass() {
    std::unique_ptr<Packet> packet = std::move(const_cast<std::unique_ptr<Packet>&>(waiting_.top()));
    waiting_.pop();
    Line& line = lines_[packet->to];
    if (packet->is_across) {
      [[maybe_unused]] const ssize_t n = ::write(devices_[packet->to], packet->bytes.data(), packet->bytes.size());
    } else if (admit(line, *packet, line.down_bps, line.down_loss, down_free_s_[packet->to], line.received)) {
      packet->is_across = true;
      waiting_.push(std::move(packet));
    }
  }

  const std::span<const int> devices_;
  const std::span<Line> lines_;
  std::vector<double> up_free_s_, down_free_s_;
  std::map<std::pair<std::size_t, std::size_t>, double> last_s_;
  std::priority_queue<std::unique_ptr<Packet>, std::vector<std::unique_ptr<Packet>>, Later> waiting_;
  std::uint64_t n_packets_ = 0;
  std::vector<std::uint8_t> room_ = std::vector<std::uint8_t>(kLargest);
  std::mt19937_64 random_{std::random_device{}()};
  std::uniform_real_distribution<double> uniform_;
};

}  // namespace

void relay(std::span<const int> devices, std::span<Line> lines, int stop) { Relay(devices, lines).run(stop); }

}  // namespace gradwire::netlab
