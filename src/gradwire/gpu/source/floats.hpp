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

// ---- truncated: the first bits of every value's word, after a conversion to a smaller format where few are kept. 256
// codes of k bits make eight streams side by side, of k words each; a thread makes or reads one.

enum Rounding : u32 { kTruncate = 0, kNearest = 1, kStochastic = 2 };

inline constexpr u32 kBlockValues = 256, kStreams = 8;

__device__ __forceinline__ u32 least(u32 a, u32 b) { return a < b ? a : b; }
// max(a - b, 0)
__device__ __forceinline__ u32 excess(u32 a, u32 b) { return a > b ? a - b : 0; }

// ---- a value to its code

// What to add before a shift: up to half, ties to even, or a random number.
__device__ __forceinline__ u32 addend_of(bool is_random, u32 number, u32 kept, u32 shift) {
  return is_random ? number & ((1u << shift) - 1) : (1u << (shift - 1)) - 1 + (kept & 1);
}

// The magnitude as a number of the layout with so many bits of its mantissa, at most its largest.
__device__ inline u32 rounded(u32 word, const Layout& layout, u32 mantissa_bits, bool is_random, u32 number) {
  const u32 exponent = word >> 23 & 0xFF, least_exponent = 128 - layout.bias, cut = 23 - mantissa_bits;
  const u32 full_shift = cut + excess(least_exponent, exponent);
  // What is shifted by more than 31 places is shifted twice.
  const u32 before = least(excess(full_shift, 31), 31), shift = least(full_shift, 31);
  const u32 significand = ((word & 0x7FFFFFu) | 0x800000u) >> before;
  const u32 base = excess(exponent, least_exponent) << mantissa_bits;
  const u32 addend = addend_of(is_random, number, base + (significand >> shift), shift);
  return least(base + ((significand + addend) >> shift), layout.largest >> (layout.mantissa_bits - mantissa_bits));
}

// The same to nearest, where no bits of the exponent are cut: below the smallest normal number the sum of two floats
// rounds at the last bit that the layout has.
__device__ __forceinline__ u32 rounded_to_nearest(u32 word, const Layout& layout, u32 mantissa_bits) {
  const u32 cut = 23 - mantissa_bits, magnitude = word & kMagnitude, least_normal = (128 - layout.bias) << 23;
  const u32 unit = least_normal + (cut << 23), above = magnitude - least_normal + (1u << 23);
  const u32 normal = (above + (1u << (cut - 1)) - 1 + (above >> cut & 1)) >> cut;
  const u32 subnormal = __float_as_uint(__uint_as_float(magnitude) + __uint_as_float(unit)) - unit;
  const u32 most = layout.largest >> (layout.mantissa_bits - mantissa_bits);
  return least(magnitude >= least_normal ? normal : subnormal, most);
}

// Bits of the exponent are cut: neighbours are a power of two apart, or several.
__device__ inline u32 rounded_exponent(u32 word, const Layout& layout, u32 n_bits, u32 number) {
  const u32 exponent = word >> 23 & 0xFF, rebias = 127 - layout.bias, cut = layout.exponent_bits - (n_bits - 1);
  const u32 code = excess(exponent, rebias) >> cut;
  // All three numbers are lifted alike, so that no difference is subnormal.
  const u32 lift = exponent < 64 ? 64u << 23 : 0;
  const float down = __uint_as_float(code == 0 ? 0 : (((code << cut) + rebias) << 23) + lift);
  const float up = __uint_as_float(((((code + 1) << cut) + rebias) << 23) + lift);
  const float x = __uint_as_float(exponent == 0 ? 0 : (word & kMagnitude) + lift);
  return least(code + (fraction_of(number) * (up - down) < x - down), layout.largest >> (layout.width - n_bits));
}

// How a value becomes a code: its first bits; rounded among numbers of its own dtype; or of a format, to which it is
// scaled: cut off, to numbers that have fewer bits of exponent, or to nearest and by chance.
enum Way : u32 { kFirstBits, kOwnDtype, kCutOff, kFewExponents, kOfFormat };

