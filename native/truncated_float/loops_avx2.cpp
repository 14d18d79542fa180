#if defined(__AVX2__)
#include "random/counter_lanes.hpp"

namespace gradwire::truncated_float {
namespace {
void draw_group(const random::Stream& stream, std::uint64_t group, std::uint32_t* numbers) {
  __m256i lanes[8];
  random::draw(stream, group, lanes);
  for (int i = 0; i < 8; ++i) _mm256_storeu_si256(reinterpret_cast<__m256i*>(numbers + 8 * i), lanes[i]);
}
}  // namespace
}  // namespace gradwire::truncated_float

#include "truncated_float/loops.hpp"

namespace gradwire::truncated_float {

const Kernels kAvx2[floats::kDtypes] = {make_kernels<Dtype::float32>(), make_kernels<Dtype::bfloat16>(),
                                        make_kernels<Dtype::float16>()};

}  // namespace gradwire::truncated_float
#endif
