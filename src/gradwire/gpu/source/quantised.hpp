// One-bit, two-bit and QSGD messages (docs/format.md#quantised) on a device: the bytes of native/quantisers, with error
// feedback. A message takes five launches (measure, choose, pack, pieces, seal), to read it three (pieces, check,
// unpack); their grids and threads stand in gradwire/codecs/quantised.py. With scales by group
// (docs/format.md#scales-by-group) it is gw_grouped_measure, gw_grouped_head, gw_grouped_pack; gw_grouped_check and
// gw_grouped_unpack.
#pragma once

#include "checksum.hpp"

namespace gradwire::gpu {

enum Kind : u32 { kOneBit = 0, kTwoBit = 1, kQsgd = 3 };
enum Rule : u32 { kFixed = 0, kMean = 1, kTwoMeans = 2 };

inline constexpr u32 kMagic = 0x54515747u, kFormatVersion = 1, kHeaderBytes = 32, kSealedBytes = 28;
inline constexpr u32 kGroup = 64;  // values that numbers are drawn for, and fields written, together
inline constexpr u32 kLanes = 8;   // in which the CPU adds up a block

// What the values of a block add up to: without their signs above and below zero, or squared (in `positive`).
struct Sums {
  double positive, negative;
  u64 n_negative;
  u32 largest;     // magnitude, as bits
  float per_unit;  // qsgd: levels to one
};

struct Quantise {
  const void* values;     // (n,) of `dtype`
  const float* residual;  // (n,), or null
  float* left_out;        // (n,), or null; may be `residual`
  u8* message;            // whole, at a multiple of 4 bytes
  Sums* sums;             // one a block of `block` values
  u32* pieces;            // one a piece of the payload
  u64* n_bytes;           // of the message, for the host
  u32* is_nonfinite;      // 0
  u64 n, seed, step;
  float residual_scale, parameter;
  u32 kind, dtype, rule, levels;
  u32 block;  // values that are added up together: the CPU's 4096, or qsgd's
  u32 pad;
};

__device__ __forceinline__ float term_of(const Quantise& p, u32 bits, float carried) {
  const float value = value_of_bits(p.dtype, bits);
  return p.residual == nullptr ? value : value + carried * p.residual_scale;
}

__device__ __forceinline__ u64 norm_bytes(u32 kind, u64 n, u32 block) {
  return kind == kQsgd ? 4 * parts_of(n, block) : 0;
}
__device__ __forceinline__ u64 payload_bytes(u32 kind, u64 n, u32 block, u32 levels) {
  if (kind == kQsgd) return norm_bytes(kind, n, block) + parts_of(n, kGroup) * (levels <= 7 ? kGroup / 2 : kGroup);
  return 4 * parts_of(n, kind == kOneBit ? 32 : 16);
}

__device__ __forceinline__ float term_of(const Quantise& p, u64 i) {
  return term_of(p, bits_at(p.values, p.dtype, i), p.residual == nullptr ? 0.0f : p.residual[i]);
}

// What makes terms of values `stride` apart, before `end`; zeros behind it.
template <u32 kBatch>
struct Loaded {
  u32 bits[kBatch];
  float carried[kBatch];
};
template <u32 kBatch>
__device__ __forceinline__ void load(const Quantise& p, u64 first, u64 stride, u64 end, Loaded<kBatch>& to) {
  load_bits(p.values, p.dtype, first, stride, end, to.bits);
  GW_UNROLLED for (u32 q = 0; q < kBatch; ++q) {
    const u64 i = first + q * stride;
    to.carried[q] = p.residual != nullptr && i < end ? p.residual[i] : 0.0f;
  }
}

// Eight threads, each a lane of the CPU's; then the lanes in its order, which a butterfly gives to all of them.
template <u32 kBatch>
__device__ inline Sums sums_of(const Quantise& p, u64 begin, u64 end) {
  Sums own{0, 0, 0, 0, 0};
  constexpr u32 kStep = kBatch * kLanes;
  Loaded<kBatch> now, next;
  u64 first = begin + threadIdx.x % kLanes;
  load(p, first, kLanes, end, now);
  for (; first < end; first += kStep) {
    if (first + kStep < end) load(p, first + kStep, kLanes, end, next);
    GW_UNROLLED for (u32 q = 0; q < kBatch; ++q) {  // zeros past the end add nothing
      const float value = term_of(p, now.bits[q], now.carried[q]);
      const double magnitude = static_cast<double>(__uint_as_float(magnitude_bits(value)));
      if (magnitude_bits(value) > own.largest) own.largest = magnitude_bits(value);
      if (p.kind == kQsgd) {
        own.positive += magnitude * magnitude;
        continue;
      }
      own.positive += value > 0 ? magnitude : 0;
      own.negative += value < 0 ? magnitude : 0;
      own.n_negative += value < 0;
    }
    now = next;
  }
  return {sum_of_lanes(own.positive, kLanes), sum_of_lanes(own.negative, kLanes), sum_of_lanes(own.n_negative, kLanes),
          largest_of_lanes(own.largest, kLanes), 0};
}

// Eight threads a block.
GW_KERNEL_BY_DTYPE(gw_quantised_measure, Quantise, dtype) {
  const u64 block = thread_number() / kLanes, begin = block * p.block;
  const u64 end = begin < p.n ? smaller(begin + p.block, p.n) : begin;
  Sums own = sums_of<16>(p, begin, end);
  if (threadIdx.x % kLanes != 0 || begin >= p.n) return;
  if (p.kind == kQsgd) {
    const double wide = __dsqrt_rn(own.positive);
    if (wide > kLargestFloat) own.largest = kInfinity;
    float norm = narrowed(wide);
    own.per_unit = static_cast<float>(static_cast<double>(p.levels) / wide);
    if (norm < kLeastScale) norm = own.per_unit = 0;
    store32(p.message + kHeaderBytes + 4 * block, __float_as_uint(norm));
  }
  if (own.largest >= kInfinity) atomicOr(p.is_nonfinite, 1u);
  p.sums[block] = own;
}

__device__ inline float mean_of(double sum, u64 count) {
  return count == 0 ? 0.0f : narrowed(sum / static_cast<double>(count));
}

inline constexpr u32 kChooseThreads = 256;
inline constexpr u64 kRunBlocks = 64;  // that are added up before those of the next run (native/quantisers/sweep.hpp)

__device__ __forceinline__ void add_up(Sums& all, const Sums& part) {
  all.positive += part.positive;
  all.negative += part.negative;
  all.n_negative += part.n_negative;
  if (part.largest > all.largest) all.largest = part.largest;
}

// By one block of threads: the sums of n blocks, by runs and in their order; thread 0 has them.
__device__ inline Sums sum_of_blocks(const Sums* sums, u64 n_blocks) {
  auto& runs = shared_as<Sums[kChooseThreads]>();
  Sums all{0, 0, 0, 0, 0};
  for (u64 first = 0; first < n_blocks; first += kChooseThreads * kRunBlocks) {
    Sums own{0, 0, 0, 0, 0};
    const u64 begin = first + threadIdx.x * kRunBlocks, end = smaller(begin + kRunBlocks, n_blocks);
    for (u64 i = begin; i < end; i += 8) {
      Sums eight[8];
      GW_UNROLLED for (u32 q = 0; q < 8; ++q) eight[q] = i + q < end ? sums[i + q] : Sums{0, 0, 0, 0, 0};
      GW_UNROLLED for (u32 q = 0; q < 8; ++q) add_up(own, eight[q]);
    }
    runs[threadIdx.x] = own;
    __syncthreads();
    for (u64 run = 0; threadIdx.x == 0 && run < smaller(kChooseThreads, parts_of(n_blocks - first, kRunBlocks)); ++run)
      add_up(all, runs[run]);
    __syncthreads();
  }
  return all;
}

// The header but for its checksum, and what follows `fourth`, which is zero.
__device__ inline void write_header(const Quantise& p, u32 version, bool is_finite, u32 third, u32 fourth) {
  store32(p.message, kMagic);
  p.message[4] = static_cast<u8>(version);
  p.message[5] = static_cast<u8>(p.kind);
  p.message[6] = is_finite ? 0 : 1;
  p.message[7] = static_cast<u8>(third);
  store64(p.message + 8, p.n);
  store32(p.message + 16, fourth);
  store64(p.message + 20, 0);
}

// One block: the header but for its checksum.
GW_KERNEL(gw_quantised_choose, Quantise) {
  Sums all{0, 0, 0, 0, 0};
  if (p.kind != kQsgd) all = sum_of_blocks(p.sums, parts_of(p.n, p.block));
  if (threadIdx.x != 0) return;
  const bool is_finite = *p.is_nonfinite == 0;
  float first = 0, second = 0;
  if (is_finite && p.kind != kQsgd) {
    const float mean = mean_of(all.positive + all.negative, p.n);
    first = p.parameter;
    if (p.kind == kOneBit) {
      if (p.rule != kFixed) first = p.rule == kTwoMeans ? mean_of(all.positive, p.n - all.n_negative) : mean;
      second = p.rule == kTwoMeans ? mean_of(all.negative, all.n_negative) : first;
    } else if (p.rule != kFixed) {
      first = narrowed(static_cast<double>(p.parameter) * static_cast<double>(mean));
    }
  }
  write_header(p, kFormatVersion, is_finite, p.kind == kQsgd ? p.levels : 0, p.kind == kQsgd ? p.block : 0);
  store32(p.message + 20, __float_as_uint(first));
  store32(p.message + 24, __float_as_uint(second));
  *p.n_bytes = kHeaderBytes + (is_finite ? payload_bytes(p.kind, p.n, p.block, p.levels) : 0);
}

// Two-bit: a value's code.
__device__ __forceinline__ u32 code_of(float term, float threshold) {
  return term >= threshold && term > 0 ? 1 : term <= -threshold && term < 0 ? 2 : 0;
}
// What the code stands for; of zeros with a threshold of zero, their own sign: nothing is left out of them.
__device__ __forceinline__ float decoded_of(float term, float threshold) {
  const bool is_beyond = __uint_as_float(magnitude_bits(term)) >= threshold;
  return is_beyond ? __uint_as_float(__float_as_uint(threshold) | (__float_as_uint(term) & ~kMagnitude)) : 0.0f;
}

// Two bits with four levels: 0 inner, 1 outer, 2 -inner, 3 -outer.
__device__ __forceinline__ u32 nearest_code(float term, float inner, float outer) {
  return (__uint_as_float(magnitude_bits(term)) >= 0.5f * inner + 0.5f * outer) | (term < 0) << 1;
}
__device__ __forceinline__ float level_of(u32 code, float inner, float outer) {
  const float level = code & 1 ? outer : inner;
  return code & 2 ? -level : level;
}

// Values to a word: a power of two.
__device__ __forceinline__ constexpr u32 word_shift(u32 kind) { return kind == kOneBit ? 5 : 4; }

// Up to four neighbours of a code word, which have the same scales.
struct Fields {
  u64 value;
  u32 n;
  float first, second;
};

// One-bit and two-bit, a thread for four fields. fields_at(word, number of the first in it)
template <u32 kKind, bool kHasLevels, class FieldsAt>
__device__ __forceinline__ void pack_words(const Quantise& p, u64 n_words, u32* words, FieldsAt fields_at) {
  constexpr u32 kThreads = (1u << word_shift(kKind)) / 4;  // a word
  const bool is_finite = p.message[6] == 0;
  for (u64 four = thread_number(); four / kWarp * kWarp < n_words * kThreads; four += thread_count()) {
    const u64 number = four / kThreads;
    const u32 place = static_cast<u32>(four % kThreads);
    const Fields own = fields_at(number, 4 * place);
    u32 bits[4], carried[4]{}, left[4], word = 0;
    load_four(p.values, p.dtype, own.value, own.n, bits);
    if (p.residual != nullptr) load_four(p.residual, kFloat32, own.value, own.n, carried);
    GW_UNROLLED for (u32 q = 0; q < 4; ++q) {
      const float term = term_of(p, bits[q], __uint_as_float(carried[q]));
      float decoded = 0;
      u32 code = term < 0;
      if (kKind == kOneBit) {
        decoded = term < 0 ? -own.second : own.first;
      } else {
        code = kHasLevels ? nearest_code(term, own.first, own.second) : code_of(term, own.first);
        decoded = kHasLevels ? level_of(code, own.first, own.second) : decoded_of(term, own.first);
      }
      word |= (q < own.n ? code : 0) << (kKind == kOneBit ? q : 2 * q);
      // A message that is not finite says nothing else, so the residual stays.
      left[q] = is_finite ? __float_as_uint((term - decoded) * (1 / p.residual_scale)) : carried[q];
    }
    if (p.left_out != nullptr) store_four(p.left_out, kFloat32, own.value, own.n, left);
    word <<= place * (32 / kThreads);
    for (u32 lanes = 1; lanes < kThreads; lanes *= 2) word |= __shfl_xor_sync(kWholeWarp, word, lanes);
    if (is_finite && place == 0 && number < n_words) words[number] = word;
  }
}

// Those of a message with one scale, or two, for all of its values.
__device__ __forceinline__ Fields plain_fields(u64 n, u64 value, float first, float second) {
  return {value, value < n ? static_cast<u32>(smaller(4, n - value)) : 0, first, second};
}

GW_KERNEL_BY_DTYPE(gw_quantised_pack, Quantise, dtype) {
  const float first = __uint_as_float(load32(p.message + 20)), second = __uint_as_float(load32(p.message + 24));
  u32* const words = reinterpret_cast<u32*>(p.message + kHeaderBytes);
  const auto fields_at = [&](u64 word, u32 number) {
    return plain_fields(p.n, (word << word_shift(p.kind)) + number, first, second);
  };
  if (p.kind == kOneBit)
    pack_words<kOneBit, false>(p, parts_of(p.n, 32), words, fields_at);
  else
    pack_words<kTwoBit, false>(p, parts_of(p.n, 16), words, fields_at);
}

// Fields of a byte, or of half a byte: of the eight values of a group that share a counter.
__device__ __forceinline__ void put_fields(u8* codes, bool are_nibbles, u64 group, u64 lane, const u8 (&own)[8]) {
  if (are_nibbles)
    for (u32 q = 0; q < 4; ++q) codes[group * 32 + 8 * q + lane] = static_cast<u8>(own[q] | own[q + 4] << 4);
  else
    for (u32 q = 0; q < 8; ++q) codes[group * 64 + 8 * q + lane] = own[q];
}
__device__ __forceinline__ u32 field_of(const u8* codes, bool are_nibbles, u64 i) {
  if (!are_nibbles) return codes[i];
  const u64 place = i % kGroup;
  return codes[i / kGroup * 32 + place % 32] >> (place < 32 ? 0 : 4) & 15;
}

// QSGD: a thread draws once for the eight values that share a counter.
GW_KERNEL_BY_DTYPE(gw_quantised_pack_levels, Quantise, dtype) {
  const bool is_finite = p.message[6] == 0, are_nibbles = p.levels <= 7;
  const u32 sign = are_nibbles ? 8 : 128;
  u8* const codes = p.message + kHeaderBytes + norm_bytes(p.kind, p.n, p.block);
  const Power block(p.block);
  for (u64 counter = thread_number(); counter < parts_of(p.n, kGroup) * kLanes; counter += thread_count()) {
    const u64 group = counter / kLanes, lane = counter % kLanes, first = group * kGroup + lane;
    Loaded<8> loaded;
    load(p, first, kLanes, p.n, loaded);
    const Drawn drawn = draw(p.seed, p.step, counter);
    const u64 number = block.parts(group * kGroup);
    const float per_unit = p.sums[number].per_unit;
    const float step = __uint_as_float(load32(p.message + kHeaderBytes + 4 * number)) / static_cast<float>(p.levels);
    u8 own[8];
    GW_UNROLLED for (u32 q = 0; q < 8; ++q) {
      const u64 i = first + 8 * q;
      own[q] = 0;
      if (i >= p.n) continue;
      const float term = term_of(p, loaded.bits[q], loaded.carried[q]);
      float decoded = 0;
      if (is_finite) {
        const float raised = __uint_as_float(magnitude_bits(term)) * per_unit + fraction_of(drawn.number(q));
        const int level = static_cast<int>(smaller(static_cast<u32>(raised), p.levels));
        own[q] = static_cast<u8>(static_cast<u32>(level) | (term < 0 ? sign : 0));
        decoded = static_cast<float>(term < 0 ? -level : level) * step;
      }
      if (p.left_out != nullptr)
        p.left_out[i] = is_finite ? (term - decoded) * (1 / p.residual_scale) : loaded.carried[q];
    }
    if (is_finite) put_fields(codes, are_nibbles, group, lane, own);
  }
}

// Of a payload that ends at `end`, the checksum of the piece of this block of threads.
__device__ inline void sum_up_piece(const u8* message, u64 end, u32* pieces) {
  ChecksumShared& shared = shared_as<ChecksumShared>();
  const u64 begin = static_cast<u64>(blockIdx.x) * kPieceBytes;
  if (begin >= end) return;
  fill_checksum_table(shared);
  const u32 sum = checksum_of_piece(message + kHeaderBytes + begin, smaller(kPieceBytes, end - begin), shared);
  if (threadIdx.x == 0) pieces[blockIdx.x] = sum;
}

GW_KERNEL(gw_quantised_pieces, Quantise) { sum_up_piece(p.message, *p.n_bytes - kHeaderBytes, p.pieces); }

// One block.
GW_KERNEL(gw_quantised_seal, Quantise) {
  ChecksumShared& shared = shared_as<ChecksumShared>();
  fill_checksum_table(shared);
  const u32 sum = checksum_of_message(p.message, kSealedBytes, *p.n_bytes - kHeaderBytes, p.pieces, shared);
  if (threadIdx.x == 0) store32(p.message + kSealedBytes, sum);
}

struct Dequantise {
  const u8* message;  // whole, at a multiple of 4 bytes; `payload` bytes behind the header if it is finite, else none
  void* out;          // (n,) of `dtype`
  u32* pieces;
  u32* error;  // 0, or 7 less the first of Wrong
  u64 n, payload;
  float divisor;
  u32 kind, dtype, adds, levels, block;
};

GW_KERNEL(gw_quantised_read_pieces, Dequantise) { sum_up_piece(p.message, p.payload, p.pieces); }

// By one block: what both formats say. Returns whether the message is finite.
__device__ inline bool check_message(const Dequantise& p, u32 version, u32 third, u32 fourth) {
  ChecksumShared& shared = shared_as<ChecksumShared>();
  fill_checksum_table(shared);
  const u8* const at = p.message;
  const bool is_finite = !(at[6] & 1);
  const u32 sum = checksum_of_message(at, kSealedBytes, is_finite ? p.payload : 0, p.pieces, shared);
  if (threadIdx.x != 0) return is_finite;
  if (load32(at) != kMagic) report(p.error, kHeader);
  if (at[4] != version) report(p.error, kVersion);
  if (load64(at + 8) != p.n) report(p.error, kElements);
  if (load32(at + kSealedBytes) != sum) report(p.error, kChecksum);
  if (at[5] != p.kind || at[6] > 1 || at[7] != third || load32(at + 16) != fourth) report(p.error, kField);
  return is_finite;
}

GW_KERNEL(gw_quantised_check, Dequantise) {
  check_message(p, kFormatVersion, p.levels, p.block);
  if (threadIdx.x == 0 && (load32(p.message + 20) >= kInfinity || load32(p.message + 24) >= kInfinity))
    report(p.error, kField);
}

// What a code of one or two bits stands for; NaN where no encoder writes it, which is reported.
template <u32 kKind, bool kHasLevels>
__device__ __forceinline__ float value_of(const Dequantise& p, u32 word, u32 i, float first, float second) {
  if (kKind == kOneBit) return word >> i & 1 ? -second : first;
  const u32 code = word >> 2 * i & 3;
  if (kHasLevels) return level_of(code, first, second);
  if (code == 3) report(p.error, kCode);
  return code == 3 ? __uint_as_float(kNan) : code == 1 ? first : code == 2 ? -first : 0.0f;
}

// Values, or their sum with what is there; NaN where a message is not whole, so that nobody goes on with less.
template <u32 kKind, bool kHasLevels, class FieldsAt>
__device__ __forceinline__ void unpack_words(const Dequantise& p, u64 n_words, const u32* words, FieldsAt fields_at) {
  constexpr u32 kThreads = (1u << word_shift(kKind)) / 4;                     // a word
  const bool is_finite = *p.error <= error_word(kCode) && p.message[6] == 0;  // more was written by an earlier kernel
  for (u64 four = thread_number(); four < n_words * kThreads; four += thread_count()) {
    const u32 place = 4 * static_cast<u32>(four % kThreads);
    const Fields own = fields_at(four / kThreads, place);
    if (own.n == 0) continue;
    const bool is_right = __float_as_uint(own.first) < kInfinity && __float_as_uint(own.second) < kInfinity;
    if (is_finite && !is_right) report(p.error, kCode);
    const u32 word = is_finite ? words[four / kThreads] >> place * (32 >> word_shift(kKind)) : 0;
    u32 there[4]{}, bits[4];
    if (p.adds) load_four(p.out, kFloat32, own.value, own.n, there);
    GW_UNROLLED for (u32 q = 0; q < 4; ++q) {
      float value = __uint_as_float(kNan);
      if (is_finite && is_right && q < own.n) value = value_of<kKind, kHasLevels>(p, word, q, own.first, own.second);
      value = divided(value, p.divisor);
      bits[q] = bits_of_value(p.dtype, p.adds ? added(__uint_as_float(there[q]), value) : value);
    }
    store_four(p.out, p.dtype, own.value, own.n, bits);
  }
}

GW_KERNEL_BY_DTYPE(gw_quantised_unpack, Dequantise, dtype) {
  const float first = __uint_as_float(load32(p.message + 20)), second = __uint_as_float(load32(p.message + 24));
  const u32* const words = reinterpret_cast<const u32*>(p.message + kHeaderBytes);
  const auto fields_at = [&](u64 word, u32 number) {
    return plain_fields(p.n, (word << word_shift(p.kind)) + number, first, second);
  };
  if (p.kind == kOneBit)
    unpack_words<kOneBit, false>(p, parts_of(p.n, 32), words, fields_at);
  else
    unpack_words<kTwoBit, false>(p, parts_of(p.n, 16), words, fields_at);
}

GW_KERNEL_BY_DTYPE(gw_quantised_unpack_levels, Dequantise, dtype) {
  const bool is_finite = *p.error <= error_word(kCode) && p.message[6] == 0, are_nibbles = p.levels <= 7;
  const u32* const norms = reinterpret_cast<const u32*>(p.message + kHeaderBytes);
  const u8* const codes = p.message + kHeaderBytes + norm_bytes(p.kind, p.n, p.block);
  const Power block(p.block);
  for (u64 i = thread_number(); i < p.n; i += thread_count()) {
    float value = __uint_as_float(kNan);
    if (is_finite) {
      const u32 code = field_of(codes, are_nibbles, i), mask = are_nibbles ? 7 : 127, norm = norms[block.parts(i)];
      const int level = static_cast<int>(code & mask);
      if (norm >= kInfinity || (code & mask) > p.levels)
        report(p.error, kCode);
      else
        value = static_cast<float>(code > mask ? -level : level) *
                (__uint_as_float(norm) / static_cast<float>(p.levels)) / p.divisor;
    }
    put_value(p.out, p.dtype, i, p.adds ? added(static_cast<const float*>(p.out)[i], value) : value);
  }
}

// ---- scales by group

inline constexpr double kInnerLevel = 0.5675, kOuterLevel = 1.8930;  // native/quantisers/groups.cpp
inline constexpr u32 kGroupedVersion = 2, kCutBytes = 4, kScaleBytes = 2, kUpperInfinity = kInfinity >> 16;

// Values of one tensor, which begin with a group and with a word of their own.
struct Piece {
  u64 begin, first_group, first_word;
};

struct Grouping {
  const Piece* pieces;  // n_pieces, and one where all of them end
  u64 n_pieces;
  u32 values, per_group;  // values to a group; scales of it
};

struct QuantiseGroups {
  Quantise base;  // `block` means nothing
  Grouping by;
};

struct DequantiseGroups {
  Dequantise base;
  Grouping by;
};

__device__ __forceinline__ const Piece& end_of(const Grouping& by) { return by.pieces[by.n_pieces]; }
__device__ __forceinline__ u64 cuts_of(const Grouping& by) { return by.n_pieces > 0 ? by.n_pieces - 1 : 0; }
__device__ __forceinline__ u64 scales_at(const Grouping& by) { return kHeaderBytes + kCutBytes * (1 + cuts_of(by)); }
__device__ __forceinline__ u64 codes_at(const Grouping& by) {
  return scales_at(by) + 4 * parts_of(end_of(by).first_group * by.per_group * kScaleBytes, 4);
}

__device__ __forceinline__ float widened(u16 scale) { return __uint_as_float(static_cast<u32>(scale) << 16); }
__device__ __forceinline__ u16 upper_half(double value) {
  const u32 bits = __float_as_uint(narrowed(value)), nearest = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
  return static_cast<u16>(nearest < kUpperInfinity ? nearest : kUpperInfinity - 1);
}
__device__ __forceinline__ double exact_mean(double sum, u64 count) {
  return count == 0 ? 0.0 : sum / static_cast<double>(count);
}
// From field `number` of code word `word` on.
__device__ __forceinline__ Fields fields_of(const Grouping& by, const u8* message, u32 kind, u64 word, u32 number) {
  if (word >= end_of(by).first_word) return {0, 0, 0, 0};
  const u64 index = last_up_to(by.pieces, by.n_pieces, &Piece::first_word, word), end = by.pieces[index + 1].begin;
  const Piece piece = by.pieces[index];
  const u64 offset = ((word - piece.first_word) << word_shift(kind)) + number, value = piece.begin + offset;
  const u64 group = piece.first_group + Power(by.values).parts(offset);
  if (value >= end) return {0, 0, 0, 0};
  const u16* const scales = reinterpret_cast<const u16*>(message + scales_at(by)) + group * by.per_group;
  return {value, static_cast<u32>(smaller(4, end - value)), widened(scales[0]), widened(scales[by.per_group - 1])};
}

// work(words of the kind, and with which levels)
#define GW_BY_KIND(kind, per_group, work, ...) \
  if (kind == kOneBit)                         \
    work<kOneBit, false>(__VA_ARGS__);         \
  else if (per_group == 2)                     \
    work<kTwoBit, true>(__VA_ARGS__);          \
  else                                         \
    work<kTwoBit, false>(__VA_ARGS__)

// Eight threads a group.
GW_KERNEL_BY_DTYPE(gw_grouped_measure, QuantiseGroups, base.dtype) {
  const u64 group = thread_number() / kLanes;
  u64 begin = 0, end = 0;
  if (group < end_of(p.by).first_group) {
    const u64 number = last_up_to(p.by.pieces, p.by.n_pieces, &Piece::first_group, group);
    begin = p.by.pieces[number].begin + (group - p.by.pieces[number].first_group) * p.by.values;
    end = smaller(begin + p.by.values, p.by.pieces[number + 1].begin);
  }
  const Sums sums = sums_of<8>(p.base, begin, end);
  if (threadIdx.x % kLanes != 0 || begin == end) return;
  if (sums.largest >= kInfinity) atomicOr(p.base.is_nonfinite, 1u);
  u16* const scales = reinterpret_cast<u16*>(p.base.message + scales_at(p.by)) + group * p.by.per_group;
  const double magnitude = exact_mean(sums.positive + sums.negative, end - begin);
  if (p.by.per_group == 1) {
    const double factor = p.base.kind == kTwoBit ? static_cast<double>(p.base.parameter) : 1.0;
    scales[0] = upper_half(factor * magnitude);
  } else if (p.base.kind == kOneBit) {
    scales[0] = upper_half(exact_mean(sums.positive, end - begin - sums.n_negative));
    scales[1] = upper_half(exact_mean(sums.negative, sums.n_negative));
  } else {
    scales[0] = upper_half(kInnerLevel * magnitude);
    scales[1] = upper_half(kOuterLevel * magnitude);
  }
}

// One block: all but scales, codes and checksum.
GW_KERNEL(gw_grouped_head, QuantiseGroups) {
  u8* const message = p.base.message;
  const u64 n_groups = end_of(p.by).first_group;
  for (u64 i = threadIdx.x; i < cuts_of(p.by); i += blockDim.x)
    store32(message + kHeaderBytes + kCutBytes * (1 + i), static_cast<u32>(p.by.pieces[i + 1].begin));
  if (threadIdx.x != 0) return;
  const bool is_finite = *p.base.is_nonfinite == 0;
  write_header(p.base, kGroupedVersion, is_finite, p.by.per_group, p.by.values);
  store32(message + kHeaderBytes, static_cast<u32>(cuts_of(p.by)));
  for (u64 at = scales_at(p.by) + n_groups * p.by.per_group * kScaleBytes; at < codes_at(p.by); ++at) message[at] = 0;
  *p.base.n_bytes = is_finite ? codes_at(p.by) + 4 * end_of(p.by).first_word : kHeaderBytes;
}

GW_KERNEL_BY_DTYPE(gw_grouped_pack, QuantiseGroups, base.dtype) {
  const auto fields_at = [&](u64 word, u32 number) {
    return fields_of(p.by, p.base.message, p.base.kind, word, number);
  };
  u32* const words = reinterpret_cast<u32*>(p.base.message + codes_at(p.by));
  GW_BY_KIND(p.base.kind, p.by.per_group, pack_words, p.base, end_of(p.by).first_word, words, fields_at);
}

// One block.
GW_KERNEL(gw_grouped_check, DequantiseGroups) {
  const u8* const at = p.base.message;
  const bool is_finite = check_message(p.base, kGroupedVersion, p.by.per_group, p.by.values);
  for (u64 i = threadIdx.x; is_finite && i < cuts_of(p.by); i += blockDim.x)
    if (load32(at + kHeaderBytes + kCutBytes * (1 + i)) != p.by.pieces[i + 1].begin) report(p.base.error, kField);
  if (threadIdx.x == 0 && (load64(at + 20) != 0 || (is_finite && load32(at + kHeaderBytes) != cuts_of(p.by))))
    report(p.base.error, kField);
}

GW_KERNEL_BY_DTYPE(gw_grouped_unpack, DequantiseGroups, base.dtype) {
  const auto fields_at = [&](u64 word, u32 number) {
    return fields_of(p.by, p.base.message, p.base.kind, word, number);
  };
  const u32* const words = reinterpret_cast<const u32*>(p.base.message + codes_at(p.by));
  GW_BY_KIND(p.base.kind, p.by.per_group, unpack_words, p.base, end_of(p.by).first_word, words, fields_at);
}

}  // namespace gradwire::gpu