struct Rules {
  Layout layout;
  Way way;
  bool is_random;
};
__device__ inline Rules rules_of(const FloatEncode& p) {
  const Format& f = p.format;
  const Layout layout = layout_of(f);
  const bool is_native = f.format == kNative, cuts_exponent = f.n_bits < 1 + layout.exponent_bits;
  const Way way = is_exact(f) || (is_native && p.rounding == kTruncate) ? kFirstBits
                  : is_native && !cuts_exponent                         ? kOwnDtype
                  : p.rounding == kTruncate                             ? kCutOff
                  : cuts_exponent                                       ? kFewExponents
                                                                        : kOfFormat;
  return {layout, way, p.rounding == kStochastic};
}

// Of a value's bits, whose partition has that scale: as a word, which is 0 for what is not finite, and what divides by
// it.
struct Scale {
  u32 word;
  float inverse;  // of powers of two, which FP4's are not
};
template <u32 kWay>
__device__ __forceinline__ u32 code_of(const Format& f, const Rules& rules, u32 bits, Scale scale, u32 number) {
  const Layout& layout = rules.layout;
  const u32 raw = raw_word(f.dtype, bits), shift = 32 - f.n_bits, sign = (raw & kSign) >> shift;
  if (scale.word == 0) return 0;
  if (kWay == kFirstBits) return raw >> shift;
  if (kWay == kOwnDtype) {
    const u32 magnitude = raw & kMagnitude, addend = addend_of(rules.is_random, number, magnitude >> shift, shift);
    return least((magnitude + addend) >> shift, layout.largest >> (layout.width - f.n_bits)) | sign;
  }
  u32 word = float_word(f.dtype, bits);
  if (kWay != kFewExponents || f.format != kNative) {  // subnormal values count as zero
    const float normal = __uint_as_float((word & kInfinity) == 0 ? word & kSign : word);
    word = __float_as_uint(f.format == kFp4 ? quotient(normal, __uint_as_float(scale.word)) : normal * scale.inverse);
  }
  if (kWay == kCutOff) return rounded(word, layout, layout.mantissa_bits, false, 0) >> (layout.width - f.n_bits) | sign;
  if (kWay == kFewExponents) return rounded_exponent(word, layout, f.n_bits, rules.is_random ? number : kSign) | sign;
  const u32 mantissa_bits = f.n_bits - 1 - layout.exponent_bits;
  if (!rules.is_random) return rounded_to_nearest(word, layout, mantissa_bits) | sign;
  return rounded(word, layout, mantissa_bits, true, number) | sign;
}

// ---- writing

__device__ __forceinline__ float inverse_of(const Format& f, u32 scale) {
  return has_scales(f) && scale != 0 ? quotient(1, __uint_as_float(scale)) : 0;
}

// The number that the largest code stands for.
__device__ inline float largest_number(const Format& f) {
  const Layout layout = layout_of(f);
  const u32 cut = layout.width - f.n_bits, magnitude = layout.largest >> cut << cut;
  return __uint_as_float((magnitude << (23 - layout.mantissa_bits)) + ((127 - layout.bias) << 23));
}

__device__ inline u32 scale_for(u32 largest, const Format& f) {
  if (largest >= kInfinity) return 0;
  if (!has_scales(f)) return kUnitScale;
  if (largest >> 23 == 0) return kLeastScaleWord;
  const u32 ratio = __float_as_uint(quotient(__uint_as_float(largest), largest_number(f)));
  const u32 below = f.format == kFp4 ? 0xFFFFu : 0x7FFFFFu, scale = (ratio + below) & ~below;
  return scale > kLeastScaleWord ? scale : kLeastScaleWord;
}

inline constexpr u32 kThreadValues = kBlockValues / kStreams, kUnitValues = kWarp * kThreadValues;

