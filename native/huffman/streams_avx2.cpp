// The same loops, compiled with BMI2: shifts that take their count from any register.
#include "huffman/stream_loops.hpp"

#if defined(__x86_64__)
namespace gradwire {

const StreamKernels kStreamKernelsAvx2 = {encode_stream_loop, decode_streams_loop};

}  // namespace gradwire
#endif
