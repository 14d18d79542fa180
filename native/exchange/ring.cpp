#include "exchange/ring.hpp"

#include <algorithm>
#include <array>
#include <vector>

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

  const auto encode = [&](const Values& values, std::size_t first) {
    wire::Message message = channel.take(max_bytes);
    message.n_bytes = coder.encode(values, first, message.room());
    return message;
  };
  const auto encode_mean = [&](const Values& total, std::size_t first, const Values& mean) {
    wire::Message message = channel.take(max_bytes);
    message.n_bytes = coder.encode_mean(total, first, mean, message.room());
    return message;
  };
  // What arrives in hop h leaves again in hop h+1, at the same chunk.
  std::vector<wire::Message> outbox(n_chunks);
  const std::size_t n_messages = 2 * (world - 1) * n_chunks, first_gathered = (world - 1) * n_chunks;
  const std::size_t ahead = std::min(n_ahead, n_chunks - 1);

  const auto write = [&](std::size_t number) {
    const std::size_t hop = number / n_chunks, index = number % n_chunks;
    if (hop == 0) {
      const auto [first, count] = cut.chunk(rank, index);
      outbox[index] = encode(buffer.slice(first, count), first);
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
      outbox[index] = hop == world - 2 ? encode_mean(total, first, own) : encode(total, first);
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

}  // namespace gradwire::exchange