// `Drawn::number` of a q that is known at run time only: chosen, as registers have no index.
__device__ __forceinline__ u32 number_of(const Drawn& drawn, u32 q) {
  const u32 low = q < 2 ? drawn.words[0] : drawn.words[1], high = q < 6 ? drawn.words[2] : drawn.words[3];
  const u32 word = q < 4 ? low : high;
  return q % 2 == 0 ? word : word << 16 | word >> 16;
}

// A stream of a whole block from that value on, its words 32 bytes apart.
template <u32 kWay>
__device__ __forceinline__ void pack_stream(const FloatEncode& p, const Rules& rules, u64 first, u8* at) {
  const Format& f = p.format;
  const Power partition(f.partition);
  u64 window = 0;
  u32 n_window = 0;
  Drawn drawn{{0, 0, 0, 0}};
  for (u32 group = 0; group < 4; ++group) {
    const u64 value = first + 64 * group;
    u32 bits[8];
    load_eight<kStreams>(p.values, f.dtype, value, bits);
    // The eight numbers of a counter are those of eight neighbours in a stream.
    if (rules.is_random) drawn = draw(p.seed, p.step, value / 64 * 8 + value % 8);
    const u32 words[2] = {p.scales[partition.parts(value)], p.scales[partition.parts(value + 32)]};
    const float inverse = inverse_of(f, words[0]);
    const float inverses[2] = {inverse, f.partition == 32 ? inverse_of(f, words[1]) : inverse};
    GW_UNROLLED for (u32 q = 0; q < 8; ++q) {
      const u32 code = code_of<kWay>(f, rules, bits[q], {words[q / 4], inverses[q / 4]}, drawn.number(q));
      window |= static_cast<u64>(code) << n_window;
      n_window += f.n_bits;
      if (n_window < 32) continue;
      store32(at, static_cast<u32>(window));
      at += 4 * kStreams;
      window >>= 32;
      n_window -= 32;
    }
  }
}

__device__ inline u32 code_of(const FloatEncode& p, const Rules& rules, u64 i) {
  const Format& f = p.format;
  const u32 word = p.scales[Power(f.partition).parts(i)], bits = bits_at(p.values, f.dtype, i);
  const Scale scale{word, inverse_of(f, word)};
  u32 number = 0;
  if (rules.is_random) number = number_of(draw(p.seed, p.step, i / 64 * 8 + i % 8), static_cast<u32>(i % 64 / 8));
  switch (rules.way) {
    case kFirstBits:
      return code_of<kFirstBits>(f, rules, bits, scale, number);
    case kOwnDtype:
      return code_of<kOwnDtype>(f, rules, bits, scale, number);
    case kCutOff:
      return code_of<kCutOff>(f, rules, bits, scale, number);
    case kFewExponents:
      return code_of<kFewExponents>(f, rules, bits, scale, number);
    default:
      return code_of<kOfFormat>(f, rules, bits, scale, number);
  }
}

// The codes past a chunk's last whole block, which are one stream: a thread makes a byte.
__device__ __forceinline__ void pack_rest(const FloatEncode& p, const Rules& rules, const Chunk& own) {
  const u32 k = p.format.n_bits, n_whole = own.n / kBlockValues * kBlockValues, n = own.n - n_whole;
  for (u32 byte = threadIdx.x; 8 * byte < n * k; byte += blockDim.x) {
    u32 bits = 0;
    for (u32 i = 8 * byte / k; i * k < 8 * byte + 8 && i < n; ++i) {
      const u64 code = code_of(p, rules, own.first + n_whole + i);
      bits |= static_cast<u32>(i * k < 8 * byte ? code >> (8 * byte - i * k) : code << (i * k - 8 * byte));
    }
    own.codes[n_whole / 8 * k + byte] = static_cast<u8>(bits);
  }
}

