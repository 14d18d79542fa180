// The reference: what the AVX2 twin has to give, byte for byte.
#include "sketch/index_loop.hpp"
#include "sketch/kernel_table.hpp"

namespace gradwire::sketch {

const Kernels kPortable = kernels_with(index_values<Dtype::float32>, index_values<Dtype::bfloat16>);

}  // namespace gradwire::sketch
