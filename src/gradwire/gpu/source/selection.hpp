// The largest magnitudes of segments of values, on a device: the elements of native/top_k and of DGC's thresholds, of
// equal magnitudes the first. gw_select_begin; from a sample a threshold (count and narrow three times, then try and
// adapt by turns), or the exact one (count and narrow over the values); then measure, place, bases and write.
// gw_select_add reads. Grids and threads stand in gradwire/codecs/selection.py.
#pragma once

#include "device.hpp"

namespace gradwire::gpu {

inline constexpr u32 kSelectThreads = 256;
inline constexpr u64 kSelectPiece = 2048;  // values that a warp looks through
inline constexpr u64 kSelectPieces = kSelectThreads / kWarp;
inline constexpr u64 kSelectTile = kSelectPiece * kSelectPieces;  // and a block
inline constexpr u32 kSelectBins = 2048;
inline constexpr u64 kNoSamples = ~0ull;
inline constexpr u32 kAdaptations = 10;  // of DGC's threshold, which is good from kFewest to kMost times what is wanted
inline constexpr double kFewest = 0.8, kMost = 1.3, kLeastNormal = 1.1754943508222875e-38;

// Values of which some are taken; none is empty.
struct Segment {
  u64 begin, end, first_tile, n_wanted;
  // Of DGC: places in it (the whole of it, if there are kNoSamples), and how many of them the threshold selects. 0: no
  // sample, and exactly n_wanted are taken.
  u64 first_sample, n_samples, first_sample_tile, n_top;
};

struct Choice {
  double threshold, lowest, highest;  // lowest selects too many and highest too few; 0: not known
  u64 n_from;                         // values from the threshold up
  u64 n_left;                         // to be found among those with the leading bits
  u64 base, n_taken;                  // where they go
  u32 leading;                        // bits of the magnitude that is looked for
  u32 from;                           // the threshold's magnitude
  u32 above, n_equal;                 // larger magnitudes are taken, and the first that equal it
  u32 is_settled, is_exact;
};

// Values of a piece, and then of those before it in its segment.
struct Found {
  u32 n_above, n_equal;
};

struct Select {
  float* values;  // (n,); what is taken becomes zero
  float* beside;  // (n,), or null: there too
  const Segment* segments;
  const u32* samples;
  Choice* choices;
  u32* bins;  // kSelectBins a segment
  Found* pieces;
  u32* n_taken;  // of all segments, or null
  u32* indices;  // ascending in each segment
  float* taken;
  u64 n_segments, n_tiles, room;
  u32 shift, n_bits;  // of the magnitude, that are counted
  u32 round;          // of adaptation
  u32 of_samples;     // tiles are the samples'
  u32 takes_zeros, pad;
};

struct Scatter {
  const u32* n_taken;  // or null: all
  const u32* indices;  // (room,)
  const float* taken;
  float* sums;  // (n,)
  u32* error;
  u64 n, room;
};

// The segment of a tile.
__device__ __forceinline__ u64 segment_of(const Select& p, u64 Segment::* first_tile, u64 tile) {
  return last_up_to(p.segments, p.n_segments, first_tile, tile);
}

GW_KERNEL(gw_select_begin, Select) {
  for (u64 i = thread_number(); i < p.n_segments * kSelectBins; i += thread_count()) p.bins[i] = 0;
  for (u64 i = thread_number(); i < p.n_segments; i += thread_count()) {
    const Segment segment = p.segments[i];
    Choice own{};
    own.is_exact = own.is_settled = segment.n_samples == 0;
    own.n_left = segment.n_samples == 0 ? segment.n_wanted : segment.n_top;
    p.choices[i] = own;
  }
}

// A block a tile: how often values that begin with the leading bits have which next ones.
GW_KERNEL(gw_select_count, Select) {
  auto& bins = shared_as<u32[kSelectBins]>();
  const u64 tile = blockIdx.x;
  const u64 number = segment_of(p, p.of_samples ? &Segment::first_sample_tile : &Segment::first_tile, tile);
  const Segment segment = p.segments[number];
  if (!p.of_samples && !p.choices[number].is_exact) return;
  const u32 leading = p.choices[number].leading, end_bit = p.shift + p.n_bits, mask = (1u << p.n_bits) - 1;
  for (u32 bin = threadIdx.x; bin < kSelectBins; bin += kSelectThreads) bins[bin] = 0;
  __syncthreads();
  const u64 n = p.of_samples ? segment.n_samples : segment.end - segment.begin;
  const u64 first = (tile - (p.of_samples ? segment.first_sample_tile : segment.first_tile)) * kSelectTile;
  const bool is_drawn = p.of_samples && segment.first_sample != kNoSamples;
  for (u64 i = first + threadIdx.x; i < smaller(first + kSelectTile, n); i += kSelectThreads) {
    const u32 bits = magnitude_bits(p.values[segment.begin + (is_drawn ? p.samples[segment.first_sample + i] : i)]);
    if ((bits ^ leading) >> end_bit == 0) atomicAdd(&bins[bits >> p.shift & mask], 1u);
  }
  __syncthreads();
  for (u32 bin = threadIdx.x; bin < kSelectBins; bin += kSelectThreads)
    if (bins[bin] != 0) atomicAdd(&p.bins[number * kSelectBins + bin], bins[bin]);
}

// A block a segment: the bin in which the last of the largest lies.
GW_KERNEL(gw_select_narrow, Select) {
  auto& sums = shared_as<u32[kSelectThreads]>();
  constexpr u32 kEach = kSelectBins / kSelectThreads;
  u32* const bins = p.bins + blockIdx.x * static_cast<u64>(kSelectBins);
  Choice& choice = p.choices[blockIdx.x];
  if (!p.of_samples && !choice.is_exact) return;
  u32 sum = 0;
  for (u32 i = 0; i < kEach; ++i) sum += bins[threadIdx.x * kEach + i];
  sums[threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.x == 0) {
    u64 n_above = 0;
    u32 group = kSelectThreads - 1;
    while (group > 0 && n_above + sums[group] < choice.n_left) n_above += sums[group--];
    u32 bin = group * kEach + kEach - 1;
    while (bin > group * kEach && n_above + bins[bin] < choice.n_left) n_above += bins[bin--];
    choice.leading |= bin << p.shift;
    choice.n_left -= smaller(n_above, choice.n_left);
    if (!p.of_samples && p.shift == 0) {
      choice.above = choice.leading;
      choice.n_equal = choice.leading != 0 || p.takes_zeros ? static_cast<u32>(choice.n_left) : 0;
    }
  }
  __syncthreads();
  for (u32 i = 0; i < kEach; ++i) bins[threadIdx.x * kEach + i] = 0;
}

// A block a tile: how many values the threshold selects.
GW_KERNEL(gw_select_try, Select) {
  const u64 number = segment_of(p, &Segment::first_tile, blockIdx.x);
  if (p.choices[number].is_settled) return;
  const Segment segment = p.segments[number];
  const u32 from = p.choices[number].from;
  const u64 first = segment.begin + (blockIdx.x - segment.first_tile) * kSelectTile;
  u64 count = 0;
  for (u64 i = first + threadIdx.x; i < smaller(first + kSelectTile, segment.end); i += kSelectThreads)
    count += magnitude_bits(p.values[i]) >= from;
  count = sum_of_lanes(count);
  if (threadIdx.x % kWarp == 0 && count != 0) atomicAdd(&p.choices[number].n_from, count);
}

// A thread a segment, with the CPU's double precision: round 0 takes the sample's threshold, the others move it.
GW_KERNEL(gw_select_adapt, Select) {
  for (u64 i = thread_number(); i < p.n_segments; i += thread_count()) {
    Choice& own = p.choices[i];
    if (own.is_settled) continue;
    const u64 wanted = p.segments[i].n_wanted;
    if (p.round == 0) {
      own.threshold = static_cast<double>(__uint_as_float(own.leading));
    } else {
      const double n_wanted = static_cast<double>(wanted), n_from = static_cast<double>(own.n_from);
      const bool are_many = n_from > kMost * n_wanted, are_few = n_from < kFewest * n_wanted && own.threshold > 0;
      if (p.round > kAdaptations || !(are_many || are_few)) {
        own.is_settled = 1;
        own.is_exact = own.n_from > wanted || are_few;
        own.above = own.from - 1;
        own.n_equal = own.leading = 0;
        own.n_left = wanted;
        continue;
      }
      if (are_many)
        own.lowest = own.threshold > kLeastNormal ? own.threshold : kLeastNormal;
      else
        own.highest = own.threshold;
      if (own.lowest > 0 && own.highest > 0)
        own.threshold = (own.lowest + own.highest) / 2;
      else
        own.threshold = own.lowest > 0 ? own.lowest * kMost : own.highest * kFewest;
    }
    const u32 bits = magnitude_bits(static_cast<float>(own.threshold));
    own.from = bits == 0 ? 1 : bits;
    own.n_from = 0;
  }
}

// A warp a piece.
GW_KERNEL(gw_select_measure, Select) {
  const u64 number = segment_of(p, &Segment::first_tile, blockIdx.x), piece = thread_number() / kWarp;
  const Segment segment = p.segments[number];
  const u32 above = p.choices[number].above;
  const u64 first = segment.begin + (piece - segment.first_tile * kSelectPieces) * kSelectPiece;
  u32 n_above = 0, n_equal = 0;
  for (u64 i = first + threadIdx.x % kWarp; i < smaller(first + kSelectPiece, segment.end); i += kWarp) {
    const u32 bits = magnitude_bits(p.values[i]);
    n_above += bits > above;
    n_equal += bits == above;
  }
  const Found found{sum_of_lanes(n_above), sum_of_lanes(n_equal)};
  if (threadIdx.x % kWarp == 0) p.pieces[piece] = found;
}

// A block a segment: what lies before each of its pieces. Both counts are below 2^31, so one sum carries them.
GW_KERNEL(gw_select_place, Select) {
  auto& sums = shared_as<u64[kSelectThreads]>();
  const Segment segment = p.segments[blockIdx.x];
  Found* const pieces = p.pieces + segment.first_tile * kSelectPieces;
  const u64 n_pieces = parts_of(segment.end - segment.begin, kSelectTile) * kSelectPieces;
  u64 before = 0;
  for (u64 first = 0; first < n_pieces; first += kSelectThreads) {
    const u64 piece = first + threadIdx.x;
    u64 own = 0;
    if (piece < n_pieces) own = static_cast<u64>(pieces[piece].n_above) << 32 | pieces[piece].n_equal;
    const u64 sum = before + sum_up_to<kSelectThreads>(own, sums) - own;
    if (piece < n_pieces) pieces[piece] = Found{static_cast<u32>(sum >> 32), static_cast<u32>(sum)};
    before += sums[kSelectThreads - 1];
  }
  Choice& choice = p.choices[blockIdx.x];
  if (threadIdx.x == 0) choice.n_taken = (before >> 32) + smaller(before & 0xFFFFFFFFu, choice.n_equal);
}

// One block: where each segment's go, one after the other, and how many there are.
GW_KERNEL(gw_select_bases, Select) {
  auto& sums = shared_as<u64[kSelectThreads]>();
  u64 before = 0;
  for (u64 first = 0; first < p.n_segments; first += kSelectThreads) {
    const u64 number = first + threadIdx.x;
    const u64 own = number < p.n_segments ? p.choices[number].n_taken : 0;
    const u64 base = before + sum_up_to<kSelectThreads>(own, sums) - own;
    if (number < p.n_segments) p.choices[number].base = base;
    before += sums[kSelectThreads - 1];
  }
  if (threadIdx.x == 0 && p.n_taken != nullptr) *p.n_taken = static_cast<u32>(before);
}

// A warp a piece.
GW_KERNEL(gw_select_write, Select) {
  const u64 number = segment_of(p, &Segment::first_tile, blockIdx.x), piece = thread_number() / kWarp;
  const u32 lane = threadIdx.x % kWarp, before_lane = (1u << lane) - 1;
  const Segment segment = p.segments[number];
  const Choice choice = p.choices[number];
  Found found = p.pieces[piece];
  const u64 first = segment.begin + (piece - segment.first_tile * kSelectPieces) * kSelectPiece;
  for (u64 row = first; row < smaller(first + kSelectPiece, segment.end); row += kWarp) {
    const u64 i = row + lane;
    const u32 bits = i < segment.end ? magnitude_bits(p.values[i]) : 0;
    const bool is_above = i < segment.end && bits > choice.above;
    const bool is_equal = i < segment.end && bits == choice.above;
    const u32 above = __ballot_sync(kWholeWarp, is_above), equal = __ballot_sync(kWholeWarp, is_equal);
    const u32 n_equal = found.n_equal + __popc(equal & before_lane);
    if (is_above || (is_equal && n_equal < choice.n_equal)) {
      const u64 at = choice.base + found.n_above + __popc(above & before_lane) + smaller(n_equal, choice.n_equal);
      if (at < p.room) {  // as it always is, unless values change meanwhile
        p.indices[at] = static_cast<u32>(i);
        p.taken[at] = p.values[i];
      }
      p.values[i] = 0;
      if (p.beside != nullptr) p.beside[i] = 0;
    }
    found.n_above += __popc(above);
    found.n_equal += __popc(equal);
  }
}

// Adds one rank's elements, whose indices ascend; others are reported, and nothing is written outside.
GW_KERNEL(gw_select_add, Scatter) {
  const u64 n_taken = p.n_taken == nullptr ? p.room : *p.n_taken;
  if (n_taken > p.room && thread_number() == 0) report(p.error, kField);
  for (u64 i = thread_number(); i < smaller(n_taken, p.room); i += thread_count()) {
    const u32 index = p.indices[i];
    if (index >= p.n || (i > 0 && index <= p.indices[i - 1]))
      report(p.error, kField);
    else
      p.sums[index] += p.taken[i];
  }
}

}  // namespace gradwire::gpu
