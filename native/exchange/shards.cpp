#include "exchange/shards.hpp"

#include <algorithm>
#include <cstring>

#include "bits/bit_io.hpp"
#include "errors.hpp"

namespace gradwire::exchange {
namespace {

constexpr std::size_t kFrontBytes = 8;  // how many values follow the codec's message, and zeros
constexpr std::uint32_t kRaw = UINT32_MAX;
constexpr std::size_t kWindow = 1024;    // values that are looked through before any is listed
constexpr std::size_t kShareOfOdd = 16;  // more odd values than one in so many: the message is raw
constexpr std::size_t kMessagesAhead = 2;

// What the codec does not keep: of exponent 0 all but the positive zero; of float16, which is coded as float32, the
// negative zero. False if there are more than `most`.
template <class Word, Word exponent, Word sign>
bool find_odd_words(const Values& values, std::size_t most, std::vector<std::uint32_t>& places) {
  const auto is_odd = [data = values.data](std::size_t i) {
    const auto word = load<Word>(data + sizeof(Word) * i);
    return exponent == 0 ? word == sign : (word & exponent) == 0 && word != 0;
  };
  for (std::size_t begin = 0; begin < values.n; begin += kWindow) {
    const std::size_t end = std::min(values.n, begin + kWindow);
    std::uint32_t n_odd = 0;
    for (std::size_t i = begin; i < end; ++i) n_odd += is_odd(i);
    if (n_odd == 0) continue;
    if (places.size() + n_odd > most) return false;
    for (std::size_t i = begin; i < end; ++i)
      if (is_odd(i)) places.push_back(static_cast<std::uint32_t>(i));
  }
  return true;
}

bool find_odd(const Values& values, std::size_t most, std::vector<std::uint32_t>& places) {
  places.clear();
  if (values.dtype == Dtype::float32)
    return find_odd_words<std::uint32_t, floats::kInfinity, floats::kSign>(values, most, places);
  return values.dtype == Dtype::bfloat16 ? find_odd_words<std::uint16_t, 0x7F80, 0x8000>(values, most, places)
                                         : find_odd_words<std::uint16_t, 0, 0x8000>(values, most, places);
}

}  // namespace

std::size_t ExactCodec::max_message_bytes(std::size_t n_values) const {
  const std::size_t listed = n_values / kShareOfOdd * (4 + floats::bytes_of(dtype_));
  return kFrontBytes + std::max(n_values * floats::bytes_of(dtype_), codec_.max_message_bytes(n_values) + listed);
}

std::size_t ExactCodec::encode(const Values& values, std::size_t first, Bytes out) {
  thread_local std::vector<std::uint32_t> places;
  const std::size_t n_raw = values.n * values.element_bytes(), entry = 4 + values.element_bytes();
  std::uint32_t front[2] = {kRaw, 0};
  std::size_t n_bytes = n_raw;
  if (find_odd(values, values.n / kShareOfOdd, places)) {
    const std::size_t coded = codec_.encode(values, first, out.subspan(kFrontBytes));
    if (coded + entry * places.size() < n_raw) {
      front[0] = static_cast<std::uint32_t>(places.size());
      std::uint8_t* at = out.data() + kFrontBytes + coded;
      for (const std::uint32_t place : places) {
        std::memcpy(at, &place, 4);
        std::memcpy(at + 4, values.data + place * values.element_bytes(), values.element_bytes());
        at += entry;
      }
      n_bytes = coded + entry * places.size();
    }
  }
  std::memcpy(out.data(), front, kFrontBytes);
  if (front[0] == kRaw && n_raw > 0) std::memcpy(out.data() + kFrontBytes, values.data, n_raw);
  return kFrontBytes + n_bytes;
}

void ExactCodec::decode(ConstBytes message, std::size_t first, const Values& values) {
  const std::size_t n_raw = values.n * values.element_bytes(), entry = 4 + values.element_bytes();
  std::uint32_t front[2] = {0, 0};
  if (message.size() >= kFrontBytes) std::memcpy(front, message.data(), kFrontBytes);
  const std::size_t listed = front[0] == kRaw ? n_raw : front[0] * entry;
  if (message.size() < kFrontBytes + listed || front[1] != 0 ||
      (front[0] == kRaw && message.size() != kFrontBytes + n_raw))
    throw CorruptMessage("a message of ", message.size(), " bytes for ", values.n, " exact values is not whole");
  const std::uint8_t* at = message.data() + message.size() - listed;
  if (front[0] == kRaw) {
    if (n_raw > 0) std::memcpy(values.data, at, n_raw);
    return;
  }
  codec_.decode(message.subspan(kFrontBytes, message.size() - kFrontBytes - listed), first, values);
  for (std::uint32_t i = 0; i < front[0]; ++i, at += entry) {
    const auto place = load<std::uint32_t>(at);
    if (place >= values.n) throw CorruptMessage("a message for ", values.n, " exact values lists value ", place);
    std::memcpy(values.data + place * values.element_bytes(), at + 4, values.element_bytes());
  }
}

std::size_t Bfloat16Codec::encode(const Values& values, std::size_t, Bytes out) {
  if (values.dtype == Dtype::float32)
    narrow({reinterpret_cast<const float*>(values.data), values.n}, {out.data(), values.n, Dtype::bfloat16});
  else if (values.n > 0)
    std::memcpy(out.data(), values.data, 2 * values.n);
  return 2 * values.n;
}

void Bfloat16Codec::decode(ConstBytes message, std::size_t, const Values& values) {
  if (message.size() != 2 * values.n)
    throw CorruptMessage(message.size(), " bytes came for ", values.n, " values of 16 bits");
  if (values.dtype == Dtype::float32)
    widen({const_cast<std::uint8_t*>(message.data()), values.n, Dtype::bfloat16},
          {reinterpret_cast<float*>(values.data), values.n});
  else if (values.n > 0)
    std::memcpy(values.data, message.data(), message.size());
}

void gather_parts(wire::Mesh& mesh, const Ticket& ticket, Codec& codec, const Values& all, bool adopts_own,
                  std::size_t n_chunks, Account& account) {
  const auto world = static_cast<std::size_t>(mesh.world_size()), rank = static_cast<std::size_t>(mesh.rank());
  if (world == 1 || all.n == 0) return;
  const Cut cut{all.n, world, n_chunks};
  const std::size_t max_bytes = codec.max_message_bytes(cut.largest());
  const std::vector<int> peers = mesh.others();
  Channel channel(mesh, ticket.stream, ticket.facts, max_bytes, peers, account);
  const std::size_t ahead = std::min(channel.messages_ahead(kMessagesAhead), n_chunks - 1);
  const auto read = [&](ConstBytes message, std::size_t part, std::size_t index) {
    const auto [first, count] = cut.chunk(part, index);
    const Timed timed(account, Kind::decode);
    codec.decode(message, first, all.slice(first, count));
  };
  for (std::size_t index = 0; index < n_chunks + ahead; ++index) {
    if (index < n_chunks) {
      const auto [first, count] = cut.chunk(rank, index);
      wire::Message message = channel.take(max_bytes);
      const std::int64_t started = now_ns();
      message.n_bytes = codec.encode(all.slice(first, count), first, message.room());
      message.is_sealed = codec.seals();
      account.add(Kind::encode, started);
      for (const int peer : peers) channel.send(peer, message, SIZE_MAX);
      if (adopts_own) read(message.bytes(), rank, index);
    }
    if (index < ahead) continue;
    for (auto peer = peers.rbegin(); peer != peers.rend(); ++peer)
      read(channel.receive(*peer).bytes(), static_cast<std::size_t>(*peer), index - ahead);
  }
  channel.finish();
}

namespace {

// A rank's sums of its own part; nothing goes back.
class SumEnds final : public Ends {
 public:
  SumEnds(wire::Mesh& mesh, Codec& codec, const Values& all, std::size_t divisor, std::size_t n_chunks,
          Account& account)
      : rank_(static_cast<std::size_t>(mesh.rank())),
        codec_(codec),
        all_(all),
        cut_{all.n, static_cast<std::size_t>(mesh.world_size()), n_chunks},
        divisor_(static_cast<float>(divisor)),
        total_(mesh.pool().take(4 * cut_.largest())),
        scratch_(mesh.pool().take(4 * cut_.largest())),
        account_(account) {}
  std::size_t max_push_bytes() const override { return codec_.max_message_bytes(cut_.largest()); }
  std::size_t max_pull_bytes() const override { return 0; }
  bool seals_push() const override { return codec_.seals(); }

