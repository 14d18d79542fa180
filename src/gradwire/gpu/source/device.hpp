// What kernels are written against. NVRTC and nvcc compile them for devices; for any other compiler tests bring an
// emulation.hpp of their own, in which a block's threads are fibers, so that the very same source runs on the host.
//
// Rules: one struct by value as a kernel's parameter; shared memory is one struct; warp operations by whole warps;
// blocks order each other by launches only; no fused multiply-add, so that floats are the CPU's; a decoder checks what
// it reads before it relies on it, and says what is wrong by `report`.
#pragma once

#if defined(__CUDACC__)
#define GW_EMULATED 0
#define GW_KERNEL(name, Parameters) extern "C" __global__ void name(const Parameters p)
#else
#define GW_EMULATED 1
#define GW_KERNEL(name, Parameters) inline void name(const Parameters& p)
#include "emulation.hpp"
#endif

namespace gradwire::gpu {

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

inline constexpr u32 kWholeWarp = 0xFFFFFFFFu;
inline constexpr u32 kWarp = 32;

// The block's shared memory; its size is given at launch.
template <class T>
__device__ __forceinline__ T& shared_as() {
#if GW_EMULATED
  return *reinterpret_cast<T*>(emulation::shared_memory());
#else
  extern __shared__ __align__(16) unsigned char shared_bytes[];
  return *reinterpret_cast<T*>(shared_bytes);
#endif
}

__device__ __forceinline__ u64 thread_number() { return static_cast<u64>(blockIdx.x) * blockDim.x + threadIdx.x; }
__device__ __forceinline__ u64 thread_count() { return static_cast<u64>(gridDim.x) * blockDim.x; }
__device__ __forceinline__ u64 smaller(u64 a, u64 b) { return a < b ? a : b; }
__device__ __forceinline__ u64 parts_of(u64 n, u64 size) { return (n + size - 1) / size; }

// Little-endian words at any address.
__device__ __forceinline__ u32 load32(const u8* at) {
  return at[0] | static_cast<u32>(at[1]) << 8 | static_cast<u32>(at[2]) << 16 | static_cast<u32>(at[3]) << 24;
}
__device__ __forceinline__ u64 load64(const u8* at) { return load32(at) | static_cast<u64>(load32(at + 4)) << 32; }
__device__ __forceinline__ void store32(u8* at, u32 word) {
  for (u32 i = 0; i < 4; ++i) at[i] = static_cast<u8>(word >> 8 * i);
}
__device__ __forceinline__ void store64(u8* at, u64 word) {
  store32(at, static_cast<u32>(word));
  store32(at + 4, static_cast<u32>(word >> 32));
}

// The first thing that is wrong with a message, in the order of these numbers, goes to the host.
enum Wrong : u32 { kHeader = 1, kVersion = 2, kElements = 3, kChecksum = 4, kField = 5, kCode = 6 };
__device__ __forceinline__ u32 error_word(Wrong what) { return static_cast<u32>(kCode + 1 - what); }
__device__ __forceinline__ void report(u32* error, Wrong what) { atomicMax(error, error_word(what)); }

}  // namespace gradwire::gpu
