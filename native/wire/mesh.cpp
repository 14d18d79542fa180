#include "wire/mesh.hpp"

#include <pthread.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <set>
#include <system_error>

#include "checksum/crc32c.hpp"
#include "errors.hpp"

namespace gradwire::wire {
namespace {

constexpr std::size_t kMessagesPerCall = 8;
constexpr int kEventsPerCall = 64;

std::string describe(int error) { return std::generic_category().message(error); }

}  // namespace

// ---- streams

void Mesh::open(std::uint32_t number, const Facts& facts, std::uint64_t max_bytes, std::span<const int> peers) {
  Lock lock(mutex_);
  for (const int peer : peers) meet(lock, peer);
  const auto n = static_cast<std::size_t>(world_size_);
  const auto [entry, is_new] = streams_.try_emplace(number);
  if (!is_new) throw InvalidArgument("stream ", number, " is open already");
  Stream& stream = entry->second;
  stream.facts = facts;
  stream.max_bytes = max_bytes;
  stream.n_sent.assign(n, 0);
  stream.n_arrived.assign(n, 0);
  stream.inboxes.resize(n);
  stream.waiting_since.resize(n);
  for (auto& connection : connections_)
    if (connection && connection->is_parked && connection->header.stream == number) {
      connection->is_parked = false;
      begin_body(*connection, stream);
      watch(*connection);
    }
}

void Mesh::close(std::uint32_t number) {
  const std::lock_guard lock(mutex_);
  streams_.erase(number);
}

Mesh::Stream& Mesh::stream_of(std::uint32_t number) {
  const auto entry = streams_.find(number);
  if (entry == streams_.end()) throw InvalidArgument("stream ", number, " is not open");
  return entry->second;
}

void Mesh::send(int peer, std::uint32_t number, Message message) {
  const bool is_sealed = message.is_sealed;
  const std::uint32_t checksum = is_sealed ? 0 : crc32c(message.bytes());
  const std::lock_guard lock(mutex_);
  throw_if_broken();
  Stream& stream = stream_of(number);
  Connection& connection = *connections_[peer];
  if (connection.has_ended) lose(peer, connection.end, Clock::now());
  const Header header{number, stream.n_sent[peer]++, message.n_bytes, stream.facts, is_sealed, checksum};
  connection.queue.push_back({pack_header(header), std::move(message)});
  if (connection.queue.size() == 1) connection.out = {Clock::now()};
  write(connection);
}

Message Mesh::receive(int peer, std::uint32_t number) {
  Lock lock(mutex_);
  auto& inbox = stream_of(number).inboxes[peer];
  if (inbox.empty()) read(*connections_[peer]);
  serve_until(lock, peer, [&] {
    if (inbox.empty() && connections_[peer]->has_ended) lose(peer, connections_[peer]->end, Clock::now());
    return !inbox.empty();
  });
  Message message = std::move(inbox.front().message);
  inbox.pop_front();
  return message;
}

Arrival Mesh::receive_any(std::uint32_t number, std::span<const int> peers) {
  Lock lock(mutex_);
  auto& inboxes = stream_of(number).inboxes;
  auto& waiting_since = streams_.at(number).waiting_since;
  const auto now = Clock::now();
  std::vector<bool> is_awaited(waiting_since.size(), false);
  for (const int peer : peers) is_awaited[peer] = true;
  // A peer is waited for from the first call that asks for it on, whoever else sends meanwhile.
  for (std::size_t peer = 0; peer < waiting_since.size(); ++peer)
    if (!is_awaited[peer])
      waiting_since[peer] = {};
    else if (waiting_since[peer] == Clock::time_point{})
      waiting_since[peer] = now;
  int found = -1;
  serve_until(
      lock, peers, [&](int peer) { return waiting_since[peer]; },
      [&] {
        for (const int peer : peers)
          if (!inboxes[peer].empty()) {
            found = peer;
            return true;
          }
        for (const int peer : peers)
          if (connections_[peer]->has_ended) lose(peer, connections_[peer]->end, Clock::now());
        return false;
      });
  waiting_since[found] = {};
  Arrival arrival = std::move(inboxes[found].front());
  inboxes[found].pop_front();
  return arrival;
}

void Mesh::wait_until_sent(int peer, std::size_t n_left) {
  Lock lock(mutex_);
  Connection& connection = *connections_[peer];
  serve_until(lock, peer, [&] { return connection.queue.size() <= n_left; });
}

void Mesh::wait_until_all_sent() {
  for (int peer = 0; peer < world_size_; ++peer) {
    {
      const std::lock_guard lock(mutex_);
      if (!connections_[peer]) continue;
    }
    wait_until_sent(peer, 0);
  }
}

// ---- connections

void Mesh::meet(Lock& lock, int peer) {
  throw_if_broken();
  if (connections_[peer]) return;
  if (endpoints_.empty()) throw InvalidArgument("this mesh has not been told where the other ranks are");
  if (peer > rank_) {  // the higher rank connects
    serve_until(lock, peer, [&] { return connections_[peer] != nullptr; });
    return;
  }
  const Endpoint endpoint = endpoints_[peer];
  lock.unlock();
  Descriptor socket = reach(peer, endpoint);
  lock.lock();
  throw_if_broken();
  if (!connections_[peer]) add(peer, std::move(socket));
}

void Mesh::add(int peer, Descriptor socket) {
  tune(socket, timeout_s_);
  auto connection = std::make_unique<Connection>();
  connection->socket = std::move(socket);
  connection->peer = peer;
  connection->in.last = connection->out.last = connection->free_since = Clock::now();
  connections_[peer] = std::move(connection);
  watch(*connections_[peer]);
  wake();
}

void Mesh::watch(Connection& connection) {
  std::uint32_t wanted = 0;
  if (!connection.is_parked) wanted |= EPOLLIN;
  if (!connection.queue.empty()) wanted |= EPOLLOUT;
  if (connection.has_ended || (connection.is_parked && connection.is_hung)) wanted = 0;
  if (wanted == connection.watched_for && (connection.is_watched || wanted == 0)) return;
  epoll_event event{};
  event.events = wanted;
  event.data.u64 = static_cast<std::uint64_t>(connection.peer);
  // Nothing wanted is not watched at all: an end would be reported again and again.
  const int operation = wanted == 0 ? EPOLL_CTL_DEL : connection.is_watched ? EPOLL_CTL_MOD : EPOLL_CTL_ADD;
  if (operation != EPOLL_CTL_DEL || connection.is_watched)
    if (epoll_ctl(epoll_.get(), operation, connection.socket.get(), &event) != 0)
      throw std::system_error(errno, std::generic_category(), "epoll_ctl");
  connection.is_watched = wanted != 0;
  connection.watched_for = wanted;
}

void Mesh::end(Connection& connection, const std::string& why) {
  if (connection.has_ended) return;
  connection.has_ended = true;
  connection.end = why;
  watch(connection);
  if (!connection.queue.empty()) lose(connection.peer, why, Clock::now());
}

void Mesh::begin_message(Connection& connection) {
  connection.n_header = 0;
  connection.header = unpack_header(connection.raw_header, connection.peer);
  const auto stream = streams_.find(connection.header.stream);
  if (stream == streams_.end())
    connection.is_parked = true;
  else
    begin_body(connection, stream->second);
}

void Mesh::begin_body(Connection& connection, Stream& stream) {
  const Header& header = connection.header;
  compare_facts(stream.facts, header.facts, rank_, connection.peer);
  if (header.number != stream.n_arrived[connection.peer] || header.n_bytes > stream.max_bytes)
    throw CorruptMessage("rank ", connection.peer, " announced message ", header.number, " of ", header.n_bytes,
                         " bytes, where message ", stream.n_arrived[connection.peer], " of at most ", stream.max_bytes,
                         " was due (bucket ", stream.facts.bucket, ", step ", stream.facts.step,
                         "); check that all ranks run the same gradwire, and the host's memory and network");
  // Streams have few sizes of their own, so blocks of the largest one are used again whatever comes.
  connection.message = pool_.take(static_cast<std::size_t>(header.n_bytes));
  connection.n_body = 0;
  if (header.n_bytes == 0) deliver(connection, stream);
}

void Mesh::deliver(Connection& connection, Stream& stream) {
  const auto now = Clock::now();
  const Header& header = connection.header;
  connection.message->is_sealed = header.is_sealed;
  if (!header.is_sealed && crc32c(connection.message->bytes()) != header.checksum)
    throw CorruptMessage("rank ", connection.peer, " sent message ", header.number, " (bucket ", stream.facts.bucket,
                         ", step ", stream.facts.step,
                         "), whose checksum does not match: bytes were changed on the way; check the host's memory and "
                         "network");
  const std::chrono::nanoseconds duration = now - connection.free_since;
  connection.free_since = now;
  ++stream.n_arrived[connection.peer];
  stream.inboxes[connection.peer].push_back({connection.peer, std::move(*connection.message), duration.count()});
  connection.message.reset();
}

void Mesh::read(Connection& connection) {
  while (!connection.is_parked && !connection.has_ended) {
    // The rest of the body, and in the same call the header behind it.
    iovec parts[2];
    int n_parts = 0;
    std::size_t n_asked = 0, n_rest = 0;
    if (connection.message) {
      n_rest = connection.message->n_bytes - connection.n_body;
      parts[n_parts++] = {connection.message->block->data() + connection.n_body, n_rest};
      n_asked += n_rest;
    }
    parts[n_parts++] = {connection.raw_header.data() + connection.n_header, kHeaderBytes - connection.n_header};
    n_asked += kHeaderBytes - connection.n_header;
    const ssize_t n = readv(connection.socket.get(), parts, n_parts);
    if (n < 0) {
      if (errno == EINTR) continue;
      if (errno != EAGAIN) end(connection, "closed the connection (" + describe(errno) + ")");
      return;
    }
    if (n == 0) return end(connection, "closed the connection");
    const auto now = Clock::now();
    // Where nothing had come, the first bytes of a message are on their way since about now.
    if (!connection.message && connection.n_header == 0 && static_cast<std::size_t>(n) <= kHeaderBytes)
      connection.free_since = now;
    const std::size_t n_of_body = std::min<std::size_t>(n, n_rest);
    connection.n_body += n_of_body;
    connection.n_header += static_cast<std::size_t>(n) - n_of_body;
    connection.in.add(static_cast<std::size_t>(n),
                      (n_of_body > 0 && n_of_body == n_rest) || connection.n_header == kHeaderBytes);
    if (connection.message && connection.n_body == connection.message->n_bytes) {
      const auto stream = streams_.find(connection.header.stream);
      if (stream != streams_.end())
        deliver(connection, stream->second);
      else
        connection.message.reset();  // its stream was closed meanwhile: an exchange that failed
    }
    if (!connection.message && connection.n_header == kHeaderBytes) begin_message(connection);
    if (static_cast<std::size_t>(n) < n_asked) break;
  }
  watch(connection);
}

void Mesh::write(Connection& connection) {
  while (!connection.queue.empty()) {
    iovec parts[2 * kMessagesPerCall];
    std::size_t n_parts = 0, n_asked = 0;
    for (std::size_t i = 0; i < std::min(kMessagesPerCall, connection.queue.size()); ++i) {
      Outgoing& outgoing = connection.queue[i];
      const auto part = [&](const std::uint8_t* data, std::size_t size, std::size_t n_done) {
        if (n_done >= size) return;
        parts[n_parts++] = {const_cast<std::uint8_t*>(data) + n_done, size - n_done};
        n_asked += size - n_done;
      };
      const std::size_t n_sent = outgoing.n_sent;
      part(outgoing.header.data(), kHeaderBytes, n_sent);
      part(outgoing.message.bytes().data(), outgoing.message.n_bytes,
           n_sent < kHeaderBytes ? 0 : n_sent - kHeaderBytes);
    }
    msghdr call{};
    call.msg_iov = parts;
    call.msg_iovlen = n_parts;
    const ssize_t n = sendmsg(connection.socket.get(), &call, MSG_NOSIGNAL);
    if (n < 0) {
      if (errno == EINTR) continue;
      if (errno != EAGAIN) return end(connection, "closed the connection (" + describe(errno) + ")");
      break;
    }
    bool is_whole = false;
    for (std::size_t left = static_cast<std::size_t>(n); left > 0;) {
      Outgoing& outgoing = connection.queue.front();
      const std::size_t rest = kHeaderBytes + outgoing.message.n_bytes - outgoing.n_sent;
      const std::size_t taken = std::min(left, rest);
      outgoing.n_sent += taken;
      left -= taken;
      if (taken == rest) connection.queue.pop_front();
      is_whole |= taken == rest;
    }
    connection.out.add(static_cast<std::size_t>(n), is_whole);
    if (static_cast<std::size_t>(n) < n_asked) break;
  }
  watch(connection);
}

// ---- the loop

template <class Predicate>
void Mesh::serve_until(Lock& lock, int peer, Predicate is_done) {
  const std::array<int, 1> peers = {peer};
  const auto started = Clock::now();
  serve_until(lock, peers, [started](int) { return started; }, is_done);
}

template <class Since, class Predicate>
void Mesh::serve_until(Lock& lock, std::span<const int> peers, Since waiting_since, Predicate is_done) {
  for (;;) {
    throw_if_broken();
    if (is_done()) return;
    auto deadline = Clock::time_point::max();
    for (const int peer : peers) {
      auto since = waiting_since(peer);
      if (const auto& connection = connections_[peer])
        since = std::max({since, connection->in.last, connection->queue.empty() ? since : connection->out.last});
      if (Clock::now() >= since + seconds(timeout_s_)) lose(peer, "did not answer", waiting_since(peer));
      deadline = std::min(deadline, since + seconds(timeout_s_));
    }
    if (!is_serving_) {
      serve_once(lock, deadline);
    } else {
      ++n_waiting_;
      if (deadline == Clock::time_point::max())
        changed_->wait(lock);
      else
        changed_->wait_until(lock, deadline);
      --n_waiting_;
    }
  }
}

void Mesh::serve_once(Lock& lock, Clock::time_point deadline) {
  epoll_event events[kEventsPerCall];
  is_serving_ = true;
  lock.unlock();
  const int timeout_ms = deadline == Clock::time_point::max() ? -1 : milliseconds_until(deadline);
  const int n = epoll_wait(epoll_.get(), events, kEventsPerCall, timeout_ms);
  const int error = errno;
  lock.lock();
  is_serving_ = false;
  // However this ends, one of those who wait for it takes over.
  struct Notify {
    Mesh& mesh;
    ~Notify() {
      if (mesh.n_waiting_ > 0) mesh.changed_->notify_all();
    }
  } const notify{*this};
  if (n < 0) {
    if (error == EINTR) return;
    throw std::system_error(error, std::generic_category(), "epoll_wait");
  }
  for (int i = 0; i < n; ++i) {
    if (events[i].data.u64 == kWakeUp) {
      std::uint64_t count;
      [[maybe_unused]] const ssize_t drained = ::read(wake_.get(), &count, sizeof count);
      continue;
    }
    const auto& connection = connections_[events[i].data.u64];
    if (!connection) continue;
    if (events[i].events & EPOLLOUT) write(*connection);
    if (events[i].events & (EPOLLIN | EPOLLHUP | EPOLLERR)) {
      if (connection->is_parked) {
        connection->is_hung = true;
        watch(*connection);
      } else {
        read(*connection);
      }
    }
  }
}

void Mesh::wake() {
  const std::uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = ::write(wake_.get(), &one, sizeof one);
  if (n_waiting_ > 0) changed_->notify_all();
}

// How a mesh begins and ends: its door and those of others, a loss, a break, a fork of the process.

namespace {

// All meshes of this process, for the fork handlers. Never destroyed: a child may fork while statics are taken down.
struct Registry {
  std::mutex mutex;
  std::set<Mesh*> meshes;
};
Registry& registry() {
  static Registry* const all = new Registry;
  return *all;
}

}  // namespace

// A child shares the parent's sockets: as long as it holds them, a peer does not see the parent's death. It closes
// them, and never uses them.
struct Mesh::Forked {
  static void before() {
    registry().mutex.lock();
    for (Mesh* mesh : registry().meshes) mesh->mutex_.lock();
  }
  static void in_parent() {
    for (Mesh* mesh : registry().meshes) mesh->mutex_.unlock();
    registry().mutex.unlock();
  }
  static void in_child() {
    for (Mesh* mesh : registry().meshes) {
      mesh->is_broken_ = true;
      static_cast<void>(mesh->changed_.release());
      for (auto& connection : mesh->connections_)
        if (connection) connection->socket.close();
      mesh->listener_.close();
      mesh->epoll_.close();
      mesh->wake_.close();
      if (mesh->doorkeeper_) {
        mesh->doorkeeper_->close_descriptors();
        mesh->doorkeeper_->abandon();
        static_cast<void>(mesh->doorkeeper_.release());
      }
      mesh->mutex_.unlock();
    }
    registry().meshes.clear();
    registry().mutex.unlock();
  }
};

Mesh::Mesh(int rank, int world_size, const std::string& host, double timeout_s)
    : rank_(rank),
      world_size_(world_size),
      timeout_s_(timeout_s),
      changed_(std::make_unique<std::condition_variable>()),
      epoll_(epoll_create1(EPOLL_CLOEXEC)),
      wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      connections_(static_cast<std::size_t>(world_size)) {
  if (!epoll_ || !wake_) throw std::system_error(errno, std::generic_category(), "epoll");
  endpoint_.host = host;
  listener_ = listen_at(host, endpoint_.port);
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.u64 = kWakeUp;
  if (epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, wake_.get(), &event) != 0)
    throw std::system_error(errno, std::generic_category(), "epoll_ctl");
  [[maybe_unused]] static const int once = pthread_atfork(Forked::before, Forked::in_parent, Forked::in_child);
  const std::lock_guard lock(registry().mutex);
  registry().meshes.insert(this);
}

