#include "exchange/pieces.hpp"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "errors.hpp"

namespace gradwire::exchange {
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
  if (n_left != 0) throw InvalidArgument("the buffer has " + std::to_string(n_left) + " values more than its pieces");
  std::size_t begin = 0;
  for (const std::int64_t size : sizes) {
    if (size >= 0) body(begin, static_cast<std::size_t>(size));
    begin += magnitude(size);
  }
}

// body(begin, n, message) of every piece of a group.
template <class Body>
void for_messages(Bytes group, Sizes sizes, std::uint64_t n_values, const Body& body) {
  std::size_t at = 0;
  for_pieces(sizes, n_values, [&](std::size_t begin, std::size_t n) {
    std::uint32_t length = 0;
    const bool has_length = group.size() - at >= kLengthBytes;
    if (has_length) std::memcpy(&length, group.data() + at, kLengthBytes);
    if (!has_length || length > group.size() - at - kLengthBytes)
      throw CorruptMessage("a group of " + std::to_string(sizes.size()) + " pieces ends after " +
                           std::to_string(group.size()) + " bytes, before the piece of values " +
                           std::to_string(begin) + " to " + std::to_string(begin + n));
    body(begin, n, group.subspan(at + kLengthBytes, length));
    at += kLengthBytes + length;
  });
  if (at != group.size())
    throw CorruptMessage("a group of " + std::to_string(sizes.size()) + " pieces has " +
                         std::to_string(group.size() - at) + " bytes too many");
}

}  // namespace

std::size_t max_group_bytes(const Codec& codec, Sizes sizes) {
  std::size_t n_bytes = 0;
  for (const std::int64_t size : sizes)
    if (size >= 0) n_bytes += kLengthBytes + codec.max_message_bytes(static_cast<std::size_t>(size));
  return n_bytes;
}

std::size_t encode_group(Codec& codec, std::span<float> values, std::size_t first, Sizes sizes,
                         const Feedback& feedback, std::span<std::uint8_t> out) {
  if (!feedback.residual.empty() && feedback.residual.size() != values.size())
    throw InvalidArgument("the residual has another size than the values");
  if (feedback.left_out.size() != values.size()) throw InvalidArgument("left_out has another size than the values");
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

void decode_group(Codec& codec, Bytes message, std::size_t first, Sizes sizes, std::size_t divisor,
                  std::span<float> values) {
  for_messages(message, sizes, values.size(), [&](std::size_t begin, std::size_t n, Bytes piece) {
    codec.decode_mean(piece, first + begin, divisor, values_of(values.subspan(begin, n)));
  });
}

void add_group(Codec& codec, Bytes message, std::size_t first, Sizes sizes, std::span<float> total,
               std::span<float> scratch) {
  for_messages(message, sizes, total.size(), [&](std::size_t begin, std::size_t n, Bytes piece) {
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
  const std::size_t n = bucket_.values.size();
  if (bucket_.left_out.size() != n || (!bucket_.residual.empty() && bucket_.residual.size() != n))
    throw InvalidArgument("values, residual and left_out have to be of one size");
  std::size_t largest = 0;
  for (const auto& part : groups)
    for (const Group& group : part) {
      if (group.start > group.end || group.end > n) throw InvalidArgument("a group lies outside of the values");
      max_push_bytes_ = std::max(max_push_bytes_, max_group_bytes(push, group.sizes));
      max_pull_bytes_ = std::max(max_pull_bytes_, max_group_bytes(pull, group.sizes));
      largest = std::max(largest, group.end - group.start);
    }
  total_ = mesh.pool().take(4 * largest);
  scratch_ = mesh.pool().take(4 * largest);
}

std::int64_t PieceEnds::weigh(Codec& codec, const Group& group) {
  const std::int64_t started = now_ns();
  bool has_weighed = false;
  for_pieces(group.sizes, group.end - group.start,
             [&](std::size_t begin, std::size_t n) { has_weighed |= codec.weigh(group.start + begin, n); });
  if (!has_weighed) return started;
  account_.add(Kind::importance, started);
  return account_.spans.back().end_ns;
}

std::span<float> PieceEnds::total_of(const Group& group) const {
  return {reinterpret_cast<float*>(total_.block->data()), group.end - group.start};
}

std::span<float> PieceEnds::scratch_of(const Group& group) const {
  return {reinterpret_cast<float*>(scratch_.block->data()), group.end - group.start};
}

Feedback PieceEnds::feedback_of(const Group& group, bool has_residual) const {
  const std::size_t n = group.end - group.start;
  Feedback feedback{{}, bucket_.left_out.subspan(group.start, n), bucket_.first_draw + group.start};
  if (has_residual && !bucket_.residual.empty()) feedback.residual = bucket_.residual.subspan(group.start, n);
  return feedback;
}

std::size_t PieceEnds::encode_push(std::size_t part, std::size_t number, std::span<std::uint8_t> out) {
  const Group& group = groups_[part][number];
  const std::int64_t started = weigh(push_, group);
  const std::span<float> values = bucket_.values.subspan(group.start, group.end - group.start);
  const std::size_t n_bytes = encode_group(push_, values, group.start, group.sizes, feedback_of(group, true), out);
  account_.add(Kind::encode, started);
  return n_bytes;
}

void PieceEnds::add_pushed(std::size_t source, std::size_t number, Bytes message) {
  const Group& group = groups_[rank_][number];
  const std::int64_t started = weigh(push_, group);
  if (source == 0)
    decode_group(push_, message, group.start, group.sizes, 1, total_of(group));
  else
    add_group(push_, message, group.start, group.sizes, total_of(group), scratch_of(group));
  account_.add(Kind::decode, started);
}

// Its own values never leave this rank, so they stay exact; what was left out of them before is in the sum.
void PieceEnds::add_own(std::size_t number) {
  const std::int64_t started = now_ns();
  const Group& group = groups_[rank_][number];
  const std::span<float> total = total_of(group), own = bucket_.values.subspan(group.start, total.size());
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
  account_.add(Kind::decode, started);
}

std::size_t PieceEnds::encode_pull(std::size_t number, std::span<std::uint8_t> out) {
  const Group& group = groups_[rank_][number];
  const std::int64_t started = bucket_.has_pull ? weigh(pull_, group) : now_ns();
  const std::span<float> total = total_of(group);
  std::size_t n_bytes = 0;
  if (bucket_.has_pull) {
    // It will adopt the very values that the others decode: sum - what the encoding lost would round differently.
    n_bytes = encode_group(pull_, total, group.start, group.sizes, feedback_of(group, false), out);
  } else {
    const std::span<float> mean = bucket_.values.subspan(group.start, total.size());
    const auto divisor = static_cast<float>(world_);
    std::transform(total.begin(), total.end(), mean.begin(), [divisor](float sum) { return sum / divisor; });
    std::ranges::fill(bucket_.left_out.subspan(group.start, total.size()), 0.0f);
  }
  account_.add(Kind::encode, started);
  return n_bytes;
}

void PieceEnds::adopt(std::size_t part, std::size_t number, const wire::Message& message) {
  const Group& group = groups_[part][number];
  const std::int64_t started = weigh(pull_, group);
  const std::span<float> values = bucket_.values.subspan(group.start, group.end - group.start);
  decode_group(pull_, message.bytes(), group.start, group.sizes, world_, values);
  account_.add(Kind::decode, started);
}

}  // namespace gradwire::exchange
