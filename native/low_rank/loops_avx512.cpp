#if defined(__AVX512F__)
#include "low_rank/loops.hpp"

namespace gradwire::low_rank {

const Kernels kAvx512 = {kBlockRows, kPanelColumns, multiply_block, orthogonalise};

}  // namespace gradwire::low_rank
#endif
