#include "exchange/sum.hpp"

#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <vector>

#include "errors.hpp"

namespace gradwire::exchange {
namespace {

template <class Number, class Apply>
void combine_words(std::uint8_t* total, const std::uint8_t* own, std::size_t n, Apply apply) {
  for (std::size_t i = 0; i < n; ++i) {
    Number a, b;
    std::memcpy(&a, total + i * sizeof a, sizeof a);
    std::memcpy(&b, own + i * sizeof b, sizeof b);
    a = apply(a, b);
    std::memcpy(total + i * sizeof a, &a, sizeof a);
  }
}

// total = total combined with own, of n elements.
void combine(std::uint8_t* total, std::uint8_t* own, std::size_t n, Element element, Operation operation) {
  if (operation == Operation::bit_or)
    return combine_words<std::uint32_t>(total, own, n, [](std::uint32_t a, std::uint32_t b) { return a | b; });
  if (operation == Operation::maximum)
    return combine_words<std::int32_t>(total, own, n, [](std::int32_t a, std::int32_t b) { return std::max(a, b); });
  switch (element) {
    case Element::int32:
      return combine_words<std::uint32_t>(total, own, n, [](std::uint32_t a, std::uint32_t b) { return a + b; });
    case Element::int64:
      return combine_words<std::uint64_t>(total, own, n, [](std::uint64_t a, std::uint64_t b) { return a + b; });
    default: {
      const auto dtype = static_cast<Dtype>(element);
      return add({total, n, dtype}, {own, n, dtype});
    }
  }
}

}  // namespace

std::size_t bytes_of(Element element) {
  return element == Element::int64 ? 8 : element == Element::bfloat16 || element == Element::float16 ? 2 : 4;
}

void ring_combine(wire::Mesh& mesh, const Ticket& ticket, std::span<std::uint8_t> values, Element element,
                  Operation operation, std::size_t n_chunks, Account& account) {
  if (operation != Operation::sum && element != Element::int32)
    throw InvalidArgument("only int32 have an OR and a maximum");
  const auto world = static_cast<std::size_t>(mesh.world_size()), rank = static_cast<std::size_t>(mesh.rank());
  const std::size_t size = bytes_of(element), n = values.size() / size;
  if (world == 1 || n == 0) return;
  const Cut cut{n, world, n_chunks};
  const std::array<int, 2> peers = {static_cast<int>((rank + 1) % world), static_cast<int>((rank + world - 1) % world)};
  const auto [right, left] = peers;
  Channel channel(mesh, ticket.stream, ticket.facts, cut.largest() * size, peers, account);
  // As in ring_mean: what arrives in hop h leaves again in hop h+1, with this rank's share in its own memory.
  std::vector<wire::Message> outbox(n_chunks);
  const std::size_t n_hops = 2 * (world - 1), n_messages = n_hops * n_chunks;
  constexpr std::size_t kAhead = 2;
  const std::size_t ahead = std::min(kAhead, n_chunks - 1);
  for (std::size_t number = 0; number < n_messages + ahead; ++number) {
    if (number < n_messages) {
      wire::Message& next = outbox[number % n_chunks];
      if (number < n_chunks) {
        const auto [first, count] = cut.chunk(rank, number);
        next = channel.take(cut.largest() * size);
        next.n_bytes = count * size;
        std::copy_n(values.data() + first * size, next.n_bytes, next.block->data());
      }
      channel.send(right, next, ahead);
      next = {};
    }
    if (number < ahead) continue;
    const std::size_t hop = (number - ahead) / n_chunks, index = (number - ahead) % n_chunks;
    const auto [first, count] = cut.chunk((rank + 2 * world - 1 - hop) % world, index);
    std::uint8_t* const own = values.data() + first * size;
    wire::Message message = channel.receive(left);
    if (message.n_bytes != count * size)
      throw CorruptMessage("rank " + std::to_string(left) + " sent " + std::to_string(message.n_bytes) +
                           " bytes, where " + std::to_string(count * size) +
                           " were due; check that all ranks run the same gradwire");
    const std::int64_t started = now_ns();
    if (hop < world - 1) combine(message.block->data(), own, count, element, operation);
    if (hop >= world - 2) std::copy_n(message.bytes().data(), message.n_bytes, own);
    account.add(Kind::decode, started);
    if (hop < n_hops - 1) outbox[index] = std::move(message);
  }
  channel.finish();
}

RunningSum::RunningSum(wire::Mesh& mesh, const Ticket& ticket, std::span<std::uint8_t> values, Element element,
                       Operation operation, std::size_t n_chunks) {
  // Signals are for the threads of the program around.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  thread_ = std::thread([this, &mesh, ticket, values, element, operation, n_chunks] {
    try {
      ring_combine(mesh, ticket, values, element, operation, n_chunks, account_);
    } catch (...) {
      error_ = std::current_exception();
    }
  });
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

RunningSum::~RunningSum() {
  if (thread_.joinable()) thread_.join();
}

const Account& RunningSum::wait() {
  if (thread_.joinable()) thread_.join();
  if (error_) std::rethrow_exception(error_);
  return account_;
}

}  // namespace gradwire::exchange
