#include "low_rank/loops.hpp"

namespace gradwire::low_rank {

const Kernels kPortable = {kBlockRows, kPanelColumns, multiply_block, orthogonalise};

}  // namespace gradwire::low_rank
