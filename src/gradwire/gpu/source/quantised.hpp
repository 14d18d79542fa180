// One-bit, two-bit and QSGD messages (docs/format.md#quantised) on a device: the bytes of native/quantisers, with error
// feedback. A message takes two launches (measure, pack), to read it one (unpack): a block takes the checksum of the
// piece of the payload that it writes or reads, and the last block that is done makes or checks the header. Grids and
// threads stand in gradwire/codecs/quantised.py. With scales by group (docs/format.md#scales-by-group) it is
// gw_grouped_measure, gw_grouped_pack and gw_grouped_unpack.
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
  u32* turns;             // 0 before a launch and after it: blocks that are done; whether a value is not finite
  u64 n, seed, step;
  float residual_scale, parameter;
  u32 kind, dtype, rule, levels;
  u32 block;  // values that are added up together: the CPU's 4096, or qsgd's
  u32 pad;
};

// Of a message, whose place is a word's.
__device__ __forceinline__ u32 word_of(const u8* message, u32 at) {
  return *reinterpret_cast<const u32*>(message + at);
}

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

__device__ __forceinline__ void put_sums(const Quantise& p, u64 block, Sums own) {
  if (p.kind == kQsgd) {
    const double wide = __dsqrt_rn(own.positive);
    if (wide > kLargestFloat) own.largest = kInfinity;
    float norm = narrowed(wide);
    own.per_unit = static_cast<float>(static_cast<double>(p.levels) / wide);
    if (norm < kLeastScale) norm = own.per_unit = 0;
    store32(p.message + kHeaderBytes + 4 * block, __float_as_uint(norm));
  }
  if (own.largest >= kInfinity) atomicOr(p.turns + 1, 1u);
  p.sums[block] = own;
}

__device__ inline float mean_of(double sum, u64 count) {
  return count == 0 ? 0.0f : narrowed(sum / static_cast<double>(count));
}

inline constexpr u32 kChooseThreads = 256;
struct MeasureShared {
  Sums runs[kChooseThreads];
  u32 is_last;
};
inline constexpr u64 kRunBlocks = 64;  // that are added up before those of the next run (native/quantisers/sweep.hpp)

__device__ __forceinline__ void add_up(Sums& all, const Sums& part) {
  all.positive += part.positive;
  all.negative += part.negative;
  all.n_negative += part.n_negative;
  if (part.largest > all.largest) all.largest = part.largest;
}

