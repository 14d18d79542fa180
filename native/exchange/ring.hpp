// Ring all-reduce of messages: N-1 hops that decode, add and encode, then N-1 hops that forward bytes verbatim.
#pragma once

#include "exchange/channel.hpp"
#include "exchange/codec.hpp"

namespace gradwire::exchange {

// Which exchange it is, to the other ranks.
struct Ticket {
  std::uint32_t stream;  // the first of two numbers that are its own
  wire::Facts facts;
};

// Replaces `buffer` by the mean over the ranks. `left_out`: see Coder. `n_ahead`: messages that are on their way while
// this rank works, at most.
//
// Hop h < N-1 (reduce-scatter): send part rank-h, receive part rank-h-1, add this rank's share: so hop h+1 sends it.
// After them this rank owns the sum of part rank+1. Its final message goes round in the other N-1 hops (all-gather);
// the owner adopts the decoding of its own message, so that all ranks hold the same bits.
void ring_mean(wire::Mesh& mesh, const Ticket& ticket, Codec& codec, const Values& buffer, const Values& left_out,
               std::size_t n_chunks, std::size_t n_ahead, Account& account);

}  // namespace gradwire::exchange
