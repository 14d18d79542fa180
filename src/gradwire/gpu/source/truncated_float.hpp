// Truncated floats on a device: the first bits of every value's word, after a conversion to a smaller format where few
// are kept. 256 codes of k bits make eight streams side by side, of k words each; a thread makes or reads one.
#pragma once

#include "floats.hpp"

namespace gradwire::gpu::floats {

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

// Bits of the exponent are cut: neighbours are a power of two apart, or several.
__device__ inline u32 rounded_exponent(u32 word, const Layout& layout, u32 n_bits, u32 number) {
  const u32 exponent = word >> 23 & 0xFF, rebias = 127 - layout.bias, cut = layout.exponent_bits - (n_bits - 1);
  const u32 code = excess(exponent, rebias) >> cut;
  // All three numbers are lifted alike, so that no difference is subnormal.
  const u32 lift = exponent < 64 ? 64u << 23 : 0;
  const float down = __uint_as_float(code == 0 ? 0 : (((code << cut) + rebias) << 23) + lift);
  const float up = __uint_as_float(((((code + 1) << cut) + rebias) << 23) + lift);
  const float x = __uint_as_float(exponent == 0 ? 0 : (word & kMagnitude) + lift);
  const float share = static_cast<float>(number >> 8) * 5.9604644775390625e-08f;  // 2^-24
  return least(code + (share * (up - down) < x - down), layout.largest >> (layout.width - n_bits));
}

__device__ inline u32 code_at(const FloatEncode& p, u64 i, u32 number) {
  const Format& f = p.format;
  const Layout layout = layout_of(f);
  const u32 raw = raw_word(p.values, f.dtype, i), shift = 32 - f.n_bits, sign = (raw & kSign) >> shift;
  if (is_exact(f)) return raw >> shift;
  const u32 scale = p.scales[i / f.partition];
  if (scale == 0) return 0;
  const bool is_random = p.rounding == kStochastic, is_native = f.format == kNative;
  const bool cuts_exponent = f.n_bits < 1 + layout.exponent_bits;
  if (is_native && p.rounding == kTruncate) return raw >> shift;
  if (is_native && !cuts_exponent) {
    const u32 magnitude = raw & kMagnitude, addend = addend_of(is_random, number, magnitude >> shift, shift);
    return least((magnitude + addend) >> shift, layout.largest >> (layout.width - f.n_bits)) | sign;
  }
  u32 word = float_word(p.values, f.dtype, i);
  if (!is_native) {  // subnormal values count as zero
    const u32 normal = (word & kInfinity) == 0 ? word & kSign : word;
    word = __float_as_uint(__uint_as_float(normal) / __uint_as_float(scale));
  }
  if (p.rounding == kTruncate)
    return rounded(word, layout, layout.mantissa_bits, false, 0) >> (layout.width - f.n_bits) | sign;
  if (cuts_exponent) return rounded_exponent(word, layout, f.n_bits, is_random ? number : kSign) | sign;
  return rounded(word, layout, f.n_bits - 1 - layout.exponent_bits, is_random, number) | sign;
}

// ---- writing

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
  const u32 quotient = __float_as_uint(__uint_as_float(largest) / largest_number(f));
  const u32 below = f.format == kFp4 ? 0xFFFFu : 0x7FFFFFu, scale = (quotient + below) & ~below;
  return scale > kLeastScaleWord ? scale : kLeastScaleWord;
}

// The largest magnitude of a partition, by a warp; all its threads have it.
__device__ inline u32 largest_of_partition(const FloatEncode& p, u64 begin, u64 end) {
  u32 largest = 0;
  for (u64 i = begin + threadIdx.x % kWarp; i < end; i += kWarp) {
    const u32 magnitude = float_word(p.values, p.format.dtype, i) & kMagnitude;
    if (magnitude > largest) largest = magnitude;
  }
  for (u32 lanes = 1; lanes < kWarp; lanes *= 2) {
    const u32 other = __shfl_xor_sync(kWholeWarp, largest, lanes);
    if (other > largest) largest = other;
  }
  return largest;
}

