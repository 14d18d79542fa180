#include "exchange/means.hpp"

#include <algorithm>
#include <array>
#include <cstring>

#include "errors.hpp"

namespace gradwire::exchange {

void ring_mean(wire::Mesh& mesh, const Ticket& ticket, Codec& codec, const Values& buffer, const Values& left_out,
               std::size_t n_chunks, std::size_t n_ahead, Account& account) {
  const auto world = static_cast<std::size_t>(mesh.world_size()), rank = static_cast<std::size_t>(mesh.rank());
  if (world == 1 || buffer.n == 0) return;
  const Cut cut{buffer.n, world, n_chunks};
  Coder coder(codec, buffer, left_out, world, account);
  const std::size_t max_bytes = coder.max_message_bytes(cut.largest());
  const int right = static_cast<int>((rank + 1) % world), left = static_cast<int>((rank + world - 1) % world);
  const std::array<int, 2> peers = {right, left};
  Channel channel(mesh, ticket.stream, ticket.facts, max_bytes, peers, account);
  wire::Message scratch = channel.take(cut.largest() * buffer.element_bytes());

  // `mean`: where that is written, of the message that ends a sum.
  const auto encode = [&](const Values& values, std::size_t first, const Values* mean) {
    wire::Message message = channel.take(max_bytes);
    message.n_bytes = mean != nullptr ? coder.encode_mean(values, first, *mean, message.room())
                                      : coder.encode(values, first, message.room());
    message.is_sealed = true;
    return message;
  };
  // What arrives in hop h leaves again in hop h+1, at the same chunk.
  std::vector<wire::Message> outbox(n_chunks);
  const std::size_t n_messages = 2 * (world - 1) * n_chunks, first_gathered = (world - 1) * n_chunks;
  const std::size_t ahead = std::min(channel.messages_ahead(n_ahead), n_chunks - 1);

  const auto write = [&](std::size_t number) {
    const std::size_t hop = number / n_chunks, index = number % n_chunks;
    if (hop == 0) {
      const auto [first, count] = cut.chunk(rank, index);
      outbox[index] = encode(buffer.slice(first, count), first, nullptr);
    }
    channel.send(right, outbox[index], ahead);
    outbox[index] = {};
  };
  const auto read = [&](std::size_t number) {
    const std::size_t hop = number / n_chunks, index = number % n_chunks;
    // Both phases go on in the same order round the ring.
    const auto [first, count] = cut.chunk((rank + 2 * world - 1 - hop) % world, index);
    const Values own = buffer.slice(first, count);
    wire::Message message = channel.receive(left);
    if (number < first_gathered) {
      const Values total{scratch.block->data(), count, buffer.dtype};
      coder.decode_sum(message.bytes(), first, own, total);
      outbox[index] = encode(total, first, hop == world - 2 ? &own : nullptr);
    } else {
      coder.adopt(message.bytes(), first, own);
      if (hop < 2 * (world - 1) - 1) outbox[index] = std::move(message);
    }
  };
  for (std::size_t number = 0; number < n_messages + ahead; ++number) {
    if (number < n_messages) write(number);
    if (number >= ahead) read(number - ahead);
  }
  channel.finish();
}

// Groups that may be on their way while this rank works: k+1 is encoded while k travels while k-1 is decoded.
constexpr std::size_t kGroupsAhead = 2;

OwnersExchange::OwnersExchange(wire::Mesh& mesh, const Ticket& ticket, Ends& ends, std::vector<std::size_t> n_groups,
                               bool has_pull, std::size_t pull_bytes_ahead, Account& account)
    : ends_(ends),
      n_groups_(std::move(n_groups)),
      world_(static_cast<std::size_t>(mesh.world_size())),
      rank_(static_cast<std::size_t>(mesh.rank())),
      n_rounds_(world_ == 1 ? 0 : *std::max_element(n_groups_.begin(), n_groups_.end())),
      n_own_(n_rounds_ == 0 ? 0 : n_groups_[rank_]) {
  if (n_rounds_ == 0) return;
  peers_ = mesh.others();
  const std::size_t opening = ends.opening().size(), closing = ends.closing().size();
  pushes_ = std::make_unique<Channel>(mesh, ticket.stream, ticket.facts, std::max(ends.max_push_bytes(), opening),
                                      peers_, account);
  if (has_pull)
    pulls_ = std::make_unique<Channel>(mesh, ticket.stream + 1, ticket.facts, std::max(ends.max_pull_bytes(), closing),
                                       peers_, account);
  ahead_ = std::min(pushes_->messages_ahead(kGroupsAhead), n_rounds_ - 1);
  n_pulled_ahead_ =
      std::min(n_rounds_, std::max(ahead_, pull_bytes_ahead / std::max<std::size_t>(1, ends.max_pull_bytes())));
  results_.resize(n_own_);
}

void OwnersExchange::run() {
  if (n_rounds_ == 0) return;
  const auto tell = [](Channel& channel, const std::vector<int>& peers, ConstBytes bytes) {
    if (bytes.empty()) return;
    wire::Message message = channel.take(bytes.size());
    std::memcpy(message.block->data(), bytes.data(), bytes.size());
    for (const int peer : peers) channel.send(peer, message, SIZE_MAX);
  };
  tell(*pushes_, peers_, ends_.opening());
  for (std::size_t group = 0; group < n_rounds_ + ahead_; ++group) {
    if (group < n_rounds_) push(group);
    if (group < ahead_) continue;
    if (group == ahead_ && !ends_.opening().empty())
      for (const int peer : peers_) ends_.take_opening(static_cast<std::size_t>(peer), pushes_->receive(peer).bytes());
    answer(group - ahead_);
    if (group - ahead_ >= n_pulled_ahead_) adopt(n_adopted_++);
  }
  if (pulls_) tell(*pulls_, peers_, ends_.closing());
  pushes_->finish();
  pushes_.reset();
}

void OwnersExchange::finish() {
  if (!pulls_) return;
  while (n_adopted_ < n_rounds_) adopt(n_adopted_++);
  if (!ends_.closing().empty())
    for (const int peer : peers_) ends_.take_closing(static_cast<std::size_t>(peer), pulls_->receive(peer).bytes());
  pulls_->finish();
  pulls_.reset();
  results_.clear();
}

void OwnersExchange::push(std::size_t group) {
  for (const int peer : peers_) {
    if (group >= n_groups_[peer]) continue;
    wire::Message message = pushes_->take(ends_.max_push_bytes());
    message.n_bytes = ends_.encode_push(static_cast<std::size_t>(peer), group, message.room());
    message.is_sealed = ends_.seals_push();
    pushes_->send(peer, message, SIZE_MAX);
  }
}

void OwnersExchange::answer(std::size_t group) {
  if (group >= n_own_) return;
  for (std::size_t source = 0; source < world_; ++source)
    if (source == rank_)
      ends_.add_own(group);
    else
      ends_.add_pushed(source, group, pushes_->receive(static_cast<int>(source)).bytes());
  wire::Message& result = results_[group] = pushes_->take(std::max<std::size_t>(1, ends_.max_pull_bytes()));
  result.n_bytes = ends_.encode_pull(group, result.room());
  result.is_sealed = ends_.seals_pull();
  if (pulls_)
    for (const int peer : peers_) pulls_->send(peer, result, SIZE_MAX);
}

void OwnersExchange::adopt(std::size_t group) {
  if (!pulls_) return;
  for (auto peer = peers_.rbegin(); peer != peers_.rend(); ++peer)
    if (group < n_groups_[*peer]) ends_.adopt(static_cast<std::size_t>(*peer), group, pulls_->receive(*peer));
  if (group < n_own_) {
    ends_.adopt(rank_, group, results_[group]);
    results_[group] = {};
  }
}

void exchange_groups(wire::Mesh& mesh, const Ticket& ticket, Ends& ends, std::size_t n_groups, bool has_pull,
                     Account& account) {
  std::vector<std::size_t> of_parts(static_cast<std::size_t>(mesh.world_size()), n_groups);
  OwnersExchange exchange(mesh, ticket, ends, std::move(of_parts), has_pull, 0, account);
  exchange.run();
  exchange.finish();
}

// ---- by a codec

namespace {

class CodecEnds final : public Ends {
 public:
  CodecEnds(wire::Mesh& mesh, Codec& codec, const Values& buffer, const Values& left_out, std::size_t n_chunks,
            Account& account)
      : world_(static_cast<std::size_t>(mesh.world_size())),
        rank_(static_cast<std::size_t>(mesh.rank())),
        buffer_(buffer),
        cut_{buffer.n, world_, n_chunks},
        coder_(codec, buffer, left_out, world_, account),
        max_bytes_(coder_.max_message_bytes(cut_.largest())),
        total_(mesh.pool().take(cut_.largest() * buffer.element_bytes())),
        next_(mesh.pool().take(cut_.largest() * buffer.element_bytes())) {}

