// Gradients of three dtypes as float32 and back, with the CPU's bits; the numbers that are drawn by element.
#pragma once

#include "device.hpp"

namespace gradwire::gpu {

enum Dtype : u32 { kFloat32 = 0, kBfloat16 = 1, kFloat16 = 2 };

inline constexpr u32 kMagnitude = 0x7FFFFFFFu, kInfinity = 0x7F800000u, kNan = 0x7FC00000u;
inline constexpr float kLargestFloat = 3.4028234663852886e38f;
inline constexpr float kLeastScale = 7.888609052210118e-31f;  // 2^-100

__device__ __forceinline__ u32 magnitude_bits(float value) { return __float_as_uint(value) & kMagnitude; }

__device__ __forceinline__ float narrowed(double value) {
  return static_cast<float>(value < kLargestFloat ? value : kLargestFloat);
}

__device__ __forceinline__ float float_of_half(u16 half) {
  const u32 magnitude = (half & 0x7FFFu) << 13;
  u32 bits = __float_as_uint(__uint_as_float(magnitude) * 5.192296858534828e33f);  // 2^112: exact, subnormals too
  if (magnitude >= 0x0F800000u) bits |= kInfinity;
  return __uint_as_float(bits | (half & 0x8000u) << 16);
}

// To nearest even.
__device__ __forceinline__ u16 half_of_float(float value) {
  const u32 bits = __float_as_uint(value), magnitude = bits & kMagnitude, sign = bits >> 16 & 0x8000u;
  if (magnitude > kInfinity) return static_cast<u16>(sign | 0x7E00u);
  if (magnitude >= 0x477FF000u) return static_cast<u16>(sign | 0x7C00u);
  if (magnitude < 0x38800000u)  // subnormal: the sum rounds at the last bit that a half has
    return static_cast<u16>(sign | (__float_as_uint(__uint_as_float(magnitude) + 0.5f) - 0x3F000000u));
  return static_cast<u16>(sign | (magnitude - 0x38000000u + 0xFFFu + (magnitude >> 13 & 1)) >> 13);
}

__device__ __forceinline__ u16 bfloat16_of_float(float value) {
  const u32 bits = __float_as_uint(value);
  if ((bits & kMagnitude) > kInfinity) return static_cast<u16>(bits >> 16 | 0x40u);
  return static_cast<u16>((bits + 0x7FFFu + (bits >> 16 & 1)) >> 16);
}

__device__ __forceinline__ float value_at(const void* values, u32 dtype, u64 i) {
  if (dtype == kFloat32) return static_cast<const float*>(values)[i];
  const u16 half = static_cast<const u16*>(values)[i];
  return dtype == kBfloat16 ? __uint_as_float(static_cast<u32>(half) << 16) : float_of_half(half);
}

__device__ __forceinline__ void put_value(void* values, u32 dtype, u64 i, float value) {
  if (dtype == kFloat32)
    static_cast<float*>(values)[i] = value;
  else
    static_cast<u16*>(values)[i] = dtype == kBfloat16 ? bfloat16_of_float(value) : half_of_float(value);
}

// Devices and CPUs make NaNs of different bits; these are the CPU's of a message that is not finite.
__device__ __forceinline__ float added(float a, float b) {
  const float sum = a + b;
  return magnitude_bits(sum) > kInfinity ? __uint_as_float(kNan) : sum;
}

// ---- Philox4x32-10 by counter (native/random/counter.hpp): elements 64 g + 8 q + l share the words of counter 8 g + l

struct Drawn {
  u32 words[4];

  // The number of element q (0 to 7) of those that share the counter.
  __device__ __forceinline__ u32 number(u32 q) const {
    const u32 word = words[q / 2];
    return q % 2 == 0 ? word : word << 16 | word >> 16;
  }
};

__device__ inline Drawn draw(u64 seed, u64 step, u64 counter) {
  u32 a = static_cast<u32>(counter), b = static_cast<u32>(counter >> 32);
  u32 c = static_cast<u32>(step), d = static_cast<u32>(step >> 32);
  u32 key0 = static_cast<u32>(seed), key1 = static_cast<u32>(seed >> 32);
  for (u32 round = 0; round < 10; ++round) {
    const u64 left = static_cast<u64>(0xD2511F53u) * a, right = static_cast<u64>(0xCD9E8D57u) * c;
    a = static_cast<u32>(right >> 32) ^ b ^ key0;
    c = static_cast<u32>(left >> 32) ^ d ^ key1;
    b = static_cast<u32>(right);
    d = static_cast<u32>(left);
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  return Drawn{{a, b, c, d}};
}

}  // namespace gradwire::gpu
