// Every kernel: what NVRTC and nvcc compile.
#include "quantised.hpp"
#include "low_rank.hpp"
