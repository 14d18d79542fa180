#include "exchange/broadcast.hpp"

#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>

#include "checksum/crc32c.hpp"
#include "errors.hpp"

namespace gradwire::exchange {
namespace {

constexpr std::uint16_t kMagic = 0x4257;  // "WB"
constexpr std::size_t kChecksumBytes = 4;
constexpr std::int32_t kUnknownUs = std::numeric_limits<std::int32_t>::min();
constexpr const char* kAdvice = "; check that all ranks run the same gradwire, and the host's memory and network";

#pragma pack(push, 1)
struct Fixed {
  std::uint16_t magic;
  std::uint8_t version, flags;
  std::uint16_t origin, block;
  std::uint8_t first_bit, n_bits;
  std::uint16_t ceiling_bits;
  std::uint32_t body_bytes, sequence, step, configuration, blocks;
};
#pragma pack(pop)
static_assert(sizeof(Fixed) == 32);

// Goes through the bytes behind the fixed fields, number by number.
class Cursor {
 public:
  explicit Cursor(std::size_t at) : at_(at) {}
  template <class Number>
  void put(Bytes out, Number number) {
    std::memcpy(out.data() + at_, &number, sizeof number);
    at_ += sizeof number;
  }
  template <class Number>
  Number get(ConstBytes raw) {
    Number number;
    std::memcpy(&number, raw.data() + at_, sizeof number);
    at_ += sizeof number;
    return number;
  }

