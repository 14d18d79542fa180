#include "huffman/stream_loops.hpp"

namespace gradwire {

const StreamKernels kStreamKernelsPortable = {encode_stream_loop, decode_streams_loop};

}  // namespace gradwire