// A warp a partition.
GW_KERNEL(gw_truncated_scales, FloatEncode) {
  const Format& f = p.format;
  for (u64 partition = thread_number() / kWarp; partition * f.partition < f.n; partition += thread_count() / kWarp) {
    const u64 begin = partition * f.partition;
    const u32 largest = largest_of_partition(p, begin, smaller(begin + f.partition, f.n));
    if (threadIdx.x % kWarp != 0) continue;
    const u32 scale = is_exact(f) ? kUnitScale : scale_for(largest, f);
    p.scales[partition] = scale;
    if (!has_scales(f)) continue;
    const u64 chunk = begin / kChunkValues, own = partition - chunk * (kChunkValues / f.partition);
    u8* const at = p.message + chunk_at(f, chunk) + kScaleBytes * own;
    const u32 sent = (scale == 0 ? kUnitScale : scale) >> 16;
    at[0] = static_cast<u8>(sent);
    at[1] = static_cast<u8>(sent >> 8);
  }
}

// Where the codes of a block of 256 values begin, or those of the values past the last one.
__device__ __forceinline__ u64 codes_at(const Format& f, u64 block) {
  const u64 chunk = block / (kChunkValues / kBlockValues), own = block % (kChunkValues / kBlockValues);
  // Behind all whole chunks, where no values are left, there may be no chunk: nobody asks for its codes.
  return chunk_at(f, chunk) + head_bytes(f, values_in(f, chunk)) + own * (kBlockValues / 8) * f.n_bits;
}

// `Drawn::number` of a q that is known at run time only: chosen, as registers have no index.
__device__ __forceinline__ u32 number_of(const Drawn& drawn, u32 q) {
  const u32 low = q < 2 ? drawn.words[0] : drawn.words[1], high = q < 6 ? drawn.words[2] : drawn.words[3];
  const u32 word = q < 4 ? low : high;
  return q % 2 == 0 ? word : word << 16 | word >> 16;
}

// A stream of a whole block, its words 32 bytes apart.
__device__ inline void pack_stream(const FloatEncode& p, u64 block, u32 stream) {
  const Format& f = p.format;
  u8* at = p.message + codes_at(f, block) + 4 * stream;
  u64 window = 0;
  u32 n_window = 0;
  for (u32 group = 0; group < 4; ++group) {
    // The eight numbers of a counter are those of eight neighbours in a stream.
    Drawn drawn{{0, 0, 0, 0}};
    if (p.rounding == kStochastic) drawn = draw(p.seed, p.step, 32 * block + 8 * group + stream);
    for (u32 q = 0; q < 8; ++q) {
      const u64 i = block * kBlockValues + 64 * group + 8 * q + stream;
      window |= static_cast<u64>(code_at(p, i, number_of(drawn, q))) << n_window;
      n_window += f.n_bits;
      if (n_window < 32) continue;
      store32(at, static_cast<u32>(window));
      at += 4 * kStreams;
      window >>= 32;
      n_window -= 32;
    }
  }
}

// A byte of the codes past the last whole block, which are one stream.
__device__ inline u8 byte_of_rest(const FloatEncode& p, u64 begin, u64 byte) {
  const u32 k = p.format.n_bits;
  u32 bits = 0;
  for (u64 i = 8 * byte / k; i * k < 8 * byte + 8 && begin + i < p.format.n; ++i) {
    const u64 at = begin + i, group = at / 64;
    u32 number = 0;
    if (p.rounding == kStochastic)
      number = number_of(draw(p.seed, p.step, 8 * group + at % 8), static_cast<u32>(at % 64 / 8));
    const u64 code = code_at(p, at, number);
    bits |= static_cast<u32>(i * k < 8 * byte ? code >> (8 * byte - i * k) : code << (i * k - 8 * byte));
  }
  return static_cast<u8>(bits);
}

