#include "switch/server.hpp"

#include <algorithm>
#include <bit>
#include <cstring>
#include <random>

#include "errors.hpp"
#include "wire/socket.hpp"

namespace gradwire::innet {
namespace {

constexpr std::uint32_t kFirstSequence = 1;

std::uint32_t all_workers(std::uint8_t n_workers) { return n_workers == kMaxWorkers ? ~0u : (1u << n_workers) - 1; }

// The lanes' register actions: each reads and writes its own register once. Unsigned, so that sums wrap as in hardware.
void write_lanes(std::int32_t* registers, const std::uint8_t* payload) {
  std::memcpy(registers, payload, kPayloadBytes);
}

template <class Action>
void update_lanes(std::int32_t* registers, const std::uint8_t* payload, Action action) {
  std::array<std::int32_t, kLanes> incoming;
  std::memcpy(incoming.data(), payload, kPayloadBytes);
  for (std::size_t lane = 0; lane < kLanes; ++lane) registers[lane] = action(registers[lane], incoming[lane]);
}

}  // namespace

Pipeline::Pipeline(std::size_t n_slots, std::uint32_t epoch, Clock::duration lease) : epoch_(epoch), lease_(lease) {
  if (!std::has_single_bit(n_slots) || n_slots > (1u << 20))
    throw InvalidArgument("a switch has a power of two of slots, from 1 to 1,048,576, not ", n_slots);
  sequences_.resize(2 * n_slots);
  contents_.resize(2 * n_slots);
  seen_.resize(2 * n_slots);
  values_.resize(2 * n_slots * kLanes);
}

Reply Pipeline::process(const Header& header, const std::uint8_t* payload, const Endpoint& sender,
                        Clock::time_point now) {
  switch (header.kind) {
    case Kind::values:
      return aggregate(header, payload, sender, now);
    case Kind::join:
      return join(header, sender, now);
    case Kind::leave:
      return leave(header, sender);
    default:  // what only a switch sends
      ++counters_.foreign;
      return {};
  }
}

// The data plane. Stages in order; nothing of a later one is known to an earlier one.
Reply Pipeline::aggregate(const Header& header, const std::uint8_t* payload, const Endpoint& sender,
                          Clock::time_point now) {
  // Match: the job's row, and the sender's in it.
  Job* job = find(header);
  if (!job) return refuse(header, Reason::unknown_job);
  const std::uint32_t bit = 1u << (header.worker % kMaxWorkers);
  if (header.worker >= job->n_workers || !(job->joined & bit) || !(job->workers[header.worker] == sender) ||
      header.operation == Operation::none) {
    ++counters_.foreign;
    return {};
  }
  job->last_packet = now;
  const std::uint32_t mask = (1u << job->log2_slots) - 1;
  const std::uint32_t slot = job->first_slot + (header.sequence & mask);
  const std::uint32_t cell = 2 * slot + ((header.sequence >> job->log2_slots) & 1);

  // Register 1, the round that the slot is in. A worker enters round r + 2 only when all have the result of round r:
  // a newer sequence number may overwrite, an older one is a straggler of the network.
  const auto age = static_cast<std::int32_t>(header.sequence - sequences_[cell]);
  if (age < 0) {
    ++counters_.stale;
    return {};
  }
  const bool is_first = age > 0;
  if (is_first) sequences_[cell] = header.sequence;

  // Register 2, what is being done in it.
  const std::uint32_t content = static_cast<std::uint32_t>(header.operation) << 16 | header.collective;
  if (is_first) contents_[cell] = content;
  if (contents_[cell] != content) return refuse(header, Reason::mismatch);

  // Register 3, whose values are in it.
  const std::uint32_t before = is_first ? 0 : seen_[cell];
  const std::uint32_t after = before | bit;
  seen_[cell] = after;
  const std::uint32_t all = all_workers(job->n_workers);
  std::int32_t* const registers = &values_[std::size_t{cell} * kLanes];
  const bool is_duplicate = before & bit;
  if (is_duplicate) {
    ++counters_.duplicates;
  } else {
    // Registers 4 to 259, the lanes.
    ++counters_.values;
    if (is_first)
      write_lanes(registers, payload);
    else if (header.operation == Operation::add)
      update_lanes(registers, payload, [](std::int32_t a, std::int32_t b) {
        return static_cast<std::int32_t>(static_cast<std::uint32_t>(a) + static_cast<std::uint32_t>(b));
      });
    else if (header.operation == Operation::bit_or)
      update_lanes(registers, payload, [](std::int32_t a, std::int32_t b) { return a | b; });
    else
      update_lanes(registers, payload, [](std::int32_t a, std::int32_t b) { return std::max(a, b); });
  }

  // Out: the packet turned round, or sent to the job's multicast group.
  if (after == all) {
    Reply reply = answer(header, Kind::result);
    reply.to = is_duplicate ? Reply::To::sender : Reply::To::everyone;
    reply.values = registers;
    if (!is_duplicate) ++counters_.results;
    return reply;
  }
  if (job->left & ~after) return refuse(header, Reason::peer_left, job->left & ~after);
  if (!is_duplicate) return {};
  Reply reply = answer(header, Kind::pending);
  reply.to = Reply::To::sender;
  reply.header.word = after;
  return reply;
}

Reply Pipeline::answer(const Header& header, Kind kind) const {
  Reply reply;
  reply.header = header;
  reply.header.kind = kind;
  reply.header.epoch = epoch_;
  reply.header.word = 0;
  return reply;
}

Reply Pipeline::refuse(const Header& header, Reason reason, std::uint32_t who) {
  ++counters_.refusals;
  Reply reply = answer(header, Kind::refusal);
  reply.to = Reply::To::sender;
  reply.header.operation = Operation::none;
  reply.header.word = static_cast<std::uint32_t>(reason);
  reply.header.sequence = who;
  return reply;
}

Pipeline::Job* Pipeline::find(const Header& header) {
  if (header.handle >= kMaxJobs || header.epoch != epoch_) return nullptr;
  Job& job = jobs_[header.handle];
  return job.is_used && job.id == header.job ? &job : nullptr;
}

// ---- the control plane: a program on the switch's processor, which writes the match table

Reply Pipeline::join(const Header& header, const Endpoint& sender, Clock::time_point now) {
  const std::uint32_t n_workers = header.word & 0xFF;
  const std::uint32_t log2_slots = header.word >> 8;
  if (n_workers < 1 || n_workers > kMaxWorkers || header.worker >= n_workers || log2_slots > 20)
    return refuse(header, Reason::bad_join);
  const auto known =
      std::find_if(jobs_.begin(), jobs_.end(), [&](const Job& job) { return job.is_used && job.id == header.job; });
  Job* job = known != jobs_.end() ? &*known : admit(header, static_cast<int>(log2_slots), now);
  if (!job) return refuse(header, Reason::no_slots);
  const std::uint32_t bit = 1u << header.worker;
  const bool came_before = job->joined & bit;
  if (job->n_workers != n_workers || (job->left & bit) || (came_before && !(job->workers[header.worker] == sender)))
    return refuse(header, Reason::bad_join);
  job->workers[header.worker] = sender;
  job->joined |= bit;
  job->last_packet = now;
  Reply reply = answer(header, Kind::welcome);
  reply.to = Reply::To::sender;
  reply.header.handle = handle_of(*job);
  reply.header.sequence = kFirstSequence;
  reply.header.word = n_workers | static_cast<std::uint32_t>(job->log2_slots) << 8;
  return reply;
}

Pipeline::Job* Pipeline::admit(const Header& header, int log2_slots, Clock::time_point now) {
  const auto row = [&] {
    return std::find_if(jobs_.begin(), jobs_.end(), [](const Job& job) { return !job.is_used; });
  };
  std::uint32_t first = 0;
  // As many as asked for, or half, or a quarter, ... rather than none.
  const auto find_slots = [&] {
    for (int log2 = log2_slots; log2 >= 0; --log2)
      if (find_free_slots(1u << log2, first)) return log2;
    return -1;
  };
  int found = row() == jobs_.end() ? -1 : find_slots();
  if (found < 0) {
    for (Job& job : jobs_)
      if (job.is_used && now - job.last_packet > lease_) {
        job = {};
        ++counters_.jobs_evicted;
      }
    found = row() == jobs_.end() ? -1 : find_slots();
  }
  if (found < 0) return nullptr;
  Job& job = *row();
  const auto n_workers = static_cast<std::uint8_t>(header.word & 0xFF);
  job = {.is_used = true, .id = header.job, .n_workers = n_workers, .first_slot = first, .log2_slots = found};
  const std::size_t begin = 2 * std::size_t{first}, n = std::size_t{2} << found;
  std::fill_n(sequences_.begin() + static_cast<std::ptrdiff_t>(begin), n, kFirstSequence - 1);
  std::fill_n(contents_.begin() + static_cast<std::ptrdiff_t>(begin), n, 0);
  std::fill_n(seen_.begin() + static_cast<std::ptrdiff_t>(begin), n, 0);
  ++counters_.jobs_admitted;
  return &job;
}

bool Pipeline::find_free_slots(std::uint32_t n_slots, std::uint32_t& first) const {
  for (std::uint32_t at = 0; at + n_slots <= this->n_slots(); at += n_slots) {
    const bool is_taken = std::any_of(jobs_.begin(), jobs_.end(), [&](const Job& job) {
      return job.is_used && job.first_slot < at + n_slots && at < job.first_slot + (1u << job.log2_slots);
    });
    if (!is_taken) {
      first = at;
      return true;
    }
  }
  return false;
}

Reply Pipeline::leave(const Header& header, const Endpoint& sender) {
  Reply reply = answer(header, Kind::farewell);
  reply.to = Reply::To::sender;
  Job* job = find(header);
  if (!job) return reply;  // gone already: what was asked for is so
  if (header.worker >= job->n_workers || !(job->workers[header.worker] == sender)) {
    ++counters_.foreign;
    return {};
  }
  job->left |= 1u << header.worker;
  if (job->left == job->joined) *job = {};
  return reply;
}

std::size_t Pipeline::n_free_slots() const {
  std::size_t n_free = n_slots();
  for (const Job& job : jobs_)
    if (job.is_used) n_free -= std::size_t{1} << job.log2_slots;
  return n_free;
}

std::size_t Pipeline::n_jobs() const {
  return static_cast<std::size_t>(
      std::count_if(jobs_.begin(), jobs_.end(), [](const Job& job) { return job.is_used; }));
}

Pipeline::Workers Pipeline::workers_of(std::uint16_t handle) const {
  const Job& job = jobs_.at(handle);
  return {{job.workers.data(), job.n_workers}, job.joined & ~job.left};
}

Server::Server(const std::string& address, std::uint16_t port, std::size_t n_slots, double lease_s)
    : pipeline_(n_slots, std::random_device()(), wire::seconds(lease_s)) {
  socket_.grow_buffers(8 << 20);  // a switch takes what comes at line rate; a process must sleep at times
  socket_.bind(address, port);
}

void Server::run(double seconds) {
  const auto end = Clock::now() + wire::seconds(seconds);
  for (auto now = Clock::now(); now < end; now = Clock::now()) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(end - now).count();
    socket_.receive(static_cast<int>(std::clamp<std::int64_t>(left, 1, 1000)),
                    [&](ConstBytes datagram, const Endpoint& sender) { take(datagram, sender, now); });
    send_all();
  }
}