 private:
  std::size_t at_;
};

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

}  // namespace

HeadFormat::HeadFormat(std::size_t n_blocks, std::size_t world_size, std::uint32_t configuration, std::uint32_t blocks)
    : n_blocks_(n_blocks),
      world_size_(world_size),
      configuration_(configuration),
      blocks_(blocks),
      n_bytes_(sizeof(Fixed) + ended_bytes(n_blocks) + 4 * n_blocks + 16 * world_size + kChecksumBytes) {}

void HeadFormat::pack(const Head& head, std::uint32_t step, Bytes out) const {
  const Fixed fixed{kMagic,
                    kHeadVersion,
                    head.is_plain,
                    head.origin,
                    head.block,
                    static_cast<std::uint8_t>(head.first_bit),
                    static_cast<std::uint8_t>(head.n_bits),
                    static_cast<std::uint16_t>(head.ceiling_bits),
                    head.body_bytes,
                    head.sequence,
                    step,
                    configuration_,
                    blocks_};
  std::memcpy(out.data(), &fixed, sizeof fixed);
  std::memset(out.data() + sizeof fixed, 0, ended_bytes(n_blocks_));
  for (std::size_t block = 0; block < n_blocks_; ++block)
    if (head.ended[block]) out[sizeof fixed + block / 8] |= static_cast<std::uint8_t>(1 << block % 8);
  Cursor at(sizeof fixed + ended_bytes(n_blocks_));
  for (std::size_t block = 0; block < n_blocks_; ++block)
    at.put(out, head.remaining_s.empty() ? kUnknownUs : microseconds(head.remaining_s[block]));
  for (const std::uint64_t n : head.received_bytes) at.put(out, n);
  for (const std::uint64_t us : head.receiving_us) at.put(out, us);
  at.put(out, crc32c(out.first(n_bytes_ - kChecksumBytes)));
}

Head HeadFormat::unpack(ConstBytes raw, std::uint32_t step, int peer) const {
  const std::string who = "rank " + std::to_string(peer) + " sent";
  if (raw.size() < n_bytes_) throw CorruptMessage(who, " ", raw.size(), " bytes, fewer than a head has");
  raw = raw.first(n_bytes_);
  Fixed fixed;
  std::memcpy(&fixed, raw.data(), sizeof fixed);
  if (fixed.magic == kMagic && fixed.version != kHeadVersion)
    throw IncompatibleVersion("rank ", peer, " sends broadcast heads of version ", fixed.version, ", this build reads ",
                              kHeadVersion, "; install the same gradwire on every host");
  const std::string when = " (step " + std::to_string(step) + ")" + kAdvice;
  Cursor end(n_bytes_ - kChecksumBytes);
  if (fixed.magic != kMagic || end.get<std::uint32_t>(raw) != crc32c(raw.first(n_bytes_ - kChecksumBytes)))
    throw CorruptMessage(who, " a head that gradwire did not write", when);
  compare("configuration", "pass the same scheme and options, blocks and their order among them, on every rank",
          configuration_, fixed.configuration, fixed.origin, step);
  compare("blocks", "every rank must hold the same model and cut it into the same blocks in the same order", blocks_,
          fixed.blocks, fixed.origin, step);
  compare("step", "resume every rank from the same checkpoint and call backward equally often on all of them", step,
          fixed.step, fixed.origin, step);
  const bool has_bits = fixed.block < n_blocks_ && fixed.n_bits >= 1 && fixed.first_bit + fixed.n_bits <= kWordBits;
  const bool is_alone = fixed.block == kNoBlock && fixed.body_bytes == 0;
  const bool is_sane = fixed.flags <= 1 && fixed.ceiling_bits >= 1 && fixed.ceiling_bits <= kWordBits &&
                       fixed.origin < world_size_ && (has_bits || is_alone);
  Head head{fixed.origin,
            fixed.block,
            fixed.first_bit,
            fixed.n_bits,
            fixed.flags == 1,
            fixed.body_bytes,
            fixed.sequence,
            fixed.ceiling_bits,
            {},
            {},
            {},
            {}};
  const ConstBytes bits = raw.subspan(sizeof fixed, ended_bytes(n_blocks_));
  for (std::size_t block = 0; block < n_blocks_; ++block) head.ended.push_back(bits[block / 8] >> block % 8 & 1);
  const bool has_more = n_blocks_ % 8 != 0 && bits.back() >> n_blocks_ % 8 != 0;
  if (!is_sane || has_more) throw CorruptMessage(who, " a head out of range", when);
  Cursor at(sizeof fixed + bits.size());
  bool knows = true;
  for (std::size_t block = 0; block < n_blocks_; ++block) {
    const auto us = at.get<std::int32_t>(raw);
    knows = knows && us != kUnknownUs;
    head.remaining_s.push_back(us / 1e6);
  }
  if (!knows) head.remaining_s.clear();
  for (std::size_t rank = 0; rank < world_size_; ++rank) head.received_bytes.push_back(at.get<std::uint64_t>(raw));
  for (std::size_t rank = 0; rank < world_size_; ++rank) head.receiving_us.push_back(at.get<std::uint64_t>(raw));
  return head;
}

namespace {

constexpr std::size_t kAlignment = 64;  // a body begins at a multiple of it, so that its words are aligned
constexpr const char* kSameGradwire = "; check that all ranks run the same gradwire";

std::string rank_name(std::size_t rank) { return "rank " + std::to_string(rank); }
std::string block_name(const BlockShape& block) { return "block '" + block.name + "'"; }

}  // namespace

Broadcast::Broadcast(wire::Mesh& mesh, std::uint32_t stream, bool is_ring, std::vector<BlockShape> blocks,
                     const embedded_float::Settings& settings, std::uint32_t configuration, std::uint32_t blocks_hash)
    : mesh_(mesh),
      stream_(stream),
      is_ring_(is_ring),
      blocks_(std::move(blocks)),
      settings_(settings),
      world_(static_cast<std::size_t>(mesh.world_size())),
      rank_(static_cast<std::size_t>(mesh.rank())),
      heads_(blocks_.size(), world_, configuration, blocks_hash),
      head_bytes_((heads_.n_bytes() + kAlignment - 1) / kAlignment * kAlignment),
      received_bytes_(world_, 0),
      receiving_us_(world_, 0),
      copies_(blocks_.size()) {
  embedded_float::check_settings(settings, {0, 1});
  for (auto& of_block : copies_) of_block.resize(world_);
  // It begins with the right neighbour, so that not all ranks send to the same one at once.
  std::vector<int> others;
  for (std::size_t distance = 1; distance < world_; ++distance)
    others.push_back(static_cast<int>((rank_ + distance) % world_));
  const int left = static_cast<int>((rank_ + world_ - 1) % world_);
  std::vector<int> peers = others;
  if (is_ring_) {
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
    for (int n_bits = 1; n_bits <= kWordBits; ++n_bits) largest = std::max(largest, max_body_bytes(block, n_bits));
  begin(0);
  // Each head carries facts of its own; what they do not say is the same by construction.
  mesh_.open(stream_, {0, 0, 0, 0}, head_bytes_ + largest, peers);
}

Broadcast::~Broadcast() { mesh_.close(stream_); }

void Broadcast::begin(std::uint32_t step) {
  const std::lock_guard lock(mutex_);
  step_ = step;
  ended_.assign(world_, std::vector<bool>(blocks_.size(), false));
  sequence_ = 0;
  message_ = {};
  sent_bits_.assign(blocks_.size(), 0);
  expected_.assign(world_, 0);
  for (auto& of_block : copies_)
    for (Copy& copy : of_block) {
      copy.n_known = 0;
      copy.words = {};
    }
}

// ---- sending

std::size_t Broadcast::max_body_bytes(std::size_t block, int n_bits, int first_bit) const {
  const auto& [name, n, dtype] = blocks_.at(block);
  if (n_bits == kWordBits) return n * floats::bytes_of(dtype);
  return embedded_float::max_message_bytes(n, settings_.partition, {first_bit, n_bits});
}

std::size_t Broadcast::encode(std::size_t block, const Values& gradient, int n_bits) {
  const auto& [name, n, dtype] = blocks_.at(block);
  if (gradient.n != n || gradient.dtype != dtype) throw InvalidArgument("the gradient is not of this block");
  const int first_bit = sent_bits_[block];
  embedded_float::check_settings(settings_, {first_bit, n_bits});
  const std::size_t room = max_body_bytes(block, n_bits, first_bit), bytes = n * gradient.element_bytes();
  message_ = mesh_.pool().take(head_bytes_ + room);
  const Bytes body = message_.room().subspan(head_bytes_, room);
  next_ = {};
  next_.block = static_cast<std::uint16_t>(block);
  next_.first_bit = first_bit;
  next_.n_bits = n_bits;
  next_.is_plain = n_bits == kWordBits;
  std::size_t n_body = bytes;
  if (!next_.is_plain)
    n_body = embedded_float::encode({gradient.data, bytes}, dtype, settings_, {first_bit, n_bits}, body);
  else if (bytes > 0)
    std::memcpy(body.data(), gradient.data, bytes);
  message_.is_sealed = !next_.is_plain;
  next_.body_bytes = static_cast<std::uint32_t>(n_body);
  if (next_.body_bytes != n_body) throw InvalidArgument("a block's message is longer than 2^32 - 1 bytes");
  sent_bits_[block] += n_bits;
  message_.n_bytes = head_bytes_ + n_body;
  return n_body;
}

void Broadcast::send(const std::vector<std::size_t>& ended, int ceiling_bits, std::vector<double> remaining_s) {
  if (!remaining_s.empty() && remaining_s.size() != blocks_.size())
    throw InvalidArgument("a head tells the time that remains of every block");
  if (!message_.block) {
    message_ = mesh_.pool().take(head_bytes_);
    next_ = {};
    next_.block = kNoBlock;
  }
  next_.origin = static_cast<std::uint16_t>(rank_);
  next_.sequence = sequence_++;
  next_.ceiling_bits = ceiling_bits;
  next_.remaining_s = std::move(remaining_s);
  std::uint32_t step;
  {
    const std::lock_guard lock(mutex_);
    for (const std::size_t block : ended) ended_[rank_].at(block) = true;
    next_.ended = ended_[rank_];
    next_.received_bytes = received_bytes_;
    next_.receiving_us = receiving_us_;
    step = step_;
  }
  const Bytes head = message_.room().first(head_bytes_);
  heads_.pack(next_, step, head);
  std::fill(head.begin() + static_cast<std::ptrdiff_t>(heads_.n_bytes()), head.end(), std::uint8_t{0});
  const wire::Message message = std::exchange(message_, {});
  for (const int peer : receivers_) mesh_.send(peer, stream_, message);
}

// ---- receiving

std::optional<Heard> Broadcast::receive(std::uint32_t step) {
  std::vector<int> peers;
  {
    const std::lock_guard lock(mutex_);
    if (step_ != step) return std::nullopt;
    // What others send belongs to the next step.
    for (const Source& source : sources_)
      if (!std::all_of(source.origins.begin(), source.origins.end(), [&](int origin) {
            return std::find(ended_[origin].begin(), ended_[origin].end(), false) == ended_[origin].end();
          }))
        peers.push_back(source.peer);
  }
  if (peers.empty()) return std::nullopt;
  wire::Arrival arrival = mesh_.receive_any(stream_, peers);
  const wire::Message& message = arrival.message;
  Heard heard{heads_.unpack(message.bytes(), step, arrival.peer), arrival.duration_ns, now_ns(), 0, 0, {}};
  const Head& head = heard.head;
  const auto source =
      std::find_if(sources_.begin(), sources_.end(), [&](const Source& one) { return one.peer == arrival.peer; });
  const bool is_origin =
      std::find(source->origins.begin(), source->origins.end(), head.origin) != source->origins.end();
  if (!is_origin || head.sequence != expected_[head.origin])
    throw CorruptMessage(rank_name(arrival.peer), " sent head ", head.sequence, " of ", rank_name(head.origin),
                         " in step ", step, ", out of turn", kSameGradwire, " with the same topology");
  ++expected_[head.origin];
  if (head.block != kNoBlock) check_body(head);
  if (message.n_bytes != head_bytes_ + head.body_bytes)
    throw CorruptMessage(rank_name(arrival.peer), " announced a body of ", head.body_bytes,
                         " bytes and sent a message of ", message.n_bytes);
  if (is_ring_ && head.origin != receivers_.front()) {
    mesh_.send(receivers_.front(), stream_, message);
    heard.forwarded_bytes = wire::kHeaderBytes + message.n_bytes;
  }
  if (head.block != kNoBlock) take(head, message);
  heard.decoded_ns = now_ns();
  for (double& left_s : heard.head.remaining_s)
    left_s -= static_cast<double>(heard.decoded_ns - heard.arrived_ns) / 1e9;
  const std::lock_guard lock(mutex_);
  if (head.block != kNoBlock) {
    received_bytes_[head.origin] += head.body_bytes;
    receiving_us_[head.origin] += static_cast<std::uint64_t>(arrival.duration_ns / 1'000);
  }
  auto& before = ended_[head.origin];
  for (std::size_t block = 0; block < blocks_.size(); ++block)
    if (head.ended[block] && !before[block]) heard.newly_ended.push_back(block);
  before = head.ended;
  return heard;
}

void Broadcast::check_body(const Head& head) const {
  const auto& [name, n, dtype] = blocks_[head.block];
  const std::size_t n_words = n * floats::bytes_of(dtype);
  const bool all_at_once = head.n_bits == kWordBits;
  if (head.body_bytes > max_body_bytes(head.block, head.n_bits, head.first_bit) ||
      (head.is_plain && head.body_bytes != n_words))
    throw CorruptMessage(rank_name(head.origin), " announced ", head.body_bytes, " bytes for ", head.n_bits,
                         " bits of ", block_name(blocks_[head.block]), " in this step", kSameGradwire);
  if (head.is_plain != all_at_once)
    throw CorruptMessage(rank_name(head.origin), " sent ", head.n_bits, " bits of ", block_name(blocks_[head.block]),
                         (all_at_once ? " in planes" : " as words"), kSameGradwire);
}

void Broadcast::take(const Head& head, const wire::Message& message) {
  const auto& [name, n, dtype] = blocks_[head.block];
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

// ---- the mean

void Broadcast::mean(std::size_t block, const Values& gradient, const Values& left_out) {
  const auto& [name, n, dtype] = blocks_.at(block);
  const bool has_left_out = left_out.data != nullptr;
  if (gradient.n != n || gradient.dtype != dtype || (has_left_out && (left_out.n != n || left_out.dtype != dtype)))
    throw InvalidArgument("a mean needs values of the block's size and dtype");
  const std::lock_guard lock(mean_mutex_);
  const std::size_t bytes = n * gradient.element_bytes();
  const bool is_whole = sent_bits_[block] == kWordBits;
  const wire::Message own_memory = mesh_.pool().take(bytes), sum_memory = mesh_.pool().take(4 * n);
  const Values own = is_whole ? gradient : Values{own_memory.block->data(), n, dtype};
  if (!is_whole)
    embedded_float::quantise({gradient.data, bytes}, dtype, settings_, sent_bits_[block], {own.data, bytes});
  if (has_left_out) {
    if (bytes > 0) std::memcpy(left_out.data, gradient.data, bytes);
    subtract(left_out, own);
  }
  // The sum is float32 whatever the dtype, and begins with +0.
  const Floats sums(reinterpret_cast<float*>(sum_memory.block->data()), n);
  std::fill(sums.begin(), sums.end(), 0.0f);
  for (std::size_t rank = 0; rank < world_; ++rank)
    if (rank == rank_)
      add_to(sums, own);
    else
      add_copy(copies_[block][rank], block, rank, sums);
  const auto share = static_cast<float>(1.0 / static_cast<double>(world_));
  for (float& value : sums) value *= share;
  narrow(sums, gradient);
}

void Broadcast::add_copy(Copy& copy, std::size_t block, std::size_t rank, Floats sums) {
  const auto& [name, n, dtype] = blocks_[block];
  if (copy.words.block) {
    add_to(sums, {copy.words.block->data() + head_bytes_, n, dtype});
    copy.words = {};  // the next message needs its memory
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