  std::size_t max_push_bytes() const override { return max_bytes_; }
  std::size_t max_pull_bytes() const override { return max_bytes_; }

  std::size_t encode_push(std::size_t part, std::size_t group, Bytes out) override {
    return coder_.encode(slice(part, group), cut_.chunk(part, group).first, out);
  }
  void add_pushed(std::size_t source, std::size_t group, ConstBytes message) override {
    const Values sum = total(source, group), next{next_.block->data(), sum.n, sum.dtype};
    coder_.decode_sum(message, cut_.chunk(rank_, group).first, sum, next);
    std::swap(total_, next_);
  }
  void add_own(std::size_t group) override { add(total(rank_, group), slice(rank_, group)); }
  std::size_t encode_pull(std::size_t group, Bytes out) override {
    return coder_.encode_mean(total(world_, group), cut_.chunk(rank_, group).first, slice(rank_, group), out);
  }
  void adopt(std::size_t part, std::size_t group, const wire::Message& message) override {
    if (part == rank_) return;  // adopted as it was encoded
    coder_.adopt(message.bytes(), cut_.chunk(part, group).first, slice(part, group));
  }

 private:
  Values slice(std::size_t part, std::size_t group) const {
    const auto [first, count] = cut_.chunk(part, group);
    return buffer_.slice(first, count);
  }
  // The sum so far; it begins with zeros when the first rank's values are added.
  Values total(std::size_t source, std::size_t group) {
    const Values sum{total_.block->data(), cut_.chunk(rank_, group).count, buffer_.dtype};
    if (source == 0) std::memset(sum.data, 0, sum.n * sum.element_bytes());
    return sum;
  }

