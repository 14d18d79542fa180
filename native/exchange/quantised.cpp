#include "exchange/quantised.hpp"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "errors.hpp"
#include "quantisers/groups.hpp"

namespace gradwire::exchange {
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
    return bucket_.pulls_raw ? cut_.largest() * bucket_.gradient.element_bytes() : max_push_bytes_;
  }

  Bytes opening() override { return packed_; }
  void take_opening(std::size_t source, Bytes message) override {
    Flags& flags = is_used_by_[source];
    if (message.size() != packed_.size())
      throw CorruptMessage("rank " + std::to_string(source) + " opened its stream with " +
                           std::to_string(message.size()) + " bytes for " + std::to_string(flags.size()) +
                           " parameters");
    for (std::size_t i = 0; i < flags.size(); ++i) flags[i] = message[i / 8] >> i % 8 & 1;
  }
  Bytes closing() override { return {&is_finite_, 1}; }
  void take_closing(std::size_t source, Bytes message) override {
    if (message.size() != 1 || message[0] > 1)
      throw CorruptMessage("rank " + std::to_string(source) + " closed its stream with " +
                           std::to_string(message.size()) + " bytes that gradwire does not write");
    is_finite_ &= message[0];
  }

  std::size_t encode_push(std::size_t part, std::size_t group, std::span<std::uint8_t> out) override {
    const auto [first, count] = cut_.chunk(part, group);
    return encode(bucket_.gradient.slice(first, count), part, group, out);
  }

  void add_pushed(std::size_t source, std::size_t group, Bytes message) override {
    const std::span<float> total = total_of(source, group);
    const std::int64_t started = now_ns();
    note_finiteness(message, total.size());
    const auto [first, count] = cut_.chunk(rank_, group);
    const Flags& is_used = is_used_by_[source];
    if (std::find(is_used.begin(), is_used.end(), false) == is_used.end()) {
      decode(message, total, {.adds = true});
    } else {  // a bit alone cannot say zero
      wire::Message scratch = pool_.take(4 * count);
      const std::span<float> decoded(reinterpret_cast<float*>(scratch.block->data()), count);
      decode(message, decoded, {});
      for_unused(is_used, [&, first = first, count = count](std::size_t start, std::size_t end) {
        const std::size_t from = std::max(start, first), to = std::min(end, first + count);
        if (from < to) std::fill(decoded.begin() + (from - first), decoded.begin() + (to - first), 0.0f);
      });
      add(values_of(total), values_of(decoded));
    }
    account_.add(Kind::decode, started);
  }

  void add_own(std::size_t group) override {
    const std::int64_t started = now_ns();
    const auto [first, count] = cut_.chunk(rank_, group);
    add_to(total_of(rank_, group), bucket_.gradient.slice(first, count));
    account_.add(Kind::decode, started);
  }

  std::size_t encode_pull(std::size_t group, std::span<std::uint8_t> out) override {
    const std::span<float> total = total_of(world_, group);
    if (!bucket_.pulls_raw) {
      const std::size_t n_bytes = encode(values_of(total), rank_, group, out);
      note_finiteness(out.first(n_bytes), total.size());
      return n_bytes;
    }
    const std::int64_t started = now_ns();
    const auto [first, count] = cut_.chunk(rank_, group);
    const float scale = bucket_.residual_scale;
    if (!bucket_.residual.empty())
      for (std::size_t i = 0; i < count; ++i) total[i] += bucket_.residual[first + i] * scale;
    const Values raw{out.data(), count, bucket_.gradient.dtype};
    if (sends_means()) {
      wire::Message means = pool_.take(4 * count);
      const std::span<float> mean(reinterpret_cast<float*>(means.block->data()), count);
      for (std::size_t i = 0; i < count; ++i) mean[i] = total[i] / static_cast<float>(world_);
      is_finite_ &= static_cast<std::uint8_t>(narrow(mean, raw));
    } else {
      is_finite_ &= static_cast<std::uint8_t>(narrow(total, raw));
    }
    if (!bucket_.unsent.empty()) {
      const std::span<float> unsent = bucket_.unsent.subspan(first, count);
      const float ranks = sends_means() ? static_cast<float>(world_) : 1.0f;
      widen(raw, unsent);
      for (std::size_t i = 0; i < count; ++i) unsent[i] = (total[i] - unsent[i] * ranks) / scale;
    }
    account_.add(Kind::encode, started);
    return count * raw.element_bytes();
  }

  // Kept: nothing is adopted before all ranks have closed.
  void adopt(std::size_t part, std::size_t group, const wire::Message& message) override {
    results_.push_back({part, group, message});
  }

  QuantisedResult adopt_all() {
    const std::int64_t started = now_ns();
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
    account_.add(Kind::decode, started);
    return {is_used, is_finite_ != 0};
  }

 private:
  struct Result {
    std::size_t part, group;
    wire::Message message;
  };

  static std::span<std::uint8_t> bytes_of(const Values& values) {
    return {values.data, values.n * values.element_bytes()};
  }

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

  // `values`: of the chunk, which may be the sum of it.
  std::size_t encode(const Values& values, std::size_t part, std::size_t chunk, std::span<std::uint8_t> out) {
    const std::int64_t started = now_ns();
    const std::size_t first = cut_.chunk(part, chunk).first;
    quantisers::Options drawing = options_;
    drawing.stream.step = bucket_.draws[part * bucket_.n_chunks + chunk];
    const std::vector<std::uint32_t> cuts = cuts_within(first, first + values.n);
    drawing.cuts = cuts;
    Source source{bytes_of(values), static_cast<quantisers::Dtype>(values.dtype), {}};
    std::span<float> unsent;
    if (!bucket_.residual.empty() && !bucket_.unsent.empty()) {
      source.residual = bucket_.residual.subspan(first, values.n);
      source.residual_scale = bucket_.residual_scale;
      unsent = bucket_.unsent.subspan(first, values.n);
    }
    const std::size_t n_bytes = quantisers::encode(drawing, source, unsent, out);
    account_.add(Kind::encode, started);
    return n_bytes;
  }

  void decode(Bytes message, std::span<float> out, const quantisers::Use& use) {
    quantisers::decode(message, options_.kind, quantisers::Dtype::float32, bytes_of(values_of(out)), use);
  }

  // Puts the owner's result / ranks where the chunk lies: what every rank does with the same bytes.
  void adopt_now(std::size_t part, std::size_t group, Bytes message) {
    const auto [first, count] = cut_.chunk(part, group);
    const Values mean = bucket_.gradient.slice(first, count);
    if (bucket_.pulls_raw) {
      if (message.size() != count * mean.element_bytes())
        throw CorruptMessage("rank " + std::to_string(part) + " sent " + std::to_string(message.size()) +
                             " bytes for " + std::to_string(count) + " raw values");
      if (count > 0) std::memcpy(mean.data, message.data(), message.size());
      if (!sends_means()) divide(mean, world_);
    } else {
      if (is_finite_ && quantisers::is_nonfinite(message, count))
        throw CorruptMessage("rank " + std::to_string(part) +
                             " says that its sum is not finite, after all ranks had said that everything was");
      const quantisers::Use use{.divisor = static_cast<float>(world_)};
      quantisers::decode(message, options_.kind, static_cast<quantisers::Dtype>(mean.dtype), bytes_of(mean), use);
    }
  }

  // The sum of what has been added of this rank's chunk; zeros before the first rank's values.
  std::span<float> total_of(std::size_t source, std::size_t group) {
    const std::span<float> total(reinterpret_cast<float*>(total_.block->data()), cut_.chunk(rank_, group).count);
    if (source == 0) std::fill(total.begin(), total.end(), 0.0f);
    return total;
  }

  // Whether raw sums are divided before they travel: float16 may not hold the sum of values whose mean it holds.
  bool sends_means() const { return bucket_.gradient.dtype == Dtype::float16; }

  void note_finiteness(Bytes message, std::size_t n_values) {
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

void check(const QuantisedBucket& bucket, std::size_t world) {
  const std::size_t n = bucket.gradient.n;
  const auto fits = [n](std::size_t size) { return size == 0 || size == n; };
  bool is_right = fits(bucket.residual.size()) && fits(bucket.unsent.size()) && bucket.residual_scale > 0 &&
                  bucket.spans.size() == bucket.is_used.size() && bucket.n_chunks > 0 &&
                  bucket.draws.size() == world * bucket.n_chunks;
  for (const auto& [start, end] : bucket.spans) is_right = is_right && start <= end && end <= n;
  if (!is_right) throw InvalidArgument("a quantised bucket's residuals, spans or draws do not fit its gradient");
}

}  // namespace

QuantisedResult quantised_mean(wire::Mesh& mesh, const Ticket& ticket, const quantisers::Options& options,
                               const QuantisedBucket& bucket, Account& account) {
  const auto world = static_cast<std::size_t>(mesh.world_size());
  check(bucket, world);
  QuantisedEnds ends(mesh, options, bucket, account);
  OwnersExchange exchange(mesh, ticket, ends, std::vector<std::size_t>(world, bucket.n_chunks), true, 0, account);
  exchange.run();
  exchange.finish();
  return ends.adopt_all();
}

}  // namespace gradwire::exchange
