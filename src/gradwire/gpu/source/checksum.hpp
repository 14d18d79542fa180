// CRC32C by many threads. Without its initial and final complement the checksum is linear: that of A B is that of A,
// times x^(8 bytes of B) modulo the polynomial, plus that of B; and leading zeros change nothing.
#pragma once

#include "device.hpp"

namespace gradwire::gpu {

inline constexpr u32 kPolynomial = 0x82F63B78u;  // reflected: bit 31 is x^0
inline constexpr u64 kPieceBytes = 16384;        // of a payload to a block of threads
inline constexpr u32 kChecksumThreads = 256;

// Not inlined: it would be unrolled at every call.
__device__ __noinline__ u32 product_of(u32 a, u32 b) {
  u32 product = 0;
  for (u32 bit = 0; bit < 32; ++bit) {
    if (a >> (31 - bit) & 1) product ^= b;
    b = b >> 1 ^ (b & 1 ? kPolynomial : 0);
  }
  return product;
}

// x^(8 2^k), by k.
__device__ const u32 kSquares[40] = {
    0x00800000u, 0x00008000u, 0x82F63B78u, 0x6EA2D55Cu, 0x18B8EA18u, 0x510AC59Au, 0xB82BE955u, 0xB8FDB1E7u,
    0x88E56F72u, 0x74C360A4u, 0xE4172B16u, 0x0D65762Au, 0x35D73A62u, 0x28461564u, 0xBF455269u, 0xE2EA32DCu,
    0xFE7740E6u, 0xF946610Bu, 0x3C204F8Fu, 0x538586E3u, 0x59726915u, 0x734D5309u, 0xBC1AC763u, 0x7D0722CCu,
    0xD289CABEu, 0xE94CA9BCu, 0x05B74F3Fu, 0xA51E1F42u, 0x40000000u, 0x20000000u, 0x08000000u, 0x00800000u,
    0x00008000u, 0x82F63B78u, 0x6EA2D55Cu, 0x18B8EA18u, 0x510AC59Au, 0xB82BE955u, 0xB8FDB1E7u, 0x88E56F72u,
};

// x^(8 n_bytes).
__device__ inline u32 shift_by(u64 n_bytes) {
  u32 result = 1u << 31;  // 1
  for (u32 k = 0; n_bytes != 0; ++k, n_bytes /= 2)
    if (n_bytes & 1) result = product_of(result, kSquares[k]);
  return result;
}

struct ChecksumShared {
  u32 table[256];
  u32 warps[kChecksumThreads / kWarp];
};

// For all threads of a block of kChecksumThreads.
__device__ inline void fill_checksum_table(ChecksumShared& shared) {
  u32 word = threadIdx.x;
  for (u32 bit = 0; bit < 8; ++bit) word = word >> 1 ^ (word & 1 ? kPolynomial : 0);
  shared.table[threadIdx.x] = word;
  __syncthreads();
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

// Of any bytes; thread 0 has it. Every thread takes as many neighbours, counted from the end.
__device__ inline u32 checksum_of_piece(const u8* bytes, u64 n_bytes, ChecksumShared& shared) {
  u64 each = kPieceBytes / kChecksumThreads;
  while (each * kChecksumThreads < n_bytes) each *= 2;
  const u64 after = (kChecksumThreads - 1 - threadIdx.x) * each;
  const u64 end = n_bytes > after ? n_bytes - after : 0, begin = end > each ? end - each : 0;
  u32 sum = 0;
  for (u64 i = begin; i < end; ++i) sum = sum >> 8 ^ shared.table[(sum ^ bytes[i]) & 0xFF];
  return xor_over_block(product_of(sum, shift_by(after)), shared);
}

// Of two stretches of bytes, with both complements; thread 0 has it.
__device__ inline u32 checksum_of_both(const u8* first, u64 n_first, const u8* second, u64 n_second,
                                       ChecksumShared& shared) {
  const u32 a = checksum_of_piece(first, n_first, shared), b = checksum_of_piece(second, n_second, shared);
  if (threadIdx.x != 0) return 0;
  return b ^ product_of(a, shift_by(n_second)) ^ product_of(~0u, shift_by(n_first + n_second)) ^ ~0u;
}

// Of a header and its payload, with both complements, from the sums of the payload's pieces; thread 0 has it.
__device__ inline u32 checksum_of_message(const u8* header, u32 header_bytes, u64 payload_bytes, const u32* pieces,
                                          ChecksumShared& shared) {
  const u64 n_bytes = header_bytes + payload_bytes;
  u32 sum = 0;
  for (u64 piece = threadIdx.x; piece * kPieceBytes < payload_bytes; piece += kChecksumThreads) {
    const u64 end = smaller((piece + 1) * kPieceBytes, payload_bytes);
    sum ^= product_of(pieces[piece], shift_by(payload_bytes - end));
  }
  const u32 payload = xor_over_block(sum, shared);
  const u32 head = checksum_of_piece(header, header_bytes, shared);
  if (threadIdx.x != 0) return 0;
  return payload ^ product_of(head, shift_by(payload_bytes)) ^ product_of(~0u, shift_by(n_bytes)) ^ ~0u;
}

}  // namespace gradwire::gpu