  const std::size_t world_, rank_;
  const Values buffer_;
  const Cut cut_;
  Coder coder_;
  const std::size_t max_bytes_;
  wire::Message total_, next_;
};

}  // namespace

void direct_mean(wire::Mesh& mesh, const Ticket& ticket, Codec& codec, const Values& buffer, const Values& left_out,
                 std::size_t n_chunks, Account& account) {
  if (mesh.world_size() == 1 || buffer.n == 0) return;
  CodecEnds ends(mesh, codec, buffer, left_out, n_chunks, account);
  exchange_groups(mesh, ticket, ends, n_chunks, true, account);
}

// ---- quantised parts with error feedback

namespace {

using quantisers::Source;
using Flags = std::vector<bool>;

// At least one byte, so that a stream always has an opening.
std::size_t packed_bytes(std::size_t n_flags) { return std::max<std::size_t>(1, (n_flags + 7) / 8); }

class QuantisedEnds final : public Ends {
 public:
  QuantisedEnds(wire::Mesh& mesh, const quantisers::Options& options, const QuantisedBucket& bucket, Account& account)
      : bucket_(bucket),
        options_(options),
        world_(static_cast<std::size_t>(mesh.world_size())),
        rank_(static_cast<std::size_t>(mesh.rank())),
        cut_{bucket.gradient.n, world_, bucket.n_chunks},
        starts_(starts_of(bucket, options)),
        max_push_bytes_(quantisers::max_message_bytes(options, cut_.largest(), starts_.size())),
        is_used_by_(world_, Flags(bucket.is_used.size(), false)),
        packed_(packed_bytes(bucket.is_used.size()), 0),
        total_(mesh.pool().take(4 * cut_.largest())),
        pool_(mesh.pool()),
        account_(account) {
    is_used_by_[rank_] = bucket.is_used;
    for (std::size_t i = 0; i < bucket.is_used.size(); ++i)
      packed_[i / 8] |= static_cast<std::uint8_t>(bucket.is_used[i] << i % 8);
  }

  std::size_t max_push_bytes() const override { return max_push_bytes_; }
  std::size_t max_pull_bytes() const override {
    if (bucket_.pulls_raw) return cut_.largest() * bucket_.gradient.element_bytes();
    return quantisers::max_message_bytes(answering(), cut_.largest(), starts_.size());
  }

  bool seals_pull() const override { return !bucket_.pulls_raw; }

