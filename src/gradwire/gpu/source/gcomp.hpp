// GComp messages of format 2 (docs/format.md#gcomp-format-2) on a device. To write one takes five launches (measure,
// place, pack, exponents, seal), to read it four (check, checksums, streams, unpack); their grids and
// threads stand in gradwire/codecs/gcomp.py.
#pragma once

#include "checksum.hpp"

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

// How many mantissa bits of a value travel (native/gcomp/kernels.hpp).
struct KeepRule {
  int mantissa_bits, cap, floor, lowest_exponent, highest_exponent;

  // `importance`: 0 but in mode paper.
  __device__ __forceinline__ u32 kept(u32 exponent, u32 importance) const {
    if (exponent == kNonfinite) return static_cast<u32>(mantissa_bits);
    const int most = static_cast<int>(exponent) - lowest_exponent;
    int kept = cap < most ? cap : most;
    if (importance != 0) {
      const int needed = static_cast<int>(exponent) - static_cast<int>(importance / 4) + mantissa_bits - 86;
      const int least = needed < floor ? floor : needed;
      if (least < kept) kept = least;
    }
    return static_cast<u32>(kept);
  }
  __device__ __forceinline__ bool has(u32 exponent) const {  // besides 0
    return exponent == kNonfinite ||
           (static_cast<int>(exponent) >= lowest_exponent && static_cast<int>(exponent) <= highest_exponent);
  }
};

// `kept_bits`: a header's, the cap and above its 5 bits the floor.
__device__ __forceinline__ KeepRule keep_rule(u32 dtype, u32 kept_bits) {
  const int mantissa_bits = dtype == kFloat32 ? 23 : dtype == kBfloat16 ? 7 : 10;
  const int cap = static_cast<int>(kept_bits & 31), floor = static_cast<int>(kept_bits >> 5);
  if (dtype == kFloat16) return {mantissa_bits, cap, floor, 103, 142};
  return {mantissa_bits, cap, floor, -23, 254};
}

// As `put_value`, but a NaN keeps its bits.
__device__ __forceinline__ void put_word(void* values, u32 dtype, u64 i, u32 word) {
  if (dtype == kFloat32 || (word & kMagnitude) <= kInfinity) return put_value(values, dtype, i, __uint_as_float(word));
  const u32 half = (word >> 16 & 0x8000u) | 0x7C00u | (word >> 13 & 0x3FFu);
  put_bits(values, dtype, i, dtype == kBfloat16 ? word >> 16 : half);
}

// ---- a block works on a chunk, and half a warp of it, a thread a lane, on a segment: 64 rounds of sixteen values

inline constexpr u32 kSegments = 16, kSegmentValues = kChunkValues / kSegments;

__device__ __forceinline__ u32 own_lane() { return threadIdx.x % kLanes; }
__device__ __forceinline__ u32 own_segment() { return threadIdx.x / kLanes; }

// What the sixteen threads of a segment say, the first one lowest.
__device__ __forceinline__ u32 ballot_of_segment(bool says) {
  return __ballot_sync(kWholeWarp, says) >> (threadIdx.x % kWarp / kLanes * kLanes) & 0xFFFFu;
}

// ---- writing: the lengths of all chunks are known before the first of them is written. And the histogram of
// exponents, for the next Huffman table.

inline constexpr u32 kBatch = 8;  // values that a thread has under way
inline constexpr u32 kEncodeThreads = kChecksumThreads;
inline constexpr u32 kStreamThreads = kEncodeThreads / kStreams;

struct ChunkLengths {
  u32 mantissa_bytes, exponent_bytes, importance_checksum;
  u32 is_raw, is_nonfinite, n_escapes;
  u32 stream_bytes[kStreams];
};

struct Encode {
  const void* values;    // (n,) of `dtype`
  const u8* importance;  // (n,) in mode paper, else null
  const Table* table;
  u8* message;           // whole, at a multiple of 4 bytes
  u64* n_bytes;          // of the message, for the host
  u8* exponents;         // work: a byte a value
  ChunkLengths* chunks;  // work
  u64 n, table_id;
  u32 dtype, mode, kept_bits, rounds;
};

// What is sent of a value; of an exponent of 0, nothing else.
struct Sent {
  u32 exponent, kept, field;
  __device__ __forceinline__ u32 n_bits() const { return exponent == 0 ? 0 : kept + 1; }
};

// To nearest, ties to even; what would become Inf is truncated instead.
__device__ __forceinline__ u32 rounded(u32 word, u32 kept, u32 highest_exponent) {
  const u32 dropped = 23 - kept;
  if (dropped == 0) return word;
  const u32 mask = ~((1u << dropped) - 1);
  const u32 nearest = (word + (1u << (dropped - 1)) - 1 + (word >> dropped & 1)) & mask;
  const bool overflows = (nearest >> 23 & 255) > highest_exponent && (word >> 23 & 255) <= highest_exponent;
  return overflows ? word & mask : nearest;
}

