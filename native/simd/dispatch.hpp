// Which instruction sets the codecs may use. Every level gives the same bytes.
//
// Files named *loops.cpp are compiled once for each of two levels, or three where they have code for AVX-512. Each of
// them defines the kernels of one family for its own Level<GW_LEVEL>; everything else in them has internal linkage, or
// a CPU could be asked for instructions that it lacks.
#pragma once

namespace gradwire {

// Each level includes the ones before it.
enum class SimdLevel { portable = 0, avx2 = 1, avx512 = 2 };

// The best level of this machine, unless `limit_simd_level` lowered it.
SimdLevel simd_level();

// Lowers the level (tests compare levels, users rule out a suspect). Never raises it above what the machine has.
void limit_simd_level(SimdLevel limit);

template <int level>
struct Level {};

// kernels(Level) for the current level, or `best` where that is less.
template <int best, class Kernels>
decltype(auto) at_current_level(const Kernels& kernels) {
  const SimdLevel level = simd_level();
  if constexpr (best == 2)
    if (level == SimdLevel::avx512) return kernels(Level<2>());
  return level == SimdLevel::portable ? kernels(Level<0>()) : kernels(Level<1>());
}

// Declares name_at(Level) for every level up to `best`, which *loops.cpp define, and name(): the current level's.
#define GW_KERNELS(Kernels, name, best)                                                  \
  const Kernels& name##_at(Level<0>);                                                    \
  const Kernels& name##_at(Level<1>);                                                    \
  const Kernels& name##_at(Level<2>);                                                    \
  inline const Kernels& name() {                                                         \
    return at_current_level<best>([](auto level) -> auto& { return name##_at(level); }); \
  }

}  // namespace gradwire
