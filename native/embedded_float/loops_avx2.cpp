#if defined(__AVX2__)
#include "embedded_float/loops.hpp"

namespace gradwire::embedded_float {

const Kernels kAvx2[floats::kDtypes] = {make_kernels<Dtype::float32>(), make_kernels<Dtype::bfloat16>(),
                                        make_kernels<Dtype::float16>()};

}  // namespace gradwire::embedded_float
#endif