// The scales of a block's values, by eight threads that have a stream each; written by the first of those of a
// partition, which is some 32s of them, or up to four blocks. Returns whether one is not finite.
__device__ __forceinline__ bool choose_scales(const FloatEncode& p, const Chunk& own, u32 first) {
  const Format& f = p.format;
  const Power partition(f.partition);
  u32 bits[kThreadValues], largest[kStreams];
  load_bits(p.values, f.dtype, own.first + first + threadIdx.x % kStreams, kStreams, own.first + own.n, bits);
  GW_UNROLLED for (u32 c = 0; c < kStreams; ++c) {
    largest[c] = 0;
    GW_UNROLLED for (u32 j = 4 * c; j < 4 * c + 4; ++j) {
      const u32 magnitude = float_word(f.dtype, bits[j]) & kMagnitude;
      if (magnitude > largest[c]) largest[c] = magnitude;
    }
  }
  GW_UNROLLED for (u32 step = kStreams / 2; step > 0; step /= 2)  // into the first of those that share a scale
      GW_UNROLLED for (u32 c = 0; c < kStreams; ++c) if (32 * step < f.partition && !(c & step) &&
                                                         largest[c | step] > largest[c]) largest[c] = largest[c | step];
  const u32 n_lanes = f.partition > kBlockValues ? f.partition / kThreadValues : kStreams;
  bool found = false;
  GW_UNROLLED for (u32 c = 0; c < kStreams; ++c) {
    const u32 at = first + 32 * c;
    if (32 * c & (f.partition - 1)) continue;
    const u32 most = largest_of_lanes(largest[c], n_lanes), scale = is_exact(f) ? kUnitScale : scale_for(most, f);
    found |= scale == 0;
    if (threadIdx.x % kStreams != 0 || at >= own.n || at & (f.partition - 1)) continue;
    const u32 index = static_cast<u32>(partition.parts(at)), sent = (scale == 0 ? kUnitScale : scale) >> 16;
    p.scales[partition.parts(own.first) + index] = scale;
    if (!has_scales(f)) continue;
    own.at[kScaleBytes * index] = static_cast<u8>(sent);
    own.at[kScaleBytes * index + 1] = static_cast<u8>(sent >> 8);
  }
  return found;
}

// Where the blocks of this thread begin: a warp takes four at once, and a thread a stream of one.
template <class Work>
__device__ __forceinline__ void for_blocks(const Chunk& own, Work work) {
  for (u32 unit = threadIdx.x / kWarp * kUnitValues; unit < own.n; unit += blockDim.x * kThreadValues)
    work(unit + threadIdx.x % kWarp / kStreams * kBlockValues);
}

template <u32 kWay>
__device__ __forceinline__ void pack_blocks(const FloatEncode& p, const Rules& rules, const Chunk& own) {
  const u32 stream = threadIdx.x % kStreams;
  for_blocks(own, [&](u32 first) {
    if (first + kBlockValues <= own.n)
      pack_stream<kWay>(p, rules, own.first + first + stream, own.codes + first / 8 * p.format.n_bits + 4 * stream);
  });
}

__device__ __forceinline__ bool pack_chunk(const FloatEncode& p, const Chunk& own) {
  const Rules rules = rules_of(p);
  bool found = false;
  for_blocks(own, [&](u32 first) { found |= choose_scales(p, own, first); });
  __syncthreads();
  switch (rules.way) {
    case kFirstBits:
      pack_blocks<kFirstBits>(p, rules, own);
      break;
    case kOwnDtype:
      pack_blocks<kOwnDtype>(p, rules, own);
      break;
    case kCutOff:
      pack_blocks<kCutOff>(p, rules, own);
      break;
    case kFewExponents:
      pack_blocks<kFewExponents>(p, rules, own);
      break;
    default:
      pack_blocks<kOfFormat>(p, rules, own);
  }
  pack_rest(p, rules, own);
  return found;
}

GW_KERNEL_OF_ROWS(gw_truncated_pack, FloatEncode) {
  const u64 chunk = blockIdx.x % p.per_row;
  const bool found = chunk < chunks_of(p.format) && pack_chunk(p, chunk_of(p, chunk));
  __syncthreads();
  seal(p, chunk, found);
}

// ---- reading

