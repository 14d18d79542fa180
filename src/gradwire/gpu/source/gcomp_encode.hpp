// GComp messages written: six launches (measure, place, pack, exponents, seal_chunks, seal); their grids and threads
// stand in gradwire/codecs/gcomp.py. The lengths of all chunks are known before the first of them is written. And the
// histogram of exponents, for the next Huffman table.
#pragma once

#include "gcomp.hpp"

namespace gradwire::gpu::gcomp {

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

__device__ inline Sent sent_at(const Encode& p, const KeepRule& rule, u64 i) {
  u32 word = __float_as_uint(value_at(p.values, p.dtype, i));
  const u32 importance = p.mode == kModePaper ? p.importance[i] : 0, before = word >> 23 & 255;
  if (p.rounds && before != 0)
    word = rounded(word, rule.kept(before, importance), static_cast<u32>(rule.highest_exponent));
  const u32 exponent = word >> 23 & 255;
  if (exponent == 0) return {0, 0, 0};
  const u32 kept = rule.kept(exponent, importance);
  return {exponent, kept, (word & 0x7FFFFFu) >> (23 - kept) | word >> 31 << kept};
}

__device__ __forceinline__ u32 length_of(u32 code) { return code >> 16 & 31; }

// A block a chunk: how long its segments will be; the exponents as they are sent.
GW_KERNEL(gw_gcomp_measure, Encode) {
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
  for (u32 i = threadIdx.x; i < n; i += blockDim.x) {
    const Sent sent = sent_at(p, rule, first + i);
    const u32 code = p.table->codes[sent.exponent];
    p.exponents[first + i] = static_cast<u8>(sent.exponent);
    if (i / quarter != stream) {
      atomicAdd(&shared.stream_bits[stream], stream_bits);
      stream = i / quarter;
      stream_bits = 0;
    }
    stream_bits += length_of(code);
    lane_bits += sent.n_bits();
    n_escapes += (code & kIsEscaped) != 0;
    if (sent.exponent == kNonfinite) atomicMax(&shared.is_nonfinite, 1u);
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

// The sum of what the threads up to this one give; `sums` then holds it for all of them.
__device__ inline u32 sum_up_to(u32 own, u32* sums) {
  __syncthreads();
  sums[threadIdx.x] = own;
  for (u32 distance = 1; distance < kEncodeThreads; distance *= 2) {
    __syncthreads();
    const u32 before = threadIdx.x >= distance ? sums[threadIdx.x - distance] : 0;
    __syncthreads();
    own += before;
    sums[threadIdx.x] = own;
  }
  __syncthreads();
  return own;
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
    const u32 n_bytes = own.mantissa_bytes + own.exponent_bytes, up_to = sum_up_to(n_bytes, shared.sums);
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

// Half a warp a chunk, a thread a lane: signs and mantissas. A ballot tells every lane where its full word goes.
GW_KERNEL(gw_gcomp_pack, Encode) {
  const u64 chunk = thread_number() / kLanes, first = chunk * kChunkValues;
  const u32 lane = own_lane(), n = chunk < chunks_of(p.n) ? values_in(p.n, chunk) : 0;
  const KeepRule rule = keep_rule(p.dtype, p.kept_bits);
  u8* at = n == 0 ? nullptr : p.message + chunk_header(p.message, chunk).offset;
  u32 bits = 0, n_bits = 0;
  for (u32 round = 0; round < rounds_of(p.n); ++round) {
    const u32 i = round * kLanes + lane;
    Sent sent{0, 0, 0};
    if (i < n) sent = sent_at(p, rule, first + i);
    const u64 joined = static_cast<u64>(bits) << sent.n_bits() | sent.field;
    n_bits += sent.n_bits();
    const bool is_full = n_bits >= 32;
    const u32 full = ballot_of_chunk(is_full);
    if (is_full) {
      n_bits -= 32;
      store32(at + 4 * __popc(full & ((1u << lane) - 1)), static_cast<u32>(joined >> n_bits));
    }
    bits = static_cast<u32>(joined) & ((1u << n_bits) - 1);
    at += 4 * __popc(full);
  }
  if (n != 0) store32(at + 4 * lane, bits | 1u << n_bits);
}

// A block a chunk, 64 threads a stream: the exponents, coded in shared memory; or as they are.
GW_KERNEL(gw_gcomp_exponents, Encode) {
  struct Shared {
    u32 sums[kEncodeThreads];
    u32 stage[kChunkValues / 4];
  };
  Shared& shared = shared_as<Shared>();
  const u64 chunk = blockIdx.x;
  const u32 n = values_in(p.n, chunk);
  const u8* const exponents = p.exponents + chunk * kChunkValues;
  const ChunkLengths& own = p.chunks[chunk];
  u8* const segment = p.message + chunk_header(p.message, chunk).exponents_at();
  if (own.is_raw) {
    for (u32 i = threadIdx.x; i < n; i += blockDim.x) segment[i] = exponents[i];
    return;
  }
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
  u32 escape = sum_up_to(n_escapes, shared.sums) - n_escapes;
  u32 bit = sum_up_to(n_bits, shared.sums) - n_bits;
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

// A block a chunk.
GW_KERNEL(gw_gcomp_seal_chunks, Encode) {
  ChecksumShared& shared = shared_as<ChecksumShared>();
  const u64 chunk = blockIdx.x;
  const ChunkHeader own = chunk_header(p.message, chunk);
  fill_checksum_table(shared);
  const u32 sum = checksum_of_both(p.message + own.offset, own.n_bytes(), p.message, 0, shared);
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
  struct Shared {
    u32 counts[kEncodeThreads / kWarp][256];
  };
  Shared& shared = shared_as<Shared>();
  for (u32 warp = 0; warp < kEncodeThreads / kWarp; ++warp) shared.counts[warp][threadIdx.x] = 0;
  __syncthreads();
  for (u64 i = thread_number(); i < p.n; i += thread_count())
    atomicAdd(&shared.counts[threadIdx.x / kWarp][__float_as_uint(value_at(p.values, p.dtype, i)) >> 23 & 255], 1u);
  __syncthreads();
  u64 sum = 0;
  for (u32 warp = 0; warp < kEncodeThreads / kWarp; ++warp) sum += shared.counts[warp][threadIdx.x];
  if (sum != 0) atomicAdd(&p.counts[threadIdx.x], sum);
}

}  // namespace gradwire::gpu::gcomp
