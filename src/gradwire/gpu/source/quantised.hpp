// One-bit, two-bit and QSGD messages (docs/format.md#quantised) on a device: the bytes of native/quantisers, with error
// feedback. A message takes five launches (measure, choose, pack, pieces, seal), to read it three (pieces, check,
// unpack); their grids and threads stand in gradwire/codecs/quantised.py.
#pragma once

#include "checksum.hpp"
#include "values.hpp"

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
  u64 n, seed, step;
  float residual_scale, parameter;
  u32 kind, dtype, rule, levels;
  u32 block;  // values that are added up together: the CPU's 4096, or qsgd's
  u32 pad;
};

__device__ __forceinline__ float term_of(const Quantise& p, u64 i) {
  const float value = value_at(p.values, p.dtype, i);
  return p.residual == nullptr ? value : value + p.residual[i] * p.residual_scale;
}

__device__ __forceinline__ u64 norm_bytes(u32 kind, u64 n, u32 block) {
  return kind == kQsgd ? 4 * parts_of(n, block) : 0;
}
__device__ __forceinline__ u64 payload_bytes(u32 kind, u64 n, u32 block, u32 levels) {
  if (kind == kQsgd) return norm_bytes(kind, n, block) + parts_of(n, kGroup) * (levels <= 7 ? kGroup / 2 : kGroup);
  return 4 * parts_of(n, kind == kOneBit ? 32 : 16);
}

// Eight threads, each a lane of the CPU's; then the lanes in its order, which a butterfly gives to all of them.
__device__ inline Sums sums_of(const Quantise& p, u64 begin, u64 end) {
  Sums own{0, 0, 0, 0, 0};
  for (u64 i = begin + threadIdx.x % kLanes; i < end; i += kLanes) {
    const float value = term_of(p, i);
    const u32 magnitude = magnitude_bits(value);
    if (magnitude > own.largest) own.largest = magnitude;
    if (p.kind == kQsgd) {
      own.positive += static_cast<double>(value) * static_cast<double>(value);
      continue;
    }
    own.positive += static_cast<double>(value > 0 ? value : 0.0f);
    own.negative += static_cast<double>(value < 0 ? -value : 0.0f);
    own.n_negative += value < 0;
  }
  for (u32 lanes = 1; lanes < kLanes; lanes *= 2) {
    own.positive += __shfl_xor_sync(kWholeWarp, own.positive, lanes);
    own.negative += __shfl_xor_sync(kWholeWarp, own.negative, lanes);
    own.n_negative += __shfl_xor_sync(kWholeWarp, own.n_negative, lanes);
    const u32 other = __shfl_xor_sync(kWholeWarp, own.largest, lanes);
    if (other > own.largest) own.largest = other;
  }
  return own;
}

// Eight threads a block.
GW_KERNEL(gw_quantised_measure, Quantise) {
  const u64 block = thread_number() / kLanes, begin = block * p.block;
  const u64 end = begin < p.n ? smaller(begin + p.block, p.n) : begin;
  Sums own = sums_of(p, begin, end);
  if (threadIdx.x % kLanes != 0 || begin >= p.n) return;
  if (p.kind == kQsgd) {
    const double wide = __dsqrt_rn(own.positive);
    if (wide > kLargestFloat) own.largest = kInfinity;
    float norm = narrowed(wide);
    own.per_unit = static_cast<float>(static_cast<double>(p.levels) / wide);
    if (norm < kLeastScale) norm = own.per_unit = 0;
    store32(p.message + kHeaderBytes + 4 * block, __float_as_uint(norm));
  }
  p.sums[block] = own;
}

__device__ inline float mean_of(double sum, u64 count) {
  return count == 0 ? 0.0f : narrowed(sum / static_cast<double>(count));
}

inline constexpr u32 kChooseThreads = 256;