// Of values so far from each other, which lie before `end`; of what is behind it, nothing.
__device__ __forceinline__ void load_values(const Encode& p, u64 first, u64 stride, u64 end, u32 (&bits)[kBatch],
                                            u32 (&importance)[kBatch]) {
  load_bits(p.values, p.dtype, first, stride, end, bits);
  GW_UNROLLED for (u32 q = 0; q < kBatch; ++q) {
    const u64 i = first + q * stride;
    importance[q] = p.mode == kModePaper && i < end ? p.importance[i] : 0;
  }
}

__device__ inline Sent sent_of(const Encode& p, const KeepRule& rule, u32 bits, u32 importance) {
  u32 word = __float_as_uint(value_of_bits(p.dtype, bits));
  const u32 before = word >> 23 & 255;
  if (p.rounds && before != 0)
    word = rounded(word, rule.kept(before, importance), static_cast<u32>(rule.highest_exponent));
  const u32 exponent = word >> 23 & 255;
  if (exponent == 0) return {0, 0, 0};
  const u32 kept = rule.kept(exponent, importance);
  return {exponent, kept, (word & 0x7FFFFFu) >> (23 - kept) | word >> 31 << kept};
}

__device__ __forceinline__ u32 length_of(u32 code) { return code >> 16 & 31; }

// A block a chunk: how long its segments will be; the exponents as they are sent.
GW_KERNEL_BY_DTYPE(gw_gcomp_measure, Encode, dtype) {
  struct Shared {
    ChecksumShared checksum;
    u32 lane_bits[kLanes], stream_bits[kStreams], n_escapes, is_nonfinite;
  };
  Shared& shared = shared_as<Shared>();
  const u64 chunk = blockIdx.x, first = chunk * kChunkValues;
  const u32 n = values_in(p.n, chunk), quarter = stream_begin(n, 1);
  const KeepRule rule = keep_rule(p.dtype, p.kept_bits);
  if (threadIdx.x < kLanes) shared.lane_bits[threadIdx.x] = 0;
  if (threadIdx.x < kStreams) shared.stream_bits[threadIdx.x] = 0;
  if (threadIdx.x == 0) shared.n_escapes = shared.is_nonfinite = 0;
  fill_checksum_table(shared.checksum);
  u32 lane_bits = 0, n_escapes = 0, stream = 0, stream_bits = 0;
  for (u32 at = threadIdx.x; at < n; at += kBatch * kEncodeThreads) {
    u32 bits[kBatch], importance[kBatch];
    load_values(p, first + at, kEncodeThreads, first + n, bits, importance);
    GW_UNROLLED for (u32 q = 0; q < kBatch; ++q) {
      const u32 i = at + q * kEncodeThreads;
      if (i >= n) break;
      const Sent sent = sent_of(p, rule, bits[q], importance[q]);
      const u32 code = p.table->codes[sent.exponent];
      p.exponents[first + i] = static_cast<u8>(sent.exponent);
      const u32 own_stream = (i >= quarter) + (i >= 2 * quarter) + (i >= 3 * quarter);
      if (own_stream != stream) {
        atomicAdd(&shared.stream_bits[stream], stream_bits);
        stream = own_stream;
        stream_bits = 0;
      }
      stream_bits += length_of(code);
      lane_bits += sent.n_bits();
      n_escapes += (code & kIsEscaped) != 0;
      if (sent.exponent == kNonfinite) atomicMax(&shared.is_nonfinite, 1u);
    }
  }
  atomicAdd(&shared.stream_bits[stream], stream_bits);
  atomicAdd(&shared.lane_bits[own_lane()], lane_bits);
  atomicAdd(&shared.n_escapes, n_escapes);
  __syncthreads();
  u32 importance = 0;
  if (p.mode == kModePaper) importance = checksum_of_both(p.importance + first, n, p.importance, 0, shared.checksum);
  if (threadIdx.x != 0) return;
  ChunkLengths own{
      kTailBytes,  kSegmentHeaderBytes + shared.n_escapes, importance, 0, shared.is_nonfinite, shared.n_escapes,
      {0, 0, 0, 0}};
  for (u32 lane = 0; lane < kLanes; ++lane) own.mantissa_bytes += shared.lane_bits[lane] / 32 * 4;
  for (u32 j = 0; j < kStreams; ++j) {
    own.stream_bytes[j] = (shared.stream_bits[j] + 7) / 8;
    own.exponent_bytes += own.stream_bytes[j];
  }
  if (own.exponent_bytes >= n) {
    own.is_raw = 1;
    own.exponent_bytes = n;
  }
  p.chunks[chunk] = own;
}

