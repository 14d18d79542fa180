// GComp messages read: four launches (check, checksums, streams, unpack); their grids and threads stand in
// gradwire/codecs/gcomp.py. Whatever a message says, nothing outside it is read: every access behind its headers goes
// through `word_at`.
#pragma once

#include "gcomp.hpp"

namespace gradwire::gpu::gcomp {

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
__device__ __forceinline__ u32 word_at(const Decode& p, u64 i) {
  if (i < p.n_bytes / 4) return reinterpret_cast<const u32*>(p.message)[i];
  u32 word = 0;
  if (i == p.n_bytes / 4)
    for (u32 byte = 0; byte < p.n_bytes % 4; ++byte) word |= static_cast<u32>(p.message[4 * i + byte]) << 8 * byte;
  return word;
}

// The four bytes from any one on.
__device__ __forceinline__ u32 bytes_at(const Decode& p, u64 byte) {
  const u32 word = word_at(p, byte / 4), past = static_cast<u32>(byte % 4) * 8;
  return past == 0 ? word : word >> past | word_at(p, byte / 4 + 1) << (32 - past);
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

// The exponents of a stream to where its values' are; whether its bits are what its bytes hold.
__device__ inline bool decode_stream(const Decode& p, const u16* look_up, const ChunkHeader& own, u32 stream, u8* out) {
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
  u64 word = begin / 4, window = word_at(p, word) >> 8 * (begin % 4);
  u32 n_window = 32 - 8 * static_cast<u32>(begin % 4), n_used = 0, four = 0;
  for (u32 i = first; i < last; ++i) {
    if (n_window < kLookUpBits) {
      window |= static_cast<u64>(word_at(p, ++word)) << n_window;
      n_window += 32;
    }
    const u32 entry = look_up[window & (kLookUpEntries - 1)], n_bits = entry & 0xFF;
    window >>= n_bits;
    n_window -= n_bits;
    n_used += n_bits;
    four |= (entry >> 8) << 8 * (i % 4);
    if (i % 4 != 3 && i + 1 != last) continue;
    const u32 group = i - i % 4;
    if (i % 4 == 3 && group >= first)
      *reinterpret_cast<u32*>(out + group) = four;
    else  // a word that another stream's values share
      for (u32 j = group > first ? group : first; j <= i; ++j) out[j] = static_cast<u8>(four >> 8 * (j % 4));
    four = 0;
  }
  return parts_of(n_used, 8) == n_stream;
}

// A thread a stream.
GW_KERNEL(gw_gcomp_streams, Decode) {
  struct Shared {
    u16 look_up[kLookUpEntries];
  };
  Shared& shared = shared_as<Shared>();
  for (u32 i = threadIdx.x; i < kLookUpEntries; i += blockDim.x) shared.look_up[i] = p.table->look_up[i];
  __syncthreads();
  const u64 number = thread_number(), chunk = number / kStreams;
  if (!is_whole(p) || chunk >= chunks_of(p.n)) return;
  const ChunkHeader own = chunk_header(p.message, chunk);
  const bool is_right =
      own.is_raw() || decode_stream(p, shared.look_up, own, number % kStreams, p.exponents + chunk * kChunkValues);
  p.stream_is_bad[number] = !is_right;
}

__device__ __forceinline__ void put_decoded(const Decode& p, u64 i, u32 word) {
  if (!p.adds && p.divisor == 1) return put_word(p.out, p.dtype, i, word);
  const float value = __uint_as_float(word);
  const float result = p.adds ? added(value, value_at(p.out, p.dtype, i)) : value / p.divisor;
  put_value(p.out, p.dtype, i, magnitude_bits(result) > kInfinity ? __uint_as_float(kNan) : result);
}

// Half a warp a chunk, a thread a lane: from the last value to the first. How many bits a lane takes follows from the
// exponents, so a ballot tells every lane which word is its own.
GW_KERNEL(gw_gcomp_unpack, Decode) {
  const u64 n_chunks = chunks_of(p.n), chunk = thread_number() / kLanes, first = chunk * kChunkValues;
  const u32 lane = own_lane(), n = chunk < n_chunks ? values_in(p.n, chunk) : 0;
  if (!is_whole(p)) {
    for (u32 i = lane; i < n; i += kLanes) put_value(p.out, p.dtype, first + i, __uint_as_float(kNan));
    return;
  }
  ChunkHeader own{0, 0, 0, 0, 0, 0, 0};
  u32 bits = 0, n_bits = 0, n_words = 0, n_escapes = 0;
  bool is_bad = false;
  if (n != 0) {
    own = chunk_header(p.message, chunk);
    const u32 last = bytes_at(p, own.exponents_at() - kTailBytes + 4 * lane);
    n_bits = last == 0 ? 0 : 31 - __clz(last);
    bits = last == 0 ? 0 : last ^ 1u << n_bits;
    is_bad = last == 0 || (lane < kStreams && p.stream_is_bad[chunk * kStreams + lane] != 0);
    n_words = (own.mantissa_bits - 8 * kTailBytes) / 32;
    if (!own.is_raw()) n_escapes = bytes_at(p, own.exponents_at() + 2 * kStreams) & 0xFFFFu;
  }
  const u64 escapes = own.offset + own.n_bytes() - n_escapes;
  const KeepRule rule = keep_rule(p.dtype, p.kept_bits);
  for (u32 round = rounds_of(p.n); round-- > 0;) {
    const u32 i = round * kLanes + lane;
    u32 exponent = 0;
    if (i < n) exponent = own.is_raw() ? bytes_at(p, own.exponents_at() + i) & 0xFF : p.exponents[first + i];
    const bool is_escaped = i < n && !own.is_raw() && exponent == p.placeholder;
    const u32 escaped = ballot_of_chunk(is_escaped);
    if (is_escaped) {
      const u32 place = n_escapes - __popc(escaped >> lane);  // its own is the last of those
      exponent = bytes_at(p, escapes + place) & 0xFF;
      if (place >= n_escapes || !(p.table->codes[exponent] & kIsEscaped)) is_bad = true;
    }
    const u32 n_escaped = __popc(escaped);
    if (n_escaped > n_escapes) is_bad = true;
    n_escapes -= n_escaped < n_escapes ? n_escaped : n_escapes;

    if (exponent != 0 && !rule.has(exponent)) {
      is_bad = true;
      exponent = 0;
    }
    const u32 importance = exponent != 0 && p.mode == kModePaper ? p.importance[first + i] : 0;
    const u32 kept = exponent == 0 ? 0 : rule.kept(exponent, importance), n_field = exponent == 0 ? 0 : kept + 1;
    const bool takes = n_bits < n_field;
    const u32 taking = ballot_of_chunk(takes), n_taken = __popc(taking);
    u64 joined = bits;
    if (takes) {
      const u32 place = n_words - __popc(taking >> lane);
      if (place >= n_words) is_bad = true;
      joined |= static_cast<u64>(bytes_at(p, own.offset + 4ull * place)) << n_bits;
      n_bits += 32;
    }
    if (n_taken > n_words) is_bad = true;
    n_words -= n_taken < n_words ? n_taken : n_words;
    const u32 field = static_cast<u32>(joined) & ((1u << n_field) - 1);
    bits = static_cast<u32>(joined >> n_field);
    n_bits -= n_field;
    if (i >= n) continue;
    const u32 mantissa = field & ((1u << kept) - 1);
    put_decoded(p, first + i, exponent == 0 ? 0 : field >> kept << 31 | exponent << 23 | mantissa << (23 - kept));
  }
  if (ballot_of_chunk(is_bad || n_words != 0 || n_bits != 0 || n_escapes != 0) == 0) return;
  if (lane == 0) report(p.error, kCode);
  for (u32 i = lane; i < n; i += kLanes) put_value(p.out, p.dtype, first + i, __uint_as_float(kNan));
}

}  // namespace gradwire::gpu::gcomp
