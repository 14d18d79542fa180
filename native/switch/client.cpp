#include "switch/client.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <thread>

#include "errors.hpp"

namespace gradwire::innet {
namespace {

// Ranks and switch that share a machine's cores sleep for tens of milliseconds at a time: timers of 10 ms sent 3 to 6 %
// of all packets again where none was lost (4 ranks, 2 cores, 200 Mb/s). A loss in mid-stream does not wait for a
// timer.
constexpr double kFirstTimerS = 0.1, kLeastTimerS = 0.05, kMostTimerS = 1.0;
constexpr double kTickS = 0.0025;  // how often timers are looked at
constexpr double kLeastOvertakenS = 0.01;
// A packet is taken for lost when one so much later is done: a burst of the socket may overtake another.
constexpr std::uint32_t kOvertaken = kMaxBurst;
// Packets that ask again while nothing moves at all: one slow rank must not draw the others' whole windows.
constexpr std::size_t kProbes = 4;
constexpr double kLeastWindow = 16;
// What the kernel charges a socket's buffer for a packet of 1,064 bytes that comes singly.
constexpr std::size_t kChargedBytes = 2304;
constexpr double kSliceS = 0.1;    // `stop` is noticed after this long
constexpr double kRefusedS = 1.0;  // "nobody listens here" for so long means that the switch is gone
constexpr double kFarewellS = 0.25;

double now_s() { return std::chrono::duration<double>(Clock::now().time_since_epoch()).count(); }

std::string list_workers(std::uint32_t workers) {
  std::string text;
  for (int worker = 0; worker < 32; ++worker)
    if (workers >> worker & 1) text += (text.empty() ? "" : ", ") + std::to_string(worker);
  return text;
}

std::string format_s(double seconds) {
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), "%.1f", seconds);
  return text.data();
}

}  // namespace

Client::Client(const std::string& address, std::uint16_t port, std::uint64_t job, std::size_t worker,
               std::size_t n_workers, std::size_t wanted_slots)
    : address_(address),
      port_(port),
      job_(job),
      worker_(static_cast<std::uint8_t>(worker)),
      n_workers_(n_workers),
      log2_wanted_(std::countr_zero(wanted_slots)) {
  if (n_workers < 1 || n_workers > kMaxWorkers || worker >= n_workers)
    throw InvalidArgument("a switch serves 1 to 32 ranks a job: its bitmap is one 32-bit register");
  if (!std::has_single_bit(wanted_slots) || wanted_slots > (1u << 20))
    throw InvalidArgument("slots are a power of two from 1 to 1,048,576");
  receive_packets_ = std::max<std::size_t>(socket_.grow_buffers(4 << 20) / kChargedBytes, 1);
  socket_.connect(address, port);
  burst_.reserve(kMaxBurst);
  headers_.resize(kMaxBurst);
}

std::string Client::name() const { return "the switch at " + address_ + ":" + std::to_string(port_); }

Header Client::make(Kind kind) const {
  return {.kind = kind, .worker = worker_, .job = job_, .epoch = epoch_, .handle = handle_};
}

void Client::send_one(const Header& header) {
  Header sealed = header;
  sealed.checksum = checksum_of(sealed, nullptr);
  const Outgoing packet{&sealed, nullptr};
  counters_.bytes_sent += kHeaderBytes * socket_.send(nullptr, {&packet, 1});
}

