// CRC32C by many threads. Without its initial and final complement the checksum is linear: that of A B is that of A,
// times x^(8 bytes of B) modulo the polynomial, plus that of B; and leading zeros change nothing.
#pragma once

#include "device.hpp"

namespace gradwire::gpu {

inline constexpr u32 kPolynomial = 0x82F63B78u;  // reflected: bit 31 is x^0
inline constexpr u32 kOne = 0x80000000u, kToTheEight = 0x00800000u;
inline constexpr u64 kPieceBytes = 2048;  // of a payload to a block of threads
inline constexpr u32 kChecksumThreads = 256;

__device__ constexpr u32 product(u32 a, u32 b) {
  u32 sum = 0;
  for (u32 bit = 0; bit < 32; ++bit) {
    if (a >> (31 - bit) & 1) sum ^= b;
    b = b >> 1 ^ (b & 1 ? kPolynomial : 0);
  }
  return sum;
}
// Not inlined: it would be unrolled at every call.
__device__ __noinline__ u32 product_of(u32 a, u32 b) { return product(a, b); }

struct ChecksumTables {
  u32 powers[5][256];   // x^(8 i 256^k)
  u32 shifted[4][256];  // byte k of a word, times x^(8 * 1024): past a word of each thread of a block
  u32 bytes[256];       // a byte, times x^8
  u32 ends[256];        // x^(8 * 4 (256 - i)): past the words of threads from i on
};
__device__ constexpr ChecksumTables checksum_tables() {
  ChecksumTables tables{};
  u32 base = kToTheEight;
  for (u32 k = 0; k < 5; ++k) {
    tables.powers[k][0] = kOne;
    for (u32 i = 1; i < 256; ++i) tables.powers[k][i] = product(tables.powers[k][i - 1], base);
    base = product(tables.powers[k][255], base);
  }
  const u32 past = tables.powers[1][4];
  for (u32 i = 1; i < 256; ++i) {
    const u32 lowest = i & (~i + 1), rest = i ^ lowest;
    for (u32 k = 0; k < 4; ++k)
      tables.shifted[k][i] = rest ? tables.shifted[k][rest] ^ tables.shifted[k][lowest] : product(i << 8 * k, past);
    tables.ends[256 - i] = product(i == 1 ? kOne : tables.ends[257 - i], tables.powers[0][4]);
    tables.bytes[i] = rest ? tables.bytes[rest] ^ tables.bytes[lowest] : product(i, kToTheEight);
  }
  tables.ends[0] = past;
  return tables;
}
__device__ const ChecksumTables kChecksumTables = checksum_tables();

// x^(8 n_bytes).
__device__ inline u32 shift_by(u64 n_bytes) {
  u32 result = kOne;
  for (u32 k = 0; n_bytes != 0; ++k, n_bytes >>= 8) {
    const u32 factor = kChecksumTables.powers[k][n_bytes & 0xFF];
    result = result == kOne ? factor : factor == kOne ? result : product_of(result, factor);
  }
  return result;
}

struct ChecksumShared {
  u32 shifted[4][256];
  u32 warps[kChecksumThreads / kWarp];
};

// For all threads of a block of kChecksumThreads.
__device__ inline void fill_checksum_table(ChecksumShared& shared) {
  for (u32 k = 0; k < 4; ++k) shared.shifted[k][threadIdx.x] = kChecksumTables.shifted[k][threadIdx.x];
  __syncthreads();
}

// A sum, times x^(8 * 1024).
__device__ __forceinline__ u32 past_threads(u32 sum, const ChecksumShared& shared) {
  return shared.shifted[0][sum & 0xFF] ^ shared.shifted[1][sum >> 8 & 0xFF] ^ shared.shifted[2][sum >> 16 & 0xFF] ^
         shared.shifted[3][sum >> 24];
}

// XOR over the block; thread 0 has it.
__device__ inline u32 xor_over_block(u32 word, ChecksumShared& shared) {
  for (u32 lanes = 1; lanes < kWarp; lanes *= 2) word ^= __shfl_xor_sync(kWholeWarp, word, lanes);
  if (threadIdx.x % kWarp == 0) shared.warps[threadIdx.x / kWarp] = word;
  __syncthreads();
  u32 all = 0;
  if (threadIdx.x == 0)
    for (u32 warp = 0; warp < kChecksumThreads / kWarp; ++warp) all ^= shared.warps[warp];
  __syncthreads();
  return all;
}

// Of any bytes; thread 0 has it. Threads take words in turn, the last one the last whole word, behind words of zeros;
// what is left behind that is thread 0's.
__device__ inline u32 checksum_of_piece(const u8* bytes, u64 n_bytes, ChecksumShared& shared) {
  constexpr u32 kBatch = 4;
  const u32 before = static_cast<u32>(reinterpret_cast<u64>(bytes) % 4);
  const u32* const words = reinterpret_cast<const u32*>(bytes - before);
  const u64 n_words = (before + n_bytes) / 4, n_taken = parts_of(n_words, kBatch * kChecksumThreads) * kBatch;
  const u64 n_zeros = n_taken * kChecksumThreads - n_words;
  u32 sum = 0;
  for (u64 at = threadIdx.x; at < n_taken * kChecksumThreads; at += kBatch * kChecksumThreads) {
    u32 own[kBatch];
    GW_UNROLLED for (u32 q = 0; q < kBatch; ++q) {
      const u64 i = at + q * kChecksumThreads;
      own[q] = i < n_zeros ? 0 : words[i - n_zeros];
      if (i == n_zeros) own[q] &= ~0u << 8 * before;
    }
    GW_UNROLLED for (u32 q = 0; q < kBatch; ++q) sum = own[q] ^ past_threads(sum, shared);
  }
  sum = xor_over_block(product_of(sum, kChecksumTables.ends[threadIdx.x]), shared);
  if (threadIdx.x == 0)
    for (u64 i = n_words == 0 ? 0 : 4 * n_words - before; i < n_bytes; ++i)
      sum = sum >> 8 ^ kChecksumTables.bytes[(sum ^ bytes[i]) & 0xFF];
  return sum;
}

// With the complement that all begins with, and without the one at the end: of what comes behind bytes of this
// checksum.
__device__ inline u32 checksum_behind(u32 before, u32 own, u64 n_own) {
  return n_own == 0 ? before : own ^ product_of(before, shift_by(n_own));
}

// Of two stretches of bytes, with both complements; thread 0 has it.
__device__ inline u32 checksum_of_both(const u8* first, u64 n_first, const u8* second, u64 n_second,
                                       ChecksumShared& shared) {
  const u32 a = checksum_of_piece(first, n_first, shared);
  const u32 b = n_second == 0 ? 0 : checksum_of_piece(second, n_second, shared);
  return threadIdx.x == 0 ? ~checksum_behind(checksum_behind(~0u, a, n_first), b, n_second) : 0;
}

// What comes of n bytes' pieces, of kPieceBytes but for the last, with so many bytes behind; the XOR over a block's
// threads.
__device__ inline u32 part_of_pieces(const u32* pieces, u64 n_bytes, u64 n_behind, const ChecksumShared& shared) {
  static_assert(kPieceBytes == 2 * 4 * kChecksumThreads);
  constexpr u32 kBatch = 4;
  const u64 n_whole = n_bytes / kPieceBytes, each = parts_of(n_whole, kChecksumThreads);
  const u64 begin = threadIdx.x * each, end = smaller(begin + each, n_whole);
  u32 sum = 0;
  for (u64 at = begin; at < end; at += kBatch) {
    u32 own[kBatch];
    GW_UNROLLED for (u32 q = 0; q < kBatch; ++q) own[q] = at + q < end ? pieces[at + q] : 0;
    for (u32 q = 0; q < kBatch && at + q < end; ++q) sum = past_threads(past_threads(sum, shared), shared) ^ own[q];
  }
  if (begin < end) sum = product_of(sum, shift_by(n_bytes - end * kPieceBytes + n_behind));
  if (threadIdx.x == kChecksumThreads - 1 && n_bytes % kPieceBytes != 0)
    sum ^= product_of(pieces[n_whole], shift_by(n_behind));
  return sum;
}

// Of a header of whole words and its payload of two stretches, with both complements, from the sums of their pieces;
// thread 0 has it.
__device__ inline u32 checksum_of_message(const u8* header, u32 n_words, u64 n_first, u64 n_second, const u32* pieces,
                                          ChecksumShared& shared) {
  u32 sum = part_of_pieces(pieces, n_first, n_second, shared);
  sum ^= part_of_pieces(pieces + parts_of(n_first, kPieceBytes), n_second, 0, shared);
  if (threadIdx.x < n_words) {
    const u32 word = load32(header + 4 * threadIdx.x) ^ (threadIdx.x == 0 ? ~0u : 0);
    sum ^= product_of(word, shift_by(n_first + n_second + 4 * (n_words - threadIdx.x)));
  }
  return ~xor_over_block(sum, shared);
}

}  // namespace gradwire::gpu
