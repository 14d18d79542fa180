// GComp messages of format 2 (docs/format.md#gcomp-format-2) on a device: what reading and writing share.
#pragma once

#include "checksum.hpp"
#include "values.hpp"

namespace gradwire::gpu::gcomp {

inline constexpr u32 kMagic = 0x43475747u, kFormatVersion = 2;
inline constexpr u32 kBlockHeaderBytes = 48, kChunkHeaderBytes = 32, kSegmentHeaderBytes = 10, kSealedBytes = 44;
inline constexpr u32 kChunkValues = 16384, kStreams = 4;
inline constexpr u32 kLanes = 16;  // stacks of mantissa bits
inline constexpr u32 kTailBytes = 4 * kLanes;
inline constexpr u32 kModeNone = 0, kModePaper = 1, kModeUniform = 2;
inline constexpr u32 kNonfinite = 255;  // as an exponent
inline constexpr u32 kLookUpBits = 11, kLookUpEntries = 1u << kLookUpBits;

// A Huffman table as `gradwire/codecs/huffman.py` lays it out.
struct Table {
  u16 look_up[kLookUpEntries];  // by the next bits of a stream: the code's length, and above its 8 bits the exponent
  u32 codes[256];               // by exponent: the code, from bit 16 on its length, bit 31: it is the escape's
};
inline constexpr u32 kIsEscaped = 1u << 31;

__device__ __forceinline__ u64 chunks_of(u64 n) { return parts_of(n, kChunkValues); }
__device__ __forceinline__ u64 headers_of(u64 n) { return kBlockHeaderBytes + kChunkHeaderBytes * chunks_of(n); }
__device__ __forceinline__ u32 values_in(u64 n, u64 chunk) {
  return static_cast<u32>(smaller(n - chunk * kChunkValues, kChunkValues));
}

// Where the values of a stream begin.
__device__ __forceinline__ u32 stream_begin(u32 n, u32 stream) {
  return static_cast<u32>(smaller(stream * parts_of(n, kStreams), n));
}

struct ChunkHeader {
  u64 offset;
  u32 exponent_bytes, importance_checksum, mantissa_bits, n_values, flags, checksum;

  __device__ __forceinline__ u64 exponents_at() const { return offset + mantissa_bits / 8; }
  __device__ __forceinline__ u64 n_bytes() const { return mantissa_bits / 8 + exponent_bytes; }
  __device__ __forceinline__ bool is_raw() const { return flags & 1; }
};

__device__ inline ChunkHeader chunk_header(const u8* message, u64 chunk) {
  const u8* const at = message + kBlockHeaderBytes + kChunkHeaderBytes * chunk;
  return {load64(at),      load32(at + 8),  load32(at + 12), load32(at + 16),
          load32(at + 20), load32(at + 24), load32(at + 28)};
}

// How many mantissa bits of a value travel (native/gcomp/lanes.hpp).
struct KeepRule {
  int mantissa_bits, cap, lowest_exponent, highest_exponent;

  // `importance`: 0 but in mode paper.
  __device__ __forceinline__ u32 kept(u32 exponent, u32 importance) const {
    if (exponent == kNonfinite) return static_cast<u32>(mantissa_bits);
    const int most = static_cast<int>(exponent) - lowest_exponent;
    int kept = cap < most ? cap : most;
    if (importance != 0) {
      const int needed = static_cast<int>(exponent) - static_cast<int>(importance / 4) + mantissa_bits - 86;
      if (needed < kept) kept = needed < 0 ? 0 : needed;
    }
    return static_cast<u32>(kept);
  }
  __device__ __forceinline__ bool has(u32 exponent) const {  // besides 0
    return exponent == kNonfinite ||
           (static_cast<int>(exponent) >= lowest_exponent && static_cast<int>(exponent) <= highest_exponent);
  }
};

__device__ __forceinline__ KeepRule keep_rule(u32 dtype, u32 cap) {
  const int mantissa_bits = dtype == kFloat32 ? 23 : dtype == kBfloat16 ? 7 : 10;
  if (dtype == kFloat16) return {mantissa_bits, static_cast<int>(cap), 103, 142};
  return {mantissa_bits, static_cast<int>(cap), -23, 254};
}

// As `put_value`, but a NaN keeps its bits.
__device__ __forceinline__ void put_word(void* values, u32 dtype, u64 i, u32 word) {
  const u32 magnitude = word & kMagnitude;
  if (dtype == kFloat32)
    static_cast<u32*>(values)[i] = word;
  else if (magnitude <= kInfinity)
    put_value(values, dtype, i, __uint_as_float(word));
  else if (dtype == kBfloat16)
    static_cast<u16*>(values)[i] = static_cast<u16>(word >> 16);
  else
    static_cast<u16*>(values)[i] = static_cast<u16>((word >> 16 & 0x8000u) | 0x7C00u | (magnitude >> 13 & 0x3FFu));
}

// ---- half a warp works on a chunk

__device__ __forceinline__ u32 own_lane() { return threadIdx.x % kLanes; }

// What the sixteen threads of a chunk say, the first one lowest.
__device__ __forceinline__ u32 ballot_of_chunk(bool says) {
  return __ballot_sync(kWholeWarp, says) >> (threadIdx.x % kWarp / kLanes * kLanes) & 0xFFFFu;
}

// Rounds of sixteen values that cover any chunk: as many for all of them, as warps stay together.
__device__ __forceinline__ u32 rounds_of(u64 n) { return static_cast<u32>(parts_of(smaller(n, kChunkValues), kLanes)); }

}  // namespace gradwire::gpu::gcomp
