// Which instruction sets the codecs may use. Every level gives the same bytes.
#pragma once

namespace gradwire {

// Each level includes the ones before it.
enum class SimdLevel { portable = 0, avx2 = 1, avx512 = 2 };

// The best level of this machine, unless `limit_simd_level` lowered it.
SimdLevel simd_level();

// Lowers the level (tests compare levels, users rule out a suspect). Never raises it above what the machine has.
void limit_simd_level(SimdLevel limit);

}  // namespace gradwire