__device__ __forceinline__ u32 word_of_code(const Format& f, const Layout& layout, u32 code, u32 scale) {
  const u32 shift = 32 - f.n_bits;
  if (f.format == kNative) return code << shift;
  const u32 sign_bit = 1u << (f.n_bits - 1), magnitude = (code & (sign_bit - 1)) << (layout.width - f.n_bits);
  float value = __uint_as_float((magnitude << (23 - layout.mantissa_bits)) + ((127 - layout.bias) << 23));
  if (magnitude >> layout.mantissa_bits == 0)  // in units of the smallest subnormal number
    value = static_cast<float>(magnitude) * __uint_as_float((128 - layout.bias - layout.mantissa_bits) << 23);
  const u32 scaled = __float_as_uint(value * __uint_as_float(scale));
  return narrowed_word(f.dtype, least(scaled, 0x7F7FFFFFu) | (code & sign_bit) << shift);
}

// Of a value's partition; 0 where it is not finite. Marks are there, or what `check_head` reports.
__device__ inline u32 scale_of(const FloatDecode& p, const Chunk& own, u32 i) {
  const Power partition(p.format.partition);
  const u64 index = partition.parts(own.first + i);
  if (is_flagged(p) && !is_exact(p.format) && (p.message[marks_at(p.format) + index / 8] >> index % 8 & 1)) return 0;
  if (!has_scales(p.format)) return kUnitScale;
  const u8* const at = own.at + kScaleBytes * partition.parts(i);
  return static_cast<u32>(at[0] | at[1] << 8) << 16;
}

__device__ __forceinline__ u32 word_of(const Format& f, const Layout& layout, u32 code, u32 scale) {
  return scale != 0 ? word_of_code(f, layout, code, scale) : raw_nan(f.dtype);
}

GW_KERNEL_BY_DTYPE(gw_truncated_unpack, FloatDecode, format.dtype) {
  read_messages(p, [](const FloatDecode& p, const Chunk& own) {
    const Format& f = p.format;
    const u32 k = f.n_bits, mask = k == 32 ? ~0u : (1u << k) - 1;
    const Layout layout = layout_of(f);
    const u32 stream = threadIdx.x % kStreams, n_whole = own.n / kBlockValues * kBlockValues;
    for_blocks(own, [&](u32 block) {
      if (block + kBlockValues > own.n) return;
      const u8* at = own.codes + block / 8 * k + 4 * stream;
      u64 window = 0;
      u32 n_window = 0, words[8], there[8]{}, scales[2];
      for (u32 group = 0; group < 4; ++group) {
        const u32 value = block + stream + 64 * group;
        if (p.to.adds) load_eight<kStreams>(p.to.out, f.dtype, own.first + value, there);
        scales[0] = scale_of(p, own, value);
        scales[1] = f.partition == 32 ? scale_of(p, own, value + 32) : scales[0];
        GW_UNROLLED for (u32 q = 0; q < 8; ++q) {
          if (n_window < k) {
            window |= static_cast<u64>(load32(at)) << n_window;
            at += 4 * kStreams;
            n_window += 32;
          }
          words[q] = word_of(f, layout, static_cast<u32>(window) & mask, scales[q / 4]);
          window >>= k;
          n_window -= k;
        }
        put_eight<kStreams>(p.to, f.dtype, own.first + value, words, there);
      }
    });
    const u8* const rest = own.codes + n_whole / 8 * k;
    for (u32 i = threadIdx.x; i < own.n - n_whole; i += blockDim.x) {
      u64 bits = 0;
      for (u32 byte = i * k / 8; 8 * byte < (i + 1) * k; ++byte)
        bits |= static_cast<u64>(rest[byte]) << 8 * (byte - i * k / 8);
      const u64 to = own.first + n_whole + i;
      const u32 there = p.to.adds ? bits_at(p.to.out, f.dtype, to) : 0,
                code = static_cast<u32>(bits >> i * k % 8) & mask;
      put_raw(p.to, f.dtype, to, word_of(f, layout, code, scale_of(p, own, n_whole + i)), there);
    }
  });
}

// ---- embedded: a shared exponent a partition, sign and magnitude in bit planes. Messages with the first 2 to 31 bits,
// which have no escapes.

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
