#include "exchange/broadcast.hpp"

#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>

#include "bits/bit_io.hpp"
#include "checksum/crc32c.hpp"
#include "errors.hpp"

namespace gradwire::exchange {
namespace {

constexpr std::uint16_t kMagic = 0x4257;  // "WB"
constexpr std::size_t kChecksumBytes = 4;
constexpr std::int32_t kUnknownUs = std::numeric_limits<std::int32_t>::min();
constexpr std::size_t kAlignment = 64;  // a body begins at a multiple of it, so that its words are aligned
constexpr const char* kSameGradwire = "; check that all ranks run the same gradwire";
constexpr const char* kAdvice = "; check that all ranks run the same gradwire, and the host's memory and network";

// A head begins with these, as they travel.
struct Fixed {
  std::uint16_t magic;
  std::uint8_t version, flags;
  std::uint16_t origin, block;
  std::uint8_t first_bit, n_bits;
  std::uint16_t ceiling_bits;
  std::uint32_t body_bytes, sequence, step, configuration, blocks;
};
static_assert(sizeof(Fixed) == 32);

std::int32_t microseconds(double seconds) {
  return static_cast<std::int32_t>(
      std::clamp(1e6 * seconds, kUnknownUs + 1.0, double{std::numeric_limits<std::int32_t>::max()}));
}

std::size_t ended_bytes(std::size_t n_blocks) { return (n_blocks + 7) / 8; }

void compare(const char* name, const char* advice, std::uint32_t mine, std::uint32_t theirs, unsigned origin,
             std::uint32_t step) {
  if (mine != theirs)
    throw RankMismatch("ranks disagree on ", name, ": ", mine, " here, ", theirs, " on rank ", origin, " (step ", step,
                       " here). What to do: ", advice, ".");
}

std::string rank_name(std::size_t rank) { return "rank " + std::to_string(rank); }
std::string block_name(const BlockShape& block) { return "block '" + block.name + "'"; }

}  // namespace

HeadFormat::HeadFormat(std::size_t n_blocks, std::size_t world_size, std::uint32_t configuration, std::uint32_t blocks)
    : n_blocks_(n_blocks),
      world_size_(world_size),
      configuration_(configuration),
      blocks_(blocks),
      n_bytes_(sizeof(Fixed) + ended_bytes(n_blocks) + 4 * n_blocks + 16 * world_size + 16 + kChecksumBytes) {}

void HeadFormat::pack(const Head& head, std::uint32_t step, Bytes out) const {
  const auto flags = static_cast<std::uint8_t>(head.is_plain | head.is_answer << 1);
  const Fixed fixed{kMagic,      kHeadVersion,      flags,           head.origin,   head.block, head.first_bit,
                    head.n_bits, head.ceiling_bits, head.body_bytes, head.sequence, step,       configuration_,
                    blocks_};
  store(out.data(), fixed);
  std::memset(out.data() + sizeof fixed, 0, ended_bytes(n_blocks_));
  for (std::size_t block = 0; block < n_blocks_; ++block)
    if (head.ended[block]) out[sizeof fixed + block / 8] |= static_cast<std::uint8_t>(1 << block % 8);
  std::uint8_t* at = out.data() + sizeof fixed + ended_bytes(n_blocks_);
  const auto put = [&at](auto number) {
    store(at, number);
    at += sizeof number;
  };
  for (std::size_t block = 0; block < n_blocks_; ++block)
    put(head.remaining_s.empty() ? kUnknownUs : microseconds(head.remaining_s[block]));
  for (const std::uint64_t n : head.received_bytes) put(n);
  for (const std::uint64_t us : head.receiving_us) put(us);
  for (const std::uint64_t us : head.hidden_us) put(us);
  put(crc32c(out.first(n_bytes_ - kChecksumBytes)));
}

Head HeadFormat::unpack(ConstBytes raw, std::uint32_t step, int peer) const {
  const std::string who = "rank " + std::to_string(peer) + " sent";
  if (raw.size() < n_bytes_) throw CorruptMessage(who, " ", raw.size(), " bytes, fewer than a head has");
  raw = raw.first(n_bytes_);
  const auto fixed = load<Fixed>(raw.data());
  if (fixed.magic == kMagic && fixed.version != kHeadVersion)
    throw IncompatibleVersion("rank ", peer, " sends broadcast heads of version ", fixed.version, ", this build reads ",
                              kHeadVersion, "; install the same gradwire on every host");
  const std::string when = " (step " + std::to_string(step) + ")" + kAdvice;
  if (fixed.magic != kMagic ||
      load<std::uint32_t>(raw.data() + n_bytes_ - kChecksumBytes) != crc32c(raw.first(n_bytes_ - kChecksumBytes)))
    throw CorruptMessage(who, " a head that gradwire did not write", when);
  compare("configuration", "pass the same scheme and options, blocks and their order among them, on every rank",
          configuration_, fixed.configuration, fixed.origin, step);
  compare("blocks", "every rank must hold the same model and cut it into the same blocks in the same order", blocks_,
          fixed.blocks, fixed.origin, step);
  compare("step", "resume every rank from the same checkpoint and call backward equally often on all of them", step,
          fixed.step, fixed.origin, step);
  const bool has_bits = fixed.block < n_blocks_ && fixed.n_bits >= 1 && fixed.first_bit + fixed.n_bits <= kWordBits;
  const bool is_alone = fixed.block == kNoBlock && fixed.body_bytes == 0;
  const bool is_sane = fixed.flags <= 3 && fixed.ceiling_bits >= 1 && fixed.ceiling_bits <= kWordBits &&
                       fixed.origin < world_size_ && (has_bits || is_alone);
  const bool is_plain = (fixed.flags & 1) != 0, is_answer = (fixed.flags & 2) != 0;
  Head head{fixed.origin, fixed.block,      fixed.first_bit, fixed.n_bits,      is_plain,
            is_answer,    fixed.body_bytes, fixed.sequence,  fixed.ceiling_bits};
  const ConstBytes bits = raw.subspan(sizeof fixed, ended_bytes(n_blocks_));
  for (std::size_t block = 0; block < n_blocks_; ++block) head.ended.push_back(bits[block / 8] >> block % 8 & 1);
  const bool has_more = n_blocks_ % 8 != 0 && bits.back() >> n_blocks_ % 8 != 0;
  if (!is_sane || has_more) throw CorruptMessage(who, " a head out of range", when);
  const std::uint8_t* at = bits.data() + bits.size();
  const auto get = [&at](auto& number) {
    std::memcpy(&number, at, sizeof number);
    at += sizeof number;
  };
  std::vector<std::int32_t> remaining_us(n_blocks_);
  head.received_bytes.resize(world_size_);
  head.receiving_us.resize(world_size_);
  for (std::int32_t& us : remaining_us) get(us);
  for (std::uint64_t& n : head.received_bytes) get(n);
  for (std::uint64_t& us : head.receiving_us) get(us);
  for (std::uint64_t& us : head.hidden_us) get(us);
  if (std::ranges::find(remaining_us, kUnknownUs) == remaining_us.end())
    for (const std::int32_t us : remaining_us) head.remaining_s.push_back(us / 1e6);
  return head;
}

Broadcast::Broadcast(wire::Mesh& mesh, std::uint32_t stream, Topology topology, std::vector<BlockShape> blocks,
                     const embedded_float::Settings& settings, std::uint32_t configuration, std::uint32_t blocks_hash)
    : mesh_(mesh),
      stream_(stream),
      topology_(topology),
      blocks_(std::move(blocks)),
      settings_(settings),
      world_(static_cast<std::size_t>(mesh.world_size())),
      rank_(static_cast<std::size_t>(mesh.rank())),
      heads_(blocks_.size(), world_, configuration, blocks_hash),
      head_bytes_((heads_.n_bytes() + kAlignment - 1) / kAlignment * kAlignment),
      received_bytes_(world_, 0),
      receiving_us_(world_, 0),
      shared_(has_owners() ? blocks_.size() : 0),
      copies_(blocks_.size()) {
  for (auto& of_block : copies_) of_block.resize(world_);
  const std::vector<int> others = mesh.others();
  const int left = static_cast<int>((rank_ + world_ - 1) % world_);
  std::vector<int> peers = others;
  if (topology_ == Topology::ring) {
    receivers_ = {others.front()};
    sources_ = {{left, others}};
    peers = {others.front()};
    if (left != others.front()) peers.push_back(left);
  } else {
    receivers_ = others;
    for (const int peer : others) sources_.push_back({peer, {peer}});
  }
  std::size_t largest = 0;
  for (std::size_t block = 0; block < blocks_.size(); ++block)
    for (int n_bits = 1; n_bits <= kWordBits; ++n_bits)
      largest =
          std::max({largest, max_body_bytes(block, n_bits),
                    has_owners() ? body_bytes(part_of(block, world_ - 1).count + 1, Dtype::float32, n_bits, 0) : 0});
  begin(0);
  // Each head carries facts of its own; what they do not say is the same by construction.
  mesh_.open(stream_, {0, 0, 0, 0}, head_bytes_ + largest, peers);
}

Broadcast::~Broadcast() { mesh_.close(stream_); }

void Broadcast::begin(std::uint32_t step) {
  const std::lock_guard lock(mutex_);
  step_ = step;
  ended_.assign(world_, std::vector<bool>(blocks_.size(), false));
  answered_ = ended_;
  sequence_ = 0;
  messages_.clear();
  for (Shared& one : shared_) one = {};
  sent_bits_.assign(blocks_.size(), 0);
  expected_.assign(world_, 0);
  for (auto& of_block : copies_)
    for (Copy& copy : of_block) {
      copy.n_known = 0;
      copy.words = {};
    }
}

// ---- sending

Cut::Range Broadcast::part_of(std::size_t block, std::size_t rank) const {
  const std::size_t n = blocks_.at(block).n;
  return has_owners() ? Cut{n, world_, 1}.chunk(rank, 0) : Cut::Range{0, n};
}

std::size_t Broadcast::body_bytes(std::size_t n, Dtype dtype, int n_bits, int first_bit) const {
  if (n_bits == kWordBits) return n * floats::bytes_of(dtype);
  return embedded_float::max_message_bytes(n, settings_.partition, {first_bit, n_bits});
}

std::size_t Broadcast::max_body_bytes(std::size_t block, int n_bits, int first_bit) const {
  const auto& [name, n, dtype] = blocks_.at(block);
  return body_bytes(has_owners() ? Cut{n, world_, 1}.largest() : n, dtype, n_bits, first_bit);
}

std::size_t Broadcast::write_body(const Values& values, int n_bits, int first_bit, const Bytes& body) const {
  if (n_bits != kWordBits)
    return embedded_float::encode(values.bytes(), values.dtype, settings_, {first_bit, n_bits}, body);
  if (values.n > 0) std::memcpy(body.data(), values.data, values.bytes().size());
  return values.bytes().size();
}

std::size_t Broadcast::encode(std::size_t block, const Values& gradient, int n_bits) {
  const auto& [name, n, dtype] = blocks_.at(block);
  const int first_bit = sent_bits_[block];
  next_ = {.block = static_cast<std::uint16_t>(block),
           .first_bit = static_cast<std::uint8_t>(first_bit),
           .n_bits = static_cast<std::uint8_t>(n_bits),
           .is_plain = n_bits == kWordBits};
  messages_.clear();
  std::size_t largest = 0;
  for (std::size_t receiver = 0; receiver < (has_owners() ? receivers_.size() : 1); ++receiver) {
    const auto [first, count] = part_of(block, static_cast<std::size_t>(receivers_[receiver]));
    wire::Message message = mesh_.pool().take(head_bytes_ + body_bytes(count, dtype, n_bits, first_bit));
    const std::size_t n_body =
        write_body(gradient.slice(first, count), n_bits, first_bit, message.room().subspan(head_bytes_));
    if (n_body > std::numeric_limits<std::uint32_t>::max())
      throw InvalidArgument("a block's message is longer than 2^32 - 1 bytes");
    message.is_sealed = !next_.is_plain;
    message.n_bytes = head_bytes_ + n_body;
    largest = std::max(largest, n_body);
    messages_.push_back(std::move(message));
  }
  const std::lock_guard lock(answer_mutex_);
  sent_bits_[block] += n_bits;
  if (has_owners() && !shared_[block].sum.block) {
    Shared& shared = shared_[block];
    shared.own = gradient;
    shared.sum = mesh_.pool().take(4 * n);
    std::ranges::fill(shared.sum.floats(n), 0.0f);
  }
  return largest;
}

std::vector<std::size_t> Broadcast::queued_bytes() const {
  std::vector<std::size_t> bytes;
  for (std::size_t receiver = 0; receiver < receivers_.size(); ++receiver) {
    const std::size_t n = messages_.empty() ? head_bytes_ : messages_[messages_.size() == 1 ? 0 : receiver].n_bytes;
    bytes.push_back(wire::kHeaderBytes + n);
  }
  return bytes;
}

// Under answer_mutex_, so that the order of a rank's heads is that of their numbers.
void Broadcast::post(Head& head, const std::vector<wire::Message>& messages) {
  head.origin = static_cast<std::uint16_t>(rank_);
  head.sequence = sequence_++;
  head.ceiling_bits = ceiling_bits_;
  head.hidden_us = hidden_us_;
  std::uint32_t step;
  {
    const std::lock_guard lock(mutex_);
    head.ended = (head.is_answer ? answered_ : ended_)[rank_];
    head.received_bytes = received_bytes_;
    head.receiving_us = receiving_us_;
    step = step_;
  }
  for (std::size_t i = 0; i < receivers_.size(); ++i) {
    wire::Message message = messages[messages.size() == 1 ? 0 : i];
    if (i == 0 || messages.size() > 1) {
      head.body_bytes = static_cast<std::uint32_t>(message.n_bytes - head_bytes_);
      const Bytes room = message.room().first(head_bytes_);
      heads_.pack(head, step, room);
      std::fill(room.begin() + static_cast<std::ptrdiff_t>(heads_.n_bytes()), room.end(), std::uint8_t{0});
    }
    mesh_.send(receivers_[i], stream_, std::move(message));
  }
}

Sent Broadcast::send(const std::vector<std::size_t>& ended, int ceiling_bits, std::vector<double> remaining_s,
                     const std::array<std::uint64_t, 2>& hidden_us) {
  if (messages_.empty()) {
    messages_ = {mesh_.pool().take(head_bytes_)};
    next_ = {};
  }
  const std::size_t block = next_.block;
  next_.remaining_s = std::move(remaining_s);
  const std::lock_guard order(answer_mutex_);
  ceiling_bits_ = static_cast<std::uint16_t>(ceiling_bits);
  hidden_us_ = hidden_us;
  {
    const std::lock_guard lock(mutex_);
    for (const std::size_t one : ended) ended_[rank_].at(one) = true;
  }
  post(next_, std::exchange(messages_, {}));
  Sent sent;
  if (!has_owners()) {
    sent.ended = ended;
    return sent;
  }
  for (std::size_t one = 0; one < blocks_.size(); ++one)
    if ((one == block || std::ranges::count(ended, one) != 0) && answer(one, sent.answers)) sent.ended.push_back(one);
  return sent;
}

// ---- receiving

std::optional<Heard> Broadcast::receive(std::uint32_t step) {
  std::vector<int> peers;
  {
    const std::lock_guard lock(mutex_);
    if (step_ != step) return std::nullopt;
    // What others send belongs to the next step.
    const auto is_over = [&](int origin) {
      return std::ranges::count(ended_[origin], false) == 0 &&
             (!has_owners() || std::ranges::count(answered_[origin], false) == 0);
    };
    for (const Source& source : sources_)
      if (!std::ranges::all_of(source.origins, is_over)) peers.push_back(source.peer);
  }
  if (peers.empty()) return std::nullopt;
  wire::Arrival arrival = mesh_.receive_any(stream_, peers);
  const wire::Message& message = arrival.message;
  Heard heard{heads_.unpack(message.bytes(), step, arrival.peer), arrival.duration_ns, now_ns(), 0, {}, {}};
  const Head& head = heard.head;
  const auto source = std::ranges::find(sources_, arrival.peer, &Source::peer);
  if (std::ranges::count(source->origins, head.origin) == 0 || head.sequence != expected_[head.origin])
    throw CorruptMessage(rank_name(arrival.peer), " sent head ", head.sequence, " of ", rank_name(head.origin),
                         " in step ", step, ", out of turn", kSameGradwire, " with the same topology");
  ++expected_[head.origin];
  if (head.block != kNoBlock) check_body(head);
  if (message.n_bytes != head_bytes_ + head.body_bytes)
    throw CorruptMessage(rank_name(arrival.peer), " announced a body of ", head.body_bytes,
                         " bytes and sent a message of ", message.n_bytes);
  if (topology_ == Topology::ring && head.origin != receivers_.front()) {
    mesh_.send(receivers_.front(), stream_, message);
    heard.sent_bytes.push_back(wire::kHeaderBytes + message.n_bytes);
  }
  std::unique_lock order(answer_mutex_, std::defer_lock);
  if (has_owners()) order.lock();
  if (head.block != kNoBlock) {
    if (head.is_answer)
      take_answer(head, message);
    else
      take(head, message);
  }
  heard.decoded_ns = now_ns();
  for (double& left_s : heard.head.remaining_s)
    left_s -= static_cast<double>(heard.decoded_ns - heard.arrived_ns) / 1e9;
  std::vector<std::size_t> newly;
  {
    const std::lock_guard lock(mutex_);
    if (head.block != kNoBlock) {
      received_bytes_[head.origin] += head.body_bytes;
      receiving_us_[head.origin] += static_cast<std::uint64_t>(arrival.duration_ns / 1'000);
    }
    auto& before = (head.is_answer ? answered_ : ended_)[head.origin];
    for (std::size_t block = 0; block < blocks_.size(); ++block)
      if (head.ended[block] && !before[block]) newly.push_back(block);
    before = head.ended;
  }
  if (!has_owners() || head.is_answer) {
    heard.newly_ended = std::move(newly);
    return heard;
  }
  for (std::size_t block = 0; block < blocks_.size(); ++block)
    if ((block == head.block || std::ranges::count(newly, block) != 0) && answer(block, heard.sent_bytes))
      heard.newly_ended.push_back(block);
  return heard;
}

void Broadcast::check_body(const Head& head) const {
  const Dtype dtype = head.is_answer ? Dtype::float32 : blocks_[head.block].dtype;
  const std::size_t n = part_of(head.block, head.is_answer ? head.origin : rank_).count;
  const std::size_t n_words = n * floats::bytes_of(dtype);
  const bool all_at_once = head.n_bits == kWordBits;
  if (head.body_bytes > body_bytes(n, dtype, head.n_bits, head.first_bit) || (head.is_answer && !has_owners()) ||
      (head.is_plain && head.body_bytes != n_words))
    throw CorruptMessage(rank_name(head.origin), " announced ", head.body_bytes, " bytes for ", head.n_bits,
                         " bits of ", block_name(blocks_[head.block]), " in this step", kSameGradwire);
  if (head.is_plain != all_at_once)
    throw CorruptMessage(rank_name(head.origin), " sent ", head.n_bits, " bits of ", block_name(blocks_[head.block]),
                         (all_at_once ? " in planes" : " as words"), kSameGradwire);
}

void Broadcast::take(const Head& head, const wire::Message& message) {
  const Dtype dtype = blocks_[head.block].dtype;
  const std::size_t n = part_of(head.block, rank_).count;
  Copy& copy = copies_[head.block][head.origin];
  const auto out_of_order = [&] {
    return CorruptMessage(rank_name(head.origin), " announced bits ", head.first_bit, " to ",
                          head.first_bit + head.n_bits, " of ", block_name(blocks_[head.block]), " and sent others",
                          kSameGradwire);
  };
  if (copy.words.block || copy.n_known != head.first_bit) throw out_of_order();
  if (head.is_plain) {
    copy.words = message;
    return;
  }
  if (!copy.codes) {
    copy.codes = std::make_unique_for_overwrite<std::uint32_t[]>(n);
    copy.exponents.resize(embedded_float::partitions_of(n, settings_.partition));
  }
  const embedded_float::Known known{{copy.codes.get(), n}, copy.exponents, dtype, settings_, copy.n_known};
  const int n_known = embedded_float::refine(message.bytes().subspan(head_bytes_), known);
  if (n_known != head.first_bit + head.n_bits) throw out_of_order();
  copy.n_known = n_known;
}

// ---- owners

bool Broadcast::is_set(const std::vector<std::vector<bool>>& flags, std::size_t rank, std::size_t block) {
  const std::lock_guard lock(mutex_);
  return flags[rank][block];
}

void Broadcast::take_answer(const Head& head, const wire::Message& message) {
  const auto [first, count] = part_of(head.block, head.origin);
  Shared& shared = shared_[head.block];
  if (!shared.sum.block || is_set(answered_, head.origin, head.block))
    throw CorruptMessage(rank_name(head.origin), " answered ", block_name(blocks_[head.block]),
                         " before it had anything of it, or after its last answer", kSameGradwire);
  const Floats sum = shared.sum.floats(blocks_[head.block].n);
  if (head.is_plain)
    return add_to(sum.subspan(first, count), {message.block->data() + head_bytes_, count, Dtype::float32});
  const wire::Message decoded = mesh_.pool().take(4 * count);
  embedded_float::decode(message.bytes().subspan(head_bytes_), Dtype::float32, {decoded.block->data(), 4 * count});
  add_to(sum.subspan(first, count), {decoded.block->data(), count, Dtype::float32});
}

bool Broadcast::answer(std::size_t block, std::vector<std::size_t>& sent_bytes) {
  Shared& shared = shared_[block];
  bool all_ended = true;
  int most_bits = sent_bits_[block], least_bits = most_bits;
  std::size_t n_known = static_cast<std::size_t>(most_bits);
  if (shared.is_final || most_bits == 0) return false;
  for (std::size_t rank = 0; rank < world_; ++rank) {
    const bool has_ended = is_set(ended_, rank, block);
    all_ended = all_ended && has_ended;
    if (rank == rank_) continue;
    const Copy& copy = copies_[block][rank];
    const int known = copy.words.block ? kWordBits : copy.n_known;
    if (known == 0 && !has_ended) return false;
    most_bits = std::max(most_bits, known);
    least_bits = std::min(least_bits, known);
    n_known += static_cast<std::size_t>(known);
  }
  if (shared.answered_bits != 0 && !all_ended) return false;
  shared.is_final = all_ended;
  Head head{.is_answer = true};
  std::vector<wire::Message> messages;
  if (shared.n_known == n_known) {
    messages.push_back(mesh_.pool().take(head_bytes_));
  } else {
    const auto [first, count] = part_of(block, rank_);
    const wire::Message memory = mesh_.pool().take(4 * count);
    const Floats sum = memory.floats(count);
    sum_copies(block, shared.own.slice(first, count), sum);
    const Floats known = shared.sum.floats(blocks_[block].n).subspan(first, count);
    subtract(values_of(sum), values_of(known));
    // What a second answer adds is as small as what the first one left out: its sign and as many bits as came.
    const int more_bits = std::clamp(most_bits - shared.answered_bits + 1, 2, 31);
    head.n_bits = static_cast<std::uint8_t>(shared.answered_bits == 0 ? most_bits : more_bits);
    head.is_plain = head.n_bits == kWordBits;
    head.block = static_cast<std::uint16_t>(block);
    head.origin = static_cast<std::uint16_t>(rank_);
    wire::Message message = mesh_.pool().take(head_bytes_ + body_bytes(count, Dtype::float32, head.n_bits, 0));
    const Bytes body = message.room().subspan(head_bytes_);
    message.n_bytes = head_bytes_ + write_body(values_of(sum), head.n_bits, 0, body);
    message.is_sealed = !head.is_plain;
    shared.lost.assign(sum.begin(), sum.end());
    std::vector<float> before(known.begin(), known.end());
    take_answer(head, message);
    for (std::size_t i = 0; i < count; ++i) shared.lost[i] -= known[i] - before[i];
    messages.push_back(std::move(message));
    shared.answered_bits = std::max(least_bits, 1);
    shared.n_known = n_known;
  }
  {
    const std::lock_guard lock(mutex_);
    answered_[rank_][block] = shared.is_final;
  }
  sent_bytes.push_back(wire::kHeaderBytes + messages.front().n_bytes);
  post(head, messages);
  return shared.is_final;
}

void Broadcast::mean_of_parts(std::size_t block, const Values& gradient, const Values& left_out) {
  Shared& shared = shared_[block];
  const Floats sum = shared.sum.floats(gradient.n);
  for (std::size_t rank = 0; left_out.data != nullptr && rank < world_; ++rank) {
    const auto [first, count] = part_of(block, rank);
    const Values part = left_out.slice(first, count), own = gradient.slice(first, count);
    if (rank == rank_) {
      narrow(shared.lost, part);
      continue;
    }
    const wire::Message sent = mesh_.pool().take(own.bytes().size());
    embedded_float::quantise(own.bytes(), own.dtype, settings_, sent_bits_[block],
                             {sent.block->data(), own.bytes().size()});
    if (count > 0) std::memcpy(part.data, own.data, own.bytes().size());
    subtract(part, {sent.block->data(), count, own.dtype});
  }
  write_mean(sum, gradient);
  shared.sum = {};
}

// ---- the mean

void Broadcast::mean(std::size_t block, const Values& gradient, const Values& left_out) {
  const auto& [name, n, dtype] = blocks_.at(block);
  const std::lock_guard lock(mean_mutex_);
  if (has_owners()) return mean_of_parts(block, gradient, left_out);
  const std::size_t bytes = n * gradient.element_bytes();
  const bool is_whole = sent_bits_[block] == kWordBits;
  const wire::Message own_memory = mesh_.pool().take(bytes), sum_memory = mesh_.pool().take(4 * n);
  const Values own = is_whole ? gradient : Values{own_memory.block->data(), n, dtype};
  if (!is_whole)
    embedded_float::quantise({gradient.data, bytes}, dtype, settings_, sent_bits_[block], {own.data, bytes});
  if (left_out.data != nullptr) {
    if (bytes > 0) std::memcpy(left_out.data, gradient.data, bytes);
    subtract(left_out, own);
  }
  sum_copies(block, own, sum_memory.floats(n));
  write_mean(sum_memory.floats(n), gradient);
}

// The sum is float32 whatever the dtype, and begins with +0.
void Broadcast::sum_copies(std::size_t block, const Values& own, Floats sums) {
  std::ranges::fill(sums, 0.0f);
  for (std::size_t rank = 0; rank < world_; ++rank)
    if (rank == rank_)
      add_to(sums, own);
    else
      add_copy(copies_[block][rank], block, rank, sums);
}

void Broadcast::write_mean(Floats sums, const Values& mean) const {
  const auto share = static_cast<float>(1.0 / static_cast<double>(world_));
  for (float& value : sums) value *= share;
  narrow(sums, mean);
}

void Broadcast::add_copy(Copy& copy, std::size_t block, std::size_t rank, Floats sums) {
  const Dtype dtype = blocks_[block].dtype;
  const std::size_t n = sums.size();
  if (copy.words.block) {
    add_to(sums, {copy.words.block->data() + head_bytes_, n, dtype});
    if (!has_owners() || shared_[block].is_final) copy.words = {};  // the next message needs its memory
    return;
  }
  if (copy.n_known == 0)
    throw CorruptMessage(rank_name(rank), " said that ", block_name(blocks_[block]),
                         " is complete before it sent any of it", kSameGradwire);
  const embedded_float::Known known{{copy.codes.get(), n}, copy.exponents, dtype, settings_, copy.n_known};
  if (dtype == Dtype::float32) return embedded_float::add(known, sums);
  // As its sender adds it: rounded to the gradient's dtype.
  const wire::Message rounded = mesh_.pool().take(n * floats::bytes_of(dtype));
  embedded_float::write(known, {rounded.block->data(), rounded.n_bytes});
  add_to(sums, {rounded.block->data(), n, dtype});
}

}  // namespace gradwire::exchange
