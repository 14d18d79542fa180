#if defined(__AVX2__)
#include "bits/word_packing_loops.hpp"

namespace gradwire::word_packing {

const Kernel kAvx2[kMaxBits + 1] = GRADWIRE_KERNELS;

}  // namespace gradwire::word_packing
#endif