// One block: the sums in the order of their blocks, and the header but for its checksum.
GW_KERNEL(gw_quantised_choose, Quantise) {
  struct Shared {
    Sums sums[kChooseThreads];
  };
  Shared& shared = shared_as<Shared>();
  const u64 n_blocks = parts_of(p.n, p.block);
  Sums all{0, 0, 0, 0, 0};
  for (u64 first = 0; first < n_blocks; first += kChooseThreads) {
    if (first + threadIdx.x < n_blocks) shared.sums[threadIdx.x] = p.sums[first + threadIdx.x];
    __syncthreads();
    if (threadIdx.x == 0)
      for (u64 i = 0; i < smaller(kChooseThreads, n_blocks - first); ++i) {
        const Sums part = shared.sums[i];
        all.positive += part.positive;
        all.negative += part.negative;
        all.n_negative += part.n_negative;
        if (part.largest > all.largest) all.largest = part.largest;
      }
    __syncthreads();
  }
  if (threadIdx.x != 0) return;
  const bool is_finite = all.largest < kInfinity;
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
  u8* const header = p.message;
  store32(header, kMagic);
  header[4] = kFormatVersion;
  header[5] = static_cast<u8>(p.kind);
  header[6] = is_finite ? 0 : 1;
  header[7] = static_cast<u8>(p.kind == kQsgd ? p.levels : 0);
  store64(header + 8, p.n);
  store32(header + 16, p.kind == kQsgd ? p.block : 0);
  store32(header + 20, __float_as_uint(first));
  store32(header + 24, __float_as_uint(second));
  *p.n_bytes = kHeaderBytes + (is_finite ? payload_bytes(p.kind, p.n, p.block, p.levels) : 0);
}

// A message that is not finite says nothing else, so the residual stays.
__device__ __forceinline__ void keep(const Quantise& p, u64 i, bool is_finite, float term, float decoded) {
  if (p.left_out == nullptr) return;
  if (is_finite)
    p.left_out[i] = (term - decoded) * (1 / p.residual_scale);
  else
    p.left_out[i] = p.residual == nullptr ? 0.0f : p.residual[i];
}

// Two-bit: a value's code; and the word of 16 of them, for each of 16 neighbours.
__device__ __forceinline__ u32 code_of(float term, float threshold) {
  return term >= threshold && term > 0 ? 1 : term <= -threshold && term < 0 ? 2 : 0;
}
__device__ __forceinline__ u32 joined(u32 code, u64 i) {
  u32 word = code << 2 * (i % 16);
  for (u32 lanes = 1; lanes < 16; lanes *= 2) word |= __shfl_xor_sync(kWholeWarp, word, lanes);
  return word;
}

// What the code stands for; of zeros with a threshold of zero, their own sign: nothing is left out of them.
__device__ __forceinline__ float decoded_of(float term, float threshold) {
  const bool is_beyond = __uint_as_float(magnitude_bits(term)) >= threshold;
  return is_beyond ? __uint_as_float(__float_as_uint(threshold) | (__float_as_uint(term) & ~kMagnitude)) : 0.0f;
}

// One-bit and two-bit: a warp makes the words of 32 values.
GW_KERNEL(gw_quantised_pack, Quantise) {
  const bool is_finite = p.message[6] == 0;
  const float first = __uint_as_float(load32(p.message + 20)), second = __uint_as_float(load32(p.message + 24));
  u32* const words = reinterpret_cast<u32*>(p.message + kHeaderBytes);
  for (u64 i = thread_number(); i < parts_of(p.n, kWarp) * kWarp; i += thread_count()) {
    const bool is_there = i < p.n;
    const float term = is_there ? term_of(p, i) : 0.0f;
    if (p.kind == kOneBit) {
      const u32 word = __ballot_sync(kWholeWarp, term < 0);
      if (is_there) keep(p, i, is_finite, term, term < 0 ? -second : first);
      if (is_finite && i % kWarp == 0) words[i / kWarp] = word;
      continue;
    }
    const u32 code = code_of(term, first), word = joined(code, i);
    if (is_there) keep(p, i, is_finite, term, decoded_of(term, first));
    if (is_finite && i % 16 == 0 && is_there) words[i / 16] = word;
  }
}

// QSGD: a thread draws once for the eight values that share a counter.
GW_KERNEL(gw_quantised_pack_levels, Quantise) {
  const bool is_finite = p.message[6] == 0, are_nibbles = p.levels <= 7;
  const u32 sign = are_nibbles ? 8 : 128;
  u8* const codes = p.message + kHeaderBytes + norm_bytes(p.kind, p.n, p.block);
  for (u64 counter = thread_number(); counter < parts_of(p.n, kGroup) * kLanes; counter += thread_count()) {
    const u64 group = counter / kLanes, lane = counter % kLanes;
    const Drawn drawn = draw(p.seed, p.step, counter);
    u8 own[8];
    for (u32 q = 0; q < 8; ++q) {
      const u64 i = group * kGroup + 8 * q + lane;
      own[q] = 0;
      if (i >= p.n) continue;
      const float term = term_of(p, i);
      float decoded = 0;
      if (is_finite) {
        const u64 block = i / p.block;
        const float magnitude = __uint_as_float(magnitude_bits(term));
        const float raised =
            magnitude * p.sums[block].per_unit + static_cast<float>(drawn.number(q) >> 8) * 5.9604644775390625e-08f;
        const int level = static_cast<int>(smaller(static_cast<u32>(raised), p.levels));
        const float step = __uint_as_float(load32(p.message + kHeaderBytes + 4 * block)) / static_cast<float>(p.levels);
        own[q] = static_cast<u8>(static_cast<u32>(level) | (term < 0 ? sign : 0));
        decoded = static_cast<float>(term < 0 ? -level : level) * step;
      }
      keep(p, i, is_finite, term, decoded);
    }
    if (!is_finite) continue;
    if (are_nibbles)
      for (u32 q = 0; q < 4; ++q) codes[group * 32 + 8 * q + lane] = static_cast<u8>(own[q] | own[q + 4] << 4);
    else
      for (u32 q = 0; q < 8; ++q) codes[group * 64 + 8 * q + lane] = own[q];
  }
}

