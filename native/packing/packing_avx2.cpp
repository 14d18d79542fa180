// The same loops with bits found and cleared by one instruction each.
#if defined(__AVX2__)
#include "packing/loops.hpp"

namespace gradwire::packing {

const Kernels kAvx2 = {count_bits,
                       {pack_bits<std::uint16_t>, pack_bits<std::uint32_t>},
                       {unpack_bits<std::uint16_t>, unpack_bits<std::uint32_t>}};

}  // namespace gradwire::packing
#endif