Mesh::~Mesh() {
  {
    const std::lock_guard lock(registry().mutex);
    registry().meshes.erase(this);
  }
  shut();
}

void Mesh::join(std::vector<Endpoint> endpoints, const Secret& secret) {
  if (endpoints.size() != static_cast<std::size_t>(world_size_))
    throw InvalidArgument("a mesh needs the endpoint of every rank");
  const std::lock_guard lock(mutex_);
  endpoints_ = std::move(endpoints);
  secret_ = secret;
  doorkeeper_ = std::make_unique<Doorkeeper>(std::move(listener_), rank_, world_size_, secret,
                                             [this](int peer, Descriptor socket) {
                                               const std::lock_guard lock(mutex_);
                                               // A second connection of a rank is none of ours: the first one stays.
                                               if (!is_broken_ && !connections_[peer]) add(peer, std::move(socket));
                                             });
}

Descriptor Mesh::reach(int peer, const Endpoint& endpoint) {
  const auto started = Clock::now(), deadline = started + seconds(timeout_s_);
  while (true) {
    const auto came = Clock::now();
    Descriptor socket;
    try {
      socket = connect_to(endpoint, deadline);
    } catch (const std::system_error& error) {
      lose(peer, "did not take a connection at " + endpoint.host + " (" + error.code().message() + ")", started);
    }
    try {
      introduce(socket, rank_, peer, secret_, deadline);
      return socket;
    } catch (const PeerLost&) {
      // A process that was held up for longer than strangers may take was taken for one: it comes again.
      const auto now = Clock::now();
      if (now - came < kPatienceWithStrangers || now >= deadline) throw;
    }
  }
}

