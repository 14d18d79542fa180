// Which values of a gradient are not zero (docs/format.md#count-sketch), and the values at an index's bits one after
// the other, on a device: the bytes of native/sketch and native/packing. gw_index_write and gw_index_head make what the
// ranks OR; of the union gw_index_count counts the bits, torch adds the counts up, and gw_index_pack and
// gw_index_unpack copy values by them. Their grids and threads stand in gradwire/codecs/packed_values.py.
#pragma once

#include "device.hpp"

namespace gradwire::gpu {

inline constexpr u32 kIndexBlock = 32;  // words that are counted together, by one warp
inline constexpr u32 kHeadWords = 12;   // facts, their complement, flags, a bit for each exponent
inline constexpr u32 kNotFinite = 1, kPastTheEnd = 2;
inline constexpr int kSmallestExponent = -148;  // a float32 that is not zero is below 2^e for an e from here on

struct Index {
  void* values;     // (n,) of `dtype`
  void* packed;     // (n_packed,) of the same
  u32* words;       // (ceil(n / 32),): bit i % 32 of word i / 32 stands for value i
  u32* head;        // (kHeadWords,)
  u32* largest;     // (1,) float32 as bits: the largest magnitude
  u32* counts;      // (n_blocks,) bits set in each block of words
  const u32* ends;  // (n_blocks,) those of it and of all blocks before
  u64 n, n_blocks, n_packed;
  u32 dtype, facts;
};

__device__ __forceinline__ u64 warp_number() { return thread_number() / kWarp; }
__device__ __forceinline__ u64 warp_count() { return thread_count() / kWarp; }

// A warp a word. `largest` is zero before.
GW_KERNEL(gw_index_write, Index) {
  const u32 lane = threadIdx.x % kWarp;
  u32 largest = 0;
  for (u64 word = warp_number(); word < parts_of(p.n, kWarp); word += warp_count()) {
    const u64 i = word * kWarp + lane;
    const u32 magnitude = i < p.n ? magnitude_bits(value_at(p.values, p.dtype, i)) : 0;
    if (magnitude > largest) largest = magnitude;
    const u32 set = __ballot_sync(kWholeWarp, magnitude != 0);
    if (lane == 0) p.words[word] = set;
  }
  largest = largest_of_lanes(largest);
  if (lane == 0 && largest != 0) atomicMax(p.largest, largest);
}

// x < 2^e, for the smallest such e.
__device__ __forceinline__ int exponent_of(u32 magnitude) {
  if (magnitude >= 0x00800000u) return static_cast<int>(magnitude >> 23) - 126;
  return 32 - __clz(magnitude) - 149;
}

// One block; a thread a word.
GW_KERNEL(gw_index_head, Index) {
  const u32 largest = *p.largest;
  const bool is_finite = largest < kInfinity;
  const u32 n_bits = is_finite && largest != 0 ? static_cast<u32>(exponent_of(largest) - kSmallestExponent + 1) : 0;
  for (u32 i = threadIdx.x; i < kHeadWords; i += blockDim.x) {
    if (i == 0) p.head[i] = p.facts;
    if (i == 1) p.head[i] = ~p.facts & kMagnitude;
    if (i == 2) p.head[i] = is_finite ? 0 : kNotFinite;
    if (i < 3) continue;
    const u32 first = 32 * (i - 3);
    p.head[i] = n_bits >= first + 32 ? 0xFFFFFFFFu : n_bits > first ? (1u << (n_bits - first)) - 1 : 0;
  }
}

// A warp a block of words. Bits past the end are told in the head, and do not count.
GW_KERNEL(gw_index_count, Index) {
  const u64 n_words = parts_of(p.n, 32);
  for (u64 block = warp_number(); block < p.n_blocks; block += warp_count()) {
    const u64 at = block * kIndexBlock + threadIdx.x % kWarp;
    u32 word = at < n_words ? p.words[at] : 0;
    if (at + 1 == n_words && p.n % 32 != 0) {
      const u32 inside = (1u << p.n % 32) - 1;
      if ((word & ~inside) != 0) atomicOr(p.head + 2, kPastTheEnd);
      word &= inside;
    }
    const u32 count = sum_of_lanes(static_cast<u32>(__popc(word)));
    if (threadIdx.x % kWarp == 0) p.counts[block] = count;
  }
}

// visit(i, is_set, place) for the values of a warp's blocks, 32 at a time; `place` counts the set bits before.
template <class Visit>
__device__ __forceinline__ void visit_values(const Index& p, Visit visit) {
  const u32 lane = threadIdx.x % kWarp;
  for (u64 block = warp_number(); block < p.n_blocks; block += warp_count()) {
    u64 place = block == 0 ? 0 : p.ends[block - 1];
    const u64 end = smaller(parts_of(p.n, 32), (block + 1) * kIndexBlock);
    for (u64 at = block * kIndexBlock; at < end; ++at) {
      const u32 word = p.words[at];
      const u64 i = 32 * at + lane;
      if (i < p.n) visit(i, (word >> lane & 1) != 0, place + static_cast<u64>(__popc(word & ((1u << lane) - 1))));
      place += static_cast<u64>(__popc(word));
    }
  }
}

GW_KERNEL(gw_index_pack, Index) {
  visit_values(p, [&](u64 i, bool is_set, u64 place) {
    if (is_set && place < p.n_packed) put_bits(p.packed, p.dtype, place, bits_at(p.values, p.dtype, i));
  });
}

GW_KERNEL(gw_index_unpack, Index) {
  visit_values(p, [&](u64 i, bool is_set, u64 place) {
    put_bits(p.values, p.dtype, i, is_set && place < p.n_packed ? bits_at(p.packed, p.dtype, place) : 0);
  });
}

}  // namespace gradwire::gpu
