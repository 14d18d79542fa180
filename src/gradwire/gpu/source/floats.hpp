// Truncated-float and embedded-float messages (docs/format.md) on a device: what both share, which is their header, the
// checksums of header and chunks, and values as words. The bytes of native/truncated_float and native/embedded_float.
// The launches of a message stand in gradwire/codecs/floats.py.
#pragma once

#include "checksum.hpp"
#include "values.hpp"

namespace gradwire::gpu::floats {

enum Kind : u32 { kTruncated = 0, kEmbedded = 1 };

inline constexpr u32 kTruncatedMagic = 0x46545747u, kEmbeddedMagic = 0x46455747u, kVersionOfFormat = 1;
inline constexpr u32 kBytesOfHeader = 40, kSealed = 36;
inline constexpr u32 kChunkValues = 16384, kScaleBytes = 2;
inline constexpr u32 kNative = 0, kFp4 = 4;  // of the formats that `layout_of` knows
inline constexpr u32 kSign = 0x80000000u;
inline constexpr u32 kLeastScaleWord = 0x0D800000u;  // 2^-100
inline constexpr u32 kUnitScale = 0x3F800000u;
inline constexpr u32 kLeastExponent = 31, kRawExponent = 255;

// What is known of a message before it is read.
struct Format {
  u64 n;
  u32 kind, dtype, format, n_bits, partition, pad;
};

struct Layout {
  u32 width, exponent_bits, mantissa_bits, bias, largest;
};

// Native of three dtypes, then the formats from 1 on.
__device__ const Layout kLayouts[8] = {
    {32, 8, 23, 127, 0x7F7FFFFFu},
    {16, 8, 7, 127, 0x7F7F},
    {16, 5, 10, 15, 0x7BFF},
    {16, 5, 10, 15, 0x7BFF},
    {8, 4, 3, 7, 0x7E},
    {8, 5, 2, 15, 0x7B},
    {4, 2, 1, 1, 0x7},
    {6, 3, 2, 3, 0x1F},
};
__device__ __forceinline__ Layout layout_of(const Format& f) {
  return kLayouts[f.format == kNative ? f.dtype : f.format + 2];
}
__device__ __forceinline__ bool has_scales(const Format& f) { return f.kind == kTruncated && f.format != kNative; }
__device__ __forceinline__ bool is_exact(const Format& f) {
  return f.format == kNative && f.n_bits == kLayouts[f.dtype].width;
}

__device__ __forceinline__ u64 chunks_of(const Format& f) { return parts_of(f.n, kChunkValues); }
__device__ __forceinline__ u64 entry_bytes(const Format& f) { return f.kind == kTruncated ? 4 : 8; }
__device__ __forceinline__ u64 table_end(const Format& f) { return kBytesOfHeader + entry_bytes(f) * chunks_of(f); }
// Of n values that begin at a chunk: scales or exponents, and then codes or planes.
__device__ __forceinline__ u64 head_bytes(const Format& f, u64 n) {
  const u64 each = f.kind == kEmbedded ? 1 : has_scales(f) ? kScaleBytes : 0;
  return each * parts_of(n, f.partition);
}
__device__ __forceinline__ u64 content_bytes(const Format& f, u64 n) {
  if (f.kind == kTruncated) return head_bytes(f, n) + parts_of(n * f.n_bits, 8);
  return head_bytes(f, n) + parts_of(n, 8) * f.n_bits;  // whole partitions are whole bytes
}
__device__ __forceinline__ u64 chunk_at(const Format& f, u64 chunk) {
  return table_end(f) + chunk * content_bytes(f, kChunkValues);
}
__device__ __forceinline__ u64 values_in(const Format& f, u64 chunk) {
  return smaller(f.n - chunk * kChunkValues, kChunkValues);
}
// A bit a partition behind the chunks, where truncated values are not all finite.
__device__ __forceinline__ u64 marks_at(const Format& f) {
  const u64 n_whole = f.n / kChunkValues;
  return chunk_at(f, n_whole) + content_bytes(f, f.n % kChunkValues);
}
__device__ __forceinline__ u64 marks_bytes(const Format& f) {
  return f.kind == kTruncated && !is_exact(f) ? parts_of(parts_of(f.n, f.partition), 8) : 0;
}

// ---- values as words: of the float32 of equal value, or "raw": their own bits at the top

__device__ __forceinline__ u32 raw_word(const void* values, u32 dtype, u64 i) {
  if (dtype == kFloat32) return static_cast<const u32*>(values)[i];
  return static_cast<u32>(static_cast<const u16*>(values)[i]) << 16;
}
__device__ __forceinline__ u32 float_word(const void* values, u32 dtype, u64 i) {
  return dtype == kFloat16 ? __float_as_uint(value_at(values, dtype, i)) : raw_word(values, dtype, i);
}

// A finite word as a raw one of the dtype: the nearest, at most the largest that is finite.
__device__ __forceinline__ u32 narrowed_word(u32 dtype, u32 word) {
  if (dtype == kFloat32) return word;
  const float magnitude = __uint_as_float(word & kMagnitude);
  const u32 rounded = dtype == kBfloat16 ? bfloat16_of_float(magnitude) : half_of_float(magnitude);
  const u32 most = kLayouts[dtype].largest;
  return (rounded < most ? rounded : most) << 16 | (word & kSign);
}

__device__ __forceinline__ u32 raw_nan(u32 dtype) { return dtype == kFloat16 ? 0x7E000000u : kNan; }

struct Written {
  void* out;  // (n,) of the dtype
  float divisor;
  u32 adds;
};

// What was decoded, as a raw word; divided, or added to what is there.
__device__ __forceinline__ void put_raw(const Written& to, u32 dtype, u64 i, u32 word) {
  if (!to.adds && to.divisor == 1) {
    if (dtype == kFloat32)
      static_cast<u32*>(to.out)[i] = word;
    else
      static_cast<u16*>(to.out)[i] = static_cast<u16>(word >> 16);
    return;
  }
  const float value = dtype == kFloat16 ? float_of_half(static_cast<u16>(word >> 16)) : __uint_as_float(word);
  put_value(to.out, dtype, i, to.adds ? added(value, value_at(to.out, dtype, i)) : value / to.divisor);
}

// ---- writing

struct FloatEncode {
  const void* values;  // (n,) of `dtype`
  u8* message;         // whole, at a multiple of 4 bytes
  u32* scales;         // work of truncated: a partition's as a float32 word, 0 where it is not finite
  u32* chunk_flags;    // work: whether a chunk holds what is not finite
  u64* n_bytes;        // of the message, for the host
  u64 seed, step;
  Format format;
  u32 rounding, pad;
};

// Header, chunk table and marks, with both complements; thread 0 has it.
__device__ inline u32 checksum_of_head(const u8* message, const Format& f, u64 n_marks, ChecksumShared& shared) {
  const u64 n_table = table_end(f) - kBytesOfHeader;
  const u32 marks = checksum_of_piece(message + marks_at(f), n_marks, shared);
  const u32 head = checksum_of_both(message, kSealed, message + kBytesOfHeader, n_table, shared);
  return threadIdx.x == 0 ? marks ^ product_of(head ^ ~0u, shift_by(n_marks)) ^ ~0u : 0;
}

struct FloatShared {
  ChecksumShared checksum;
  u32 found;
};

// A block a chunk.
GW_KERNEL(gw_floats_seal_chunks, FloatEncode) {
  FloatShared& shared = shared_as<FloatShared>();
  const Format& f = p.format;
  const u64 chunk = blockIdx.x, n = values_in(f, chunk), n_partitions = parts_of(n, f.partition);
  u8* const at = p.message + chunk_at(f, chunk);
  if (threadIdx.x == 0) shared.found = 0;
  fill_checksum_table(shared.checksum);
  u32 found = 0;
  for (u64 i = threadIdx.x; i < n_partitions; i += blockDim.x)
    found |= f.kind == kEmbedded ? at[i] == kRawExponent : p.scales[chunk * (kChunkValues / f.partition) + i] == 0;
  if (found) atomicOr(&shared.found, 1u);
  const u32 sum = checksum_of_both(at, content_bytes(f, n), at, 0, shared.checksum);
  if (threadIdx.x != 0) return;
  u8* const entry = p.message + kBytesOfHeader + entry_bytes(f) * chunk;
  store32(entry, sum);
  if (f.kind == kEmbedded) store32(entry + 4, 0);
  p.chunk_flags[chunk] = shared.found;
}

// One block: the header.
GW_KERNEL(gw_floats_seal, FloatEncode) {
  FloatShared& shared = shared_as<FloatShared>();
  const Format& f = p.format;
  if (threadIdx.x == 0) shared.found = 0;
  fill_checksum_table(shared.checksum);
  u32 found = 0;
  for (u64 chunk = threadIdx.x; chunk < chunks_of(f); chunk += blockDim.x) found |= p.chunk_flags[chunk];
  if (found) atomicOr(&shared.found, 1u);
  __syncthreads();
  const u64 n_marks = shared.found ? marks_bytes(f) : 0;
  if (threadIdx.x == 0) {
    store32(p.message, f.kind == kEmbedded ? kEmbeddedMagic : kTruncatedMagic);
    store32(p.message + 4, kVersionOfFormat | f.dtype << 8 | f.format << 16 | f.n_bits << 24);
    store64(p.message + 8, f.n);
    store32(p.message + 16, f.partition | shared.found << 16);
    store32(p.message + 20, 0);
    store64(p.message + 24, marks_at(f) + n_marks);
    store32(p.message + 32, 0);
    *p.n_bytes = marks_at(f) + n_marks;
  }
  __syncthreads();
  const u32 sum = checksum_of_head(p.message, f, n_marks, shared.checksum);
  if (threadIdx.x == 0) store32(p.message + kSealed, sum);
}

// ---- reading

struct FloatDecode {
  const u8* message;  // whole, at a multiple of 4 bytes; the room of marks is there
  u32* error;         // 0, or 7 less the first of Wrong
  Format format;
  Written to;
};

// No kernel but the first two writes to the error, so all threads of the last one see the same.
__device__ __forceinline__ bool is_whole(const FloatDecode& p) { return *p.error <= error_word(kCode); }
__device__ __forceinline__ bool is_flagged(const FloatDecode& p) { return p.message[18] & 1; }

// One block.
GW_KERNEL(gw_floats_check, FloatDecode) {
  ChecksumShared& shared = shared_as<ChecksumShared>();
  const Format& f = p.format;
  fill_checksum_table(shared);
  const u64 n_marks = is_flagged(p) ? marks_bytes(f) : 0;
  const u32 sum = checksum_of_head(p.message, f, n_marks, shared);
  if (threadIdx.x != 0) return;
  const u8* const at = p.message;
  if (load32(at) != (f.kind == kEmbedded ? kEmbeddedMagic : kTruncatedMagic)) report(p.error, kHeader);
  if (at[4] != kVersionOfFormat) report(p.error, kVersion);
  if (load64(at + 8) != f.n || load64(at + 24) != marks_at(f) + n_marks) report(p.error, kElements);
  if (load32(at + kSealed) != sum) report(p.error, kChecksum);
  if (at[5] != f.dtype || at[6] != f.format || at[7] != f.n_bits || load32(at + 16) % (1u << 16) != f.partition ||
      load32(at + 16) >> 17 != 0 || load32(at + 20) != 0 || load32(at + 32) != 0 ||
      (is_flagged(p) && f.kind == kTruncated && is_exact(f)))
    report(p.error, kField);
}

// A block a chunk: its checksum, and scales or exponents that an encoder writes.
GW_KERNEL(gw_floats_read_chunks, FloatDecode) {
  ChecksumShared& shared = shared_as<ChecksumShared>();
  const Format& f = p.format;
  const u64 chunk = blockIdx.x, n = values_in(f, chunk), n_partitions = parts_of(n, f.partition);
  const u8* const at = p.message + chunk_at(f, chunk);
  fill_checksum_table(shared);
  const u32 sum = checksum_of_both(at, content_bytes(f, n), at, 0, shared);
  const u8* const entry = p.message + kBytesOfHeader + entry_bytes(f) * chunk;
  if (threadIdx.x == 0 && load32(entry) != sum) report(p.error, kChecksum);
  if (threadIdx.x == 0 && f.kind == kEmbedded && load32(entry + 4) != 0) report(p.error, kField);
  for (u64 i = threadIdx.x; i < n_partitions; i += blockDim.x) {
    if (f.kind == kEmbedded) {
      if (at[i] < kLeastExponent || (at[i] == kRawExponent && !is_flagged(p))) report(p.error, kField);
    } else if (has_scales(f)) {
      const u32 scale = static_cast<u32>(at[2 * i] | at[2 * i + 1] << 8) << 16;
      if (scale < kLeastScaleWord || scale >= kInfinity) report(p.error, kField);
    }
  }
}

}  // namespace gradwire::gpu::floats
