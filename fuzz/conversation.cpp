// libFuzzer harness of a mesh: what two peers that know the secret may send it, in any portions, with any lies, while
// this rank opens, closes and reads its streams. A model that is told the same bytes says what must come of each call:
// this message, this error, or an end. The first byte chooses: a conversation, or a whole exchange whose one peer sends
// headers that are right, or nearly, and bodies that are not.
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <vector>

#include "checksum/crc32c.hpp"
#include "errors.hpp"
#include "exchange/codecs.hpp"
#include "exchange/means.hpp"
#include "wire/mesh.hpp"

namespace wire = gradwire::wire;
namespace exchange = gradwire::exchange;
using Bytes = std::vector<std::uint8_t>;

namespace {

constexpr wire::Facts kFacts{1, 2, 3, 4};
constexpr std::size_t kHeader = 44;
constexpr std::uint32_t kStreams = 4;

void require(bool holds) {
  if (!holds) std::abort();
}

class Input {
 public:
  Input(const std::uint8_t* data, std::size_t size) : rest_(data, size) {}
  bool is_over() const { return rest_.empty(); }
  std::uint8_t byte() {
    if (rest_.empty()) return 0;
    const std::uint8_t value = rest_[0];
    rest_ = rest_.subspan(1);
    return value;
  }
  Bytes bytes(std::size_t n) {
    n = std::min(n, rest_.size());
    Bytes out(rest_.begin(), rest_.begin() + static_cast<std::ptrdiff_t>(n));
    rest_ = rest_.subspan(n);
    return out;
  }

 private:
  std::span<const std::uint8_t> rest_;
};

template <class Number>
Number number_at(const Bytes& bytes, std::size_t at) {
  Number value;
  std::memcpy(&value, bytes.data() + at, sizeof value);
  return value;
}

void append(Bytes& bytes, std::span<const std::uint8_t> more) { bytes.insert(bytes.end(), more.begin(), more.end()); }

// A right header, but that `lie` (0: nothing) alters one field by `by`, and then makes its checksum right.
Bytes make_header(wire::Header header, unsigned lie, std::uint8_t by) {
  std::uint32_t* const fields[] = {&header.stream,       &header.number,     &header.facts.configuration,
                                   &header.facts.layout, &header.facts.step, &header.facts.bucket};
  if (lie >= 1 && lie <= 6) *fields[lie - 1] ^= by;
  if (lie == 7) header.n_bytes ^= std::uint64_t{by} << by % 57;
  header.is_sealed = true;  // bodies are anything
  wire::RawHeader raw = wire::pack_header(header);
  if (lie >= 8 && lie < 12) {
    raw[lie - 8] ^= by;  // magic, version, flags
    const std::uint32_t checksum = gradwire::crc32c(std::span(raw).first(kHeader - 4));
    std::memcpy(raw.data() + kHeader - 4, &checksum, 4);
  }
  if (lie >= 12) raw[by % kHeader] ^= static_cast<std::uint8_t>(lie);
  return {raw.begin(), raw.end()};
}

enum class Fault { none, corrupt, version, mismatch, lost };

template <class Call>
Fault fault_of(Call call) {
  try {
    call();
    return Fault::none;
  } catch (const gradwire::CorruptMessage&) {
    return Fault::corrupt;
  } catch (const gradwire::IncompatibleVersion&) {
    return Fault::version;
  } catch (const gradwire::RankMismatch&) {
    return Fault::mismatch;
  } catch (const gradwire::PeerLost&) {
    return Fault::lost;
  }
}

// What becomes of the bytes of one peer, by docs/format.md#message-header.
struct Peer {
  wire::Descriptor socket;
  Bytes queued, sent;  // not sent yet; all that was
  bool is_shut = false;

  std::size_t at = 0;
  bool is_parked = false, is_unclear = false;  // unclear: it depends on how far the mesh has read
  Fault fault = Fault::none;
  std::optional<std::uint32_t> stream_now;  // of the message whose body is on its way
  std::map<std::uint32_t, std::deque<Bytes>> inboxes;
  std::map<std::uint32_t, std::uint32_t> n_arrived, n_made;

  bool has_ended() const { return is_shut && !is_parked && fault == Fault::none; }

