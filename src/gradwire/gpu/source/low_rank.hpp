// Low-rank matrices: the bits of native/low_rank, whose orders of sums are kept. What each rank computes again for
// itself from summed factors must come out the same on every GPU. Factors are stored transposed, a component a row:
// (rank, n).
#pragma once

#include "device.hpp"

namespace gradwire::gpu {

struct MultiplyFactors {
  const float* left;   // (rank, n_rows)
  const float* right;  // (rank, n_columns)
  void* matrix;        // (n_rows, n_columns) of `dtype`: left^T right, or, float32, that much less
  u64 n_rows, n_columns;
  u32 rank, dtype, subtracts;
};

GW_KERNEL(gw_multiply_factors, MultiplyFactors) {
  for (u64 i = thread_number(); i < p.n_rows * p.n_columns; i += thread_count()) {
    const u64 row = i / p.n_columns, column = i % p.n_columns;
    float sum = 0;
    for (u64 k = 0; k < p.rank; ++k) sum += p.right[k * p.n_columns + column] * p.left[k * p.n_rows + row];
    put_value(p.matrix, p.dtype, i, p.subtracts ? static_cast<const float*>(p.matrix)[i] - sum : sum);
  }
}

struct OrthogonaliseFactors {
  float* factors;  // (blocks, rank, n), rank <= n
  u64 n;
  u32 rank;
};

inline constexpr u32 kOrthogonaliseThreads = 256, kRunningSums = 16;

// The sum of v[i] w[i] by a warp: sixteen running sums, then halves added. All lanes have it.
__device__ inline float dot_by_warp(const float* v, const float* w, u64 n) {
  const u32 lane = threadIdx.x % kWarp;
  float sum = 0;
  if (lane < kRunningSums)
    for (u64 i = lane; i < n; i += kRunningSums) sum += v[i] * w[i];
  for (u32 lanes = kRunningSums / 2; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(kWholeWarp, sum, lanes);
  const float other = __shfl_xor_sync(kWholeWarp, sum, kRunningSums);
  return lane < kRunningSums ? sum : other;
}

// What lane 0 of a warp brings, to all of them.
__device__ inline float from_first_lane(float value) {
  u32 word = threadIdx.x % kWarp == 0 ? __float_as_uint(value) : 0;
  for (u32 lanes = 1; lanes < kWarp; lanes *= 2) word |= __shfl_xor_sync(kWholeWarp, word, lanes);
  return __uint_as_float(word);
}

// (I - tau v v^T) on the rows after `pivot`, a row to a warp; v = (1, tail) begins at column `pivot`. Ends with a
// barrier.
__device__ inline void reflect(float* factor, u32 rank, u64 n, u32 pivot, float tau) {
  const u32 lane = threadIdx.x % kWarp;
  const float* const tail = factor + pivot * n + pivot + 1;
  const u64 n_tail = n - pivot - 1;
  for (u32 k = pivot + 1 + threadIdx.x / kWarp; k < rank; k += kOrthogonaliseThreads / kWarp) {
    float* const row = factor + k * n + pivot + 1;
    const float head = from_first_lane(lane == 0 ? row[-1] : 0.0f);  // the others do not read what lane 0 writes
    const float weight = tau * (head + dot_by_warp(tail, row, n_tail));
    if (lane == 0) row[-1] = head - weight;
    for (u64 i = lane; i < n_tail; i += kWarp) row[i] -= tail[i] * weight;
  }
  __syncthreads();
}

__device__ __forceinline__ float power_of_two(int exponent) {
  return __uint_as_float(static_cast<u32>(exponent + 127) << 23);
}

// By a power of two, so that the largest of n magnitudes lies in [0.5, 1): squares neither overflow nor vanish.
__device__ inline void scale_to_one(float* factor, u64 n, u32& largest) {
  if (threadIdx.x == 0) largest = 0;
  __syncthreads();
  u32 own = 0;
  for (u64 i = threadIdx.x; i < n; i += kOrthogonaliseThreads)
    if (magnitude_bits(factor[i]) > own) own = magnitude_bits(factor[i]);
  atomicMax(&largest, own);
  __syncthreads();
  const u32 bits = largest;
  __syncthreads();
  if (bits == 0) return;
  int exponent = static_cast<int>(bits >> 23) - 126;
  if (bits < 1u << 23)  // subnormal
    for (exponent = -148; bits >> (exponent + 149); ++exponent) {
    }
  // In two steps: the reciprocal of a subnormal is beyond float32.
  const float first = power_of_two(-exponent / 2), second = power_of_two(-exponent - -exponent / 2);
  for (u64 i = threadIdx.x; i < n; i += kOrthogonaliseThreads) factor[i] = factor[i] * first * second;
  __syncthreads();
}

// A block a factor: Householder's QR of the transposed factor, without its R. Shared memory: 2 + rank floats.
GW_KERNEL(gw_orthogonalise_factors, OrthogonaliseFactors) {
  float& squares = shared_as<float>();
  float* const taus = &squares + 2;
  float* const factor = p.factors + static_cast<u64>(blockIdx.x) * p.rank * p.n;
  scale_to_one(factor, p.rank * p.n, *reinterpret_cast<u32*>(&squares + 1));
  for (u32 k = 0; k < p.rank; ++k) {
    float* const row = factor + k * p.n;
    float* const tail = row + k + 1;
    const u64 n_tail = p.n - k - 1;
    if (threadIdx.x < kWarp) {
      const float sum = dot_by_warp(tail, tail, n_tail);
      if (threadIdx.x == 0) squares = sum;
    }
    __syncthreads();
    const bool reflects = squares > 0;
    const float head = row[k];
    const float norm = static_cast<float>(__dsqrt_rn(static_cast<double>(head * head + squares)));
    const float reflected = head > 0 ? -norm : norm;
    const float tau = reflects ? (reflected - head) / reflected : 0.0f;
    for (u64 i = threadIdx.x; i < n_tail; i += kOrthogonaliseThreads)
      tail[i] = reflects ? tail[i] / (head - reflected) : 0.0f;
    if (threadIdx.x == 0) taus[k] = tau;
    __syncthreads();
    if (reflects) reflect(factor, p.rank, p.n, k, tau);
  }
  for (u32 k = p.rank; k-- > 0;) {
    float* const row = factor + k * p.n;
    const float tau = taus[k];
    for (u64 j = k + 1 + threadIdx.x; j < p.rank; j += kOrthogonaliseThreads) factor[j * p.n + k] = 0;
    __syncthreads();
    reflect(factor, p.rank, p.n, k, tau);
    for (u64 i = k + 1 + threadIdx.x; i < p.n; i += kOrthogonaliseThreads) row[i] *= -tau;
    if (threadIdx.x == 0) row[k] = 1 - tau;
    __syncthreads();
  }
}

}  // namespace gradwire::gpu