  ConstBytes opening() override { return packed_; }
  void take_opening(std::size_t source, ConstBytes message) override {
    Flags& flags = is_used_by_[source];
    if (message.size() != packed_.size())
      throw CorruptMessage("rank ", source, " opened its stream with ", message.size(), " bytes for ", flags.size(),
                           " parameters");
    for (std::size_t i = 0; i < flags.size(); ++i) flags[i] = message[i / 8] >> i % 8 & 1;
  }
  ConstBytes closing() override { return {&is_finite_, 1}; }
  void take_closing(std::size_t source, ConstBytes message) override {
    if (message.size() != 1 || message[0] > 1)
      throw CorruptMessage("rank ", source, " closed its stream with ", message.size(),
                           " bytes that gradwire does not write");
    is_finite_ &= message[0];
  }

  std::size_t encode_push(std::size_t part, std::size_t group, Bytes out) override {
    const auto [first, count] = cut_.chunk(part, group);
    return encode(options_, bucket_.gradient.slice(first, count), part, group, out);
  }

  void add_pushed(std::size_t source, std::size_t group, ConstBytes message) override {
    const Floats total = total_of(source, group);
    const Timed timed(account_, Kind::decode);
    note_finiteness(message, total.size());
    const auto [first, count] = cut_.chunk(rank_, group);
    const Flags& is_used = is_used_by_[source];
    if (std::ranges::count(is_used, false) == 0) {
      decode(message, total, {.adds = true});
    } else {  // a bit alone cannot say zero
      wire::Message scratch = pool_.take(4 * count);
      const Floats decoded = scratch.floats(count);
      decode(message, decoded, {});
      for_unused(is_used, [&, first = first, count = count](std::size_t start, std::size_t end) {
        const std::size_t from = std::max(start, first), to = std::min(end, first + count);
        if (from < to) std::fill(decoded.begin() + (from - first), decoded.begin() + (to - first), 0.0f);
      });
      add(values_of(total), values_of(decoded));
    }
  }

  void add_own(std::size_t group) override {
    const Timed timed(account_, Kind::decode);
    const auto [first, count] = cut_.chunk(rank_, group);
    add_to(total_of(rank_, group), bucket_.gradient.slice(first, count));
  }

  std::size_t encode_pull(std::size_t group, Bytes out) override {
    const Floats total = total_of(world_, group);
    if (!bucket_.pulls_raw) {
      const std::size_t n_bytes = encode(answering(), values_of(total), rank_, group, out);
      note_finiteness(out.first(n_bytes), total.size());
      return n_bytes;
    }
    const Timed timed(account_, Kind::encode);
    const auto [first, count] = cut_.chunk(rank_, group);
    const float scale = bucket_.residual_scale;
    if (!bucket_.residual.empty())
      for (std::size_t i = 0; i < count; ++i) total[i] += bucket_.residual[first + i] * scale;
    const Values raw{out.data(), count, bucket_.gradient.dtype};
    if (sends_means()) {
      wire::Message means = pool_.take(4 * count);
      const Floats mean = means.floats(count);
      for (std::size_t i = 0; i < count; ++i) mean[i] = total[i] / static_cast<float>(world_);
      is_finite_ &= static_cast<std::uint8_t>(narrow(mean, raw));
    } else {
      is_finite_ &= static_cast<std::uint8_t>(narrow(total, raw));
    }
    if (!bucket_.unsent.empty()) {
      const Floats unsent = bucket_.unsent.subspan(first, count);
      const float ranks = sends_means() ? static_cast<float>(world_) : 1.0f;
      widen(raw, unsent);
      for (std::size_t i = 0; i < count; ++i) unsent[i] = (total[i] - unsent[i] * ranks) / scale;
    }
    return count * raw.element_bytes();
  }

  // Kept: nothing is adopted before all ranks have closed.
  void adopt(std::size_t part, std::size_t group, const wire::Message& message) override {
    results_.push_back({part, group, message});
  }

  QuantisedResult adopt_all() {
    const Timed timed(account_, Kind::decode);
    for (auto& [part, group, message] : results_) {
      adopt_now(part, group, message.bytes());
      message = {};
    }
    Flags is_used = bucket_.is_used;
    for (const Flags& theirs : is_used_by_)
      for (std::size_t i = 0; i < is_used.size(); ++i) is_used[i] = is_used[i] || theirs[i];
    const Values& mean = bucket_.gradient;
    for_unused(is_used, [&](std::size_t start, std::size_t end) {
      std::memset(mean.data + start * mean.element_bytes(), 0, (end - start) * mean.element_bytes());
    });
    return {is_used, is_finite_ != 0};
  }

