// How a mesh begins and ends: its door and those of others, a loss, a break, a fork of the process.
#include <pthread.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstdio>
#include <set>
#include <system_error>

#include "errors.hpp"
#include "wire/mesh.hpp"

namespace gradwire::wire {
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
  if (is_broken_) throw PeerLost("rank " + std::to_string(rank_) + " has broken off its connections");
}

void Mesh::lose(int peer, const std::string& what, Clock::time_point started) const {
  const double waited_s = std::chrono::duration<double>(Clock::now() - started).count();
  char times[80];
  std::snprintf(times, sizeof times, "(waited %.1f s, timeout_s=%g)", waited_s, timeout_s_);
  const char* cure = waited_s >= timeout_s_ ? " If it was only slow, pass attach(..., timeout_s=) more." : "";
  const std::string whom = "rank " + std::to_string(peer);
  throw PeerLost("rank " + std::to_string(rank_) + " lost " + whom + ", which " + what + " " + times +
                 ". Look at the output of " + whom + " for the cause, and restart from the last checkpoint." + cure);
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
