// Every kernel: what NVRTC and nvcc compile.
#include "quantised.hpp"
#include "low_rank.hpp"
#include "gcomp_decode.hpp"
#include "gcomp_encode.hpp"