  void follow(const std::map<std::uint32_t, std::uint64_t>& open) {
    while (fault == Fault::none && sent.size() - at >= kHeader) {
      const Bytes header(sent.begin() + static_cast<std::ptrdiff_t>(at),
                         sent.begin() + static_cast<std::ptrdiff_t>(at + kHeader));
      const bool is_ours = number_at<std::uint16_t>(header, 0) == 0x4757;
      const auto checksum = gradwire::crc32c(std::span(header).first(kHeader - 4));
      if (is_ours && header[2] != wire::kVersion)
        fault = Fault::version;
      else if (!is_ours || header[3] > 1 || number_at<std::uint32_t>(header, kHeader - 4) != checksum)
        fault = Fault::corrupt;
      if (fault != Fault::none) return;
      const auto stream = number_at<std::uint32_t>(header, 4);
      const auto n_bytes = number_at<std::uint64_t>(header, 8);
      is_parked = !open.contains(stream);
      if (is_parked) return;
      if (std::memcmp(header.data() + 20, &kFacts, sizeof kFacts) != 0)
        fault = Fault::mismatch;
      else if (number_at<std::uint32_t>(header, 16) != n_arrived[stream] || n_bytes > open.at(stream))
        fault = Fault::corrupt;
      if (fault != Fault::none) return;
      stream_now = stream;
      if (sent.size() - at - kHeader < n_bytes) return;
      stream_now.reset();
      const auto body = sent.begin() + static_cast<std::ptrdiff_t>(at + kHeader);
      if (header[3] == 0 && number_at<std::uint32_t>(header, 36) !=
                                gradwire::crc32c({sent.data() + at + kHeader, static_cast<std::size_t>(n_bytes)})) {
        fault = Fault::corrupt;
        return;
      }
      inboxes[stream].emplace_back(body, body + static_cast<std::ptrdiff_t>(n_bytes));
      ++n_arrived[stream];
      at += kHeader + n_bytes;
    }
  }
  // The mesh may have read what is there, or not yet.
  void forget(std::uint32_t stream) {
    if (!inboxes[stream].empty() || stream_now == stream || fault != Fault::none) is_unclear = true;
    n_arrived[stream] = n_made[stream] = 0;
  }
  bool is_known(std::uint32_t stream) {
    return !is_unclear && (!inboxes[stream].empty() || fault != Fault::none || has_ended());
  }
};

class Conversation {
 public:
  explicit Conversation(std::size_t n_peers, double timeout_s)
      : mesh_(0, 1 + static_cast<int>(n_peers), {"127.0.0.1"}, timeout_s, {}), peers_(n_peers) {
    wire::Secret secret{};
    mesh_.join(std::vector<wire::Endpoints>(1 + n_peers, mesh_.endpoints()), secret);
    const auto soon = wire::Clock::now() + std::chrono::seconds(15);
    for (std::size_t i = 0; i < n_peers; ++i) {
      ranks_.push_back(static_cast<int>(1 + i));
      peers_[i].socket = wire::connect_to(mesh_.endpoints()[0], soon);
      const linger at_once{1, 0};  // no port is kept once it closes
      setsockopt(peers_[i].socket.get(), SOL_SOCKET, SO_LINGER, &at_once, sizeof at_once);
      wire::introduce(peers_[i].socket, ranks_[i], 0, secret, soon);
    }
  }
  ~Conversation() {
    mesh_.break_off();
    for (Peer& peer : peers_) peer.socket.close();
  }
  wire::Mesh& mesh() { return mesh_; }