GW_KERNEL(gw_truncated_pack, FloatEncode) {
  const Format& f = p.format;
  const u64 n_blocks = f.n / kBlockValues, begin = n_blocks * kBlockValues;
  for (u64 i = thread_number(); i < n_blocks * kStreams; i += thread_count())
    pack_stream(p, i / kStreams, static_cast<u32>(i % kStreams));
  for (u64 byte = thread_number(); byte < parts_of((f.n - begin) * f.n_bits, 8); byte += thread_count())
    p.message[codes_at(f, n_blocks) + byte] = byte_of_rest(p, begin, byte);
  for (u64 byte = thread_number(); byte < marks_bytes(f); byte += thread_count()) {
    u32 marks = 0;
    for (u64 bit = 0; bit < 8 && (8 * byte + bit) * f.partition < f.n; ++bit)
      marks |= (p.scales[8 * byte + bit] == 0 ? 1u : 0u) << bit;
    p.message[marks_at(f) + byte] = static_cast<u8>(marks);
  }
}

// ---- reading

__device__ inline u32 word_of_code(const Format& f, u32 code, u32 scale) {
  const u32 shift = 32 - f.n_bits;
  if (f.format == kNative) return code << shift;
  const Layout layout = layout_of(f);
  const u32 sign_bit = 1u << (f.n_bits - 1), magnitude = (code & (sign_bit - 1)) << (layout.width - f.n_bits);
  float value = __uint_as_float((magnitude << (23 - layout.mantissa_bits)) + ((127 - layout.bias) << 23));
  if (magnitude >> layout.mantissa_bits == 0)  // in units of the smallest subnormal number
    value = static_cast<float>(magnitude) * __uint_as_float((128 - layout.bias - layout.mantissa_bits) << 23);
  const u32 scaled = __float_as_uint(value * __uint_as_float(scale));
  return narrowed_word(f.dtype, least(scaled, 0x7F7FFFFFu) | (code & sign_bit) << shift);
}

__device__ inline void put_code(const FloatDecode& p, bool is_right, u64 i, u32 code) {
  const Format& f = p.format;
  const u64 partition = i / f.partition, chunk = i / kChunkValues;
  const bool is_marked = is_right && is_flagged(p) && (p.message[marks_at(f) + partition / 8] >> partition % 8 & 1);
  u32 word = raw_nan(f.dtype);
  if (is_right && !is_marked) {
    const u8* const at =
        p.message + chunk_at(f, chunk) + kScaleBytes * (partition - chunk * (kChunkValues / f.partition));
    const u32 scale = has_scales(f) ? static_cast<u32>(at[0] | at[1] << 8) << 16 : kUnitScale;
    word = word_of_code(f, code, scale);
  }
  put_raw(p.to, f.dtype, i, word);
}

GW_KERNEL(gw_truncated_unpack, FloatDecode) {
  const Format& f = p.format;
  const bool is_right = is_whole(p);
  const u32 k = f.n_bits, mask = k == 32 ? ~0u : (1u << k) - 1;
  const u64 n_blocks = f.n / kBlockValues, begin = n_blocks * kBlockValues;
  for (u64 own = thread_number(); own < n_blocks * kStreams; own += thread_count()) {
    const u64 block = own / kStreams, stream = own % kStreams;
    const u8* at = p.message + codes_at(f, block) + 4 * stream;
    u64 window = 0;
    u32 n_window = 0;
    for (u32 j = 0; j < 32; ++j) {
      if (n_window < k) {
        window |= static_cast<u64>(load32(at)) << n_window;
        at += 4 * kStreams;
        n_window += 32;
      }
      put_code(p, is_right, block * kBlockValues + kStreams * j + stream, static_cast<u32>(window) & mask);
      window >>= k;
      n_window -= k;
    }
  }
  for (u64 i = thread_number(); i < f.n - begin; i += thread_count()) {
    const u8* const from = p.message + codes_at(f, n_blocks);
    u64 bits = 0;
    for (u64 byte = i * k / 8; 8 * byte < (i + 1) * k; ++byte)
      bits |= static_cast<u64>(from[byte]) << 8 * (byte - i * k / 8);
    put_code(p, is_right, begin + i, static_cast<u32>(bits >> i * k % 8) & mask);
  }
}

}  // namespace gradwire::gpu::floats
