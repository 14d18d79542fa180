// Streams of the late device, each a thread that runs its operations in order and late, and events on them.
#pragma once

#include <c10/core/Stream.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

namespace late {

using Clock = std::chrono::steady_clock;

constexpr int kDevices = 2;
constexpr auto kType = c10::DeviceType::PrivateUse1;

inline std::atomic<int> lateness_us{0};
inline std::atomic<int64_t> n_waits_with_gil{0};  // the host stood still and held up every Python thread
inline thread_local int64_t n_waits_here = 0;     // how often this thread stood still for a device

class Stream {
 public:
  explicit Stream(unsigned seed) : random_(seed) {
    std::thread([this] { run(); }).detach();
  }

  // The operation's place in the order; `wait` for it.
  uint64_t enqueue(std::function<void()> operation) {
    std::lock_guard lock(mutex_);
    const int fixed = fixed_lateness_us_;
    const int delay_us = fixed >= 0 ? fixed : static_cast<int>(random_() % (lateness_us.load() + 1));
    waiting_.push_back({std::move(operation), Clock::now() + std::chrono::microseconds(delay_us)});
    changed_.notify_all();
    return ++n_enqueued_;
  }

  void wait(uint64_t place) {
    std::unique_lock lock(mutex_);
    wanted_ = std::max(wanted_, place);
    changed_.notify_all();
    changed_.wait(lock, [&] { return n_done_ >= place; });
  }

  uint64_t end() {
    std::lock_guard lock(mutex_);
    return n_enqueued_;
  }

  bool has_passed(uint64_t place) {
    std::lock_guard lock(mutex_);
    return n_done_ >= place;
  }

  // Every operation from now on takes this long, instead of a random time; negative: random again.
  void be_late(int us) { fixed_lateness_us_ = us; }

 private:
  struct Operation {
    std::function<void()> run;
    Clock::time_point not_before;
  };

  void run() {
    std::unique_lock lock(mutex_);
    for (;;) {
      changed_.wait(lock, [&] { return !waiting_.empty(); });
      const auto not_before = waiting_.front().not_before;
      changed_.wait_until(lock, not_before, [&] { return wanted_ > n_done_; });
      auto operation = std::move(waiting_.front().run);
      waiting_.pop_front();
      lock.unlock();
      operation();
      operation = nullptr;
      lock.lock();
      ++n_done_;
      changed_.notify_all();
    }
  }

  std::minstd_rand random_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Operation> waiting_;
  std::atomic<int> fixed_lateness_us_{-1};
  uint64_t n_enqueued_ = 0, n_done_ = 0, wanted_ = 0;
};

inline thread_local int current_device = 0;
inline thread_local int64_t current_stream[kDevices] = {};

inline std::mutex streams_mutex;
inline std::vector<std::unique_ptr<Stream>>* const streams = new std::vector<std::unique_ptr<Stream>>[kDevices];

inline Stream& stream_at(int device, int64_t id) {
  std::lock_guard lock(streams_mutex);
  auto& all = streams[device];
  while (static_cast<int64_t>(all.size()) <= id)
    all.push_back(std::make_unique<Stream>(7919 * all.size() + device + 1));
  return *all[id];
}

inline Stream& stream_at(const c10::Stream& stream) { return stream_at(stream.device_index(), stream.id()); }
inline Stream& stream_of(int device) { return stream_at(device, current_stream[device]); }

inline int64_t new_stream(int device) {
  int64_t id;
  {
    std::lock_guard lock(streams_mutex);
    id = std::max<int64_t>(1, static_cast<int64_t>(streams[device].size()));
  }
  stream_at(device, id);
  return id;
}

// The host waits, without the interpreter's lock.
inline void wait_on_host(Stream& stream, uint64_t place) {
  if (stream.has_passed(place)) return;
  ++n_waits_here;
  if (!PyGILState_Check()) return stream.wait(place);
  ++n_waits_with_gil;
  pybind11::gil_scoped_release released;
  stream.wait(place);
}

struct Event {
  c10::Stream stream;
  uint64_t place;
  std::shared_ptr<Clock::time_point> passed = nullptr;  // when the stream came by, of events that time
};

}  // namespace late
