#if defined(__AVX2__)
#include "low_rank/loops.hpp"

namespace gradwire::low_rank {

const Kernels kAvx2 = {kBlockRows, kPanelColumns, multiply_block, orthogonalise};

}  // namespace gradwire::low_rank
#endif