// A block a piece.
GW_KERNEL(gw_quantised_pieces, Quantise) {
  ChecksumShared& shared = shared_as<ChecksumShared>();
  const u64 begin = static_cast<u64>(blockIdx.x) * kPieceBytes, end = *p.n_bytes - kHeaderBytes;
  if (begin >= end) return;
  fill_checksum_table(shared);
  const u32 sum = checksum_of_piece(p.message + kHeaderBytes + begin, smaller(kPieceBytes, end - begin), shared);
  if (threadIdx.x == 0) p.pieces[blockIdx.x] = sum;
}

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

GW_KERNEL(gw_quantised_read_pieces, Dequantise) {
  ChecksumShared& shared = shared_as<ChecksumShared>();
  const u64 begin = static_cast<u64>(blockIdx.x) * kPieceBytes;
  fill_checksum_table(shared);
  const u32 sum = checksum_of_piece(p.message + kHeaderBytes + begin, smaller(kPieceBytes, p.payload - begin), shared);
  if (threadIdx.x == 0) p.pieces[blockIdx.x] = sum;
}

// One block.
GW_KERNEL(gw_quantised_check, Dequantise) {
  ChecksumShared& shared = shared_as<ChecksumShared>();
  fill_checksum_table(shared);
  const u8* const at = p.message;
  const u64 payload = at[6] & 1 ? 0 : p.payload;
  const u32 sum = checksum_of_message(at, kSealedBytes, payload, p.pieces, shared);
  if (threadIdx.x != 0) return;
  if (load32(at) != kMagic) report(p.error, kHeader);
  if (at[4] != kFormatVersion) report(p.error, kVersion);
  if (load64(at + 8) != p.n) report(p.error, kElements);
  if (load32(at + kSealedBytes) != sum) report(p.error, kChecksum);
  if (at[5] != p.kind || at[6] > 1 || at[7] != p.levels || load32(at + 16) != p.block || load32(at + 20) >= kInfinity ||
      load32(at + 24) >= kInfinity)
    report(p.error, kField);
}

// Values, or their sum with what is there; NaN where a message is not whole, so that nobody goes on with less.
GW_KERNEL(gw_quantised_unpack, Dequantise) {
  const bool is_whole = *p.error <= error_word(kCode);  // more was written by an earlier kernel
  const bool is_finite = is_whole && p.message[6] == 0, are_nibbles = p.levels <= 7;
  const float first = __uint_as_float(load32(p.message + 20)) / p.divisor;
  const float second = __uint_as_float(load32(p.message + 24)) / p.divisor;
  const u32* const words = reinterpret_cast<const u32*>(p.message + kHeaderBytes);
  const u8* const codes = p.message + kHeaderBytes + norm_bytes(p.kind, p.n, p.block);
  for (u64 i = thread_number(); i < p.n; i += thread_count()) {
    float value = __uint_as_float(kNan);
    if (is_finite && p.kind == kOneBit) {
      value = words[i / 32] >> i % 32 & 1 ? -second : first;
    } else if (is_finite && p.kind == kTwoBit) {
      const u32 code = words[i / 16] >> 2 * (i % 16) & 3;
      if (code == 3)
        report(p.error, kCode);
      else
        value = code == 1 ? first : code == 2 ? -first : 0.0f;
    } else if (is_finite) {
      const u64 group = i / kGroup, place = i % kGroup;
      const u32 code = are_nibbles ? codes[group * 32 + place % 32] >> (place < 32 ? 0 : 4) & 15 : codes[i];
      const u32 mask = are_nibbles ? 7 : 127, norm = words[i / p.block];
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

}  // namespace gradwire::gpu
