// Signs and their majority on a device: the bits of native/signs. A rank's message is a word that is not 0 where one of
// its values is not finite, then a bit a value. Grids and threads stand in gradwire/codecs/signs.py.
#pragma once

#include "device.hpp"

namespace gradwire::gpu {

struct Signs {
  void* values;  // (n,) of `dtype`
  u32* words;    // messages of 1 + parts_of(n, 32) words, one after the other: this rank's own, or those of all
  u32* flags;    // to read, or null: not 0 from then on if a rank's values were not finite
  u64 n;
  u32 dtype, n_ranks;
  u32 unit;  // what is written where most are not below zero, as bits of `dtype`
  u32 ties_are_positive;
};

// A warp makes the word of 32 values; the first word was 0.
GW_KERNEL(gw_signs_pack, Signs) {
  for (u64 i = thread_number(); i < parts_of(p.n, kWarp) * kWarp; i += thread_count()) {
    const float value = i < p.n ? value_at(p.values, p.dtype, i) : 0.0f;
    const u32 word = __ballot_sync(kWholeWarp, value < 0);
    const u32 not_finite = __ballot_sync(kWholeWarp, magnitude_bits(value) >= kInfinity);
    if (i % kWarp != 0) continue;
    p.words[1 + i / kWarp] = word;
    if (not_finite != 0) atomicOr(p.words, 1u);
  }
}

// What most ranks have, or NaN for all if one had values that were not finite.
GW_KERNEL(gw_signs_vote, Signs) {
  const u64 stride = 1 + parts_of(p.n, kWarp);
  const u32 sign = p.dtype == kFloat32 ? 0x80000000u : 0x8000u;
  const u32 nan = p.dtype == kFloat32 ? kNan : p.dtype == kBfloat16 ? kNan >> 16 : 0x7E00u;
  u32 not_finite = 0;
  for (u32 rank = 0; rank < p.n_ranks; ++rank) not_finite |= p.words[rank * stride];
  if (not_finite != 0 && p.flags != nullptr && thread_number() == 0) atomicOr(p.flags, 1u);
  for (u64 i = thread_number(); i < p.n; i += thread_count()) {
    u32 n_negative = 0;
    for (u32 rank = 0; rank < p.n_ranks; ++rank) n_negative += p.words[rank * stride + 1 + i / kWarp] >> i % kWarp & 1;
    const bool is_tied = 2 * n_negative == p.n_ranks && p.ties_are_positive == 0;
    const u32 voted = is_tied ? 0 : 2 * n_negative > p.n_ranks ? p.unit | sign : p.unit;
    put_bits(p.values, p.dtype, i, not_finite != 0 ? nan : voted);
  }
}

}  // namespace gradwire::gpu