void Server::take(ConstBytes datagram, const Endpoint& sender, Clock::time_point now) {
  bytes_received_ += datagram.size();
  Header header;
  const Check check = read_header(datagram, header);
  if (check != Check::good) {
    pipeline_.count_foreign();
    if (check == Check::other_version && header.kind == Kind::join) refuse_version(sender);
    return;
  }
  Reply reply = pipeline_.process(header, datagram.data() + kHeaderBytes, sender, now);
  if (reply.to == Reply::To::nobody) return;
  reply.header.checksum = checksum_of(reply.header, reply.values);
  if (reply.to == Reply::To::sender) {
    direct_.push_back({sender, reply.header, reply.values});
    return;
  }
  const std::uint16_t handle = reply.header.handle;
  if (results_[handle].empty()) waiting_.push_back(handle);
  results_[handle].emplace_back(reply.header, reply.values);
  // Sent at once when a burst is full: the workers go on while the rest of the batch is looked at.
  if (results_[handle].size() == kMaxBurst) send_results(handle);
}

void Server::refuse_version(const Endpoint& sender) {
  Header header;  // of this version: the reader sees which it is
  header.kind = Kind::refusal;
  header.checksum = checksum_of(header, nullptr);
  direct_.push_back({sender, header, nullptr});
}

