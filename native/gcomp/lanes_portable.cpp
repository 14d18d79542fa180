#include "gcomp/lane_loops.hpp"

namespace gradwire::gcomp {

const LaneKernels kLaneKernelsPortable = {
    push_loop,
    pop_loop,
    {widen_loop<Dtype::float32>, widen_loop<Dtype::bfloat16>, widen_loop<Dtype::float16>},
    {finish_loop<Dtype::float32>, finish_loop<Dtype::bfloat16>, finish_loop<Dtype::float16>}};

}  // namespace gradwire::gcomp
