// What kernels are written against. NVRTC and nvcc compile them for devices; for any other compiler tests bring an
// emulation.hpp of their own, in which a block's threads are fibers, so that the very same source runs on the host.
//
// Rules: one struct by value as a kernel's parameter; shared memory is one struct; warp operations by whole warps;
// no block waits for another, but the one that is done last (`is_last_of`) has what the others wrote; no fused
// multiply-add, so that floats are the CPU's; a decoder says what is wrong by `report`, and is bounded by what it
// knows.
#pragma once

#if defined(__CUDACC__)
#define GW_EMULATED 0
#define GW_UNROLLED _Pragma("unroll")
#define GW_KERNEL(name, Parameters) extern "C" __global__ void name(const Parameters p)
#else
#define GW_EMULATED 1
#define GW_UNROLLED
#define GW_KERNEL(name, Parameters) inline void name(const Parameters& p)
#include "emulation.hpp"
#endif

// A kernel whose code is made for each dtype, which `member` of its parameters says: inside, the compiler knows it.
#define GW_KERNEL_BY_DTYPE(name, Parameters, member)              \
  __device__ __forceinline__ void name##_of(const Parameters& p); \
  GW_KERNEL(name, Parameters) {                                   \
    Parameters own = p;                                           \
    if (p.member == kFloat32)                                     \
      own.member = kFloat32, name##_of(own);                      \
    else if (p.member == kBfloat16)                               \
      own.member = kBfloat16, name##_of(own);                     \
    else                                                          \
      own.member = kFloat16, name##_of(own);                      \
  }                                                               \
  __device__ __forceinline__ void name##_of(const Parameters& p)

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

// Of `n` neighbours in a warp, a power of two: the sum of what they have, or the largest; for all of them.
template <class Number>
__device__ __forceinline__ Number sum_of_lanes(Number own, u32 n = kWarp) {
  for (u32 lanes = 1; lanes < n; lanes *= 2) own += __shfl_xor_sync(kWholeWarp, own, lanes);
  return own;
}
__device__ __forceinline__ u32 largest_of_lanes(u32 own, u32 n = kWarp) {
  if (n == kWarp) return __reduce_max_sync(kWholeWarp, own);
  for (u32 lanes = 1; lanes < n; lanes *= 2) {
    const u32 other = __shfl_xor_sync(kWholeWarp, own, lanes);
    if (other > own) own = other;
  }
  return own;
}

// The sum of what the block's first so many threads, up to this one, give; `sums` then holds it for all of them.
template <u32 kThreads, class Number>
__device__ __forceinline__ Number sum_up_to(Number own, Number* sums) {
  __syncthreads();
  sums[threadIdx.x] = own;
  for (u32 distance = 1; distance < kThreads; distance *= 2) {
    __syncthreads();
    const Number before = threadIdx.x >= distance ? sums[threadIdx.x - distance] : 0;
    __syncthreads();
    own += before;
    sums[threadIdx.x] = own;
  }
  __syncthreads();
  return own;
}

// Whether this block is the last one of n to come here; it then sees what the others wrote before. The counter is 0 for
// the next launch again.
__device__ __forceinline__ bool is_last_of(u32 n_blocks, u32* counter, u32& shared_word) {
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    shared_word = atomicInc(counter, n_blocks - 1) == n_blocks - 1;
    __threadfence();
  }
  __syncthreads();
  return shared_word != 0;
}

// The last of n items whose `first` is up to `at`; item 0, if there is none.
template <class Item>
__device__ __forceinline__ u64 last_up_to(const Item* items, u64 n, u64 Item::* first, u64 at) {
  u64 low = 0, high = n;
  while (high - low > 1) {
    const u64 middle = (low + high) / 2;
    if (items[middle].*first <= at)
      low = middle;
    else
      high = middle;
  }
  return low;
}

// n / size and n % size of a power of two that is known at run time only.
struct Power {
  u32 shift;
  __device__ __forceinline__ explicit Power(u32 size) : shift(31 - __clz(size)) {}
  __device__ __forceinline__ u64 parts(u64 n) const { return n >> shift; }
};