 private:
  struct Result {
    std::size_t part, group;
    wire::Message message;
  };

  // Where tensors begin, for codecs none of whose scales may serve two of them.
  static std::vector<std::size_t> starts_of(const QuantisedBucket& bucket, const quantisers::Options& options) {
    std::vector<std::size_t> starts;
    if (!quantisers::has_groups(options)) return starts;
    for (const auto& [start, end] : bucket.spans) starts.push_back(start);
    std::sort(starts.begin(), starts.end());
    starts.erase(std::unique(starts.begin(), starts.end()), starts.end());
    return starts;
  }

  std::vector<std::uint32_t> cuts_within(std::size_t first, std::size_t last) const {
    std::vector<std::uint32_t> cuts;
    for (auto at = std::upper_bound(starts_.begin(), starts_.end(), first); at != starts_.end() && *at < last; ++at)
      cuts.push_back(static_cast<std::uint32_t>(*at - first));
    return cuts;
  }

  // What sums are encoded by.
  quantisers::Options answering() const {
    quantisers::Options options = options_;
    options.levels = bucket_.pull_levels;
    return options;
  }

  // `values`: of the chunk, which may be the sum of it.
  std::size_t encode(quantisers::Options drawing, const Values& values, std::size_t part, std::size_t chunk,
                     Bytes out) {
    const Timed timed(account_, Kind::encode);
    const std::size_t first = cut_.chunk(part, chunk).first;
    drawing.stream.step = bucket_.draws[part * bucket_.n_chunks + chunk];
    const std::vector<std::uint32_t> cuts = cuts_within(first, first + values.n);
    drawing.cuts = cuts;
    Source source{values.bytes(), values.dtype, {}};
    Floats unsent;
    if (!bucket_.residual.empty() && !bucket_.unsent.empty()) {
      source.residual = bucket_.residual.subspan(first, values.n);
      source.residual_scale = bucket_.residual_scale;
      unsent = bucket_.unsent.subspan(first, values.n);
    }
    return quantisers::encode(drawing, source, unsent, out);
  }

  void decode(ConstBytes message, Floats out, const quantisers::Use& use) {
    quantisers::decode(message, options_.kind, quantisers::Dtype::float32, values_of(out).bytes(), use);
  }

  // Puts the owner's result / ranks where the chunk lies: what every rank does with the same bytes.
  void adopt_now(std::size_t part, std::size_t group, ConstBytes message) {
    const auto [first, count] = cut_.chunk(part, group);
    const Values mean = bucket_.gradient.slice(first, count);
    if (bucket_.pulls_raw) {
      if (message.size() != count * mean.element_bytes())
        throw CorruptMessage("rank ", part, " sent ", message.size(), " bytes for ", count, " raw values");
      if (count > 0) std::memcpy(mean.data, message.data(), message.size());
      if (!sends_means()) divide(mean, world_);
    } else {
      if (is_finite_ && quantisers::is_nonfinite(message, count))
        throw CorruptMessage("rank ", part,
                             " says that its sum is not finite, after all ranks had said that everything was");
      const quantisers::Use use{.divisor = static_cast<float>(world_)};
      quantisers::decode(message, options_.kind, mean.dtype, mean.bytes(), use);
    }
  }

  // The sum of what has been added of this rank's chunk; zeros before the first rank's values.
  Floats total_of(std::size_t source, std::size_t group) {
    const Floats total = total_.floats(cut_.chunk(rank_, group).count);
    if (source == 0) std::fill(total.begin(), total.end(), 0.0f);
    return total;
  }

  // Whether raw sums are divided before they travel: float16 may not hold the sum of values whose mean it holds.
  bool sends_means() const { return bucket_.gradient.dtype == Dtype::float16; }

  void note_finiteness(ConstBytes message, std::size_t n_values) {
    if (quantisers::is_nonfinite(message, n_values)) is_finite_ = 0;
  }

  template <class Body>
  void for_unused(const Flags& is_used, const Body& body) {
    for (std::size_t i = 0; i < is_used.size(); ++i)
      if (!is_used[i]) body(bucket_.spans[i].first, bucket_.spans[i].second);
  }

