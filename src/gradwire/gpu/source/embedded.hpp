// Embedded floats on a device: a shared exponent a partition, sign and magnitude in bit planes. Messages with the first
// 2 to 31 bits, which have no escapes.
#pragma once

#include "floats.hpp"

namespace gradwire::gpu::floats {

// A warp takes 256 values of a partition at once, a thread eight of them; or all of a smaller one. Four planes of
// theirs are nibbles of a word a thread, which the transposition of a warp's words turns into words of planes, and
// back.
inline constexpr u32 kGroups = 8;

// Bit `lane` of word i becomes bit i of word `lane`; words of a warp's threads. What a thread keeps of its own in each
// of five steps, and how far the other's word is turned for the rest.
struct Transposition {
  u32 kept[5], turns[5];

  __device__ __forceinline__ Transposition() {
    u32 mask = 0xFFFFu;
    GW_UNROLLED for (u32 i = 0; i < 5; ++i) {
      const u32 step = 16 >> i;
      kept[i] = threadIdx.x & step ? ~mask : mask;
      turns[i] = threadIdx.x & step ? step : 32 - step;
      mask ^= mask << (step / 2);
    }
  }
  __device__ __forceinline__ u32 of(u32 word) const {
    GW_UNROLLED for (u32 i = 0; i < 5; ++i) {
      const u32 other = __shfl_xor_sync(kWholeWarp, word, 16 >> i);
      word = (word & kept[i]) | (__funnelshift_r(other, other, turns[i]) & ~kept[i]);
    }
    return word;
  }
};

// Where the words of four planes lie: those of one thread each, after or before their transposition.
struct PlaneWord {
  u32 plane;          // counted from the sign
  u32 byte, n_bytes;  // of the plane; 0 where there is none
};
__device__ __forceinline__ PlaneWord plane_word(const Format& f, u32 planes, u32 first, u32 n_values) {
  const u32 lane = threadIdx.x % kWarp, plane = planes + 3 - lane % 4, byte = (first + lane / 4 * kWarp) / 8;
  const u32 n_bytes = (n_values + 7) / 8;
  return {plane, byte, plane < f.n_bits && byte < n_bytes ? least(4, n_bytes - byte) : 0};
}

// Sign, and below it the magnitude in units of 2^(exponent - 157), or its root in units of 2^-31.
__device__ __forceinline__ u32 embedded_code(const Format& f, u32 word, u32 exponent) {
  const u32 own = word >> 23 & 0xFF, distance = exponent - own;
  if (f.version == 1) return (word & kSign) | (((word & 0x7FFFFFu) | 0x800000u) << 7) >> least(distance, 31);
  const u32 significand = ((word + ((~exponent & 1) << 23)) & 0xFFFFFFu) << 6 | 1u << 30;
  return (word & kSign) | significand >> least(own == 0 ? 31 : distance >> 1, 31);
}

// The same of version 2, where 2^exponent is not below it.
__device__ __forceinline__ u32 root_code(u32 word, u32 exponent) {
  const u32 magnitude = word & kMagnitude, halved = ((exponent << 23 | 0x7FFFFFu) - magnitude) >> 24;
  const u32 significand = ((word + ((~exponent & 1) << 23)) & 0xFFFFFFu) << 6 | 1u << 30;
  return (word & kSign) | (magnitude < 0x800000u ? 0 : significand >> least(halved, 31));
}

// Slabs that are whole, of version 2, whose planes are words: without any bounds.
__device__ __forceinline__ bool are_slabs(const Format& f, const Chunk& own, u32 n) {
  return n % (kGroups * kWarp) == 0 && f.version == 2 && is_word(own.codes);
}
// From the slab at `at` of a partition on: the word of four planes that is this thread's.
__device__ __forceinline__ u32 plane_place(u32 at, u32 plane_bytes) {
  const u32 lane = threadIdx.x % kWarp;
  return (3 - lane % 4) * plane_bytes + at / 8 + lane / 4 * 4;
}

// A partition of them, whose values are finite.
__device__ __forceinline__ void pack_slabs(const FloatEncode& p, u64 first, u32 n, u32 exponent, u8* planes,
                                           u32 (&bits)[kGroups]) {
  const Format& f = p.format;
  const Transposition transposed;
  for (u32 at = 0; at < n; at += kGroups * kWarp) {
    if (n > kGroups * kWarp) load_eight<kWarp>(p.values, f.dtype, first + at, bits);
    GW_UNROLLED for (u32 g = 0; g < kGroups; ++g) bits[g] = root_code(float_word(f.dtype, bits[g]), exponent);
    u8* place = planes + plane_place(at, n / 8);
    for (u32 plane = 3 - threadIdx.x % 4, four = 0; four < f.n_bits; four += 4, plane += 4, place += n / 2) {
      u32 word = 0;
      GW_UNROLLED for (u32 g = 0; g < kGroups; ++g) {
        word |= bits[g] >> (28 - 4 * g) & 15u << 4 * g;
        bits[g] <<= 4;
      }
      word = transposed.of(word);
      if (plane < f.n_bits) *reinterpret_cast<u32*>(place) = word;
    }
  }
}

// A partition from value `begin` of its chunk on. Returns whether its values are finite.
__device__ __forceinline__ bool pack_partition(const FloatEncode& p, const Chunk& own, u32 begin) {
  const Format& f = p.format;
  const u32 lane = threadIdx.x % kWarp, n = least(f.partition, own.n - begin), slab = kGroups * kWarp;
  const u64 first = own.first + begin + lane, end = own.first + begin + n;
  u32 bits[kGroups], largest = 0;
  const bool is_quick = are_slabs(f, own, n);
  for (u32 at = 0; at < n; at += slab) {
    if (is_quick)
      load_eight<kWarp>(p.values, f.dtype, first + at, bits);
    else
      load_bits(p.values, f.dtype, first + at, kWarp, end, bits);
    GW_UNROLLED for (u32 g = 0; g < kGroups; ++g) {
      const u32 magnitude = float_word(f.dtype, bits[g]) & kMagnitude;
      if (magnitude > largest) largest = magnitude;
    }
  }
  largest = largest_of_lanes(largest) >> 23;
  const u32 exponent = largest > kLeastExponent ? largest : kLeastExponent;
  if (lane == 0) own.at[Power(f.partition).parts(begin)] = static_cast<u8>(exponent);
  u8* const planes = own.codes + begin / 8 * f.n_bits;
  if (is_quick && exponent != kRawExponent) {
    pack_slabs(p, first, n, exponent, planes, bits);
    return true;
  }
  const Transposition transposed;
  for (u32 at = 0; at < n; at += slab) {
    if (n > slab) load_bits(p.values, f.dtype, first + at, kWarp, end, bits);
    u32 codes[kGroups];
    GW_UNROLLED for (u32 g = 0; g < kGroups; ++g) {
      const bool is_raw = exponent == kRawExponent;
      codes[g] = is_raw ? raw_word(f.dtype, bits[g]) : embedded_code(f, float_word(f.dtype, bits[g]), exponent);
      if (at + g * kWarp + lane >= n) codes[g] = 0;
    }
    for (u32 four = 0; four < f.n_bits; four += 4) {
      u32 word = 0;
      GW_UNROLLED for (u32 g = 0; g < kGroups; ++g) word |= (codes[g] << four >> 28) << 4 * g;
      word = transposed.of(word);
      const PlaneWord to = plane_word(f, four, at, n);
      u8* const place = planes + to.plane * ((n + 7) / 8) + to.byte;
      if (to.n_bytes == 4)
        store32(place, word);
      else
        for (u32 byte = 0; byte < to.n_bytes; ++byte) place[byte] = static_cast<u8>(word >> 8 * byte);
    }
  }
  return exponent != kRawExponent;
}

GW_KERNEL_OF_ROWS(gw_embedded_pack, FloatEncode) {
  const u64 chunk = blockIdx.x % p.per_row;
  bool found = false;
  if (chunk < chunks_of(p.format)) {
    const Chunk own = chunk_of(p, chunk);
    for (u32 index = threadIdx.x / kWarp; index < own.n_partitions; index += blockDim.x / kWarp)
      found |= !pack_partition(p, own, index * p.format.partition);
  }
  __syncthreads();
  seal(p, chunk, found);
}

// The middle of all magnitudes, or roots, whose first bits these are, as a float32 word.
__device__ __forceinline__ u32 embedded_word(u32 n_bits, u32 version, u32 code, u32 exponent) {
  const u32 known = code & kMagnitude, middle = (1u << (31 - n_bits)) - (version == 1);
  if (version != 1) {
    const u32 root = known + middle;
    const u32 n_zeros = __clz(root);  // 1 at least
    const u32 squared = ((exponent + 1) << 23) - (n_zeros << 24) + (root << (n_zeros - 1) >> 6 & 0xFFFFFFu);
    return (code & kSign) | (known != 0 && static_cast<int>(squared) >= 0x800000 ? squared : 0);
  }
  const u32 magnitude = least(known == 0 ? 0 : known + middle, 0x7FFFFF80u);
  const float weight = __uint_as_float((exponent - kLeastExponent + 1) << 23);
  return (code & kSign) | __float_as_uint(static_cast<float>(static_cast<int>(magnitude)) * weight);
}

// A partition of slabs that are whole, whose values are finite.
__device__ __forceinline__ void unpack_slabs(const FloatDecode& p, u64 first, u32 n, u32 exponent, const u8* planes) {
  const Format& f = p.format;
  const Transposition transposed;
  for (u32 at = 0; at < n; at += kGroups * kWarp) {
    u32 codes[kGroups]{}, there[kGroups]{};
    const u64 i = first + at + threadIdx.x % kWarp;
    if (p.to.adds) load_eight<kWarp>(p.to.out, f.dtype, i, there);
    const u8* place = planes + plane_place(at, n / 8);
    for (u32 plane = 3 - threadIdx.x % 4, four = 0; four < f.n_bits; four += 4, plane += 4, place += n / 2) {
      const u32 word = transposed.of(plane < f.n_bits ? *reinterpret_cast<const u32*>(place) : 0);
      GW_UNROLLED for (u32 g = 0; g < kGroups; ++g) codes[g] |= (word << (28 - 4 * g) & 0xF0000000u) >> four;
    }
    GW_UNROLLED for (u32 g = 0; g < kGroups; ++g) codes[g] =
        narrowed_word(f.dtype, embedded_word(f.n_bits, 2, codes[g], exponent));
    put_eight<kWarp>(p.to, f.dtype, i, codes, there);
  }
}

__device__ __forceinline__ void unpack_partition(const FloatDecode& p, const Chunk& own, u32 begin) {
  const Format& f = p.format;
  const u32 lane = threadIdx.x % kWarp, n = least(f.partition, own.n - begin);
  const u64 first = own.first + begin;
  const u32 exponent = own.at[Power(f.partition).parts(begin)];
  const u8* const planes = own.codes + begin / 8 * f.n_bits;
  if (are_slabs(f, own, n) && exponent != kRawExponent) return unpack_slabs(p, first, n, exponent, planes);
  const Transposition transposed;
  for (u32 at = 0; at < n; at += kGroups * kWarp) {
    u32 codes[kGroups]{}, there[kGroups]{};
    if (p.to.adds) load_bits(p.to.out, f.dtype, first + at + lane, kWarp, first + n, there);
    for (u32 four = 0; four < f.n_bits; four += 4) {
      const PlaneWord from = plane_word(f, four, at, n);
      const u8* const place = planes + from.plane * ((n + 7) / 8) + from.byte;
      u32 word = 0;
      if (from.n_bytes == 4)
        word = load32(place);
      else
        for (u32 byte = 0; byte < from.n_bytes; ++byte) word |= static_cast<u32>(place[byte]) << 8 * byte;
      word = transposed.of(word);
      GW_UNROLLED for (u32 g = 0; g < kGroups; ++g) codes[g] |= word >> 4 * g << 28 >> four;
    }
    GW_UNROLLED for (u32 g = 0; g < kGroups; ++g) {
      const u32 i = at + g * kWarp + lane;
      if (i >= n) continue;
      const bool is_number = exponent != kRawExponent;
      const u32 word =
          is_number ? narrowed_word(f.dtype, embedded_word(f.n_bits, f.version, codes[g], exponent)) : raw_nan(f.dtype);
      put_raw(p.to, f.dtype, first + i, word, there[g]);
    }
  }
}

GW_KERNEL_BY_DTYPE(gw_embedded_unpack, FloatDecode, format.dtype) {
  read_messages(p, [](const FloatDecode& p, const Chunk& own) {
    for (u32 index = threadIdx.x / kWarp; index < own.n_partitions; index += blockDim.x / kWarp)
      unpack_partition(p, own, index * p.format.partition);
  });
}

}  // namespace gradwire::gpu::floats