// Little-endian words at any address, which is a word's as a rule.
__device__ __forceinline__ bool is_word(const void* at) { return reinterpret_cast<u64>(at) % 4 == 0; }
__device__ __forceinline__ u32 load32(const u8* at) {
  if (is_word(at)) return *reinterpret_cast<const u32*>(at);
  return at[0] | static_cast<u32>(at[1]) << 8 | static_cast<u32>(at[2]) << 16 | static_cast<u32>(at[3]) << 24;
}
__device__ __forceinline__ u64 load64(const u8* at) { return load32(at) | static_cast<u64>(load32(at + 4)) << 32; }
__device__ __forceinline__ void store32(u8* at, u32 word) {
  if (is_word(at)) {
    *reinterpret_cast<u32*>(at) = word;
    return;
  }
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

// ---- gradients of three dtypes as float32 and back, with the CPU's bits; the numbers that are drawn by element

enum Dtype : u32 { kFloat32 = 0, kBfloat16 = 1, kFloat16 = 2 };

inline constexpr u32 kMagnitude = 0x7FFFFFFFu, kInfinity = 0x7F800000u, kNan = 0x7FC00000u;
inline constexpr float kLargestFloat = 3.4028234663852886e38f;
inline constexpr float kLeastScale = 7.888609052210118e-31f;  // 2^-100

__device__ __forceinline__ u32 magnitude_bits(float value) { return __float_as_uint(value) & kMagnitude; }

__device__ __forceinline__ float narrowed(double value) {
  return static_cast<float>(value < kLargestFloat ? value : kLargestFloat);
}

__device__ __forceinline__ float float_of_half(u16 half) {
  const u32 magnitude = (half & 0x7FFFu) << 13;
  u32 bits = __float_as_uint(__uint_as_float(magnitude) * 5.192296858534828e33f);  // 2^112: exact, subnormals too
  if (magnitude >= 0x0F800000u) bits |= kInfinity;
  return __uint_as_float(bits | (half & 0x8000u) << 16);
}

// To nearest even.
__device__ __forceinline__ u16 half_of_float(float value) {
  const u32 bits = __float_as_uint(value), magnitude = bits & kMagnitude, sign = bits >> 16 & 0x8000u;
  if (magnitude > kInfinity) return static_cast<u16>(sign | 0x7E00u);
  if (magnitude >= 0x477FF000u) return static_cast<u16>(sign | 0x7C00u);
  if (magnitude < 0x38800000u)  // subnormal: the sum rounds at the last bit that a half has
    return static_cast<u16>(sign | (__float_as_uint(__uint_as_float(magnitude) + 0.5f) - 0x3F000000u));
  return static_cast<u16>(sign | (magnitude - 0x38000000u + 0xFFFu + (magnitude >> 13 & 1)) >> 13);
}

__device__ __forceinline__ u16 bfloat16_of_float(float value) {
  const u32 bits = __float_as_uint(value);
  if ((bits & kMagnitude) > kInfinity) return static_cast<u16>(bits >> 16 | 0x40u);
  return static_cast<u16>((bits + 0x7FFFu + (bits >> 16 & 1)) >> 16);
}

// A value's own bits, of a dtype of 16 bits in the lower half.
__device__ __forceinline__ u32 bits_at(const void* values, u32 dtype, u64 i) {
  return dtype == kFloat32 ? static_cast<const u32*>(values)[i] : static_cast<const u16*>(values)[i];
}
__device__ __forceinline__ void put_bits(void* values, u32 dtype, u64 i, u32 bits) {
  if (dtype == kFloat32)
    static_cast<u32*>(values)[i] = bits;
  else
    static_cast<u16*>(values)[i] = static_cast<u16>(bits);
}

// Values `first`, `first` + stride, ... before `end`, zeros behind it: all loads are under way before one is waited
// for.
template <u32 kBatch>
__device__ __forceinline__ void load_bits(const void* values, u32 dtype, u64 first, u64 stride, u64 end,
                                          u32 (&bits)[kBatch]) {
  const u64 n = first < end ? end - first : 0;
  if (dtype == kFloat32) {
    const u32* const own = static_cast<const u32*>(values) + first;
    GW_UNROLLED for (u32 q = 0; q < kBatch; ++q) bits[q] = q * stride < n ? own[q * stride] : 0;
  } else {
    const u16* const own = static_cast<const u16*>(values) + first;
    GW_UNROLLED for (u32 q = 0; q < kBatch; ++q) bits[q] = q * stride < n ? own[q * stride] : 0;
  }
}
__device__ __forceinline__ float value_of_bits(u32 dtype, u32 bits) {
  if (dtype == kFloat16) return float_of_half(static_cast<u16>(bits));
  return __uint_as_float(dtype == kBfloat16 ? bits << 16 : bits);
}
__device__ __forceinline__ float value_at(const void* values, u32 dtype, u64 i) {
  return value_of_bits(dtype, bits_at(values, dtype, i));
}
__device__ __forceinline__ u32 bits_of_value(u32 dtype, float value) {
  return dtype == kFloat32    ? __float_as_uint(value)
         : dtype == kBfloat16 ? bfloat16_of_float(value)
                              : half_of_float(value);
}
__device__ __forceinline__ void put_value(void* values, u32 dtype, u64 i, float value) {
  put_bits(values, dtype, i, bits_of_value(dtype, value));
}

// Not inlined: what a division comes to is long, and most have nothing to divide by.
__device__ __noinline__ float quotient(float value, float divisor) { return value / divisor; }
__device__ __forceinline__ float divided(float value, float divisor) {
  return divisor == 1 ? value : quotient(value, divisor);
}

// The bits of four neighbours, which lie at a multiple of four, in one access.
template <class Word>
struct alignas(4 * sizeof(Word)) Four {
  Word words[4];
};
template <class Word>
__device__ __forceinline__ void load_four(const void* values, u64 i, u32 (&bits)[4]) {
  const Four<Word> four = *reinterpret_cast<const Four<Word>*>(static_cast<const Word*>(values) + i);
  GW_UNROLLED for (u32 q = 0; q < 4; ++q) bits[q] = four.words[q];
}
template <class Word>
__device__ __forceinline__ void store_four(void* values, u64 i, const u32 (&bits)[4]) {
  Four<Word> four;
  GW_UNROLLED for (u32 q = 0; q < 4; ++q) four.words[q] = static_cast<Word>(bits[q]);
  *reinterpret_cast<Four<Word>*>(static_cast<Word*>(values) + i) = four;
}

// Devices and CPUs make NaNs of different bits; these are the CPU's of a message that is not finite.
__device__ __forceinline__ float added(float a, float b) {
  const float sum = a + b;
  return magnitude_bits(sum) > kInfinity ? __uint_as_float(kNan) : sum;
}

// ---- Philox4x32-10 by counter (native/random/counter.hpp): elements 64 g + 8 q + l share the words of counter 8 g + l

struct Drawn {
  u32 words[4];

  // The number of element q (0 to 7) of those that share the counter.
  __device__ __forceinline__ u32 number(u32 q) const {
    const u32 word = words[q / 2];
    return q % 2 == 0 ? word : word << 16 | word >> 16;
  }
};

// A number as a fraction of one: 24 bits, exactly.
__device__ __forceinline__ float fraction_of(u32 number) {
  return static_cast<float>(number >> 8) * 5.9604644775390625e-08f;
}

__device__ __noinline__ Drawn draw(u64 seed, u64 step, u64 counter) {
  u32 a = static_cast<u32>(counter), b = static_cast<u32>(counter >> 32);
  u32 c = static_cast<u32>(step), d = static_cast<u32>(step >> 32);
  u32 key0 = static_cast<u32>(seed), key1 = static_cast<u32>(seed >> 32);
  for (u32 round = 0; round < 10; ++round) {
    const u64 left = static_cast<u64>(0xD2511F53u) * a, right = static_cast<u64>(0xCD9E8D57u) * c;
    a = static_cast<u32>(right >> 32) ^ b ^ key0;
    c = static_cast<u32>(left >> 32) ^ d ^ key1;
    b = static_cast<u32>(right);
    d = static_cast<u32>(left);
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  return Drawn{{a, b, c, d}};
}

}  // namespace gradwire::gpu