// One block: where each chunk begins; all headers but for the checksums of segments and headers.
GW_KERNEL(gw_gcomp_place, Encode) {
  struct Shared {
    u32 sums[kEncodeThreads], is_nonfinite;
  };
  Shared& shared = shared_as<Shared>();
  if (threadIdx.x == 0) shared.is_nonfinite = 0;
  const u64 n_chunks = chunks_of(p.n);
  u64 begin = headers_of(p.n);
  for (u64 base = 0; base < n_chunks; base += kEncodeThreads) {
    const u64 chunk = base + threadIdx.x;
    ChunkLengths own{};
    if (chunk < n_chunks) own = p.chunks[chunk];
    const u32 n_bytes = own.mantissa_bytes + own.exponent_bytes,
              up_to = sum_up_to<kEncodeThreads>(n_bytes, shared.sums);
    if (own.is_nonfinite) atomicMax(&shared.is_nonfinite, 1u);
    if (chunk < n_chunks) {
      u8* const at = p.message + kBlockHeaderBytes + kChunkHeaderBytes * chunk;
      store64(at, begin + up_to - n_bytes);
      store32(at + 8, own.exponent_bytes);
      store32(at + 12, own.importance_checksum);
      store32(at + 16, 8 * own.mantissa_bytes);
      store32(at + 20, values_in(p.n, chunk));
      store32(at + 24, own.is_raw);
    }
    begin += shared.sums[kEncodeThreads - 1];
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  u8* const at = p.message;
  store32(at, kMagic);
  at[4] = kFormatVersion;
  at[5] = static_cast<u8>(p.dtype);
  at[6] = static_cast<u8>(p.mode);
  at[7] = static_cast<u8>(p.kept_bits);
  store64(at + 8, p.table_id);
  store64(at + 16, p.n);
  store64(at + 24, begin);
  store32(at + 32, static_cast<u32>(n_chunks));
  store32(at + 36, shared.is_nonfinite);
  store32(at + 40, 0);
  *p.n_bytes = begin;
}

// What is sent of a thread's values of a segment, from `first` on; of what is not before `end`, nothing.
template <class Work>
__device__ __forceinline__ void for_own_values(const Encode& p, u64 first, u64 end, Work work) {
  const KeepRule rule = keep_rule(p.dtype, p.kept_bits);
  for (u32 at = 0; at < kSegmentValues; at += kBatch * kLanes) {
    u32 raw[kBatch], importance[kBatch];
    load_values(p, first + at, kLanes, end, raw, importance);
    GW_UNROLLED for (u32 q = 0; q < kBatch; ++q)
        work(first + at + q * kLanes < end ? sent_of(p, rule, raw[q], importance[q]) : Sent{0, 0, 0});
  }
}

// A block a chunk: signs and mantissas. How many bits of a lane come before a segment says where its words go; what of
// them begins its first word, it learns last.
GW_KERNEL_BY_DTYPE(gw_gcomp_pack, Encode, dtype) {
  struct Shared {
    u32 n_bits[kSegments][kLanes];                           // of a segment
    u32 left[kSegments][kLanes], n_left[kSegments][kLanes];  // behind its last whole word
    bool is_behind_a_word[kSegments][kLanes];
  };
  Shared& shared = shared_as<Shared>();
  const u64 chunk = blockIdx.x, first = chunk * kChunkValues;
  const u32 lane = own_lane(), segment = own_segment(), n = values_in(p.n, chunk),
            begin = segment * kSegmentValues + lane;
  u32 n_own = 0, n_before = 0;
  for_own_values(p, first + begin, first + n, [&](const Sent& sent) { n_own += sent.n_bits(); });
  shared.n_bits[segment][lane] = n_own;
  __syncthreads();
  for (u32 before = 0; before < segment; ++before) n_before += shared.n_bits[before][lane];
  u8* at = p.message + chunk_header(p.message, chunk).offset + 4 * sum_of_lanes(n_before / 32, kLanes);
  u8* first_at = nullptr;
  u32 first_word = 0, bits = 0, n_bits = n_before % 32;
  for_own_values(p, first + begin, first + n, [&](const Sent& sent) {
    const u64 joined = static_cast<u64>(bits) << sent.n_bits() | sent.field;
    n_bits += sent.n_bits();
    const bool is_full = n_bits >= 32;
    const u32 full = ballot_of_segment(is_full);
    if (is_full) {
      n_bits -= 32;
      const u32 word = static_cast<u32>(joined >> n_bits);
      u8* const place = at + 4 * __popc(full & ((1u << lane) - 1));
      if (first_at == nullptr)
        first_at = place, first_word = word;
      else
        store32(place, word);
    }
    bits = static_cast<u32>(joined) & ((1u << n_bits) - 1);
    at += 4 * __popc(full);
  });
  shared.left[segment][lane] = bits;
  shared.n_left[segment][lane] = first_at == nullptr ? n_own : n_bits;
  shared.is_behind_a_word[segment][lane] = first_at != nullptr;
  __syncthreads();
  u32 carried = 0, n_carried = 0;
  for (u32 before = segment; before-- > 0;) {
    carried |= shared.left[before][lane] << n_carried;
    n_carried += shared.n_left[before][lane];
    if (shared.is_behind_a_word[before][lane]) break;
  }
  if (first_at != nullptr) store32(first_at, n_carried == 0 ? first_word : first_word | carried << (32 - n_carried));
  if (segment != kSegments - 1) return;
  if (first_at == nullptr) bits |= carried << n_own;
  store32(at + 4 * lane, bits | 1u << n_bits);
}

struct ExponentShared {
  u32 sums[kEncodeThreads];
  u32 stage[kChunkValues / 4];
  ChecksumShared checksum;
};

// By a block, 64 threads a stream: exponents coded in shared memory.
__device__ inline void code_exponents(const Encode& p, const ChunkLengths& own, const u8* exponents, u32 n, u8* segment,
                                      ExponentShared& shared) {
  for (u32 i = threadIdx.x; i < kChunkValues / 4; i += blockDim.x) shared.stage[i] = 0;
  const u32 stream = threadIdx.x / kStreamThreads, stop = stream_begin(n, stream + 1);
  const u32 each = static_cast<u32>(parts_of(stream_begin(n, 1), kStreamThreads));
  const u32 own_begin = stream_begin(n, stream) + threadIdx.x % kStreamThreads * each;
  const u32 begin = static_cast<u32>(smaller(own_begin, stop)), end = static_cast<u32>(smaller(own_begin + each, stop));
  u32 n_bits = 0, n_escapes = 0;
  for (u32 i = begin; i < end; ++i) {
    const u32 code = p.table->codes[exponents[i]];
    n_bits += length_of(code);
    n_escapes += (code & kIsEscaped) != 0;
  }
  u32 escape = sum_up_to<kEncodeThreads>(n_escapes, shared.sums) - n_escapes;
  u32 bit = sum_up_to<kEncodeThreads>(n_bits, shared.sums) - n_bits;
  if (stream > 0) bit -= shared.sums[stream * kStreamThreads - 1];
  u32 byte = kSegmentHeaderBytes;
  for (u32 j = 0; j < kStreams; ++j) {
    if (j == stream) bit += 8 * byte;
    byte += own.stream_bytes[j];
  }
  escape += byte;
  const auto put = [&](u32 at, u32 field) {  // of up to 16 bits
    const u64 placed = static_cast<u64>(field) << at % 32;
    atomicOr(&shared.stage[at / 32], static_cast<u32>(placed));
    if (placed >> 32 != 0) atomicOr(&shared.stage[at / 32 + 1], static_cast<u32>(placed >> 32));
  };
  if (threadIdx.x <= kStreams)
    put(16 * threadIdx.x, threadIdx.x < kStreams ? own.stream_bytes[threadIdx.x] : own.n_escapes);
  for (u32 i = begin; i < end; ++i) {
    const u32 code = p.table->codes[exponents[i]];
    put(bit, code & 0xFFFFu);
    bit += length_of(code);
    if (code & kIsEscaped) put(8 * escape++, exponents[i]);
  }
  __syncthreads();
  for (u32 i = threadIdx.x; i < own.exponent_bytes; i += blockDim.x)
    segment[i] = static_cast<u8>(shared.stage[i / 4] >> 8 * (i % 4));
}

// A block a chunk: the exponents, coded or as they are, and the checksum of all of it.
GW_KERNEL(gw_gcomp_exponents, Encode) {
  ExponentShared& shared = shared_as<ExponentShared>();
  const u64 chunk = blockIdx.x;
  const u32 n = values_in(p.n, chunk);
  const ChunkHeader header = chunk_header(p.message, chunk);
  const ChunkLengths& own = p.chunks[chunk];
  const u8* const exponents = p.exponents + chunk * kChunkValues;
  u8* const segment = p.message + header.exponents_at();
  if (own.is_raw)
    for (u32 i = threadIdx.x; i < n; i += blockDim.x) segment[i] = exponents[i];
  else
    code_exponents(p, own, exponents, n, segment, shared);
  fill_checksum_table(shared.checksum);
  const u32 sum = checksum_of_both(p.message + header.offset, header.n_bytes(), p.message, 0, shared.checksum);
  if (threadIdx.x == 0) store32(p.message + kBlockHeaderBytes + kChunkHeaderBytes * chunk + 28, sum);
}

// One block.
GW_KERNEL(gw_gcomp_seal, Encode) {
  ChecksumShared& shared = shared_as<ChecksumShared>();
  fill_checksum_table(shared);
  const u32 sum = checksum_of_both(p.message, kSealedBytes, p.message + kBlockHeaderBytes,
                                   headers_of(p.n) - kBlockHeaderBytes, shared);
  if (threadIdx.x == 0) store32(p.message + kSealedBytes, sum);
}

struct Count {
  const void* values;  // (n,) of `dtype`
  u64* counts;         // (256,): added to
  u64 n;
  u32 dtype, pad;
};

// A row of counts a warp, so that fewer threads meet at one.
GW_KERNEL(gw_gcomp_count, Count) {
  auto& counts = shared_as<u32[kEncodeThreads / kWarp][256]>();
  for (u32 warp = 0; warp < kEncodeThreads / kWarp; ++warp) counts[warp][threadIdx.x] = 0;
  __syncthreads();
  for (u64 i = thread_number(); i < p.n; i += thread_count())
    atomicAdd(&counts[threadIdx.x / kWarp][__float_as_uint(value_at(p.values, p.dtype, i)) >> 23 & 255], 1u);
  __syncthreads();
  u64 sum = 0;
  for (u32 warp = 0; warp < kEncodeThreads / kWarp; ++warp) sum += counts[warp][threadIdx.x];
  if (sum != 0) atomicAdd(&p.counts[threadIdx.x], sum);
}

// ---- reading: whatever a message says, nothing outside it is read. Every access behind its headers goes through
// `word_at`.

struct Decode {
  const u8* message;     // at a multiple of 4 bytes
  const u8* importance;  // (n,) in mode paper, else null
  const Table* table;
  void* out;               // (n,) of `dtype`
  u8* exponents;           // work: a byte a value, whole chunks, at a multiple of 4 bytes
  u8* stream_is_bad;       // work: one a stream
  u32* are_headers_right;  // work
  u32* error;              // 0; or 7 less the first of Wrong; or kOtherImportance
  u64 n, n_bytes, table_id;
  float divisor;
  u32 dtype, mode, kept_bits, adds;
  u32 placeholder;  // what an escape's code decodes to; 256 where the table has none
};

inline constexpr u32 kOtherImportance = kCode + 1;

// A word of the message; zeros past its end.
__device__ __noinline__ u32 last_word(const u8* message, u64 n_bytes, u64 i) {
  u32 word = 0;
  for (u64 byte = 4 * i; byte < n_bytes; ++byte) word |= static_cast<u32>(message[byte]) << 8 * (byte - 4 * i);
  return word;
}
__device__ __forceinline__ u32 word_at(const Decode& p, u64 i) {
  if (i < p.n_bytes / 4) return reinterpret_cast<const u32*>(p.message)[i];
  return last_word(p.message, p.n_bytes, i);
}

// The four bytes from any one on.
__device__ __forceinline__ u32 bytes_at(const Decode& p, u64 byte) {
  const u64 both = word_at(p, byte / 4) | static_cast<u64>(word_at(p, byte / 4 + 1)) << 32;
  return static_cast<u32>(both >> byte % 4 * 8);
}

// No kernel but the first two writes more than this, so all threads of the others see the same.
__device__ __forceinline__ bool is_whole(const Decode& p) { return *p.error <= error_word(kCode); }

// One block: what the other kernels rely on. Every chunk has the values and lengths that it can have, and begins where
// the one before ends.
GW_KERNEL(gw_gcomp_check, Decode) {
  struct Shared {
    ChecksumShared checksum;
    u32 is_wrong;
  };
  Shared& shared = shared_as<Shared>();
  const auto wrong = [&](Wrong what) {
    report(p.error, what);
    shared.is_wrong = 1;
  };
  if (threadIdx.x == 0) shared.is_wrong = 0;
  fill_checksum_table(shared.checksum);
  const u8* const at = p.message;
  const u64 n_chunks = chunks_of(p.n), headers = headers_of(p.n);
  const bool has_headers = p.n_bytes >= headers;  // if not, there is nothing to look at
  u32 sum = 0;
  if (has_headers)
    sum = checksum_of_both(at, kSealedBytes, at + kBlockHeaderBytes, headers - kBlockHeaderBytes, shared.checksum);
  if (threadIdx.x == 0 && !has_headers) wrong(kHeader);
  if (threadIdx.x == 0 && has_headers) {
    if (load32(at) != kMagic) wrong(kHeader);
    if (at[4] != kFormatVersion) wrong(kVersion);
    if (load64(at + 16) != p.n || load64(at + 24) != p.n_bytes) wrong(kElements);
    if (load32(at + kSealedBytes) != sum) wrong(kChecksum);
    if (at[5] != p.dtype || at[6] != p.mode || at[7] != p.kept_bits || load64(at + 8) != p.table_id ||
        load32(at + 32) != n_chunks || load32(at + 36) > 1 || load32(at + 40) != 0)
      wrong(kField);
  }
  for (u64 chunk = threadIdx.x; has_headers && chunk < n_chunks; chunk += blockDim.x) {
    const ChunkHeader own = chunk_header(at, chunk);
    const u32 n = values_in(p.n, chunk);
    const u64 next = chunk + 1 < n_chunks ? chunk_header(at, chunk + 1).offset : p.n_bytes;
    const u64 most_bits = n * static_cast<u64>(1 + keep_rule(p.dtype, 0).mantissa_bits) + 8 * kTailBytes;
    if (own.n_values != n || own.exponent_bytes > n || own.flags > 1 || (own.is_raw() && own.exponent_bytes != n) ||
        (p.mode != kModePaper && own.importance_checksum != 0) || own.mantissa_bits % 32 != 0 ||
        own.mantissa_bits < 8 * kTailBytes || own.mantissa_bits > most_bits || (chunk == 0 && own.offset != headers) ||
        next != own.offset + own.n_bytes())
      wrong(kField);
  }
  if (threadIdx.x == 0 && n_chunks == 0 && p.n_bytes != headers) wrong(kField);
  __syncthreads();
  if (threadIdx.x == 0) *p.are_headers_right = shared.is_wrong == 0;
}

// A block a chunk.
GW_KERNEL(gw_gcomp_checksums, Decode) {
  ChecksumShared& shared = shared_as<ChecksumShared>();
  if (*p.are_headers_right == 0) return;
  const u64 chunk = blockIdx.x;
  const ChunkHeader own = chunk_header(p.message, chunk);
  fill_checksum_table(shared);
  const u32 sum = checksum_of_both(p.message + own.offset, own.n_bytes(), p.message, 0, shared);
  if (threadIdx.x == 0 && sum != own.checksum) report(p.error, kChecksum);
  if (p.mode != kModePaper) return;
  const u32 importance = checksum_of_both(p.importance + chunk * kChunkValues, own.n_values, p.importance, 0, shared);
  if (threadIdx.x == 0 && importance != own.importance_checksum) atomicMax(p.error, kOtherImportance);
}

// By one thread: the exponents of a stream to where its values' are; whether its bits are what its bytes hold. Every 32
// of them it reads the words that the next 32 can take at most into its own places in shared memory.
inline constexpr u32 kStreamStep = 32, kStepWords = (kStreamStep * kLookUpBits + 31) / 32 + 1, kPlaces = 32;
static_assert(2 * kStepWords <= kPlaces);

struct StreamShared {
  u16 look_up[kLookUpEntries];
  u32 words[kPlaces][kWarp];
};

__device__ __forceinline__ bool decode_stream(const Decode& p, StreamShared& shared, const ChunkHeader& own, u32 stream,
                                              u8* out) {
  if (own.exponent_bytes < kSegmentHeaderBytes) return false;
  const u64 segment = own.exponents_at();
  u64 begin = segment + kSegmentHeaderBytes, end = begin;
  u64 n_stream = 0;
  for (u32 j = 0; j <= kStreams; ++j) {  // the last one's: escapes
    const u32 n_bytes = bytes_at(p, segment + 2 * j) & 0xFFFFu;
    end += n_bytes;
    if (j < stream) begin += n_bytes;
    if (j == stream) n_stream = n_bytes;
  }
  if (end != segment + own.exponent_bytes) return false;
  const u32 first = stream_begin(own.n_values, stream), last = stream_begin(own.n_values, stream + 1);
  const u32 lane = threadIdx.x % kWarp, n_first = 32 - 8 * static_cast<u32>(begin % 4);
  u64 window = word_at(p, begin / 4) >> 8 * (begin % 4), next = begin / 4 + 1;
  u32 n_window = n_first, n_taken = 0, n_there = 0, read[kStepWords];
  const auto read_words = [&] {
    GW_UNROLLED for (u32 q = 0; q < kStepWords; ++q) read[q] = word_at(p, next + q);
    next += kStepWords;
  };
  const auto keep_words = [&] {
    GW_UNROLLED for (u32 q = 0; q < kStepWords; ++q) shared.words[(n_there + q) % kPlaces][lane] = read[q];
    n_there += kStepWords;
  };
  const auto exponent = [&](bool may_need_bits) {
    if (may_need_bits) {
      const u32 word = shared.words[n_taken % kPlaces][lane], takes = n_window <= 32;
      window |= static_cast<u64>(takes ? word : 0) << (n_window & 63);
      n_window += 32 * takes;
      n_taken += takes;
    }
    const u32 entry = shared.look_up[window & (kLookUpEntries - 1)], n_bits = entry & 0xFF;
    window >>= n_bits;
    n_window -= n_bits;
    return entry >> 8;
  };
  read_words();
  for (u32 at = first; at < last; at += kStreamStep) {
    if (n_there - n_taken < kStepWords) {
      keep_words();
      read_words();
    }
    if (at % 4 == 0 && at + kStreamStep <= last) {
      for (u32 i = at; i < at + kStreamStep; i += 16) {
        u32 words[4];
        GW_UNROLLED for (u32 w = 0; w < 4; ++w) {
          words[w] = 0;
          GW_UNROLLED for (u32 j = 0; j < 4; ++j) words[w] |= exponent(j % 2 == 0) << 8 * j;
        }
        if (reinterpret_cast<u64>(out + i) % 16 == 0)
          store_four<u32>(out + i, 0, words);
        else
          for (u32 w = 0; w < 4; ++w) store32(out + i + 4 * w, words[w]);
      }
    } else {
      for (u32 i = at; i < last && i < at + kStreamStep; ++i) out[i] = static_cast<u8>(exponent(true));
    }
  }
  return parts_of(n_first + 32 * n_taken - n_window, 8) == n_stream;
}

// A thread a stream.
GW_KERNEL(gw_gcomp_streams, Decode) {
  StreamShared& shared = shared_as<StreamShared>();
  for (u32 i = threadIdx.x; i < kLookUpEntries; i += blockDim.x) shared.look_up[i] = p.table->look_up[i];
  __syncthreads();
  const u64 number = thread_number(), chunk = number / kStreams;
  if (!is_whole(p) || chunk >= chunks_of(p.n)) return;
  const ChunkHeader own = chunk_header(p.message, chunk);
  const bool is_right =
      own.is_raw() || decode_stream(p, shared, own, number % kStreams, p.exponents + chunk * kChunkValues);
  p.stream_is_bad[number] = !is_right;
}

__device__ __forceinline__ void put_decoded(const Decode& p, u64 i, u32 word, u32 sum) {
  if (!p.adds && p.divisor == 1) return put_word(p.out, p.dtype, i, word);
  const float value = __uint_as_float(word);
  const float result = p.adds ? added(value, value_of_bits(p.dtype, sum)) : divided(value, p.divisor);
  put_value(p.out, p.dtype, i, magnitude_bits(result) > kInfinity ? __uint_as_float(kNan) : result);
}

struct UnpackShared {
  u8 exponents[kChunkValues];
  u32 n_bits[kSegments][kLanes];  // of a segment
  u32 words[kSegments][kLanes];   // the last one that it takes
  bool takes[kSegments][kLanes];
  u32 n_escapes[kSegments], is_bad;
};

// By a block: the exponents of a chunk, with those that have no code of their own. Returns whether there are as many of
// them as it says; the thread's own values need no barrier.
__device__ __forceinline__ bool read_exponents(const Decode& p, const ChunkHeader& own, u64 chunk,
                                               UnpackShared& shared) {
  const u32 n = own.n_values, begin = own_segment() * kSegmentValues + own_lane();
  for (u32 i = threadIdx.x; i < n; i += blockDim.x)
    shared.exponents[i] = own.is_raw() ? p.message[own.exponents_at() + i] : p.exponents[chunk * kChunkValues + i];
  __syncthreads();
  if (own.is_raw()) return true;
  u32 n_own = 0, n_after = 0, n_all = 0;
  for (u32 i = begin; i < begin + kSegmentValues && i < n; i += kLanes) n_own += shared.exponents[i] == p.placeholder;
  n_own = sum_of_lanes(n_own, kLanes);
  if (own_lane() == 0) shared.n_escapes[own_segment()] = n_own;
  __syncthreads();
  for (u32 segment = 0; segment < kSegments; ++segment) {
    n_all += shared.n_escapes[segment];
    if (segment > own_segment()) n_after += shared.n_escapes[segment];
  }
  if (n_all != (bytes_at(p, own.exponents_at() + 2 * kStreams) & 0xFFFFu)) return false;
  if (n_all == 0) return true;
  const u64 escapes_end = own.offset + own.n_bytes();
  bool is_right = true;
  for (u32 round = kSegmentValues / kLanes; round-- > 0;) {
    const u32 i = begin + round * kLanes;
    const bool is_escaped = i < n && shared.exponents[i] == p.placeholder;
    const u32 escaped = ballot_of_segment(is_escaped);
    if (is_escaped) {
      const u32 exponent = bytes_at(p, escapes_end - n_after - __popc(escaped >> own_lane())) & 0xFF;
      is_right &= (p.table->codes[exponent] & kIsEscaped) != 0;
      shared.exponents[i] = static_cast<u8>(exponent);
    }
    n_after += __popc(escaped);
  }
  return is_right;
}

// A block a chunk, whose lanes are read from the last value to the first. How many bits a lane takes follows from the
// exponents, so a ballot tells every lane which word is its own. What a segment needs of a word that a later one has
// taken, it does last.
GW_KERNEL_BY_DTYPE(gw_gcomp_unpack, Decode, dtype) {
  UnpackShared& shared = shared_as<UnpackShared>();
  const u64 chunk = blockIdx.x, first = chunk * kChunkValues;
  const u32 lane = own_lane(), segment = own_segment(), n = values_in(p.n, chunk),
            begin = segment * kSegmentValues + lane;
  const auto give_up = [&] {
    for (u32 i = threadIdx.x; i < n; i += blockDim.x) put_value(p.out, p.dtype, first + i, __uint_as_float(kNan));
  };
  if (!is_whole(p)) return give_up();
  const ChunkHeader own = chunk_header(p.message, chunk);
  const KeepRule rule = keep_rule(p.dtype, p.kept_bits);
  if (threadIdx.x == 0) shared.is_bad = 0;
  bool is_bad = !read_exponents(p, own, chunk, shared);
  is_bad |= segment < kStreams && lane == 0 && p.stream_is_bad[chunk * kStreams + segment] != 0;
  const auto importance_of = [&](u32 i) -> u32 { return p.mode == kModePaper ? p.importance[first + i] : 0; };

  u32 n_own = 0, n_after = 0;
  for (u32 i = begin; i < begin + kSegmentValues && i < n; i += kLanes) {
    u32 exponent = shared.exponents[i];
    if (exponent == 0) continue;
    if (!rule.has(exponent)) {
      is_bad = true;
      shared.exponents[i] = 0;
    } else {
      n_own += rule.kept(exponent, importance_of(i)) + 1;
    }
  }
  shared.n_bits[segment][lane] = n_own;
  __syncthreads();
  for (u32 after = segment + 1; after < kSegments; ++after) n_after += shared.n_bits[after][lane];
  const u32 last = bytes_at(p, own.exponents_at() - kTailBytes + 4 * lane), n_last = last == 0 ? 0 : 31 - __clz(last);
  is_bad |= last == 0;
  const u32 n_taken = n_after > n_last ? (n_after - n_last + 31) / 32 : 0, n_begin = n_last + 32 * n_taken - n_after;
  u32 n_words = (own.mantissa_bits - 8 * kTailBytes) / 32 - sum_of_lanes(n_taken, kLanes), n_bits = n_begin;
  u32 bits = n_taken != 0 || last == 0 ? 0 : (last ^ 1u << n_last) >> n_after;

  const auto put = [&](u32 i, u32 exponent, u32 kept, u32 field, u32 there) {
    const u32 mantissa = field & ((1u << kept) - 1), sign = field >> kept << 31;
    put_decoded(p, first + i, exponent == 0 ? 0 : sign | exponent << 23 | mantissa << (23 - kept), there);
  };
  bool waits = n_taken != 0;  // for a word that a later segment has taken
  u32 first_word = 0, last_word = 0, n_waiting = kSegmentValues / kLanes;
  bool has_taken = false;
  for (u32 batch = kSegmentValues / kLanes / kBatch; batch-- > 0;) {
    u32 importance[kBatch], there[kBatch];
    GW_UNROLLED for (u32 q = 0; q < kBatch; ++q) {
      const u32 i = begin + (batch * kBatch + q) * kLanes;
      importance[q] = i < n ? importance_of(i) : 0;
      there[q] = p.adds && i < n ? bits_at(p.out, p.dtype, first + i) : 0;
    }
    GW_UNROLLED for (u32 q = kBatch; q-- > 0;) {
      const u32 round = batch * kBatch + q, i = begin + round * kLanes, exponent = i < n ? shared.exponents[i] : 0;
      const u32 kept = exponent == 0 ? 0 : rule.kept(exponent, importance[q]), n_field = exponent == 0 ? 0 : kept + 1;
      const bool takes = n_bits < n_field;
      const u32 taking = ballot_of_segment(takes);
      u64 joined = bits;
      if (takes) {
        last_word = bytes_at(p, own.offset + 4ull * (n_words - __popc(taking >> lane)));
        if (!has_taken) first_word = last_word;
        has_taken = true;
        joined |= static_cast<u64>(last_word) << n_bits;
        n_bits += 32;
      }
      n_words -= __popc(taking);
      bits = static_cast<u32>(joined >> n_field);
      n_bits -= n_field;
      if (waits) n_waiting = round;
      if (!waits && i < n) put(i, exponent, kept, static_cast<u32>(joined) & ((1u << n_field) - 1), there[q]);
      waits = waits && !takes;
    }
  }
  if (segment == 0) is_bad |= n_words != 0 || n_bits != 0;
  shared.words[segment][lane] = last_word;
  shared.takes[segment][lane] = has_taken;
  if (is_bad) atomicOr(&shared.is_bad, 1u);
  __syncthreads();
  if (shared.is_bad != 0) {
    if (threadIdx.x == 0) report(p.error, kCode);
    return give_up();
  }
  if (n_taken == 0) return;
  u32 after = segment + 1;
  while (!shared.takes[after][lane]) ++after;
  u64 joined = n_begin == 0 ? 0 : shared.words[after][lane] >> (32 - n_begin);
  joined |= static_cast<u64>(first_word) << n_begin;
  for (u32 round = kSegmentValues / kLanes; round-- > n_waiting;) {
    const u32 i = begin + round * kLanes, exponent = i < n ? shared.exponents[i] : 0;
    if (i >= n) continue;
    const u32 kept = exponent == 0 ? 0 : rule.kept(exponent, importance_of(i)), n_field = exponent == 0 ? 0 : kept + 1;
    put(i, exponent, kept, static_cast<u32>(joined) & ((1u << n_field) - 1),
        p.adds ? bits_at(p.out, p.dtype, first + i) : 0);
    joined >>= n_field;
  }
}

}  // namespace gradwire::gpu::gcomp