void Mesh::throw_if_broken() const {
  if (is_broken_) throw PeerLost("rank ", rank_, " has broken off its connections");
}

void Mesh::lose(int peer, const std::string& what, Clock::time_point started) const {
  const double waited_s = std::chrono::duration<double>(Clock::now() - started).count();
  char times[80];
  std::snprintf(times, sizeof times, "(waited %.1f s, timeout_s=%g)", waited_s, timeout_s_);
  const char* cure = waited_s >= timeout_s_ ? " If it was only slow, pass attach(..., timeout_s=) more." : "";
  const std::string whom = "rank " + std::to_string(peer);
  throw PeerLost("rank ", rank_, " lost ", whom, ", which ", what, " ", times, ". Look at the output of ", whom,
                 " for the cause, and restart from the last checkpoint.", cure);
}

void Mesh::break_off() {
  const std::lock_guard lock(mutex_);
  is_broken_ = true;
  for (auto& connection : connections_)
    if (connection && connection->socket) ::shutdown(connection->socket.get(), SHUT_RDWR);
  if (!changed_ || !wake_) return;  // in a forked child; shut before
  wake();
  changed_->notify_all();
}

void Mesh::shut() {
  std::unique_ptr<Doorkeeper> doorkeeper;
  {
    const std::lock_guard lock(mutex_);
    is_broken_ = true;
    doorkeeper = std::move(doorkeeper_);
  }
  doorkeeper.reset();  // not under the lock, which its thread may be waiting for
  const std::lock_guard lock(mutex_);
  listener_.close();
  epoll_.close();
  wake_.close();
  for (auto& connection : connections_) connection.reset();
  streams_.clear();
  pool_.clear();
}

}  // namespace gradwire::wire
