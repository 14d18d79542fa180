// Truncated floats on a device: the first bits of every value's word, after a conversion to a smaller format where few
// are kept. 256 codes of k bits make eight streams side by side, of k words each; a thread makes or reads one.
#pragma once

#include "floats.hpp"

namespace gradwire::gpu::floats {

enum Rounding : u32 { kTruncate = 0, kNearest = 1, kStochastic = 2 };

inline constexpr u32 kBlockValues = 256, kStreams = 8;

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

// The codes past a chunk's last whole block, which are one stream: a thread makes a byte.
template <u32 kWay>
__device__ __forceinline__ void pack_rest(const FloatEncode& p, const Rules& rules, const Chunk& own) {
  const Format& f = p.format;
  const u32 k = f.n_bits, n_whole = own.n / kBlockValues * kBlockValues, n = own.n - n_whole;
  for (u32 byte = threadIdx.x; 8 * byte < n * k; byte += blockDim.x) {
    u32 bits = 0;
    for (u32 i = 8 * byte / k; i * k < 8 * byte + 8 && i < n; ++i) {
      const u64 value = own.first + n_whole + i;
      const u32 word = p.scales[Power(f.partition).parts(value)], bits_of = bits_at(p.values, f.dtype, value);
      u32 number = 0;
      if (rules.is_random)
        number = number_of(draw(p.seed, p.step, value / 64 * 8 + value % 8), static_cast<u32>(value % 64 / 8));
      const u64 code = code_of<kWay>(f, rules, bits_of, {word, inverse_of(f, word)}, number);
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

template <u32 kWay = kOfFormat>
__device__ __forceinline__ void pack_codes(const FloatEncode& p, const Rules& rules, const Chunk& own) {
  if constexpr (kWay != kFirstBits)
    if (rules.way != kWay) return pack_codes<kWay - 1>(p, rules, own);
  const u32 stream = threadIdx.x % kStreams;
  for_blocks(own, [&](u32 first) {
    if (first + kBlockValues <= own.n)
      pack_stream<kWay>(p, rules, own.first + first + stream, own.codes + first / 8 * p.format.n_bits + 4 * stream);
  });
  pack_rest<kWay>(p, rules, own);
}

__device__ __forceinline__ bool pack_chunk(const FloatEncode& p, const Chunk& own) {
  const Rules rules = rules_of(p);
  bool found = false;
  for_blocks(own, [&](u32 first) { found |= choose_scales(p, own, first); });
  __syncthreads();
  pack_codes(p, rules, own);
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

}  // namespace gradwire::gpu::floats
