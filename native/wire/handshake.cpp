#include "wire/handshake.hpp"

#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "errors.hpp"
#include "wire/message.hpp"

namespace gradwire::wire {
namespace {

constexpr std::size_t kBlockBytes = 64;

// The first 32 bits of the fractional parts of the cube roots of the first 64 primes.
constexpr std::uint32_t kRoundConstants[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

using State = std::array<std::uint32_t, 8>;

void compress(State& state, const std::uint8_t* block) {
  std::uint32_t schedule[64];
  for (int i = 0; i < 16; ++i)
    schedule[i] = static_cast<std::uint32_t>(block[4 * i]) << 24 | static_cast<std::uint32_t>(block[4 * i + 1]) << 16 |
                  static_cast<std::uint32_t>(block[4 * i + 2]) << 8 | block[4 * i + 3];
  for (int i = 16; i < 64; ++i) {
    const std::uint32_t early = schedule[i - 15], late = schedule[i - 2];
    schedule[i] = schedule[i - 16] + (std::rotr(early, 7) ^ std::rotr(early, 18) ^ early >> 3) + schedule[i - 7] +
                  (std::rotr(late, 17) ^ std::rotr(late, 19) ^ late >> 10);
  }
  auto [a, b, c, d, e, f, g, h] = state;
  for (int i = 0; i < 64; ++i) {
    const std::uint32_t chosen = (e & f) ^ (~e & g), major = (a & b) ^ (a & c) ^ (b & c);
    const std::uint32_t first =
        h + (std::rotr(e, 6) ^ std::rotr(e, 11) ^ std::rotr(e, 25)) + chosen + kRoundConstants[i] + schedule[i];
    const std::uint32_t second = (std::rotr(a, 2) ^ std::rotr(a, 13) ^ std::rotr(a, 22)) + major;
    h = g, g = f, f = e, e = d + first, d = c, c = b, b = a, a = first + second;
  }
  const State mixed = {a, b, c, d, e, f, g, h};
  for (int i = 0; i < 8; ++i) state[i] += mixed[i];
}

Digest sha256(ConstBytes data) {
  State state = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  std::size_t at = 0;
  for (; data.size() - at >= kBlockBytes; at += kBlockBytes) compress(state, data.data() + at);
  // The rest, one bit, zeros, and the length in bits as the last eight bytes: one block, or two.
  std::uint8_t tail[2 * kBlockBytes] = {};
  const std::size_t n_left = data.size() - at;
  if (n_left > 0) std::memcpy(tail, data.data() + at, n_left);
  tail[n_left] = 0x80;
  const std::size_t tail_bytes = n_left + 9 <= kBlockBytes ? kBlockBytes : 2 * kBlockBytes;
  const std::uint64_t n_bits = 8 * static_cast<std::uint64_t>(data.size());
  for (int i = 0; i < 8; ++i) tail[tail_bytes - 1 - i] = static_cast<std::uint8_t>(n_bits >> (8 * i));
  for (std::size_t begin = 0; begin < tail_bytes; begin += kBlockBytes) compress(state, tail + begin);
  Digest digest;
  for (int i = 0; i < 32; ++i) digest[i] = static_cast<std::uint8_t>(state[i / 4] >> (24 - 8 * (i % 4)));
  return digest;
}

}  // namespace

Digest hmac_sha256(ConstBytes key, ConstBytes data) {
  std::array<std::uint8_t, kBlockBytes> padded{};
  if (key.size() > kBlockBytes) {
    const Digest shorter = sha256(key);
    std::memcpy(padded.data(), shorter.data(), shorter.size());
  } else if (!key.empty()) {
    std::memcpy(padded.data(), key.data(), key.size());
  }
  std::vector<std::uint8_t> inner, outer;
  for (const std::uint8_t byte : padded) {
    inner.push_back(byte ^ 0x36);
    outer.push_back(byte ^ 0x5c);
  }
  inner.insert(inner.end(), data.begin(), data.end());
  const Digest digest = sha256(inner);
  outer.insert(outer.end(), digest.begin(), digest.end());
  return sha256(outer);
}

namespace {

// Whether both are the same, in a time that does not tell where they differ.
bool equal_digests(ConstBytes a, ConstBytes b) {
  if (a.size() != b.size()) return false;
  std::uint8_t difference = 0;
  for (std::size_t i = 0; i < a.size(); ++i) difference |= a[i] ^ b[i];
  return difference == 0;
}

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

void fill_random(Bytes out) {
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
    if (challenge.magic != kMagic) throw PeerLost("what listens at the address of ", who, " is no rank of gradwire");
    if (challenge.version != kVersion)
      throw IncompatibleVersion(who, " speaks version ", challenge.version, ", this build ", kVersion,
                                "; install the same gradwire on every host");
    Proof proof;
    proof.rank = static_cast<std::uint32_t>(rank);
    proof.peer = static_cast<std::uint32_t>(peer);
    fill_random(proof.nonce);
    proof.digest = prove(secret, 'c', proof.rank, proof.peer, challenge.nonce, proof.nonce);
    send_all(connection, &proof, sizeof proof, deadline);
    Digest answer;
    receive_all(connection, answer.data(), answer.size(), deadline);
    if (!equal_digests(answer, prove(secret, 'a', proof.rank, proof.peer, challenge.nonce, proof.nonce)))
      throw PeerLost("what listens at the address of ", who, " does not know this group's secret");
  } catch (const std::system_error& error) {
    throw PeerLost("rank ", rank, " lost ", who, " while they introduced themselves (", error.code().message(),
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

Doorkeeper::Doorkeeper(std::vector<Descriptor> listeners, int rank, int world_size, const Secret& secret,
                       Welcome welcome)
    : listeners_(std::move(listeners)),
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
  listeners_.clear();
  stop_.close();
}

void Doorkeeper::serve() {
  std::vector<pollfd> entries;
  for (;;) {
    entries.assign(1, {stop_.get(), POLLIN, 0});
    for (const Descriptor& listener : listeners_)
      entries.push_back({visitors_.size() < kMaxVisitors ? listener.get() : -1, POLLIN, 0});
    auto deadline = Clock::time_point::max();
    for (const Visitor& visitor : visitors_) {
      entries.push_back({visitor.connection.get(), POLLIN, 0});
      deadline = std::min(deadline, visitor.deadline);
    }
    const int n = poll(entries.data(), entries.size(), visitors_.empty() ? -1 : milliseconds_until(deadline));
    if (entries[0].revents != 0) return;
    if (n < 0 && errno != EINTR) {  // more of them than the process may open by now, say
      visitors_.clear();
      continue;
    }
    std::size_t index = 1 + listeners_.size();
    const auto now = Clock::now();
    for (auto visitor = visitors_.begin(); visitor != visitors_.end(); ++index) {
      // Heard before the clock is asked: where this thread came late, what lies here did not.
      const bool was_heard = n > 0 && entries[index].revents != 0;
      const bool stays = (!was_heard || hear(*visitor)) && now < visitor->deadline;
      visitor = stays ? std::next(visitor) : visitors_.erase(visitor);
    }
    for (std::size_t i = 0; i < listeners_.size(); ++i)
      if (n > 0 && entries[1 + i].revents != 0) try {
          admit(listeners_[i]);
        } catch (const std::exception&) {  // no memory, no random numbers: this one may come again
        }
  }
}

void Doorkeeper::admit(const Descriptor& listener) {
  Descriptor connection(accept4(listener.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
  if (!connection) {
    // Out of descriptors, say: no reason to spin.
    if (errno != EAGAIN && errno != ECONNABORTED && errno != EINTR)
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
    return;
  }
  Challenge challenge;
  fill_random(challenge.nonce);
  // It fits into what the kernel holds for a new connection; a visitor for whom it does not is none of ours.
  if (!send_at_once(connection, {reinterpret_cast<const std::uint8_t*>(&challenge), sizeof challenge})) return;
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
  try {
    welcome_(static_cast<int>(proof.rank), std::move(visitor.connection), answer);
  } catch (const std::exception&) {  // no memory, say: the connection closes, which its other end sees
  }
  return false;
}

}  // namespace gradwire::wire
