// Embedded floats on a device: a shared exponent a partition, sign and magnitude in bit planes. Messages with the first
// 2 to 31 bits, which have no escapes. A warp works on a partition: 32 values to a word of each plane.
#pragma once

#include "truncated_float.hpp"

namespace gradwire::gpu::floats {

// A partition's values, where its exponent is, and its planes.
struct Partition {
  u64 begin, n, exponent_at, planes_at;
  __device__ __forceinline__ u64 plane_bytes() const { return parts_of(n, 8); }
};

__device__ inline Partition partition_at(const Format& f, u64 index) {
  const u64 begin = index * f.partition, chunk = begin / kChunkValues, first = begin - chunk * kChunkValues;
  const u64 at = chunk_at(f, chunk);
  return {begin, smaller(f.partition, f.n - begin), at + first / f.partition,
          at + head_bytes(f, values_in(f, chunk)) + first / 8 * f.n_bits};
}

// The plane of a lane counts from the least significant bit, so that a ballot over lanes is a code.
__device__ __forceinline__ bool has_plane(const Format& f, u32 lane) { return lane >= 32 - f.n_bits; }

// Sign, and below it the magnitude in units of 2^(exponent - 157).
__device__ __forceinline__ u32 embedded_code(u32 word, u32 exponent) {
  const u32 significand = ((word & 0x7FFFFFu) | 0x800000u) << 7;
  return (word & kSign) | significand >> least(exponent - (word >> 23 & 0xFF), 31);
}

GW_KERNEL(gw_embedded_pack, FloatEncode) {
  const Format& f = p.format;
  const u32 lane = threadIdx.x % kWarp;
  for (u64 index = thread_number() / kWarp; index * f.partition < f.n; index += thread_count() / kWarp) {
    const Partition own = partition_at(f, index);
    const u32 largest = largest_of_partition(p, own.begin, own.begin + own.n) >> 23;
    const u32 exponent = largest > kLeastExponent ? largest : kLeastExponent;
    if (lane == 0) p.message[own.exponent_at] = static_cast<u8>(exponent);
    u8* const plane = p.message + own.planes_at + (31 - lane) * own.plane_bytes();
    for (u64 first = 0; first < own.n; first += kWarp) {
      u32 code = 0;
      if (first + lane < own.n) {
        const u64 i = own.begin + first + lane;
        code = exponent == kRawExponent ? raw_word(p.values, f.dtype, i)
                                        : embedded_code(float_word(p.values, f.dtype, i), exponent);
      }
      u32 word = 0;
      for (u32 bit = 32 - f.n_bits; bit < 32; ++bit) {
        const u32 bits = __ballot_sync(kWholeWarp, code >> bit & 1);
        if (bit == lane) word = bits;
      }
      if (!has_plane(f, lane)) continue;
      for (u64 byte = first / 8; byte < smaller(first / 8 + 4, own.plane_bytes()); ++byte)
        plane[byte] = static_cast<u8>(word >> 8 * (byte - first / 8));
    }
  }
}

// The middle of all magnitudes whose first bits these are, as a float32 word.
__device__ __forceinline__ u32 embedded_word(u32 code, u32 exponent, u32 n_bits) {
  const u32 known = code & kMagnitude, middle = (1u << (31 - n_bits)) - 1;
  const u32 magnitude = least(known == 0 ? 0 : known + middle, 0x7FFFFF80u);
  const float weight = __uint_as_float((exponent - kLeastExponent + 1) << 23);
  return (code & kSign) | __float_as_uint(static_cast<float>(static_cast<int>(magnitude)) * weight);
}

GW_KERNEL(gw_embedded_unpack, FloatDecode) {
  const Format& f = p.format;
  const bool is_right = is_whole(p);
  const u32 lane = threadIdx.x % kWarp;
  for (u64 index = thread_number() / kWarp; index * f.partition < f.n; index += thread_count() / kWarp) {
    const Partition own = partition_at(f, index);
    const u32 exponent = p.message[own.exponent_at];
    const u8* const plane = p.message + own.planes_at + (31 - lane) * own.plane_bytes();
    for (u64 first = 0; first < own.n; first += kWarp) {
      u32 word = 0, code = 0;
      if (has_plane(f, lane))
        for (u64 byte = first / 8; byte < smaller(first / 8 + 4, own.plane_bytes()); ++byte)
          word |= static_cast<u32>(plane[byte]) << 8 * (byte - first / 8);
      for (u32 value = 0; value < kWarp; ++value) {
        const u32 bits = __ballot_sync(kWholeWarp, word >> value & 1);
        if (value == lane) code = bits;
      }
      if (first + lane >= own.n) continue;
      const bool is_number = is_right && exponent != kRawExponent;
      put_raw(p.to, f.dtype, own.begin + first + lane,
              is_number ? narrowed_word(f.dtype, embedded_word(code, exponent, f.n_bits)) : raw_nan(f.dtype));
    }
  }
}

}  // namespace gradwire::gpu::floats