// By one block of threads: the sums of n blocks, by runs and in their order; thread 0 has them.
__device__ inline Sums sum_of_blocks(const Sums* sums, u64 n_blocks) {
  Sums* const runs = shared_as<MeasureShared>().runs;
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

// Whether all values are finite, by one thread of the last block; and the word of that is 0 again.
__device__ __forceinline__ bool all_finite(const Quantise& p) {
  const bool found = p.turns[1] != 0;
  p.turns[1] = 0;
  return !found;
}

// By the last block: the header but for its checksum.
__device__ __forceinline__ void choose(const Quantise& p) {
  Sums all{0, 0, 0, 0, 0};
  if (p.kind != kQsgd) all = sum_of_blocks(p.sums, parts_of(p.n, p.block));
  if (threadIdx.x != 0) return;
  const bool is_finite = all_finite(p);
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

// Eight threads a block.
GW_KERNEL_BY_DTYPE(gw_quantised_measure, Quantise, dtype) {
  const u64 block = thread_number() / kLanes, begin = block * p.block;
  const u64 end = begin < p.n ? smaller(begin + p.block, p.n) : begin;
  Sums own = sums_of<16>(p, begin, end);
  if (threadIdx.x % kLanes == 0 && begin < p.n) put_sums(p, block, own);
  if (is_last_of(gridDim.x, p.turns, shared_as<MeasureShared>().is_last)) choose(p);
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

// A block's piece of a payload, which begins with `head_bytes` of norms, or of cuts and scales, and goes on with codes;
// or none, where there is not that much.
struct Piece {
  u64 begin, first_code;  // behind the header; of the codes
  u32 n_bytes;
  bool has_codes;
};
__device__ __forceinline__ Piece piece_of(u64 head_bytes, u64 payload) {
  const u64 n_head = parts_of(head_bytes, kPieceBytes), number = blockIdx.x;
  const bool has_codes = number >= n_head;
  const u64 own = (has_codes ? number - n_head : number) * kPieceBytes, begin = own + (has_codes ? head_bytes : 0);
  const u64 end = has_codes ? payload : head_bytes;
  return {begin, own, begin < end ? static_cast<u32>(smaller(kPieceBytes, end - begin)) : 0, has_codes};
}

inline constexpr u32 kPieceWords = kPieceBytes / 4;

// A word of codes; where its values begin, from those of the piece's first word on, and in the upper half how many they
// are; what they decode to, or are encoded by.
struct alignas(16) Unit {
  u32 word, place;
  float first, second;
};
struct QuantisedShared {
  ChecksumShared checksum;
  u32 is_last, pad[3];
  Unit units[kPieceWords];
};

// The same among all values, with the scales as they are sent.
struct Fields {
  u64 value;
  u32 n;
  float first, second;
};

// Values from one on.
__device__ __forceinline__ const void* from_value(const void* values, u32 dtype, u64 i) {
  return static_cast<const u8*>(values) + i * (dtype == kFloat32 ? 4 : 2);
}
__device__ __forceinline__ bool is_aligned(const void* values, u32 dtype) {
  return reinterpret_cast<u64>(values) % (dtype == kFloat32 ? 16 : 8) == 0;
}

// One-bit and two-bit: the threads of a word take four of its values each, and as many of some words behind it.
template <u32 kKind>
struct Fours {
  static constexpr u32 kThreads = (1u << word_shift(kKind)) / 4, kWords = kChecksumThreads / kThreads, kBatch = 4;
  static constexpr u32 kEach = kBatch * kWords;  // words of a block at once
  Unit units[kBatch];
  u32 place[kBatch], n[kBatch];  // of a thread's values; how many there are
  bool are_whole;                // all of them, at multiples of four

  __device__ __forceinline__ Fours(const Unit* all, u32 from, u32 n_words, bool is_aligned) : are_whole(is_aligned) {
    const u32 own = 4 * (threadIdx.x % kThreads);
    GW_UNROLLED for (u32 j = 0; j < kBatch; ++j) {
      units[j] = at(from, j) < n_words ? all[at(from, j)] : Unit{0, 0, 0, 0};
      const u32 end = units[j].place >> 16;
      place[j] = (units[j].place & 0xFFFFu) + own;
      n[j] = end > own ? end - own : 0;
      are_whole = are_whole && n[j] >= 4 && place[j] % 4 == 0;
    }
  }
  static __device__ __forceinline__ u32 at(u32 from, u32 j) { return from + j * kWords + threadIdx.x / kThreads; }
  static __device__ __forceinline__ u32 shift() { return threadIdx.x % kThreads * (32 / kThreads); }

  __device__ __forceinline__ void load(const void* values, u32 dtype, u32 (&bits)[kBatch][4]) const {
    if (!are_whole)
      GW_UNROLLED for (u32 j = 0; j < kBatch; ++j) GW_UNROLLED for (u32 q = 0; q < 4; ++q) bits[j][q] =
          q < n[j] ? bits_at(values, dtype, place[j] + q) : 0;
    else if (dtype == kFloat32)
      GW_UNROLLED for (u32 j = 0; j < kBatch; ++j) load_four<u32>(values, place[j], bits[j]);
    else
      GW_UNROLLED for (u32 j = 0; j < kBatch; ++j) load_four<u16>(values, place[j], bits[j]);
  }
  __device__ __forceinline__ void store(void* values, u32 dtype, const u32 (&bits)[kBatch][4]) const {
    if (!are_whole) {
      GW_UNROLLED for (u32 j = 0; j < kBatch; ++j) GW_UNROLLED for (u32 q = 0; q < 4; ++q) if (q < n[j])
          put_bits(values, dtype, place[j] + q, bits[j][q]);
    } else if (dtype == kFloat32) {
      GW_UNROLLED for (u32 j = 0; j < kBatch; ++j) store_four<u32>(values, place[j], bits[j]);
    } else {
      GW_UNROLLED for (u32 j = 0; j < kBatch; ++j) store_four<u16>(values, place[j], bits[j]);
    }
  }
};

// base: the first value of the piece. Not finite: a message that says nothing else, so the residual stays.
template <u32 kKind, bool kHasLevels>
__device__ __forceinline__ void pack_units(const Quantise& p, bool is_finite, u64 base, u32 n_words, const Unit* units,
                                           u32* words) {
  using Own = Fours<kKind>;
  const void* const values = from_value(p.values, p.dtype, base);
  const void* const residual = p.residual == nullptr ? nullptr : p.residual + base;
  float* const left_out = p.left_out == nullptr ? nullptr : p.left_out + base;
  const bool aligned = is_aligned(values, p.dtype) && is_aligned(residual, kFloat32) && is_aligned(left_out, kFloat32);
  const float to_residual = 1 / p.residual_scale;
  for (u32 from = 0; from < n_words; from += Own::kEach) {
    const Own own(units, from, n_words, aligned);
    u32 bits[Own::kBatch][4], carried[Own::kBatch][4]{}, left[Own::kBatch][4];
    own.load(values, p.dtype, bits);
    if (residual != nullptr) own.load(residual, kFloat32, carried);
    GW_UNROLLED for (u32 j = 0; j < Own::kBatch; ++j) {
      const Unit& unit = own.units[j];
      u32 word = 0;
      GW_UNROLLED for (u32 q = 0; q < 4; ++q) {
        const float term = term_of(p, bits[j][q], __uint_as_float(carried[j][q]));
        float decoded = 0;
        u32 code = term < 0;
        if (kKind == kOneBit) {
          decoded = term < 0 ? -unit.second : unit.first;
        } else {
          code = kHasLevels ? nearest_code(term, unit.first, unit.second) : code_of(term, unit.first);
          decoded = kHasLevels ? level_of(code, unit.first, unit.second) : decoded_of(term, unit.first);
        }
        word |= code << (kKind == kOneBit ? q : 2 * q);
        left[j][q] = is_finite ? __float_as_uint((term - decoded) * to_residual) : carried[j][q];
      }
      if (own.n[j] < 4) word &= (1u << (own.n[j] * (32 >> word_shift(kKind)))) - 1;
      word <<= Own::shift();
      GW_UNROLLED for (u32 lanes = 1; lanes < Own::kThreads; lanes *= 2) word |=
          __shfl_xor_sync(kWholeWarp, word, lanes);
      if (is_finite && Own::shift() == 0 && own.at(from, j) < n_words) words[own.at(from, j)] = word;
    }
    if (left_out != nullptr) own.store(left_out, kFloat32, left);
  }
}

// By a block that has written or read its piece, or none: the piece's checksum. Whether it is the last one, which then
// knows the message's.
template <class Parameters>
__device__ inline bool sums_up_message(const Parameters& p, u64 head_bytes, u64 payload, u32& sum) {
  QuantisedShared& shared = shared_as<QuantisedShared>();
  const Piece own = piece_of(head_bytes, payload);
  fill_checksum_table(shared.checksum);
  if (own.n_bytes != 0) {
    const u32 of_piece = checksum_of_piece(p.message + kHeaderBytes + own.begin, own.n_bytes, shared.checksum);
    if (threadIdx.x == 0) p.pieces[blockIdx.x] = of_piece;
  }
  if (!is_last_of(gridDim.x, p.turns, shared.is_last)) return false;
  sum = checksum_of_message(p.message, kSealedBytes / 4, head_bytes, payload - head_bytes, p.pieces, shared.checksum);
  return true;
}

__device__ inline void seal(const Quantise& p, u64 head_bytes, u64 payload) {
  u32 sum = 0;
  if (sums_up_message(p, head_bytes, payload, sum) && threadIdx.x == 0) store32(p.message + kSealedBytes, sum);
}

// Words of a piece of codes: fields_of(number of the word, among all).
template <class FieldsOf>
__device__ __forceinline__ u64 place_units(const Piece& own, Unit* units, FieldsOf fields_of) {
  const u64 base = fields_of(own.first_code / 4).value;
  for (u32 i = threadIdx.x; i < own.n_bytes / 4; i += blockDim.x) {
    const Fields fields = fields_of(own.first_code / 4 + i);
    units[i] = {0, static_cast<u32>(fields.value - base) | fields.n << 16, fields.first, fields.second};
  }
  __syncthreads();
  return base;
}

// Those of a message with one scale, or two, for all of its values.
__device__ __forceinline__ Fields plain_fields(u64 n, u32 kind, u64 word, float first, float second) {
  const u64 value = word << word_shift(kind);
  return {value, value < n ? static_cast<u32>(smaller(1u << word_shift(kind), n - value)) : 0, first, second};
}

// work(words of the kind, and with which levels)
#define GW_BY_KIND(kind, per_group, work, ...) \
  if (kind == kOneBit)                         \
    work<kOneBit, false>(__VA_ARGS__);         \
  else if (per_group == 2)                     \
    work<kTwoBit, true>(__VA_ARGS__);          \
  else                                         \
    work<kTwoBit, false>(__VA_ARGS__)

template <class FieldsOf>
__device__ __forceinline__ void pack_piece(const Quantise& p, u64 head_bytes, u64 n_words, u32 per_group,
                                           FieldsOf fields_of) {
  const bool is_finite = p.message[6] == 0;
  const u64 payload = head_bytes + 4 * n_words;
  const Piece own = piece_of(head_bytes, payload);
  if (own.has_codes && own.n_bytes != 0) {
    Unit* const units = shared_as<QuantisedShared>().units;
    const u64 base = place_units(own, units, fields_of);
    u32* const words = reinterpret_cast<u32*>(p.message + kHeaderBytes + own.begin);
    GW_BY_KIND(p.kind, per_group, pack_units, p, is_finite, base, own.n_bytes / 4, units, words);
  }
  __syncthreads();
  seal(p, is_finite ? head_bytes : 0, is_finite ? payload : 0);
}

GW_KERNEL_BY_DTYPE(gw_quantised_pack, Quantise, dtype) {
  const float first = __uint_as_float(word_of(p.message, 20)), second = __uint_as_float(word_of(p.message, 24));
  const auto fields_of = [&](u64 word) { return plain_fields(p.n, p.kind, word, first, second); };
  pack_piece(p, 0, payload_bytes(p.kind, p.n, p.block, p.levels) / 4, 1, fields_of);
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
  const u32 sign = are_nibbles ? 8 : 128, group_bytes = are_nibbles ? kGroup / 2 : kGroup;
  const u64 head_bytes = norm_bytes(p.kind, p.n, p.block), payload = payload_bytes(p.kind, p.n, p.block, p.levels);
  u8* const codes = p.message + kHeaderBytes + head_bytes;
  const Power block(p.block);
  const Piece piece = piece_of(head_bytes, payload);
  const u64 first_counter = piece.first_code / group_bytes * kLanes;
  const u32 n_counters = piece.has_codes ? piece.n_bytes / group_bytes * kLanes : 0;
  for (u64 counter = first_counter + threadIdx.x; counter < first_counter + n_counters; counter += blockDim.x) {
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
  __syncthreads();
  seal(p, is_finite ? head_bytes : 0, is_finite ? payload : 0);
}

struct Dequantise {
  const u8* message;  // whole, at a multiple of 4 bytes; `payload` bytes behind the header if it is finite, else none
  void* out;          // (n,) of `dtype`
  u32* pieces;
  u32* error;  // 0, or 7 less the first of Wrong
  u32* turns;  // as of an encoder
  u64 n, payload;
  float divisor;
  u32 kind, dtype, adds, levels, block;
};

__device__ __forceinline__ bool says_finite(const Dequantise& p) { return !(p.message[6] & 1); }

// By a block that has read its piece, or none; by the last one, what the format says, and whether others found a fault
// (more(), by all threads). Values become NaN where a message is not whole, so that nobody goes on with less.
template <class More>
__device__ __forceinline__ void check(const Dequantise& p, u32 version, u32 third, u32 fourth, u64 head_bytes,
                                      More more) {
  u32& is_wrong = shared_as<QuantisedShared>().is_last;
  const bool is_finite = says_finite(p);
  u32 sum = 0;
  if (!sums_up_message(p, is_finite ? head_bytes : 0, is_finite ? p.payload : 0, sum)) return;
  more();
  if (threadIdx.x == 0) {
    u32 words[8];
    GW_UNROLLED for (u32 q = 0; q < 8; ++q) words[q] = word_of(p.message, 4 * q);
    if (words[0] != kMagic) report(p.error, kHeader);
    if ((words[1] & 0xFF) != version) report(p.error, kVersion);
    if ((words[2] | static_cast<u64>(words[3]) << 32) != p.n) report(p.error, kElements);
    if (words[7] != sum) report(p.error, kChecksum);
    if ((words[1] >> 8 & ~0x100u) != (p.kind | third << 16) || words[4] != fourth) report(p.error, kField);
    is_wrong = atomicMax(p.error, 0u) > error_word(kCode);
  }
  __syncthreads();
  for (u64 i = threadIdx.x; is_wrong && i < p.n; i += blockDim.x) put_value(p.out, p.dtype, i, __uint_as_float(kNan));
}

// By all threads of the last block: what the header of one without groups says of its scales.
__device__ __forceinline__ void check_scales(const Dequantise& p) {
  if (threadIdx.x == 0 && (word_of(p.message, 20) >= kInfinity || word_of(p.message, 24) >= kInfinity))
    report(p.error, kField);
}

// Which of a word's n codes of three levels are 3, which no encoder writes: their lower bits.
__device__ __forceinline__ u32 wrong_codes(u32 word, u32 n) {
  return word & word >> 1 & 0x55555555u & (n < 16 ? (1u << 2 * n) - 1 : ~0u);
}

// What a unit's code of one or two bits stands for, divided. Of three levels `second` is zero.
template <u32 kKind, bool kHasLevels>
__device__ __forceinline__ float value_of(const Unit& unit, u32 code) {
  if (kKind == kOneBit) return code & 1 ? -unit.second : unit.first;
  if (kHasLevels) return level_of(code, unit.first, unit.second);
  const float positive = code & 1 ? unit.first : unit.second;
  return code & 2 ? code & 1 ? __uint_as_float(kNan) : -unit.first : positive;
}

template <u32 kKind, bool kHasLevels>
__device__ __forceinline__ void unpack_units(const Dequantise& p, u64 base, u32 n_words, const Unit* units) {
  using Own = Fours<kKind>;
  void* const out = const_cast<void*>(from_value(p.out, p.dtype, base));
  for (u32 from = 0; from < n_words; from += Own::kEach) {
    const Own own(units, from, n_words, is_aligned(out, p.dtype));
    u32 bits[Own::kBatch][4];
    if (p.adds) own.load(out, kFloat32, bits);
    GW_UNROLLED for (u32 j = 0; j < Own::kBatch; ++j) {
      const u32 word = own.units[j].word >> Own::shift();
      GW_UNROLLED for (u32 q = 0; q < 4; ++q) {
        const float value = value_of<kKind, kHasLevels>(own.units[j], word >> (kKind == kOneBit ? q : 2 * q));
        bits[j][q] = bits_of_value(p.dtype, p.adds ? added(__uint_as_float(bits[j][q]), value) : value);
      }
    }
    own.store(out, p.dtype, bits);
  }
}

template <class FieldsOf>
__device__ __forceinline__ void unpack_piece(const Dequantise& p, u64 head_bytes, u32 per_group, FieldsOf fields_of) {
  const Piece own = piece_of(head_bytes, p.payload);
  if (!own.has_codes || own.n_bytes == 0) return;
  Unit* const units = shared_as<QuantisedShared>().units;
  const bool is_finite = p.message[6] == 0, has_second = p.kind == kOneBit || per_group == 2;
  const u32* const words = reinterpret_cast<const u32*>(p.message + kHeaderBytes + own.begin);
  const u64 base = place_units(own, units, fields_of);
  for (u32 i = threadIdx.x; i < own.n_bytes / 4; i += blockDim.x) {  // each its own
    Unit& unit = units[i];
    const bool is_right = __float_as_uint(unit.first) < kInfinity && __float_as_uint(unit.second) < kInfinity;
    const float nan = __uint_as_float(kNan);
    unit.word = is_finite && is_right ? words[i] : 0;
    if (is_finite && (!is_right || (!has_second && wrong_codes(unit.word, unit.place >> 16)))) report(p.error, kCode);
    unit.first = is_finite && is_right ? divided(unit.first, p.divisor) : nan;
    unit.second = !is_finite || !is_right ? nan : has_second ? divided(unit.second, p.divisor) : 0;
  }
  __syncthreads();
  GW_BY_KIND(p.kind, per_group, unpack_units, p, base, own.n_bytes / 4, units);
}

GW_KERNEL_BY_DTYPE(gw_quantised_unpack, Dequantise, dtype) {
  const float first = __uint_as_float(word_of(p.message, 20)), second = __uint_as_float(word_of(p.message, 24));
  unpack_piece(p, 0, 1, [&](u64 word) { return plain_fields(p.n, p.kind, word, first, second); });
  check(p, kFormatVersion, p.levels, p.block, 0, [&] { check_scales(p); });
}

GW_KERNEL_BY_DTYPE(gw_quantised_unpack_levels, Dequantise, dtype) {
  const bool is_finite = p.message[6] == 0, are_nibbles = p.levels <= 7;
  const u64 head_bytes = norm_bytes(p.kind, p.n, p.block);
  const u32* const norms = reinterpret_cast<const u32*>(p.message + kHeaderBytes);
  const u8* const codes = p.message + kHeaderBytes + head_bytes;
  const Power block(p.block);
  const Piece own = piece_of(head_bytes, p.payload);
  const u64 first = are_nibbles ? 2 * own.first_code : own.first_code;
  const u64 n = !own.has_codes ? 0 : are_nibbles ? 2 * own.n_bytes : own.n_bytes;
  for (u64 i = first + threadIdx.x; i < smaller(first + n, p.n); i += blockDim.x) {
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
  check(p, kFormatVersion, p.levels, p.block, head_bytes, [&] { check_scales(p); });
}

// ---- scales by group

inline constexpr double kInnerLevel = 0.5675, kOuterLevel = 1.8930;  // native/quantisers/groups.cpp
inline constexpr u32 kGroupedVersion = 2, kCutBytes = 4, kScaleBytes = 2, kUpperInfinity = kInfinity >> 16;

// Values of one tensor, which begin with a group and with a word of their own.
struct Cut {
  u64 begin, first_group, first_word;
};

struct Grouping {
  const Cut* pieces;  // n_pieces, and one where all of them end
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

__device__ __forceinline__ const Cut& end_of(const Grouping& by) { return by.pieces[by.n_pieces]; }
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
__device__ __forceinline__ Fields fields_of(const Grouping& by, const u8* message, u32 kind, u64 word) {
  const u64 index = last_up_to(by.pieces, by.n_pieces, &Cut::first_word, word), end = by.pieces[index + 1].begin;
  const Cut piece = by.pieces[index];
  const u64 offset = (word - piece.first_word) << word_shift(kind), value = piece.begin + offset;
  const u64 group = piece.first_group + Power(by.values).parts(offset);
  const u16* const scales = reinterpret_cast<const u16*>(message + scales_at(by)) + group * by.per_group;
  const u32 n = static_cast<u32>(smaller(1u << word_shift(kind), end - value));
  return {value, n, widened(scales[0]), widened(scales[by.per_group - 1])};
}

__device__ __forceinline__ void put_scales(const QuantiseGroups& p, u64 group, const Sums& sums, u64 count) {
  if (sums.largest >= kInfinity) atomicOr(p.base.turns + 1, 1u);
  u16* const scales = reinterpret_cast<u16*>(p.base.message + scales_at(p.by)) + group * p.by.per_group;
  const double magnitude = exact_mean(sums.positive + sums.negative, count);
  if (p.by.per_group == 1) {
    const double factor = p.base.kind == kTwoBit ? static_cast<double>(p.base.parameter) : 1.0;
    scales[0] = upper_half(factor * magnitude);
  } else if (p.base.kind == kOneBit) {
    scales[0] = upper_half(exact_mean(sums.positive, count - sums.n_negative));
    scales[1] = upper_half(exact_mean(sums.negative, sums.n_negative));
  } else {
    scales[0] = upper_half(kInnerLevel * magnitude);
    scales[1] = upper_half(kOuterLevel * magnitude);
  }
}

// By the last block: all but scales, codes and checksum.
__device__ __forceinline__ void write_head(const QuantiseGroups& p) {
  u8* const message = p.base.message;
  const u64 n_groups = end_of(p.by).first_group;
  for (u64 i = threadIdx.x; i < cuts_of(p.by); i += blockDim.x)
    store32(message + kHeaderBytes + kCutBytes * (1 + i), static_cast<u32>(p.by.pieces[i + 1].begin));
  if (threadIdx.x != 0) return;
  const bool is_finite = all_finite(p.base);
  write_header(p.base, kGroupedVersion, is_finite, p.by.per_group, p.by.values);
  store32(message + kHeaderBytes, static_cast<u32>(cuts_of(p.by)));
  for (u64 at = scales_at(p.by) + n_groups * p.by.per_group * kScaleBytes; at < codes_at(p.by); ++at) message[at] = 0;
  *p.base.n_bytes = is_finite ? codes_at(p.by) + 4 * end_of(p.by).first_word : kHeaderBytes;
}

// Eight threads a group.
GW_KERNEL_BY_DTYPE(gw_grouped_measure, QuantiseGroups, base.dtype) {
  const u64 group = thread_number() / kLanes;
  u64 begin = 0, end = 0;
  if (group < end_of(p.by).first_group) {
    const u64 number = last_up_to(p.by.pieces, p.by.n_pieces, &Cut::first_group, group);
    begin = p.by.pieces[number].begin + (group - p.by.pieces[number].first_group) * p.by.values;
    end = smaller(begin + p.by.values, p.by.pieces[number + 1].begin);
  }
  const Sums sums = sums_of<8>(p.base, begin, end);
  if (threadIdx.x % kLanes == 0 && begin != end) put_scales(p, group, sums, end - begin);
  if (is_last_of(gridDim.x, p.base.turns, shared_as<MeasureShared>().is_last)) write_head(p);
}

GW_KERNEL_BY_DTYPE(gw_grouped_pack, QuantiseGroups, base.dtype) {
  const u8* const message = p.base.message;
  const auto fields_at = [&](u64 word) { return fields_of(p.by, message, p.base.kind, word); };
  pack_piece(p.base, codes_at(p.by) - kHeaderBytes, end_of(p.by).first_word, p.by.per_group, fields_at);
}

GW_KERNEL_BY_DTYPE(gw_grouped_unpack, DequantiseGroups, base.dtype) {
  const u8* const at = p.base.message;
  const u64 head_bytes = codes_at(p.by) - kHeaderBytes;
  unpack_piece(p.base, head_bytes, p.by.per_group, [&](u64 word) { return fields_of(p.by, at, p.base.kind, word); });
  check(p.base, kGroupedVersion, p.by.per_group, p.by.values, head_bytes, [&] {
    const bool is_finite = says_finite(p.base);
    for (u64 i = threadIdx.x; is_finite && i < cuts_of(p.by); i += blockDim.x)
      if (load32(at + kHeaderBytes + kCutBytes * (1 + i)) != p.by.pieces[i + 1].begin) report(p.base.error, kField);
    if (threadIdx.x == 0 && (load64(at + 20) != 0 || (is_finite && load32(at + kHeaderBytes) != cuts_of(p.by))))
      report(p.base.error, kField);
  });
}

}  // namespace gradwire::gpu
