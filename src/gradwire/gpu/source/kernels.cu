// Every kernel: what NVRTC and nvcc compile.
#include "embedded_float.hpp"
#include "gcomp_decode.hpp"
#include "gcomp_encode.hpp"
#include "grouped.hpp"
#include "low_rank.hpp"
#include "quantised.hpp"
#include "ternary.hpp"
#include "truncated_float.hpp"
