// libFuzzer harness of what two ranks say before the first message of a stream: the proof that a door is shown, the
// challenge and the answer that a rank gets, the heads of a broadcast. The first byte chooses among them, the second
// what is made right again: with it a lie has a right proof, or checksum. What follows is what the bytes differ by from
// right ones. Expected outcomes come from docs/format.md, not from the code that is tested.
#include "wire/handshake.hpp"

#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <span>
#include <thread>
#include <vector>

#include "checksum/crc32c.hpp"
#include "errors.hpp"
#include "exchange/broadcast.hpp"
#include "wire/message.hpp"

namespace wire = gradwire::wire;
using Bytes = std::vector<std::uint8_t>;
using Input = std::span<const std::uint8_t>;

namespace {

constexpr wire::Secret kSecret = {1, 2, 3, 4, 5, 6, 7, 8};
constexpr std::size_t kChallengeBytes = 24, kProofBytes = 64, kAnswerBytes = 32, kProvenBytes = 32;
constexpr std::uint32_t kMagic = 0x31485747;
constexpr int kDoor = 1, kWorld = 4;

void require(bool holds) {
  if (!holds) std::abort();
}

std::uint32_t word(Input bytes, std::size_t at) {
  std::uint32_t value;
  std::memcpy(&value, bytes.data() + at, 4);
  return value;
}

void put(Bytes& bytes, std::size_t at, std::uint32_t value) { std::memcpy(bytes.data() + at, &value, 4); }

void alter(std::span<std::uint8_t> bytes, Input& input) {
  const std::size_t n = std::min(bytes.size(), input.size());
  for (std::size_t i = 0; i < n; ++i) bytes[i] ^= input[i];
  input = input.subspan(n);
}

wire::Digest prove(char direction, Input challenge, Input proof) {
  Bytes text = {static_cast<std::uint8_t>(direction)};
  text.insert(text.end(), proof.begin() + 8, proof.begin() + 16);
  text.insert(text.end(), challenge.begin() + 8, challenge.begin() + 24);
  text.insert(text.end(), proof.begin() + 16, proof.begin() + 32);
  return wire::hmac_sha256(kSecret, text);
}

wire::Clock::time_point soon() { return wire::Clock::now() + std::chrono::seconds(15); }

// Whether so many bytes come before the other side closes.
bool hears(const wire::Descriptor& connection, std::span<std::uint8_t> out) {
  try {
    wire::receive_all(connection, out.data(), out.size(), soon());
    return true;
  } catch (const std::system_error& error) {
    require(error.code().value() != ETIMEDOUT);
    return false;
  }
}

void say(const wire::Descriptor& connection, Input bytes) {
  try {
    wire::send_all(connection, bytes.data(), bytes.size(), soon());
  } catch (const std::system_error& error) {  // closed at the first wrong bytes
    require(error.code().value() != ETIMEDOUT);
  }
}

// A door for all runs, which counts whom it has let in.
struct Door {
  wire::Endpoint endpoint{"127.0.0.1", 0};
  std::array<std::atomic<long>, kWorld> n_welcome{};
  std::vector<wire::Descriptor> listeners = listen();
  wire::Doorkeeper keeper{std::move(listeners), kDoor, kWorld, kSecret,
                          [this](int peer, wire::Descriptor connection, gradwire::ConstBytes answer) {
                            if (wire::send_at_once(connection, answer)) ++n_welcome[static_cast<std::size_t>(peer)];
                          }};
  std::vector<wire::Descriptor> listen() {
    std::vector<wire::Descriptor> made;
    made.push_back(wire::listen_at(endpoint.host, endpoint.port));
    return made;
  }
};

void visit(std::uint8_t how, Input input) {
  static Door& door = *new Door;
  static std::array<long, kWorld> n_welcome{};
  const wire::Descriptor connection = wire::connect_to(door.endpoint, soon());
  const linger at_once{1, 0};  // no port is kept once it closes
  setsockopt(connection.get(), SOL_SOCKET, SO_LINGER, &at_once, sizeof at_once);
  Bytes challenge(kChallengeBytes), proof(kProofBytes);
  require(hears(connection, challenge) && word(challenge, 0) == kMagic && word(challenge, 4) == wire::kVersion);
  const std::size_t n_cut = how % 4 == 0 && !input.empty() ? input[0] % (kProofBytes + 1) : kProofBytes;
  const std::size_t first = input.empty() ? 0 : input[0] % (n_cut + 1);
  put(proof, 0, kMagic);
  put(proof, 4, wire::kVersion);
  put(proof, 8, how / 4 % 8);
  put(proof, 12, kDoor);
  const bool is_proven = how >= 128;
  if (is_proven) alter(std::span(proof).first(kProvenBytes), input);
  wire::Digest digest = prove('c', challenge, proof);
  std::copy(digest.begin(), digest.end(), proof.begin() + kProvenBytes);
  if (!is_proven)
    alter(proof, input);
  else if (how % 2 == 1)
    alter(std::span(proof).subspan(kProvenBytes), input);
  digest = prove('c', challenge, proof);
  const std::uint32_t rank = word(proof, 8);
  const bool is_right = n_cut == kProofBytes && word(proof, 0) == kMagic && word(proof, 4) == wire::kVersion &&
                        rank < kWorld && rank != kDoor && word(proof, 12) == kDoor &&
                        std::equal(digest.begin(), digest.end(), proof.begin() + kProvenBytes);
  say(connection, Input(proof).first(first));
  say(connection, Input(proof).subspan(first, n_cut - first));
  ::shutdown(connection.get(), SHUT_WR);
  Bytes answer(kAnswerBytes);
  const bool is_in = hears(connection, answer);
  require(is_in == is_right);
  if (is_in) {
    const wire::Digest expected = prove('a', challenge, proof);
    require(std::equal(expected.begin(), expected.end(), answer.begin()));
    ++n_welcome[rank];
    require(!hears(connection, std::span(answer).first(1)));  // ours is dropped by whoever is told of it
  }
  for (std::size_t i = 0; i < kWorld; ++i) require(door.n_welcome[i] == n_welcome[i]);
}

// The rank that connects, against what listens there.
void introduce(std::uint8_t how, Input input) {
  int pair[2];
  require(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, pair) == 0);
  const wire::Descriptor mine(pair[0]), theirs(pair[1]);
  Bytes challenge(kChallengeBytes);
  put(challenge, 0, kMagic);
  put(challenge, 4, wire::kVersion);
  const std::size_t n_cut = how % 4 == 0 && !input.empty() ? input[0] % (kChallengeBytes + 1) : kChallengeBytes;
  if (how % 8 < 6) alter(challenge, input);
  const bool answers = how >= 64 && n_cut == kChallengeBytes, is_rank = word(challenge, 0) == kMagic,
             is_old = is_rank && word(challenge, 4) != wire::kVersion;
  bool is_right = false;
  say(theirs, Input(challenge).first(n_cut));
  std::thread listener;
  if (answers && is_rank && !is_old)
    listener = std::thread([&] {
      Bytes proof(kProofBytes);
      require(hears(theirs, proof) && word(proof, 8) == 3 && word(proof, 12) == 2);
      wire::Digest answer = prove('a', challenge, proof);
      const wire::Digest right = answer, proven = prove('c', challenge, proof);
      require(std::equal(proven.begin(), proven.end(), proof.begin() + kProvenBytes));
      if (how % 2 == 1) alter(answer, input);
      is_right = answer == right;
      say(theirs, answer);
      ::shutdown(theirs.get(), SHUT_WR);
    });
  else {
    say(theirs, input.first(std::min(input.size(), kAnswerBytes)));
    ::shutdown(theirs.get(), SHUT_WR);
  }
  bool is_in = false, is_told = false;
  try {
    wire::introduce(mine, 3, 2, kSecret, soon());
    is_in = true;
  } catch (const gradwire::IncompatibleVersion&) {
    is_told = true;
  } catch (const gradwire::PeerLost&) {
  }
  if (listener.joinable()) listener.join();
  require(is_in == is_right);
  if (n_cut == kChallengeBytes) require(is_told == is_old);
}