void Client::join(double timeout_s) {
  const double start = now_s();
  double patience_s = 0.02;
  while (!has_joined_) {
    if (is_stopped_) throw PeerLost("this rank has closed its connection to ", name());
    if (now_s() - start > timeout_s)
      throw PeerLost(name(), " did not answer for ", format_s(timeout_s),
                     " s; start it first (gradwire switch --address ... --port ...), and look at GRADWIRE_SWITCH");
    Header header = make(Kind::join);
    header.word = static_cast<std::uint32_t>(n_workers_) | static_cast<std::uint32_t>(log2_wanted_) << 8;
    send_one(header);
    const double next_try = now_s() + patience_s;
    patience_s = std::min(2 * patience_s, 0.5);
    for (double now = now_s(); now < next_try && !has_joined_; now = now_s()) {
      socket_.receive(static_cast<int>(1000 * (next_try - now)) + 1, [&](ConstBytes datagram, const Endpoint&) {
        counters_.bytes_received += datagram.size();
        Header answer;
        const Check check = read_header(datagram, answer);
        if (check == Check::other_version)
          throw IncompatibleVersion(name(), " speaks version ", answer.version, " of the packet format, this rank ",
                                    kVersion, "; start the same release of gradwire on both");
        if (check == Check::good && answer.kind == Kind::refusal && answer.job == 0)
          throw IncompatibleVersion(name(), " does not read this rank's version of the packet format");
        if (check != Check::good || answer.job != job_ || answer.worker != worker_) {
          ++counters_.foreign;
          return;
        }
        if (answer.kind == Kind::refusal) raise_refusal(answer);
        if (answer.kind != Kind::welcome) return;
        const std::uint32_t log2 = answer.word >> 8;
        if ((answer.word & 0xFF) != n_workers_ || log2 > 20) return;
        has_joined_ = true;
        log2_slots_ = static_cast<int>(log2);
        epoch_ = answer.epoch;
        handle_ = answer.handle;
        next_sequence_ = answer.sequence;
      });
      if (socket_.was_refused()) break;  // it may not have started yet
    }
    // Nobody listens yet: the rest of the patience is spent asleep.
    if (const double left_s = next_try - now_s(); !has_joined_ && left_s > 0)
      std::this_thread::sleep_for(std::chrono::duration<double>(left_s));
  }
  flights_.assign(n_slots(), {});
  window_ = static_cast<double>(std::min(n_slots(), receive_packets_));
}

void Client::raise_refusal(const Header& header) const {
  switch (static_cast<Reason>(header.word)) {
    case Reason::no_slots:
      throw Unsupported(name(),
                        " has no slots left for another job: wait for one to end, or start it with more --slots");
    case Reason::unknown_job:
      throw PeerLost(name(),
                     " does not know this job: it was restarted, or gave the slots of a job that was silent for ",
                     "too long to another; restart from the last checkpoint");
    case Reason::mismatch:
      throw RankMismatch("ranks are in different calls of the switch: rank ", worker_, " is in call ", collective_,
                         "; the same scheme, options and model on every rank");
    case Reason::peer_left:
      throw PeerLost("rank ", list_workers(header.sequence), " has left ", name(),
                     " in the middle of a sum; look at its output for the cause");
    default:
      throw Unsupported(name(), " refused rank ", worker_, " of ", n_workers_,
                        ": another process has that place in the job, or the job another number of ranks");
  }
}

double Client::timer_s(std::uint32_t n_sent) const {
  const double base =
      smoothed_s_ > 0 ? std::clamp(smoothed_s_ + 4 * deviation_s_, kLeastTimerS, kMostTimerS) : kFirstTimerS;
  return std::min(base * static_cast<double>(1u << std::min(n_sent, 6u)), kMostTimerS);
}

void Client::measure(double round_trip_s) {  // RFC 6298
  if (smoothed_s_ == 0) {
    smoothed_s_ = round_trip_s;
    deviation_s_ = round_trip_s / 2;
    return;
  }
  deviation_s_ += (std::abs(round_trip_s - smoothed_s_) - deviation_s_) / 4;
  smoothed_s_ += (round_trip_s - smoothed_s_) / 8;
}