void Server::send_results(std::uint16_t handle) {
  burst_.clear();
  for (const auto& [header, values] : results_[handle]) burst_.push_back({&header, values});
  const auto workers = pipeline_.workers_of(handle);
  for (std::size_t worker = 0; worker < workers.endpoints.size(); ++worker)
    if (workers.joined >> worker & 1) send(workers.endpoints[worker], burst_);
  results_[handle].clear();
}

void Server::send_all() {
  for (const std::uint16_t handle : waiting_)
    if (!results_[handle].empty()) send_results(handle);
  waiting_.clear();
  for (std::size_t i = 0; i < direct_.size();) {  // neighbours of one size for one worker go together
    burst_.clear();
    std::size_t end = i;
    while (end < direct_.size() && direct_[end].to == direct_[i].to && !direct_[end].payload == !direct_[i].payload) {
      burst_.push_back({&direct_[end].header, direct_[end].payload});
      ++end;
    }
    send(direct_[i].to, burst_);
    i = end;
  }
  direct_.clear();
}

void Server::send(const Endpoint& to, std::span<const Outgoing> packets) {
  const std::size_t n_sent = socket_.send(&to, packets);
  packets_dropped_ += packets.size() - n_sent;  // as at a switch's full port: the worker asks again
  bytes_sent_ += n_sent * (packets.empty() || !packets.front().payload ? kHeaderBytes : kPacketBytes);
}

}  // namespace gradwire::innet
