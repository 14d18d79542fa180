// Every kernel: what NVRTC and nvcc compile.
#include "grouped.hpp"
#include "quantised.hpp"
#include "ternary.hpp"