void Client::reduce(std::span<std::int32_t> values, Operation operation, double timeout_s) {
  ++collective_;
  if (values.empty()) return;
  double now = now_s();
  Call call{values, operation, static_cast<std::uint32_t>((values.size() + kLanes - 1) / kLanes)};
  call.last_progress = now;
  if (const std::size_t n_tail = values.size() % kLanes) {
    call.tail.assign(kLanes, 0);
    std::copy(values.end() - static_cast<std::ptrdiff_t>(n_tail), values.end(), call.tail.begin());
  }
  double next_check = 0;
  while (call.first_done < call.n_packets) {
    if (is_stopped_) throw PeerLost("this rank has closed its connection to ", name(), " in the middle of a sum");
    send_new(call, now);
    if (now >= next_check) {
      send_due(call, now);
      next_check = now + kTickS;
    }
    flush();
    // Within the timers' grain; a result that comes wakes at once.
    const bool is_stalled = now - call.last_progress > kSliceS;
    socket_.receive(static_cast<int>(1000 * (is_stalled ? kSliceS / 5 : kTickS)) + 1,
                    [&](ConstBytes datagram, const Endpoint&) { take(call, datagram, now); });
    now = now_s();
    fail_if_late(call, now, timeout_s);
  }
  next_sequence_ += call.n_packets;
}

void Client::fail_if_late(const Call& call, double now, double timeout_s) {
  if (socket_.was_refused() && refused_at_ < 0) refused_at_ = now;
  if (refused_at_ >= 0 && call.last_answer > refused_at_) refused_at_ = -1;
  if (refused_at_ >= 0 && now - refused_at_ > kRefusedS)
    throw PeerLost(name(), " has ended: nobody listens there any more; restart from the last checkpoint");
  if (now - call.last_progress <= timeout_s) return;
  if (call.last_answer > call.last_progress && call.pending != 0) {
    const std::uint32_t all = n_workers_ == kMaxWorkers ? ~0u : (1u << n_workers_) - 1;
    throw PeerLost("rank ", list_workers(all & ~call.pending), " sent nothing to ", name(), " for ",
                   format_s(timeout_s), " s (timeout_s); look at its output for the cause");
  }
  throw PeerLost(name(), " did not answer for ", format_s(timeout_s),
                 " s (timeout_s); look at its output, and restart from the last checkpoint");
}

// ---- sending

void Client::send_new(Call& call, double now) {
  const auto limit = static_cast<std::uint32_t>(std::min(window_, static_cast<double>(n_slots())));
  while (call.next < call.n_packets && call.next - call.first_done < limit) {
    Flight& flight = flights_[(next_sequence_ + call.next) & (n_slots() - 1)];
    flight = {call.next, false, 0, now, 0};
    push(call, call.next++, now);
  }
}

void Client::send_due(Call& call, double now) {
  const double overtaken_s = std::max(1.25 * smoothed_s_, kLeastOvertakenS);
  const bool is_stalled = now - call.last_progress > timer_s(0);
  std::size_t n_resent = 0;
  for (std::uint32_t index = call.first_done; index < call.next; ++index) {
    Flight& flight = flights_[(next_sequence_ + index) & (n_slots() - 1)];
    if (flight.is_done) continue;
    const bool is_overtaken = flight.n_sent == 1 && call.highest > index + kOvertaken &&
                              now - std::max(flight.sent_at, call.moving_since) > overtaken_s;
    if (now < flight.due_at && !is_overtaken) continue;
    if (is_stalled && n_resent >= kProbes) break;
    n_resent += flight.n_sent > 0;  // 0: the queue had no room for it
    push(call, index, now);
  }
  counters_.packets_resent += n_resent;
  // Once a round trip, however many were lost in it: they filled one queue.
  if (n_resent > 0 && !is_stalled && now - last_cut_ > std::max(smoothed_s_, kLeastTimerS)) {
    window_ = std::max(0.7 * window_, std::min(kLeastWindow, static_cast<double>(n_slots())));
    last_cut_ = now;
  }
}

void Client::push(Call& call, std::uint32_t index, double now) {
  if (burst_.size() == kMaxBurst) flush();
  Flight& flight = flights_[(next_sequence_ + index) & (n_slots() - 1)];
  ++flight.n_sent;
  flight.sent_at = now;
  flight.due_at = now + timer_s(flight.n_sent - 1);
  const bool is_tail = index + 1 == call.n_packets && !call.tail.empty();
  const std::int32_t* payload = is_tail ? call.tail.data() : &call.values[std::size_t{index} * kLanes];
  Header& header = headers_[burst_.size()];
  header = make(Kind::values);
  header.operation = call.operation;
  header.sequence = next_sequence_ + index;
  header.collective = collective_;
  header.checksum = checksum_of(header, payload);
  burst_.push_back({&header, payload});
}