  const QuantisedBucket& bucket_;
  const quantisers::Options options_;
  const std::size_t world_, rank_;
  const Cut cut_;
  const std::vector<std::size_t> starts_;
  const std::size_t max_push_bytes_;
  std::vector<Flags> is_used_by_;
  std::vector<std::uint8_t> packed_;
  std::uint8_t is_finite_ = 1;
  wire::Message total_;
  std::vector<Result> results_;
  wire::Pool& pool_;
  Account& account_;
};

}  // namespace

QuantisedResult quantised_mean(wire::Mesh& mesh, const Ticket& ticket, const quantisers::Options& options,
                               const QuantisedBucket& bucket, Account& account) {
  QuantisedEnds ends(mesh, options, bucket, account);
  exchange_groups(mesh, ticket, ends, bucket.n_chunks, true, account);
  return ends.adopt_all();
}

// ---- groups of pieces

namespace {

constexpr std::size_t kLengthBytes = 4;

std::uint64_t magnitude(std::int64_t size) { return size < 0 ? 0 - static_cast<std::uint64_t>(size) : size; }

// body(begin, n) of every piece of a group of n_values.
template <class Body>
void for_pieces(Sizes sizes, std::uint64_t n_values, const Body& body) {
  std::uint64_t n_left = n_values;
  for (const std::int64_t size : sizes) {
    if (magnitude(size) > n_left) throw InvalidArgument("the pieces have more values than their buffer");
    n_left -= magnitude(size);
  }
  if (n_left != 0) throw InvalidArgument("the buffer has ", n_left, " values more than its pieces");
  std::size_t begin = 0;
  for (const std::int64_t size : sizes) {
    if (size >= 0) body(begin, static_cast<std::size_t>(size));
    begin += magnitude(size);
  }
}

// body(begin, n, message) of every piece of a group.
template <class Body>
void for_messages(ConstBytes group, Sizes sizes, std::uint64_t n_values, const Body& body) {
  std::size_t at = 0;
  for_pieces(sizes, n_values, [&](std::size_t begin, std::size_t n) {
    std::uint32_t length = 0;
    const bool has_length = group.size() - at >= kLengthBytes;
    if (has_length) std::memcpy(&length, group.data() + at, kLengthBytes);
    if (!has_length || length > group.size() - at - kLengthBytes)
      throw CorruptMessage("a group of ", sizes.size(), " pieces ends after ", group.size(),
                           " bytes, before the piece of values ", begin, " to ", begin + n);
    body(begin, n, group.subspan(at + kLengthBytes, length));
    at += kLengthBytes + length;
  });
  if (at != group.size())
    throw CorruptMessage("a group of ", sizes.size(), " pieces has ", group.size() - at, " bytes too many");
}

}  // namespace

std::size_t max_group_bytes(const Codec& codec, Sizes sizes) {
  std::size_t n_bytes = 0;
  for (const std::int64_t size : sizes)
    if (size >= 0) n_bytes += kLengthBytes + codec.max_message_bytes(static_cast<std::size_t>(size));
  return n_bytes;
}

std::size_t encode_group(Codec& codec, Floats values, std::size_t first, Sizes sizes, const Feedback& feedback,
                         Bytes out) {
  std::size_t at = 0;
  for_pieces(sizes, values.size(), [&](std::size_t begin, std::size_t n) {
    if (out.size() - at < kLengthBytes) throw BufferTooSmall("out has no room for the length of another piece");
    Feedback mine{{}, feedback.left_out.subspan(begin, n), feedback.draw + begin};
    if (!feedback.residual.empty()) mine.residual = feedback.residual.subspan(begin, n);
    const std::size_t n_bytes = codec.encode_with_feedback(values_of(values.subspan(begin, n)), first + begin, mine,
                                                           out.subspan(at + kLengthBytes));
    const auto length = static_cast<std::uint32_t>(n_bytes);
    if (length != n_bytes) throw InvalidArgument("a piece's message is longer than 2^32 - 1 bytes");
    std::memcpy(out.data() + at, &length, kLengthBytes);
    at += kLengthBytes + n_bytes;
  });
  return at;
}

void decode_group(Codec& codec, ConstBytes message, std::size_t first, Sizes sizes, std::size_t divisor,
                  Floats values) {
  for_messages(message, sizes, values.size(), [&](std::size_t begin, std::size_t n, ConstBytes piece) {
    codec.decode_mean(piece, first + begin, divisor, values_of(values.subspan(begin, n)));
  });
}

void add_group(Codec& codec, ConstBytes message, std::size_t first, Sizes sizes, Floats total, Floats scratch) {
  for_messages(message, sizes, total.size(), [&](std::size_t begin, std::size_t n, ConstBytes piece) {
    codec.decode_add(piece, first + begin, total.subspan(begin, n), scratch);
  });
}

// ---- the mean of them

PieceEnds::PieceEnds(wire::Mesh& mesh, Codec& push, Codec& pull, const Groups& groups, PieceBucket bucket,
                     Account& account)
    : push_(push),
      pull_(pull),
      groups_(groups),
      bucket_(std::move(bucket)),
      world_(static_cast<std::size_t>(mesh.world_size())),
      rank_(static_cast<std::size_t>(mesh.rank())),
      account_(account) {
  std::size_t largest = 0;
  for (const auto& part : groups)
    for (const Group& group : part) {
      max_push_bytes_ = std::max(max_push_bytes_, max_group_bytes(push, group.sizes));
      max_pull_bytes_ = std::max(max_pull_bytes_, max_group_bytes(pull, group.sizes));
      largest = std::max(largest, group.n());
    }
  total_ = mesh.pool().take(4 * largest);
  scratch_ = mesh.pool().take(4 * largest);
}

std::int64_t PieceEnds::weigh(Codec& codec, const Group& group) {
  const std::int64_t started = now_ns();
  bool has_weighed = false;
  for_pieces(group.sizes, group.n(),
             [&](std::size_t begin, std::size_t n) { has_weighed |= codec.weigh(group.start + begin, n); });
  return account_.add_importance(started, has_weighed);
}

Feedback PieceEnds::feedback_of(const Group& group, bool has_residual) const {
  const std::size_t n = group.n();
  Feedback feedback{{}, bucket_.left_out.subspan(group.start, n), bucket_.first_draw + group.start};
  if (has_residual && !bucket_.residual.empty()) feedback.residual = bucket_.residual.subspan(group.start, n);
  return feedback;
}

std::size_t PieceEnds::encode_push(std::size_t part, std::size_t number, Bytes out) {
  const Group& group = groups_[part][number];
  const Timed timed(account_, Kind::encode, weigh(push_, group));
  const Floats values = bucket_.values.subspan(group.start, group.n());
  return encode_group(push_, values, group.start, group.sizes, feedback_of(group, true), out);
}

void PieceEnds::add_pushed(std::size_t source, std::size_t number, ConstBytes message) {
  const Group& group = groups_[rank_][number];
  const Timed timed(account_, Kind::decode, weigh(push_, group));
  if (source == 0)
    decode_group(push_, message, group.start, group.sizes, 1, total_.floats(group.n()));
  else
    add_group(push_, message, group.start, group.sizes, total_.floats(group.n()), scratch_.floats(group.n()));
}

// Its own values never leave this rank, so they stay exact; what was left out of them before is in the sum.
void PieceEnds::add_own(std::size_t number) {
  const Timed timed(account_, Kind::decode);
  const Group& group = groups_[rank_][number];
  const Floats total = total_.floats(group.n()), own = bucket_.values.subspan(group.start, total.size());
  float* __restrict sum = total.data();
  const float* __restrict mine = own.data();
  if (bucket_.residual.empty()) {
    for (std::size_t i = 0; i < total.size(); ++i) sum[i] = rank_ == 0 ? mine[i] : sum[i] + mine[i];
  } else {
    const float* __restrict residual = bucket_.residual.data() + group.start;
    for (std::size_t i = 0; i < total.size(); ++i) {
      const float whole = mine[i] + residual[i];
      sum[i] = rank_ == 0 ? whole : sum[i] + whole;
    }
  }
}

std::size_t PieceEnds::encode_pull(std::size_t number, Bytes out) {
  const Group& group = groups_[rank_][number];
  const Timed timed(account_, Kind::encode, weigh(pull_, group));
  // It will adopt the very values that the others decode: sum - what the encoding lost would round differently.
  return encode_group(pull_, total_.floats(group.n()), group.start, group.sizes, feedback_of(group, false), out);
}

void PieceEnds::adopt(std::size_t part, std::size_t number, const wire::Message& message) {
  const Group& group = groups_[part][number];
  const Timed timed(account_, Kind::decode, weigh(pull_, group));
  const Floats values = bucket_.values.subspan(group.start, group.n());
  decode_group(pull_, message.bytes(), group.start, group.sizes, world_, values);
}

}  // namespace gradwire::exchange