  std::size_t encode_push(std::size_t part, std::size_t group, Bytes out) override {
    const Timed timed(account_, Kind::encode);
    const auto [first, count] = cut_.chunk(part, group);
    return codec_.encode(all_.slice(first, count), first, out);
  }
  void add_pushed(std::size_t source, std::size_t group, ConstBytes message) override {
    const Timed timed(account_, Kind::decode);
    const auto [first, count] = cut_.chunk(rank_, group);
    const Values pushed{scratch_.block->data(), count, all_.dtype};
    codec_.decode(message, first, pushed);
    add(source, pushed);
  }
  void add_own(std::size_t group) override {
    const Timed timed(account_, Kind::decode);
    const auto [first, count] = cut_.chunk(rank_, group);
    add(rank_, all_.slice(first, count));
  }
  std::size_t encode_pull(std::size_t group, Bytes) override {
    const auto [first, count] = cut_.chunk(rank_, group);
    const Floats total = total_.floats(count);
    if (divisor_ != 1)
      for (float& sum : total) sum /= divisor_;
    narrow(total, all_.slice(first, count));
    return 0;
  }
  void adopt(std::size_t, std::size_t, const wire::Message&) override {}

 private:
  void add(std::size_t source, const Values& values) {
    if (source == 0)
      widen(values, total_.floats(values.n));
    else
      add_to(total_.floats(values.n), values);
  }

  const std::size_t rank_;
  Codec& codec_;
  const Values all_;
  const Cut cut_;
  const float divisor_;
  wire::Message total_, scratch_;
  Account& account_;
};

}  // namespace

void scatter_sums(wire::Mesh& mesh, const Ticket& ticket, Codec& codec, const Values& all, std::size_t divisor,
                  std::size_t n_chunks, Account& account) {
  if (mesh.world_size() == 1 || all.n == 0) return;
  SumEnds ends(mesh, codec, all, divisor, n_chunks, account);
  exchange_groups(mesh, ticket, ends, n_chunks, false, account);
}

}  // namespace gradwire::exchange
