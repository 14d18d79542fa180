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
#include <future>
#include <iterator>
#include <set>
#include <system_error>

#include "checksum/crc32c.hpp"
#include "errors.hpp"

namespace gradwire::wire {
namespace {

constexpr std::size_t kMessagesPerCall = 8;
// Of several connections each takes so much at a time, and leaves the rest to whichever has room first.
constexpr std::size_t kConnectionBytes = 64 << 10;
// A lost connection is made anew so often, and for so long, by the next exchange.
constexpr std::chrono::seconds kRetryAfter{5}, kRetryFor{2};
constexpr int kEventsPerCall = 64;

// Of numbers that count up, and begin again at 0.
bool is_before(std::uint32_t a, std::uint32_t b) { return static_cast<std::int32_t>(a - b) < 0; }

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
  stream.early.resize(n);
  stream.waiting_since.resize(n);
  if (is_before(newest_stream_, number)) newest_stream_ = number;
  most_bytes_ = std::max(most_bytes_, max_bytes);
  for (auto& link : links_) {
    if (!link) continue;
    for (auto& connection : link->connections)
      if (connection->is_parked && connection->header.stream == number) {
        connection->is_parked = false;
        begin_body(*connection, stream);
        watch(*connection);
      }
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
  Link& link = *links_[peer];
  if (link.has_ended) lose(peer, link.end, Clock::now());
  const Header header{number, stream.n_sent[peer]++, message.n_bytes, stream.facts, is_sealed, checksum};
  if (link.n_unsent() == 0) link.out = {Clock::now()};
  link.queue.push_back({pack_header(header), std::move(message)});
  send_queued(link);
}

Message Mesh::receive(int peer, std::uint32_t number) {
  Lock lock(mutex_);
  auto& inbox = stream_of(number).inboxes[peer];
  if (inbox.empty())
    for (auto& connection : links_[peer]->connections) read(*connection);
  serve_until(lock, peer, [&] {
    if (inbox.empty() && links_[peer]->has_ended) lose(peer, links_[peer]->end, Clock::now());
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
          if (links_[peer]->has_ended) lose(peer, links_[peer]->end, Clock::now());
        return false;
      });
  waiting_since[found] = {};
  Arrival arrival = std::move(inboxes[found].front());
  inboxes[found].pop_front();
  return arrival;
}

void Mesh::wait_until_sent(int peer, std::size_t n_left) {
  Lock lock(mutex_);
  const Link& link = *links_[peer];
  serve_until(lock, peer, [&] { return link.n_unsent() <= n_left; });
}

void Mesh::wait_until_all_sent() {
  for (int peer = 0; peer < world_size_; ++peer) {
    {
      const std::lock_guard lock(mutex_);
      if (!links_[peer]) continue;
    }
    wait_until_sent(peer, 0);
  }
}

// ---- links and connections

std::size_t Mesh::Link::n_unsent() const {
  std::size_t n = queue.size();
  for (const auto& connection : connections) n += connection->queue.size();
  return n;
}

std::size_t Mesh::Link::n_alive() const {
  return static_cast<std::size_t>(std::count_if(connections.begin(), connections.end(),
                                                [](const auto& connection) { return !connection->has_stopped; }));
}

std::size_t Mesh::n_connections() {
  const std::lock_guard lock(mutex_);
  std::size_t n = 0;
  for (const auto& link : links_)
    if (link) n = std::max(n, link->n_alive());
  return n;
}

void Mesh::meet(Lock& lock, int peer) {
  throw_if_broken();
  if (peer > rank_) {  // the higher rank connects
    if (!links_[peer] && endpoints_.empty())
      throw InvalidArgument("this mesh has not been told where the other ranks are");
    serve_until(lock, peer, [&] { return links_[peer] != nullptr; });
    return;
  }
  if (const auto& link = links_[peer]) {
    if (link->has_ended || link->n_alive() >= link->n_wanted || Clock::now() < link->tried + kRetryAfter) return;
    link->tried = Clock::now();
    return add_connections(lock, peer, link->n_wanted - link->n_alive());
  }
  if (endpoints_.empty()) throw InvalidArgument("this mesh has not been told where the other ranks are");
  const Endpoints endpoints = endpoints_[peer];
  lock.unlock();
  Descriptor socket = reach(peer, endpoints, 0, seconds(timeout_s_));
  lock.lock();
  throw_if_broken();
  const std::size_t n_wanted = std::max({n_connections_for(socket), own_.size(), endpoints.size()});
  add(peer, std::move(socket));
  Link& link = *links_[peer];
  link.n_wanted = n_wanted;
  if (link.n_wanted > 1) add_connections(lock, peer, link.n_wanted - 1);
}

// One of "bbr" fills a line that loses packets, but for its window; more than that take turns at what there is.
std::size_t Mesh::n_connections_for(const Descriptor& socket) const {
  const auto trip = round_trip(socket);
  if (lines_.n_connections > 0 || trip < kLongTrip) return std::max<std::size_t>(1, lines_.n_connections);
  if (!lines_.congestion.empty() || !set_congestion(socket, "bbr")) return kConnections;
  return std::clamp<std::size_t>(static_cast<std::size_t>((trip + kTripOfOne / 2) / kTripOfOne), 2, kConnections);
}

// All at once, as each takes three round trips; the link does without those that fail.
void Mesh::add_connections(Lock& lock, int peer, std::size_t n) {
  const Endpoints endpoints = endpoints_[peer];
  const std::size_t first = links_[peer]->connections.size();
  lock.unlock();
  std::vector<std::future<Descriptor>> sockets;
  const Clock::duration patience = std::min<Clock::duration>(kRetryFor, seconds(timeout_s_ / 4));
  try {
    for (std::size_t i = 0; i < n; ++i)
      sockets.push_back(std::async(std::launch::async, [&, i] { return reach(peer, endpoints, first + i, patience); }));
  } catch (const std::system_error&) {  // no more threads
  }
  std::vector<Descriptor> made;
  for (auto& socket : sockets) try {
      made.push_back(socket.get());
    } catch (const std::exception&) {  // an interface from which there is no way, a door that is full
    }
  lock.lock();
  throw_if_broken();
  for (Descriptor& socket : made) add(peer, std::move(socket));
}

void Mesh::add(int peer, Descriptor socket) {
  auto& link = links_[peer];
  const bool is_long = round_trip(socket) >= kLongTrip;
  // The first one waits for a peer that is slow; others that nobody answers end early enough for it to take over.
  tune(socket, link ? timeout_s_ / 2 : timeout_s_);
  if (!lines_.congestion.empty() || is_long)
    set_congestion(socket, lines_.congestion.empty() ? "bbr" : lines_.congestion);
  if (!link) {
    link = std::make_unique<Link>();
    link->peer = peer;
    link->in.last = link->out.last = link->free_since = Clock::now();
  }
  auto connection = std::make_unique<Connection>();
  connection->link = link.get();
  connection->index = link->connections.size();
  connection->socket = std::move(socket);
  link->connections.push_back(std::move(connection));
  watch(*link->connections.back());
  wake();
}

void Mesh::watch(Connection& connection) {
  std::uint32_t wanted = 0;
  if (!connection.is_parked) wanted |= EPOLLIN;
  if (!connection.has_stopped && (!connection.queue.empty() || !connection.link->queue.empty())) wanted |= EPOLLOUT;
  if (connection.has_ended || (connection.is_parked && connection.is_hung)) wanted = 0;
  if (wanted == connection.watched_for && (connection.is_watched || wanted == 0)) return;
  epoll_event event{};
  event.events = wanted;
  event.data.u64 = connection.index << 32 | static_cast<std::uint64_t>(connection.link->peer);
  // Nothing wanted is not watched at all: an end would be reported again and again.
  const int operation = wanted == 0 ? EPOLL_CTL_DEL : connection.is_watched ? EPOLL_CTL_MOD : EPOLL_CTL_ADD;
  if (operation != EPOLL_CTL_DEL || connection.is_watched)
    if (epoll_ctl(epoll_.get(), operation, connection.socket.get(), &event) != 0)
      throw std::system_error(errno, std::generic_category(), "epoll_ctl");
  connection.is_watched = wanted != 0;
  connection.watched_for = wanted;
}

// may_have_more: of what the peer has sent; a link of several connections still reads it then.
void Mesh::end(Connection& connection, const std::string& why, bool may_have_more) {
  Link& link = *connection.link;
  if (connection.has_ended || (connection.has_stopped && may_have_more)) return;
  forget_acknowledged(connection);
  connection.has_stopped = true;
  connection.has_ended = !may_have_more || link.has_one_connection();
  // Others take what the peer may not have got. What it has got, it drops the second time.
  auto& rest = connection.unacknowledged;
  std::move(connection.queue.begin(), connection.queue.end(), std::back_inserter(rest));
  for (Outgoing& outgoing : rest) outgoing.n_sent = 0;
  link.queue.insert(link.queue.begin(), std::move_iterator(rest.begin()), std::move_iterator(rest.end()));
  connection.queue.clear();
  rest.clear();
  watch(connection);
  if (connection.has_ended) {  // what was begun comes again
    connection.message.reset();
    connection.n_header = 0;
  }
  if (link.n_alive() > 0) {
    if (connection.has_ended) connection.socket.close();
    return send_queued(link);
  }
  link.has_ended =
      std::all_of(link.connections.begin(), link.connections.end(), [](const auto& one) { return one->has_ended; });
  link.end = why;
  if (!link.queue.empty()) lose(link.peer, why, Clock::now());
}

void Mesh::begin_message(Connection& connection) {
  const Link& link = *connection.link;
  connection.n_header = 0;
  connection.header = unpack_header(connection.raw_header, link.peer);
  const Header& header = connection.header;
  const auto stream = streams_.find(header.stream);
  connection.is_repeated = !link.has_one_connection() && header.n_bytes <= most_bytes_ &&
                           (stream == streams_.end() ? is_before(header.stream, newest_stream_)
                                                     : stream->second.has(link.peer, header.number));
  if (connection.is_repeated) {
    connection.n_body = 0;
    if (header.n_bytes > 0) connection.message = pool_.take(static_cast<std::size_t>(header.n_bytes));
  } else if (stream == streams_.end()) {
    connection.is_parked = true;
  } else {
    begin_body(connection, stream->second);
  }
}

void Mesh::begin_body(Connection& connection, Stream& stream) {
  const Header& header = connection.header;
  const int peer = connection.link->peer;
  compare_facts(stream.facts, header.facts, rank_, peer);
  const std::uint32_t due = stream.n_arrived[peer];
  const bool is_due = connection.link->has_one_connection() ? header.number == due : !stream.has(peer, header.number);
  if (!is_due || header.n_bytes > stream.max_bytes)
    throw CorruptMessage("rank ", peer, " announced message ", header.number, " of ", header.n_bytes,
                         " bytes, where message ", due, " of at most ", stream.max_bytes, " was due (bucket ",
                         stream.facts.bucket, ", step ", stream.facts.step,
                         "); check that all ranks run the same gradwire, and the host's memory and network");
  // Streams have few sizes of their own, so blocks of the largest one are used again whatever comes.
  connection.message = pool_.take(static_cast<std::size_t>(header.n_bytes));
  connection.n_body = 0;
  if (header.n_bytes == 0) deliver(connection, stream);
}

void Mesh::deliver(Connection& connection, Stream& stream) {
  const auto now = Clock::now();
  const Header& header = connection.header;
  Link& link = *connection.link;
  connection.message->is_sealed = header.is_sealed;
  if (!header.is_sealed && crc32c(connection.message->bytes()) != header.checksum)
    throw CorruptMessage("rank ", link.peer, " sent message ", header.number, " (bucket ", stream.facts.bucket,
                         ", step ", stream.facts.step,
                         "), whose checksum does not match: bytes were changed on the way; check the host's memory and "
                         "network");
  const std::chrono::nanoseconds duration = now - link.free_since;
  link.free_since = now;
  auto& early = stream.early[link.peer];
  auto& inbox = stream.inboxes[link.peer];
  if (header.number == stream.n_arrived[link.peer]) {
    ++stream.n_arrived[link.peer];
    inbox.push_back({link.peer, std::move(*connection.message), duration.count()});
  } else if (!stream.has(link.peer, header.number))
    early[header.number] = {link.peer, std::move(*connection.message), duration.count()};
  connection.message.reset();
  for (auto next = early.begin(); next != early.end() && next->first == stream.n_arrived[link.peer];
       next = early.erase(next)) {
    ++stream.n_arrived[link.peer];
    inbox.push_back(std::move(next->second));
  }
}

void Mesh::read(Connection& connection) {
  Link& link = *connection.link;
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
    const auto is_idle = [](const auto& other) { return !other->message && other->n_header == 0; };
    if (static_cast<std::size_t>(n) <= kHeaderBytes &&
        std::all_of(link.connections.begin(), link.connections.end(), is_idle))
      link.free_since = now;
    const std::size_t n_of_body = std::min<std::size_t>(n, n_rest);
    connection.n_body += n_of_body;
    connection.n_header += static_cast<std::size_t>(n) - n_of_body;
    link.in.add(static_cast<std::size_t>(n),
                (n_of_body > 0 && n_of_body == n_rest) || connection.n_header == kHeaderBytes);
    if (connection.message && connection.n_body == connection.message->n_bytes) {
      const auto stream = streams_.find(connection.header.stream);
      if (stream != streams_.end() && !connection.is_repeated)
        deliver(connection, stream->second);
      else
        connection.message.reset();  // its stream was closed meanwhile: an exchange that failed
    }
    if (!connection.message && connection.n_header == kHeaderBytes) begin_message(connection);
    if (static_cast<std::size_t>(n) < n_asked) break;
  }
  watch(connection);
}

// Connections take turns at being the first to be asked.
void Mesh::send_queued(Link& link) {
  for (std::size_t i = 0; i < link.connections.size() && !link.queue.empty(); ++i) {
    Connection& connection = *link.connections[link.next_connection++ % link.connections.size()];
    if (!connection.has_stopped && (link.has_one_connection() || !(connection.watched_for & EPOLLOUT)))
      write(connection);
  }
}

void Mesh::write(Connection& connection) {
  Link& link = *connection.link;
  const bool is_alone = link.has_one_connection();
  for (;;) {
    std::size_t n_taken = 0;
    for (const Outgoing& outgoing : connection.queue)
      n_taken += kHeaderBytes + outgoing.message.n_bytes - outgoing.n_sent;
    while (!link.queue.empty() && connection.queue.size() < kMessagesPerCall &&
           (is_alone || n_taken < kConnectionBytes)) {
      n_taken += kHeaderBytes + link.queue.front().message.n_bytes;
      connection.queue.push_back(std::move(link.queue.front()));
      link.queue.pop_front();
    }
    if (connection.queue.empty()) break;
    iovec parts[2 * kMessagesPerCall];
    std::size_t n_parts = 0, n_asked = 0;
    for (Outgoing& outgoing : connection.queue) {
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
      if (errno != EAGAIN) return end(connection, "closed the connection (" + describe(errno) + ")", true);
      break;
    }
    bool is_whole = false;
    for (std::size_t left = static_cast<std::size_t>(n); left > 0;) {
      Outgoing& outgoing = connection.queue.front();
      const std::size_t rest = kHeaderBytes + outgoing.message.n_bytes - outgoing.n_sent;
      const std::size_t taken = std::min(left, rest);
      outgoing.n_sent += taken;
      left -= taken;
      if (taken < rest) continue;
      is_whole = true;
      if (!is_alone) connection.unacknowledged.push_back(std::move(outgoing));
      connection.queue.pop_front();
    }
    link.out.add(static_cast<std::size_t>(n), is_whole);
    if (static_cast<std::size_t>(n) < n_asked) break;
  }
  if (!is_alone) forget_acknowledged(connection);
  watch(connection);
}

// Lets go of what is with the peer's kernel, which hands it over whatever becomes of the connection.
void Mesh::forget_acknowledged(Connection& connection) {
  if (connection.unacknowledged.empty()) return;
  std::size_t n_behind = connection.queue.empty() ? 0 : connection.queue.front().n_sent;
  for (const Outgoing& outgoing : connection.unacknowledged) n_behind += outgoing.n_sent;
  const std::size_t n_missing = n_unacknowledged(connection.socket);
  while (!connection.unacknowledged.empty()) {
    n_behind -= connection.unacknowledged.front().n_sent;  // what was written after it
    if (n_missing > n_behind) break;
    connection.unacknowledged.pop_front();
  }
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
      if (const auto& link = links_[peer])
        since = std::max({since, link->in.last, link->n_unsent() == 0 ? since : link->out.last});
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
    const auto& link = links_[events[i].data.u64 & UINT32_MAX];
    if (!link) continue;
    Connection& connection = *link->connections[events[i].data.u64 >> 32];
    if ((events[i].events & EPOLLOUT) && !connection.has_stopped) write(connection);
    if (events[i].events & (EPOLLIN | EPOLLHUP | EPOLLERR)) {
      if (connection.is_parked) {
        connection.is_hung = true;
        watch(connection);
      } else {
        read(connection);
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
      for (auto& link : mesh->links_)
        if (link)
          for (auto& connection : link->connections) connection->socket.close();
      mesh->listeners_.clear();
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

Mesh::Mesh(int rank, int world_size, const std::vector<std::string>& hosts, double timeout_s, const Lines& lines)
    : rank_(rank),
      world_size_(world_size),
      timeout_s_(timeout_s),
      lines_(lines),
      changed_(std::make_unique<std::condition_variable>()),
      epoll_(epoll_create1(EPOLL_CLOEXEC)),
      wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      links_(static_cast<std::size_t>(world_size)) {
  if (!epoll_ || !wake_) throw std::system_error(errno, std::generic_category(), "epoll");
  if (hosts.empty() || lines.n_connections > kMostConnections)
    throw InvalidArgument("a mesh needs a host, and at most ", kMostConnections, " connections");
  for (const std::string& host : hosts) {
    own_.push_back({host});
    listeners_.push_back(listen_at(host, own_.back().port));
  }
  if (!lines.congestion.empty() && !set_congestion(listeners_[0], lines.congestion))
    throw InvalidArgument(
        "this kernel lets no connection have the congestion control '", lines.congestion,
        "': set GRADWIRE_CONGESTION to one of /proc/sys/net/ipv4/tcp_allowed_congestion_control, or to nothing");
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

void Mesh::join(std::vector<Endpoints> endpoints, const Secret& secret) {
  if (endpoints.size() != static_cast<std::size_t>(world_size_))
    throw InvalidArgument("a mesh needs the endpoint of every rank");
  const std::lock_guard lock(mutex_);
  endpoints_ = std::move(endpoints);
  secret_ = secret;
  doorkeeper_ = std::make_unique<Doorkeeper>(std::move(listeners_), rank_, world_size_, secret,
                                             [this](int peer, Descriptor socket, ConstBytes answer) {
                                               // With the lock held: a peer that has its answer may use the connection.
                                               const std::lock_guard lock(mutex_);
                                               const auto& link = links_[peer];
                                               if (is_broken_ || (link && link->n_alive() >= kMostConnections)) return;
                                               if (send_at_once(socket, answer)) add(peer, std::move(socket));
                                             });
}

Descriptor Mesh::reach(int peer, const Endpoints& endpoints, std::size_t index, Clock::duration patience) {
  const auto started = Clock::now(), deadline = started + patience;
  const Endpoint& endpoint = endpoints[index % endpoints.size()];
  const std::string source = own_.size() > 1 ? own_[index % own_.size()].host : "";
  while (true) {
    const auto came = Clock::now();
    Descriptor socket;
    try {
      socket = connect_to(endpoint, deadline, source);
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
  for (auto& link : links_)
    if (link)
      for (auto& connection : link->connections)
        if (connection->socket) ::shutdown(connection->socket.get(), SHUT_RDWR);
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
  listeners_.clear();
  epoll_.close();
  wake_.close();
  for (auto& link : links_) link.reset();
  streams_.clear();
  pool_.clear();
}

}  // namespace gradwire::wire