  // The first stream. A peer is lost here only where a busy machine's pauses are longer than the time-out.
  bool begin(bool may_be_lost) { return open(0, 1'000, may_be_lost); }

  // One thing after another; false after an error, which ends a run.
  bool go_on(Input& input) {
    const std::uint8_t what = input.byte(), more = input.byte();
    Peer& peer = peers_[more % peers_.size()];
    const std::uint32_t stream = more / 4 % kStreams;
    switch (what % 10) {
      case 0:
      case 1:
      case 2: {  // a message; every third one may lie
        const Bytes body = input.bytes(what >= 200 ? 10 * input.byte() : input.byte() % 64);
        const unsigned lie = what % 10 == 2 ? input.byte() % 16 : 0;
        append(peer.queued, make_header({stream, peer.n_made[stream]++, body.size(), kFacts}, lie, more));
        append(peer.queued, body);
        return true;
      }
      case 3:
        append(peer.queued, input.bytes(more % 64));
        return true;
      case 4:
        send(peer, input.byte());
        return true;
      case 5:
        return open_streams_.contains(stream) || open(stream, input.byte());
      case 6:
      case 7:
        return what >= 128 ? receive(more % peers_.size(), stream) : receive_any(stream);
      case 8:
        return answer(more % peers_.size(), stream, input.byte());
      default:
        if (open_streams_.erase(stream) == 0) return true;
        mesh_.close(stream);
        for (Peer& each : peers_) each.forget(stream), each.inboxes[stream].clear();
        return true;
    }
  }
  // The rest is sent, both peers end, and everything that came is read.
  void finish() {
    for (Peer& peer : peers_) {
      send(peer, peer.queued.size());
      ::shutdown(peer.socket.get(), SHUT_WR);
      peer.is_shut = true;
    }
    for (std::uint32_t stream = 0; stream < kStreams; ++stream)
      if (!open_streams_.contains(stream) && !open(stream, 1'000)) return;
    for (std::uint32_t stream = 0; stream < kStreams; ++stream)
      for (std::size_t i = 0; i < peers_.size(); ++i)
        while (peers_[i].is_known(stream))
          if (!receive(i, stream)) {
            // An end is no error of the others.
            if (!is_end_) return;
            break;
          }
  }
  void send(Peer& peer, std::size_t n) {
    n = std::min(n, peer.queued.size());
    const auto deadline = wire::Clock::now() + std::chrono::seconds(15);
    wire::send_all(peer.socket, peer.queued.data(), n, deadline);
    append(peer.sent, std::span(peer.queued).first(n));
    peer.queued.erase(peer.queued.begin(), peer.queued.begin() + static_cast<std::ptrdiff_t>(n));
    peer.follow(open_streams_);
  }
  Peer& peer(std::size_t i) { return peers_[i]; }

 private:
  bool open(std::uint32_t stream, std::uint64_t max_bytes, bool may_be_lost = false) {
    open_streams_[stream] = max_bytes;
    for (Peer& peer : peers_) peer.follow(open_streams_);
    const Fault fault = fault_of([&] { mesh_.open(stream, kFacts, max_bytes, ranks_); });
    return may_be_lost && fault == Fault::lost ? false : is_fine(fault);
  }
  bool receive(std::size_t i, std::uint32_t stream) {
    if (!open_streams_.contains(stream) || !peers_[i].is_known(stream)) return true;
    std::optional<wire::Message> message;
    const Fault fault = fault_of([&] { message = mesh_.receive(ranks_[i], stream); });
    is_end_ = fault == Fault::lost;
    if (is_end_) require(peers_[i].has_ended() && peers_[i].inboxes[stream].empty());
    return message ? take(peers_[i], stream, *message) : is_end_ ? false : is_fine(fault);
  }
  bool receive_any(std::uint32_t stream) {
    if (!open_streams_.contains(stream)) return true;
    std::vector<int> asked;
    bool is_known = false, may_end = false;
    for (std::size_t i = 0; i < peers_.size(); ++i) {
      if (peers_[i].is_unclear) continue;
      asked.push_back(ranks_[i]);
      is_known = is_known || peers_[i].is_known(stream);
      may_end = may_end || peers_[i].is_shut;
    }
    if (!is_known) return true;
    std::optional<wire::Arrival> arrival;
    const Fault fault = fault_of([&] { arrival = mesh_.receive_any(stream, asked); });
    if (fault == Fault::lost) require(may_end);
    if (!arrival) return fault == Fault::lost ? false : is_fine(fault);
    require(arrival->duration_ns >= 0);
    return take(peers_[static_cast<std::size_t>(arrival->peer - 1)], stream, arrival->message);
  }
  // This rank's own message, as the peer hears it.
  bool answer(std::size_t i, std::uint32_t stream, std::uint8_t n) {
    if (!open_streams_.contains(stream) || peers_[i].is_shut) return true;
    wire::Message message = mesh_.pool().take(n);
    std::fill_n(message.room().data(), n, n);
    const Fault fault = fault_of([&] { mesh_.send(ranks_[i], stream, message); });
    require(fault == Fault::none);
    Bytes heard(kHeader + n);
    wire::receive_all(peers_[i].socket, heard.data(), heard.size(), wire::Clock::now() + std::chrono::seconds(15));
    require(number_at<std::uint32_t>(heard, 4) == stream && number_at<std::uint64_t>(heard, 8) == n);
    require(std::all_of(heard.begin() + kHeader, heard.end(), [n](std::uint8_t byte) { return byte == n; }));
    return true;
  }
  bool take(Peer& peer, std::uint32_t stream, const wire::Message& message) {
    require(!peer.inboxes[stream].empty());
    const Bytes expected = std::move(peer.inboxes[stream].front());
    peer.inboxes[stream].pop_front();
    require(std::equal(expected.begin(), expected.end(), message.bytes().begin(), message.bytes().end()));
    return true;
  }
  // Every error is one that the bytes of some peer call for.
  bool is_fine(Fault fault) {
    if (fault == Fault::none) return true;
    require(std::any_of(peers_.begin(), peers_.end(),
                        [fault](const Peer& peer) { return peer.is_unclear || peer.fault == fault; }));
    return false;
  }

  wire::Mesh mesh_;
  std::vector<Peer> peers_;
  std::vector<int> ranks_;
  std::map<std::uint32_t, std::uint64_t> open_streams_;
  bool is_end_ = false;
};

// A peer's messages are there before the exchange begins, and behind them its end: it comes to its own end, by itself
// or with an error of ours.
void check_exchange(std::uint8_t how, Input& input) {
  Conversation conversation(1, 0.02);  // seconds: some lies are found by the time-out only
  if (!conversation.begin(true)) return;
  Peer& peer = conversation.peer(0);
  const std::size_t n = 1 + std::size_t{4} * input.byte(), n_chunks = 1 + how / 4 % 3;
  const bool is_ring = how % 4 == 0;
  std::array<std::uint32_t, 2> n_made{};
  while (!input.is_over()) {
    const std::uint8_t what = input.byte();
    const std::uint32_t stream = is_ring ? 0 : what % 2;
    const Bytes body = input.bytes(what >= 128 ? 8 * input.byte() : input.byte());
    const unsigned lie = what % 32 == 31 ? input.byte() % 16 : 0;
    append(peer.queued, make_header({10 + stream, n_made[stream]++, body.size(), kFacts}, lie, what));
    append(peer.queued, body);
  }
  conversation.send(peer, peer.queued.size());
  ::shutdown(peer.socket.get(), SHUT_WR);
  std::vector<float> values(n, 1.5f), residual(n), unsent(n);
  const exchange::Values buffer = exchange::values_of(values), nothing{nullptr, 0, exchange::Dtype::float32};
  gradwire::quantisers::Options options{
      .kind = static_cast<gradwire::quantisers::Kind>(how / 16 % gradwire::quantisers::kKinds),
      .parameter = 1,
      .levels = 7,
      .block = 512};
  exchange::QuantiserCodec quantiser(options);
  exchange::EmbeddedFloatCodec embedded({64, how % 4 < 2 ? 1 : 2}, 10, exchange::Dtype::float32);
  exchange::Codec& codec = how % 2 == 0 ? static_cast<exchange::Codec&>(quantiser) : embedded;
  exchange::Account account;
  const exchange::Ticket ticket{10, kFacts};
  const Fault fault = fault_of([&] {
    if (is_ring) exchange::ring_mean(conversation.mesh(), ticket, codec, buffer, nothing, n_chunks, 2, account);
    if (how % 4 == 1 || how % 4 == 2)
      exchange::direct_mean(conversation.mesh(), ticket, codec, buffer, nothing, n_chunks, account);
    if (how % 4 == 3) {
      const exchange::QuantisedBucket bucket{buffer,    residual, unsent,   1,
                                             {{0, n}},  {true},   n_chunks, std::vector<std::uint64_t>(2 * n_chunks),
                                             how >= 128};
      exchange::quantised_mean(conversation.mesh(), ticket, options, bucket, account);
    }
  });
  // Whose messages were all read is not lost; who sent none is.
  if (fault == Fault::none) require(n_made[0] + n_made[1] > 0);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size < 2) return 0;
  Input input(data + 2, size - 2);
  if (data[0] % 2 == 0) {
    Conversation conversation(1 + data[1] % 2, 15);
    conversation.begin(false);
    while (!input.is_over())
      if (!conversation.go_on(input)) return 0;
    conversation.finish();
  } else {
    check_exchange(data[1], input);
  }
  return 0;
}
