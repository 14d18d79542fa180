#include "random/counter.hpp"

namespace gradwire::truncated_float {
namespace {
void draw_group(const random::Stream& stream, std::uint64_t group, std::uint32_t* numbers) {
  random::draw(stream, group, numbers);
}
}  // namespace
}  // namespace gradwire::truncated_float

#include "truncated_float/loops.hpp"

namespace gradwire::truncated_float {

const Kernels kPortable[floats::kDtypes] = {make_kernels<Dtype::float32>(), make_kernels<Dtype::bfloat16>(),
                                            make_kernels<Dtype::float16>()};

}  // namespace gradwire::truncated_float
