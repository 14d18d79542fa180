// Every kernel: what NVRTC and nvcc compile.
#include "grouped.hpp"
#include "quantised.hpp"
#include "low_rank.hpp"
#include "gcomp_decode.hpp"
#include "gcomp_encode.hpp"
#include "ternary.hpp"
