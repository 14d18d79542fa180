// Truncated-float and embedded-float messages (docs/format.md) on a device: what both share, which is their header, the
// checksums of header and chunks, and values as words. The bytes of native/truncated_float and native/embedded_float.
// A message takes one launch (gradwire/codecs/floats.py), and several take one too. A block makes a chunk, and the last
// one of a message its header; to read them a block looks at a header, or at a chunk and its values, and the last one
// makes all values NaN where something was wrong.
#pragma once

#include "checksum.hpp"

namespace gradwire::gpu::floats {

enum Kind : u32 { kTruncated = 0, kEmbedded = 1 };

inline constexpr u32 kTruncatedMagic = 0x46545747u, kEmbeddedMagic = 0x46455747u;
inline constexpr u32 kBytesOfHeader = 40, kSealed = 36;
inline constexpr u32 kChunkValues = 16384, kScaleBytes = 2;
inline constexpr u32 kNative = 0, kFp4 = 4;  // of the formats that `layout_of` knows
inline constexpr u32 kSign = 0x80000000u;
inline constexpr u32 kLeastScaleWord = 0x0D800000u;  // 2^-100
inline constexpr u32 kUnitScale = 0x3F800000u;
inline constexpr u32 kLeastExponent = 31, kRawExponent = 255;

__device__ __forceinline__ u32 least(u32 a, u32 b) { return a < b ? a : b; }

// What is known of a message before it is read.
struct Format {
  u64 n;
  u32 kind, dtype, format, n_bits, partition;
  u32 version;  // of the message; of embedded floats 2: roots
};

struct Layout {
  u32 width, exponent_bits, mantissa_bits, bias, largest;
};

// Native of three dtypes, then the formats from 1 on.
__device__ const Layout kLayouts[8] = {{32, 8, 23, 127, 0x7F7FFFFFu},
                                       {16, 8, 7, 127, 0x7F7F},
                                       {16, 5, 10, 15, 0x7BFF},
                                       {16, 5, 10, 15, 0x7BFF},
                                       {8, 4, 3, 7, 0x7E},
                                       {8, 5, 2, 15, 0x7B},
                                       {4, 2, 1, 1, 0x7},
                                       {6, 3, 2, 3, 0x1F}};
__device__ __forceinline__ Layout layout_of(const Format& f) {
  return kLayouts[f.format == kNative ? f.dtype : f.format + 2];
}
__device__ __forceinline__ bool has_scales(const Format& f) { return f.kind == kTruncated && f.format != kNative; }
__device__ __forceinline__ bool is_exact(const Format& f) {
  return f.format == kNative && f.n_bits == kLayouts[f.dtype].width;
}

__device__ __forceinline__ u64 partitions_of(const Format& f, u64 n) {
  return Power(f.partition).parts(n + f.partition - 1);
}
__device__ __forceinline__ u64 chunks_of(const Format& f) { return parts_of(f.n, kChunkValues); }
__device__ __forceinline__ u64 entry_bytes(const Format& f) { return f.kind == kTruncated ? 4 : 8; }
__device__ __forceinline__ u64 table_end(const Format& f) { return kBytesOfHeader + entry_bytes(f) * chunks_of(f); }
// Of n values that begin at a chunk: scales or exponents, and then codes or planes.
__device__ __forceinline__ u64 head_bytes(const Format& f, u64 n) {
  const u64 each = f.kind == kEmbedded ? 1 : has_scales(f) ? kScaleBytes : 0;
  return each * partitions_of(f, n);
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
  return f.kind == kTruncated && !is_exact(f) ? parts_of(partitions_of(f, f.n), 8) : 0;
}

// ---- values as words: of the float32 of equal value, or "raw": their own bits at the top

__device__ __forceinline__ u32 raw_word(u32 dtype, u32 bits) { return dtype == kFloat32 ? bits : bits << 16; }
__device__ __forceinline__ u32 float_word(u32 dtype, u32 bits) { return __float_as_uint(value_of_bits(dtype, bits)); }

// A finite word as a raw one of the dtype: the nearest, at most the largest that is finite.
__device__ __forceinline__ u32 narrowed_word(u32 dtype, u32 word) {
  if (dtype == kFloat32) return word;
  const float magnitude = __uint_as_float(word & kMagnitude);
  const u32 rounded = dtype == kBfloat16 ? bfloat16_of_float(magnitude) : half_of_float(magnitude);
  const u32 most = kLayouts[dtype].largest;
  return (rounded < most ? rounded : most) << 16 | (word & kSign);
}

__device__ __forceinline__ u32 raw_nan(u32 dtype) { return dtype == kFloat16 ? 0x7E000000u : kNan; }

// One of several messages that a launch serves.
struct Row {
  u64 first, at;  // its values, and its bytes, from those of the first message
  u64 n, number;  // of its values; what it draws by is that much after the first step
  u64 scale;      // its first one among those of all messages
};

struct Written {
  void* out;  // (n,) of the dtype
  float divisor;
  u32 adds;
};

// What was decoded, as a raw word; divided, or added to the bits that are there.
__device__ __forceinline__ void put_raw(const Written& to, u32 dtype, u64 i, u32 word, u32 there) {
  if (!to.adds && to.divisor == 1) return put_bits(to.out, dtype, i, dtype == kFloat32 ? word : word >> 16);
  const float value = dtype == kFloat16 ? float_of_half(static_cast<u16>(word >> 16)) : __uint_as_float(word);
  put_value(to.out, dtype, i, to.adds ? added(value, value_of_bits(dtype, there)) : divided(value, to.divisor));
}

// Eight values, so far apart; all of them are there.
template <u32 kStride>
__device__ __forceinline__ void load_eight(const void* values, u32 dtype, u64 first, u32 (&bits)[8]) {
  GW_UNROLLED for (u32 q = 0; q < 8; ++q) bits[q] = dtype == kFloat32
                                                        ? (static_cast<const u32*>(values) + first)[q * kStride]
                                                        : (static_cast<const u16*>(values) + first)[q * kStride];
}
template <u32 kStride>
__device__ __forceinline__ void put_eight(const Written& to, u32 dtype, u64 first, const u32 (&words)[8],
                                          const u32 (&there)[8]) {
  if (to.adds || to.divisor != 1) {
    GW_UNROLLED for (u32 q = 0; q < 8; ++q) put_raw(to, dtype, first + q * kStride, words[q], there[q]);
    return;
  }
  GW_UNROLLED for (u32 q = 0; q < 8; ++q) {
    if (dtype == kFloat32)
      (static_cast<u32*>(to.out) + first)[q * kStride] = words[q];
    else
      (static_cast<u16*>(to.out) + first)[q * kStride] = static_cast<u16>(words[q] >> 16);
  }
}

// ---- writing

struct FloatEncode {
  const void* values;  // (n,) of `dtype`
  u8* message;         // whole, at a multiple of 4 bytes
  u32* scales;         // work of truncated: a partition's as a float32 word, 0 where it is not finite
  u32* turns;          // two a message, 0 before and after: chunks that are done; whether a value is not finite
  u64* n_bytes;        // of the message, for the host
  u64 seed, step;
  Format format;
  u32 rounding, per_row;  // blocks of a message
  const Row* rows;        // null: one message, as it stands here
};

__device__ __forceinline__ u64 bytes_of(u32 dtype) { return dtype == kFloat32 ? 4 : 2; }

// The parameters of the message that this block works on.
__device__ __forceinline__ FloatEncode own_of(const FloatEncode& all) {
  FloatEncode p = all;
  if (all.rows == nullptr) return p;
  const u64 index = blockIdx.x / all.per_row;
  const Row row = all.rows[index];
  p.values = static_cast<const u8*>(all.values) + row.first * bytes_of(all.format.dtype);
  p.message += row.at;
  p.scales += row.scale;
  p.turns += 2 * index;
  p.n_bytes += index;
  p.step += row.number;
  p.format.n = row.n;
  return p;
}
// A kernel whose body sees its own message's parameters, and which dtype it is of.
#define GW_KERNEL_OF_ROWS(name, Parameters)                                     \
  __device__ __forceinline__ void name##_own(const Parameters& p);              \
  GW_KERNEL_BY_DTYPE(name, Parameters, format.dtype) { name##_own(own_of(p)); } \
  __device__ __forceinline__ void name##_own(const Parameters& p)

// Header, chunk table and marks, with both complements; thread 0 has it.
__device__ inline u32 checksum_of_head(const u8* message, const Format& f, u64 n_marks, ChecksumShared& shared) {
  constexpr u32 kWords = kSealed / 4;
  const u64 n_table = table_end(f) - kBytesOfHeader;
  u32 sum = 0;
  if (threadIdx.x < kWords) {
    const u32 word = load32(message + 4 * threadIdx.x) ^ (threadIdx.x == 0 ? ~0u : 0);
    sum = product_of(word, shift_by(n_table + n_marks + 4 * (kWords - threadIdx.x)));
  }
  for (u32 i = 0; i < (n_marks == 0 ? 1 : 2); ++i) {
    const u8* const at = message + (i == 0 ? kBytesOfHeader : marks_at(f));
    const u32 own = checksum_of_piece(at, i == 0 ? n_table : n_marks, shared);
    if (threadIdx.x == 0) sum ^= i == 0 && n_marks != 0 ? product_of(own, shift_by(n_marks)) : own;
  }
  return ~xor_over_block(sum, shared);
}

struct FloatShared {
  ChecksumShared checksum;
  u32 is_last, is_wrong;
};

// What a block makes: one chunk. Its warps take what it consists of in turn.
struct Chunk {
  u64 index, first;  // value
  u32 n, n_partitions;
  u8 *at, *codes;  // scales or exponents, and then codes or planes
};
template <class Parameters>
__device__ __forceinline__ Chunk chunk_of(const Parameters& p, u64 index) {
  const u64 n = values_in(p.format, index);
  u8* const at = const_cast<u8*>(p.message) + chunk_at(p.format, index);
  return {index, index * kChunkValues,        static_cast<u32>(n), static_cast<u32>(partitions_of(p.format, n)),
          at,    at + head_bytes(p.format, n)};
}

// By the block that has written a chunk, or none: its entry of the table; by the message's last one, the header.
// `found`: this thread has seen what is not finite.
__device__ inline void seal(const FloatEncode& p, u64 chunk, bool found) {
  FloatShared& shared = shared_as<FloatShared>();
  const Format& f = p.format;
  fill_checksum_table(shared.checksum);
  if (found) atomicOr(p.turns + 1, 1u);
  if (chunk < chunks_of(f)) {
    const u8* const at = p.message + chunk_at(f, chunk);
    const u32 sum = checksum_of_both(at, content_bytes(f, values_in(f, chunk)), at, 0, shared.checksum);
    u8* const entry = p.message + kBytesOfHeader + entry_bytes(f) * chunk;
    if (threadIdx.x == 0) store32(entry, sum);
    if (threadIdx.x == 0 && f.kind == kEmbedded) store32(entry + 4, 0);
  }
  if (!is_last_of(p.per_row, p.turns, shared.is_last)) return;
  const bool is_flagged = p.turns[1] != 0;
  const u64 n_marks = is_flagged ? marks_bytes(f) : 0, n_partitions = partitions_of(f, f.n);
  for (u64 byte = threadIdx.x; byte < n_marks; byte += blockDim.x) {
    u32 marks = 0;
    for (u64 bit = 0; bit < 8 && 8 * byte + bit < n_partitions; ++bit)
      marks |= (p.scales[8 * byte + bit] == 0 ? 1u : 0u) << bit;
    p.message[marks_at(f) + byte] = static_cast<u8>(marks);
  }
  if (threadIdx.x == 0) {
    store32(p.message, f.kind == kEmbedded ? kEmbeddedMagic : kTruncatedMagic);
    store32(p.message + 4, f.version | f.dtype << 8 | f.format << 16 | f.n_bits << 24);
    store64(p.message + 8, f.n);
    store32(p.message + 16, f.partition | (is_flagged ? 1u << 16 : 0));
    store32(p.message + 20, 0);
    store64(p.message + 24, marks_at(f) + n_marks);
    store32(p.message + 32, 0);
    *p.n_bytes = marks_at(f) + n_marks;
  }
  __syncthreads();
  const u32 sum = checksum_of_head(p.message, f, n_marks, shared.checksum);
  if (threadIdx.x == 0) store32(p.message + kSealed, sum);
  if (threadIdx.x == 0) p.turns[1] = 0;
}

// ---- reading

struct FloatDecode {
  const u8* message;  // whole, at a multiple of 4 bytes; the room of marks is there
  u32* error;         // 0, or 7 less the first of Wrong
  u32* turns;         // one, 0 before and after: blocks that are done
  Format format;
  Written to;
  const Row* rows;   // null: one message, as it stands here
  u64 source_bytes;  // from a source's messages to the next one's
  u32 per_row, n_rows, n_sources, pad;
};

// As of an encoder; of one of several sources, whose messages are added up.
__device__ __forceinline__ FloatDecode own_of(const FloatDecode& all, u64 index, u64 source) {
  FloatDecode p = all;
  p.message += source * all.source_bytes;
  if (all.rows == nullptr) return p;
  const Row row = all.rows[index];
  p.message += row.at;
  p.to.out = static_cast<u8*>(all.to.out) + row.first * bytes_of(all.format.dtype);
  p.format.n = row.n;
  return p;
}

__device__ __forceinline__ bool is_flagged(const FloatDecode& p) { return p.message[18] & 1; }

__device__ inline void check_head(const FloatDecode& p, ChecksumShared& shared) {
  const Format& f = p.format;
  const u64 n_marks = is_flagged(p) ? marks_bytes(f) : 0;
  const u32 sum = checksum_of_head(p.message, f, n_marks, shared);
  if (threadIdx.x != 0) return;
  const u8* const at = p.message;
  if (load32(at) != (f.kind == kEmbedded ? kEmbeddedMagic : kTruncatedMagic)) report(p.error, kHeader);
  if (at[4] != f.version) report(p.error, kVersion);
  if (load64(at + 8) != f.n || load64(at + 24) != marks_at(f) + n_marks) report(p.error, kElements);
  if (load32(at + kSealed) != sum) report(p.error, kChecksum);
  if (at[5] != f.dtype || at[6] != f.format || at[7] != f.n_bits || load32(at + 16) % (1u << 16) != f.partition ||
      load32(at + 16) >> 17 != 0 || load32(at + 20) != 0 || load32(at + 32) != 0 ||
      (is_flagged(p) && f.kind == kTruncated && is_exact(f)))
    report(p.error, kField);
}

// A chunk's checksum, and scales or exponents that an encoder writes.
__device__ inline void check_chunk(const FloatDecode& p, const Chunk& own, ChecksumShared& shared) {
  const Format& f = p.format;
  const u32 sum = checksum_of_both(own.at, content_bytes(f, own.n), own.at, 0, shared);
  const u8* const entry = p.message + kBytesOfHeader + entry_bytes(f) * own.index;
  if (threadIdx.x == 0 && load32(entry) != sum) report(p.error, kChecksum);
  if (threadIdx.x == 0 && f.kind == kEmbedded && load32(entry + 4) != 0) report(p.error, kField);
  for (u32 i = threadIdx.x; i < own.n_partitions; i += blockDim.x) {
    if (f.kind == kEmbedded) {
      if (own.at[i] < kLeastExponent || (own.at[i] == kRawExponent && !is_flagged(p))) report(p.error, kField);
    } else if (has_scales(f)) {
      const u32 scale = static_cast<u32>(own.at[2 * i] | own.at[2 * i + 1] << 8) << 16;
      if (scale < kLeastScaleWord || scale >= kInfinity) report(p.error, kField);
    }
  }
}

// What a launch reads: blocks for the headers of all sources' messages, and then one for each chunk, which adds up, or
// writes, what one source after the other has sent of the same values: unpack(their parameters, the chunk).
template <class Unpack>
__device__ __forceinline__ void read_messages(const FloatDecode& all, Unpack unpack) {
  FloatShared& shared = shared_as<FloatShared>();
  const u32 n_heads = all.n_rows * all.n_sources, number = blockIdx.x - n_heads;
  fill_checksum_table(shared.checksum);
  if (blockIdx.x < n_heads)
    check_head(own_of(all, blockIdx.x / all.n_sources, blockIdx.x % all.n_sources), shared.checksum);
  for (u64 source = 0; blockIdx.x >= n_heads && source < all.n_sources; ++source) {
    const FloatDecode p = own_of(all, number / all.per_row, source);
    if (number % all.per_row >= chunks_of(p.format)) break;
    const Chunk own = chunk_of(p, number % all.per_row);
    check_chunk(p, own, shared.checksum);
    unpack(p, own);
  }
  if (!is_last_of(gridDim.x, all.turns, shared.is_last)) return;
  if (threadIdx.x == 0) shared.is_wrong = atomicMax(all.error, 0u) > error_word(kCode);
  __syncthreads();
  for (u32 index = 0; shared.is_wrong && index < all.n_rows; ++index) {
    const FloatDecode p = own_of(all, index, 0);
    for (u64 i = threadIdx.x; i < p.format.n; i += blockDim.x)
      put_raw({p.to.out, 1, 0}, p.format.dtype, i, raw_nan(p.format.dtype), 0);
  }
}

}  // namespace gradwire::gpu::floats
