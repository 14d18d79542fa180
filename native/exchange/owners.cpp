#include "exchange/owners.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

namespace gradwire::exchange {
namespace {

// Groups that may be on their way while this rank works: k+1 is encoded while k travels while k-1 is decoded.
constexpr std::size_t kGroupsAhead = 2;

}  // namespace

OwnersExchange::OwnersExchange(wire::Mesh& mesh, const Ticket& ticket, Ends& ends, std::vector<std::size_t> n_groups,
                               bool has_pull, std::size_t pull_bytes_ahead, Account& account)
    : ends_(ends),
      n_groups_(std::move(n_groups)),
      world_(static_cast<std::size_t>(mesh.world_size())),
      rank_(static_cast<std::size_t>(mesh.rank())),
      n_rounds_(world_ == 1 ? 0 : *std::max_element(n_groups_.begin(), n_groups_.end())),
      n_own_(n_rounds_ == 0 ? 0 : n_groups_[rank_]) {
  if (n_rounds_ == 0) return;
  ahead_ = std::min(kGroupsAhead, n_rounds_ - 1);
  n_pulled_ahead_ =
      std::min(n_rounds_, std::max(ahead_, pull_bytes_ahead / std::max<std::size_t>(1, ends.max_pull_bytes())));
  for (std::size_t distance = 1; distance < world_; ++distance)
    peers_.push_back(static_cast<int>((rank_ + distance) % world_));
  const std::size_t opening = ends.opening().size(), closing = ends.closing().size();
  pushes_ = std::make_unique<Channel>(mesh, ticket.stream, ticket.facts, std::max(ends.max_push_bytes(), opening),
                                      peers_, account);
  if (has_pull)
    pulls_ = std::make_unique<Channel>(mesh, ticket.stream + 1, ticket.facts, std::max(ends.max_pull_bytes(), closing),
                                       peers_, account);
  results_.resize(n_own_);
}

void OwnersExchange::run() {
  if (n_rounds_ == 0) return;
  const auto tell = [](Channel& channel, const std::vector<int>& peers, Bytes bytes) {
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

  std::size_t encode_push(std::size_t part, std::size_t group, std::span<std::uint8_t> out) override {
    return coder_.encode(slice(part, group), cut_.chunk(part, group).first, out);
  }
  void add_pushed(std::size_t source, std::size_t group, Bytes message) override {
    const Values sum = total(source, group), next{next_.block->data(), sum.n, sum.dtype};
    coder_.decode_sum(message, cut_.chunk(rank_, group).first, sum, next);
    std::swap(total_, next_);
  }
  void add_own(std::size_t group) override { add(total(rank_, group), slice(rank_, group)); }
  std::size_t encode_pull(std::size_t group, std::span<std::uint8_t> out) override {
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
  std::vector<std::size_t> n_groups(static_cast<std::size_t>(mesh.world_size()), n_chunks);
  OwnersExchange exchange(mesh, ticket, ends, std::move(n_groups), true, 0, account);
  exchange.run();
  exchange.finish();
}

}  // namespace gradwire::exchange