void Client::flush() {
  if (burst_.empty()) return;
  const std::size_t n_sent = socket_.send(nullptr, burst_);
  counters_.packets_sent += n_sent;
  counters_.bytes_sent += kPacketBytes * n_sent;
  for (std::size_t i = n_sent; i < burst_.size(); ++i) {  // the queue was full: again in a moment, as if never sent
    Flight& flight = flights_[burst_[i].header->sequence & (n_slots() - 1)];
    --flight.n_sent;
    flight.due_at = flight.sent_at;
  }
  burst_.clear();
}

// ---- receiving

void Client::take(Call& call, ConstBytes datagram, double now) {
  counters_.bytes_received += datagram.size();
  Header header;
  if (read_header(datagram, header) != Check::good || header.job != job_) {
    ++counters_.foreign;
    return;
  }
  if (header.kind == Kind::refusal) {
    if (header.worker != worker_ || header.collective != collective_) return;  // of a call that is over
    raise_refusal(header);
  }
  if (header.epoch != epoch_ || header.collective != collective_) return;
  call.last_answer = now;
  const std::uint32_t index = header.sequence - next_sequence_;
  if (index >= call.next) {
    ++counters_.foreign;
    return;
  }
  if (header.kind == Kind::result) {
    take_result(call, header, datagram.data() + kHeaderBytes, now);
    return;
  }
  if (header.kind == Kind::pending && index >= call.first_done) {
    if (index == call.first_done) call.pending = header.word;
    Flight& flight = flights_[header.sequence & (n_slots() - 1)];
    if (!flight.is_done) flight.due_at = std::max(flight.due_at, now + timer_s(flight.n_sent));
  }
}

void Client::take_result(Call& call, const Header& header, const std::uint8_t* payload, double now) {
  const std::uint32_t index = header.sequence - next_sequence_;
  Flight& flight = flights_[header.sequence & (n_slots() - 1)];
  if (index < call.first_done || flight.is_done || flight.index != index || header.operation != call.operation) {
    ++counters_.results_again;
    return;
  }
  const std::size_t at = std::size_t{index} * kLanes;
  std::memcpy(&call.values[at], payload, 4 * std::min(kLanes, call.values.size() - at));
  // A result that ends a wait for a slow rank says nothing of the network, and neither do timers that ran meanwhile.
  if (now - call.last_progress > timer_s(0)) {
    call.moving_since = now;
    for (std::uint32_t other = call.first_done; other < call.next; ++other) {
      Flight& waiting = flights_[(next_sequence_ + other) & (n_slots() - 1)];
      waiting.due_at = std::max(waiting.due_at, now + timer_s(waiting.n_sent));
    }
  }
  if (flight.n_sent == 1 && flight.sent_at >= call.moving_since) measure(now_s() - flight.sent_at);
  flight.is_done = true;
  ++counters_.results;
  call.highest = std::max(call.highest, index + 1);
  call.last_progress = now;
  call.pending = 0;
  window_ = std::min(window_ + 1.0 / 16, static_cast<double>(std::min(n_slots(), receive_packets_)));
  while (call.first_done < call.next && flights_[(next_sequence_ + call.first_done) & (n_slots() - 1)].is_done)
    ++call.first_done;
}

void Client::leave() {
  if (!has_joined_) return;
  has_joined_ = false;
  const double end = now_s() + kFarewellS;
  bool is_done = false;
  for (double now = now_s(); now < end && !is_done; now = now_s()) {
    send_one(make(Kind::leave));
    socket_.receive(50, [&](ConstBytes datagram, const Endpoint&) {
      Header header;
      is_done |= read_header(datagram, header) == Check::good && header.kind == Kind::farewell && header.job == job_;
    });
    if (socket_.was_refused()) return;
  }
}

}  // namespace gradwire::innet
