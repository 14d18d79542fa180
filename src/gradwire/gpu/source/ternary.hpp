// TernGrad's sums (docs/format.md#summed-integers) on a device: the bits of native/quantisers. gw_ternary_measure and
// gw_ternary_scales find each tensor's scale; by the largest of all ranks gw_ternary_count draws what is summed, and
// gw_ternary_mean reads the sum. Their grids and threads stand in gradwire/codecs/ternary.py.
#pragma once

#include "quantised.hpp"

namespace gradwire::gpu {

inline constexpr u32 kTernaryBlock = 4096;  // values that the CPU adds up together

// Values that share a scale.
struct Span {
  u64 begin, end, first_block;
};

struct Ternary {
  void* values;       // (n,) of `dtype`
  Sums* sums;         // one a block of a span
  u32* scales;        // one a span: float32 as bits, kInfinity if a value is not finite
  u8* counts;         // fields: of this rank, or their sum over the ranks
  const Span* spans;  // n_spans, by where they begin; none is empty
  u64 n, n_spans, n_blocks, seed, step;
  float clip;
  u32 dtype, n_ranks;
  u32 are_nibbles, is_single;  // fields of 4 bits; one scale for all, which the CPU does not divide by
};

// Eight threads a block.
GW_KERNEL(gw_ternary_measure, Ternary) {
  const u64 block = thread_number() / kLanes;
  u64 begin = 0, end = 0;
  if (block < p.n_blocks) {
    const Span span = p.spans[last_up_to(p.spans, p.n_spans, &Span::first_block, block)];
    begin = span.begin + (block - span.first_block) * kTernaryBlock;
    end = smaller(begin + kTernaryBlock, span.end);
  }
  Quantise squared{};
  squared.values = p.values;
  squared.dtype = p.dtype;
  squared.kind = kQsgd;
  const Sums sums = sums_of<16>(squared, begin, end);
  if (threadIdx.x % kLanes == 0 && block < p.n_blocks) p.sums[block] = sums;
}

// A block of threads a span: its sums in their order.
GW_KERNEL(gw_ternary_scales, Ternary) {
  const Span span = p.spans[blockIdx.x];
  const u64 n = span.end - span.begin;
  const Sums all = sum_of_blocks(p.sums + span.first_block, parts_of(n, kTernaryBlock));
  if (threadIdx.x != 0) return;
  float scale = __uint_as_float(kInfinity);
  if (all.largest < kInfinity) {
    const float clipped = narrowed(static_cast<double>(p.clip) * __dsqrt_rn(all.positive / static_cast<double>(n)));
    scale = __uint_as_float(all.largest);
    if (clipped < scale) scale = clipped;
    if (scale < kLeastScale) scale = 0;
  }
  p.scales[blockIdx.x] = __float_as_uint(scale);
}

// A thread draws once for the eight values that share a counter.
GW_KERNEL(gw_ternary_count, Ternary) {
  for (u64 counter = thread_number(); counter < parts_of(p.n, kGroup) * kLanes; counter += thread_count()) {
    const u64 group = counter / kLanes, lane = counter % kLanes;
    const Drawn drawn = draw(p.seed, p.step, counter);
    u8 own[8];
    for (u32 q = 0; q < 8; ++q) {
      const u64 i = group * kGroup + 8 * q + lane;
      own[q] = 0;
      if (i >= p.n) continue;
      const float scale =
          p.n_spans == 0 ? 0.0f : __uint_as_float(p.scales[last_up_to(p.spans, p.n_spans, &Span::begin, i)]);
      float value = value_at(p.values, p.dtype, i), per_unit = 16777216.0f;
      if (p.is_single)
        per_unit = scale >= kLeastScale ? per_unit / scale : 0.0f;
      else if (scale != 0)
        value /= scale;
      const float magnitude = __uint_as_float(magnitude_bits(value));
      const bool is_drawn = static_cast<float>(drawn.number(q) >> 8) < magnitude * per_unit;
      own[q] = static_cast<u8>(!is_drawn ? 1 : value < 0 ? 0 : 2);
    }
    put_fields(p.counts, p.are_nibbles, group, lane, own);
  }
}

// NaN where a rank's values were not finite; what is in no span stays.
GW_KERNEL(gw_ternary_mean, Ternary) {
  for (u64 i = thread_number(); i < p.n && p.n_spans != 0; i += thread_count()) {
    const u64 number = last_up_to(p.spans, p.n_spans, &Span::begin, i);
    if (i < p.spans[number].begin || i >= p.spans[number].end) continue;
    const u32 count = field_of(p.counts, p.are_nibbles, i);
    const float drawn = static_cast<float>(static_cast<int>(count) - static_cast<int>(p.n_ranks));
    const u32 bits = p.scales[number];
    const float scale = __uint_as_float(bits), ranks = static_cast<float>(p.n_ranks);
    const float mean = p.is_single ? drawn * (scale / ranks) : drawn * (1.0f / ranks) * scale;
    put_value(p.values, p.dtype, i, bits < kInfinity ? mean : __uint_as_float(kNan));
  }
}

}  // namespace gradwire::gpu
