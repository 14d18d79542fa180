// The reference: what the vector twins have to give, byte for byte.
#include "packing/loops.hpp"

namespace gradwire::packing {

const Kernels kPortable = {count_bits,
                           {pack_bits<std::uint16_t>, pack_bits<std::uint32_t>},
                           {unpack_bits<std::uint16_t>, unpack_bits<std::uint32_t>}};

}  // namespace gradwire::packing
