#include "simd/dispatch.hpp"

#include <algorithm>
#include <atomic>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace gradwire {
namespace {

#if defined(__x86_64__)
// Clang 14's __builtin_cpu_supports does not know it.
bool has_lzcnt() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid(0x80000001, &a, &b, &c, &d) != 0 && (c & (1u << 5)) != 0;
}
#endif

SimdLevel machine_level() {
#if defined(__x86_64__)
  // The AVX2 kernels also use BMI2 (pext, pdep, shifts without flags) and LZCNT, as every such processor has them.
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("bmi2") || !has_lzcnt()) return SimdLevel::portable;
  // Bytes compressed, expanded, permuted and multi-shifted: Ice Lake, Zen 4 and later.
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vbmi") &&
      __builtin_cpu_supports("avx512vbmi2"))
    return SimdLevel::avx512;
  return SimdLevel::avx2;
#endif
  return SimdLevel::portable;
}

std::atomic<SimdLevel>& current_level() {
  static std::atomic<SimdLevel> level{machine_level()};
  return level;
}

}  // namespace

SimdLevel simd_level() { return current_level().load(std::memory_order_relaxed); }

void limit_simd_level(SimdLevel limit) { current_level().store(std::min(limit, machine_level())); }

}  // namespace gradwire
