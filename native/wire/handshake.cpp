#include "wire/handshake.hpp"

#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>
#include <system_error>
#include <utility>

#include "errors.hpp"
#include "wire/message.hpp"

namespace gradwire::wire {
namespace {

constexpr std::uint32_t kMagic = 0x31485747;  // "GWH1"
constexpr std::size_t kNonceBytes = 16;
constexpr std::size_t kMaxVisitors = 256;

using Nonce = std::array<std::uint8_t, kNonceBytes>;

// Who is connected to speaks first.
struct Challenge {
  std::uint32_t magic = kMagic;
  std::uint32_t version = kVersion;
  Nonce nonce{};
};
struct Proof {
  std::uint32_t magic = kMagic;
  std::uint32_t version = kVersion;
  std::uint32_t rank = 0, peer = 0;  // who connects, and to whom
  Nonce nonce{};
  Digest digest{};
};
static_assert(sizeof(Challenge) == 24 && sizeof(Proof) == 64);

// Bound to direction, ranks and both nonces: no proof serves twice, or for anybody else.
Digest prove(const Secret& secret, char direction, std::uint32_t rank, std::uint32_t peer, const Nonce& connected,
             const Nonce& connecting) {
  std::array<std::uint8_t, 1 + 8 + 2 * kNonceBytes> text;
  text[0] = static_cast<std::uint8_t>(direction);
  std::memcpy(text.data() + 1, &rank, 4);
  std::memcpy(text.data() + 5, &peer, 4);
  std::memcpy(text.data() + 9, connected.data(), kNonceBytes);
  std::memcpy(text.data() + 9 + kNonceBytes, connecting.data(), kNonceBytes);
  return hmac_sha256(secret, text);
}

}  // namespace

void fill_random(std::span<std::uint8_t> out) {
  std::size_t at = 0;
  while (at < out.size()) {
    const ssize_t n = getrandom(out.data() + at, out.size() - at, 0);
    if (n > 0)
      at += static_cast<std::size_t>(n);
    else if (errno != EINTR)
      throw std::system_error(errno, std::generic_category(), "getrandom");
  }
}

void introduce(const Descriptor& connection, int rank, int peer, const Secret& secret, Clock::time_point deadline) {
  const std::string who = "rank " + std::to_string(peer);
  try {
    Challenge challenge;
    receive_all(connection, &challenge, sizeof challenge, deadline);
    if (challenge.magic != kMagic) throw PeerLost("what listens at the address of " + who + " is no rank of gradwire");
    if (challenge.version != kVersion)
      throw IncompatibleVersion(who + " speaks version " + std::to_string(challenge.version) + ", this build " +
                                std::to_string(kVersion) + "; install the same gradwire on every host");
    Proof proof;
    proof.rank = static_cast<std::uint32_t>(rank);
    proof.peer = static_cast<std::uint32_t>(peer);
    fill_random(proof.nonce);
    proof.digest = prove(secret, 'c', proof.rank, proof.peer, challenge.nonce, proof.nonce);
    send_all(connection, &proof, sizeof proof, deadline);
    Digest answer;
    receive_all(connection, answer.data(), answer.size(), deadline);
    if (!equal_digests(answer, prove(secret, 'a', proof.rank, proof.peer, challenge.nonce, proof.nonce)))
      throw PeerLost("what listens at the address of " + who + " does not know this group's secret");
  } catch (const std::system_error& error) {
    throw PeerLost("rank " + std::to_string(rank) + " lost " + who + " while they introduced themselves (" +
                   error.code().message() +
                   "). Look at its output for the cause, and restart from the last checkpoint");
  }
}

struct Doorkeeper::Visitor {
  Descriptor connection;
  Clock::time_point deadline;
  Nonce nonce;
  Proof proof;
  std::size_t n_heard = 0;
};

Doorkeeper::Doorkeeper(Descriptor listener, int rank, int world_size, const Secret& secret, Welcome welcome)
    : listener_(std::move(listener)),
      stop_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      rank_(rank),
      world_size_(world_size),
      secret_(secret),
      welcome_(std::move(welcome)) {
  if (!stop_) throw std::system_error(errno, std::generic_category(), "eventfd");
  // Signals are for the threads of the program around: none may end here.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  thread_ = std::thread([this] { serve(); });
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

Doorkeeper::~Doorkeeper() {
  if (!thread_.joinable()) return;
  const std::uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = write(stop_.get(), &one, sizeof one);
  thread_.join();
}

void Doorkeeper::abandon() {
  if (thread_.joinable()) thread_.detach();
}

void Doorkeeper::close_descriptors() {
  listener_.close();
  stop_.close();
}

void Doorkeeper::serve() {
  std::vector<pollfd> entries;
  for (;;) {
    entries.clear();
    entries.push_back({stop_.get(), POLLIN, 0});
    entries.push_back({visitors_.size() < kMaxVisitors ? listener_.get() : -1, POLLIN, 0});
    auto deadline = Clock::time_point::max();
    for (const Visitor& visitor : visitors_) {
      entries.push_back({visitor.connection.get(), POLLIN, 0});
      deadline = std::min(deadline, visitor.deadline);
    }
    const int n = poll(entries.data(), entries.size(), visitors_.empty() ? -1 : milliseconds_until(deadline));
    if (n < 0 && errno != EINTR) return;
    if (entries[0].revents != 0) return;
    std::size_t index = 2;
    const auto now = Clock::now();
    for (auto visitor = visitors_.begin(); visitor != visitors_.end(); ++index) {
      // Heard before the clock is asked: where this thread came late, what lies here did not.
      const bool was_heard = n > 0 && entries[index].revents != 0;
      const bool stays = (!was_heard || hear(*visitor)) && now < visitor->deadline;
      visitor = stays ? std::next(visitor) : visitors_.erase(visitor);
    }
    if (n > 0 && entries[1].revents != 0) admit();
  }
}

void Doorkeeper::admit() {
  Descriptor connection(accept4(listener_.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
  if (!connection) {
    // Out of descriptors, say: no reason to spin.
    if (errno != EAGAIN && errno != ECONNABORTED && errno != EINTR)
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
    return;
  }
  Challenge challenge;
  fill_random(challenge.nonce);
  // It fits into what the kernel holds for a new connection; a visitor for whom it does not is none of ours.
  if (send(connection.get(), &challenge, sizeof challenge, MSG_NOSIGNAL) != sizeof challenge) return;
  visitors_.push_back({std::move(connection), Clock::now() + kPatienceWithStrangers, challenge.nonce, {}, 0});
}

bool Doorkeeper::hear(Visitor& visitor) {
  auto* const to = reinterpret_cast<std::uint8_t*>(&visitor.proof);
  const ssize_t n = recv(visitor.connection.get(), to + visitor.n_heard, sizeof(Proof) - visitor.n_heard, 0);
  if (n < 0) return errno == EAGAIN || errno == EINTR;
  if (n == 0) return false;
  visitor.n_heard += static_cast<std::size_t>(n);
  const Proof& proof = visitor.proof;
  if (visitor.n_heard >= 4 && proof.magic != kMagic) return false;
  if (visitor.n_heard < sizeof(Proof)) return true;
  const bool is_peer =
      proof.version == kVersion && proof.rank < static_cast<std::uint32_t>(world_size_) &&
      proof.peer == static_cast<std::uint32_t>(rank_) && proof.rank != proof.peer &&
      equal_digests(proof.digest, prove(secret_, 'c', proof.rank, proof.peer, visitor.nonce, proof.nonce));
  if (!is_peer) return false;
  const Digest answer = prove(secret_, 'a', proof.rank, proof.peer, visitor.nonce, proof.nonce);
  if (send(visitor.connection.get(), answer.data(), answer.size(), MSG_NOSIGNAL) == static_cast<ssize_t>(answer.size()))
    try {
      welcome_(static_cast<int>(proof.rank), std::move(visitor.connection));
    } catch (const std::exception&) {  // no memory, say: the connection closes, which its other end sees
    }
  return false;
}

}  // namespace gradwire::wire