void read_head(std::uint8_t how, Input input) {
  const std::size_t n_blocks = 1 + how % 32, world = 1 + how % 5;
  const gradwire::exchange::HeadFormat format(n_blocks, world, 7, 8);
  gradwire::exchange::Head head{0, 0, 0, 32, false, false, 5, 6, 9, std::vector<bool>(n_blocks)};
  head.received_bytes = head.receiving_us = std::vector<std::uint64_t>(world);
  Bytes raw(format.n_bytes());
  format.pack(head, 3, raw);
  const bool is_cut = how % 16 == 15 && !input.empty();
  if (is_cut) raw.resize(std::min<std::size_t>(raw.size(), input[0]));
  alter(raw, input);
  if (how >= 64 && raw.size() > 4) put(raw, raw.size() - 4, gradwire::crc32c(Input(raw).first(raw.size() - 4)));
  try {
    const auto read = format.unpack(raw, 3, 0);
    require(raw.size() == format.n_bytes() && read.origin < world && read.ended.size() == n_blocks);
    require(read.block < n_blocks || (read.block == gradwire::exchange::kNoBlock && read.body_bytes == 0));
    require(read.block >= n_blocks || (read.n_bits >= 1 && read.first_bit + read.n_bits <= 32));
    require(read.ceiling_bits >= 1 && read.ceiling_bits <= 32);
    require(read.remaining_s.empty() || read.remaining_s.size() == n_blocks);
    require(read.received_bytes.size() == world && read.receiving_us.size() == world);
  } catch (const gradwire::CorruptMessage&) {
  } catch (const gradwire::IncompatibleVersion&) {
  } catch (const gradwire::RankMismatch&) {
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size < 2) return 0;
  const Input input(data + 2, size - 2);
  if (data[0] % 3 == 0) visit(data[1], input);
  if (data[0] % 3 == 1) introduce(data[1], input);
  if (data[0] % 3 == 2) read_head(data[1], input);
  return 0;
}
