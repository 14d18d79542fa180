// THC's sums (docs/format.md#summed-integers) on a device: the bits of native/quantisers. gw_thc_norms finds the norm
// of each 1,024 values; by the largest of all ranks gw_thc_write rounds rotated values to what is summed, and
// gw_thc_read rotates the sum back. Their grids and threads stand in gradwire/codecs/hadamard.py.
#pragma once

#include "quantised.hpp"

namespace gradwire::gpu {

inline constexpr u32 kTransform = 1024, kLeastTransform = 64;
// Bit t is set where t is a value of the table: {0, 3, 5, 7, 9, 11, 13, 14, 16, 17, 19, 21, 23, 25, 27, 30}.
inline constexpr u32 kTable = 0x4AAB6AA9u;
inline constexpr int kTableMiddle = 15;
inline constexpr float kTableLargest = 30.0f;

struct Rotated {
  void* values;           // (n,) of `dtype`
  const float* residual;  // (n,), or null
  float* left_out;        // (n,), or null; may be `residual`
  u32* norms;             // one for each 1,024 values: float32 as bits, kInfinity if a value is not finite
  void* codes;            // bytes or, where sums are wide, words of two: of this rank, or their sum over the ranks
  u64 n, sign_seed, sign_step, seed, step;
  float residual_scale, clip;
  u32 dtype, n_ranks, are_wide, pad;
};

// One transform block, which a block of threads works on.
struct RotationShared {
  float values[kTransform];
  u32 signs[kTransform / 32];
};

__device__ __forceinline__ Quantise terms_of(const Rotated& p) {
  Quantise terms{};
  terms.values = p.values;
  terms.residual = p.residual;
  terms.residual_scale = p.residual_scale;
  terms.dtype = p.dtype;
  terms.kind = kQsgd;  // squares are added up
  return terms;
}

// Eight threads a transform block.
GW_KERNEL(gw_thc_norms, Rotated) {
  const u64 block = thread_number() / kLanes, begin = block * kTransform;
  const Sums sums = sums_of<16>(terms_of(p), begin < p.n ? begin : p.n, smaller(begin + kTransform, p.n));
  if (threadIdx.x % kLanes != 0 || begin >= p.n) return;
  const float norm = static_cast<float>(__dsqrt_rn(sums.positive));
  p.norms[block] = sums.largest < kInfinity ? __float_as_uint(norm) : kInfinity;
}

// The last block is as long as it must be.
__device__ __forceinline__ u32 transform_size(u64 count) {
  u32 size = kLeastTransform;
  while (size < count) size *= 2;
  return size;
}

// By the first eight threads; a barrier has to follow.
__device__ __forceinline__ void draw_signs(const Rotated& p, u64 block, RotationShared& shared) {
  if (threadIdx.x >= kLanes) return;
  const Drawn drawn = draw(p.sign_seed, p.sign_step, block * kLanes + threadIdx.x);
  for (u32 word = 0; word < 4; ++word) shared.signs[kLanes * word + threadIdx.x] = drawn.words[word];
}

__device__ __forceinline__ float flipped(const RotationShared& shared, u32 i, float value) {
  return __uint_as_float(__float_as_uint(value) ^ (shared.signs[i / 32] >> i % 32 & 1) << 31);
}

// The Walsh-Hadamard transform, without its factor: the CPU's pairs in the CPU's stages. A barrier on either side.
__device__ inline void transform(RotationShared& shared, u32 size) {
  for (u32 half = 1; half < size; half *= 2) {
    __syncthreads();
    for (u32 pair = threadIdx.x; pair < size / 2; pair += blockDim.x) {
      const u32 i = pair / half * 2 * half + pair % half;
      const float a = shared.values[i], b = shared.values[i + half];
      shared.values[i] = a + b;
      shared.values[i + half] = a - b;
    }
  }
  __syncthreads();
}

__device__ __forceinline__ float factor_of(u32 size) {
  return 1.0f / static_cast<float>(__dsqrt_rn(static_cast<double>(size)));
}

// How far apart a block's whole numbers lie, and how many of them go into one.
struct Steps {
  float step, per_unit;
};

__device__ __forceinline__ Steps steps_of(const Rotated& p, u64 block, u32 size) {
  const double norm = static_cast<double>(__uint_as_float(p.norms[block]));
  const double range = static_cast<double>(p.clip) * norm / __dsqrt_rn(static_cast<double>(size));
  if (!(range >= static_cast<double>(kLeastScale)) || range > static_cast<double>(kLargestFloat)) return Steps{0, 0};
  return Steps{static_cast<float>(range / kTableMiddle), static_cast<float>(kTableMiddle / range)};
}

// A value of the table, by chance one of the two around `value`; `number` is drawn.
__device__ __forceinline__ u32 rounded(float value, u32 number) {
  const float above = value > 0 ? value : 0.0f;  // 0 for a NaN
  const float clamped = above < kTableLargest ? above : kTableLargest;
  const u32 below = (2u << static_cast<u32>(clamped)) - 1;
  const u32 rest = kTable & ~below, low = 31 - static_cast<u32>(__clz(kTable & below));
  const u32 gap = rest == 0 ? 1 : 31 - static_cast<u32>(__clz(rest & (0u - rest))) - low;
  return fraction_of(number) * static_cast<float>(gap) < clamped - static_cast<float>(low) ? low + gap : low;
}

// A block of threads a transform block.
GW_KERNEL(gw_thc_write, Rotated) {
  RotationShared& shared = shared_as<RotationShared>();
  const Quantise terms = terms_of(p);
  const u64 block = blockIdx.x, begin = block * kTransform, count = smaller(kTransform, p.n - begin);
  const u32 size = transform_size(count);
  const float factor = factor_of(size);
  const Steps steps = steps_of(p, block, size);
  draw_signs(p, block, shared);
  __syncthreads();
  for (u32 i = threadIdx.x; i < size; i += blockDim.x)
    shared.values[i] = flipped(shared, i, i < count ? term_of(terms, begin + i) : 0.0f);
  transform(shared, size);
  // A thread draws once for the eight values that share a counter.
  for (u32 counter = threadIdx.x; counter < size / 8; counter += blockDim.x) {
    const Drawn drawn = draw(p.seed, p.step, block * (kTransform / 8) + counter);
    for (u32 q = 0; q < 8; ++q) {
      const u32 i = counter / kLanes * kGroup + 8 * q + counter % kLanes;
      const float rotated = shared.values[i] * factor;
      const u32 code = rounded(rotated * steps.per_unit + static_cast<float>(kTableMiddle), drawn.number(q));
      if (p.are_wide)
        static_cast<u16*>(p.codes)[begin + i] = static_cast<u16>(code);
      else
        static_cast<u8*>(p.codes)[begin + i] = static_cast<u8>(code);
      shared.values[i] = static_cast<float>(static_cast<int>(code) - kTableMiddle) * steps.step;
    }
  }
  if (p.left_out == nullptr) return;
  transform(shared, size);
  for (u32 i = threadIdx.x; i < count; i += blockDim.x)
    p.left_out[begin + i] =
        (term_of(terms, begin + i) - flipped(shared, i, shared.values[i] * factor)) * (1 / p.residual_scale);
}

// A block of threads a transform block: NaN where a rank's values were not finite.
GW_KERNEL(gw_thc_read, Rotated) {
  RotationShared& shared = shared_as<RotationShared>();
  const u64 block = blockIdx.x, begin = block * kTransform, count = smaller(kTransform, p.n - begin);
  const u32 size = transform_size(count);
  const float factor = factor_of(size), step = steps_of(p, block, size).step / static_cast<float>(p.n_ranks);
  const bool is_finite = p.norms[block] < kInfinity;
  draw_signs(p, block, shared);
  for (u32 i = threadIdx.x; i < size; i += blockDim.x) {
    const int sum =
        p.are_wide ? static_cast<const u16*>(p.codes)[begin + i] : static_cast<const u8*>(p.codes)[begin + i];
    shared.values[i] = static_cast<float>(sum - kTableMiddle * static_cast<int>(p.n_ranks)) * step;
  }
  transform(shared, size);
  for (u32 i = threadIdx.x; i < count; i += blockDim.x) {
    const float mean = flipped(shared, i, shared.values[i] * factor);
    put_value(p.values, p.dtype, begin + i, is_finite ? mean : __uint_as_float(kNan));
  }
}

}  // namespace gradwire::gpu
