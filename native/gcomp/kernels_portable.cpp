#include "gcomp/value_loops.hpp"

namespace gradwire::gcomp {
namespace {

template <Dtype kDtype>
constexpr Kernels kKernels = {
    [](const Packing&, WordMasks&) {},  // value by value, without words
    [](const void* values, std::size_t n, const Packing& packing, std::uint8_t* exponents) {
      return split_exponents_loop<kDtype>(values, 0, n, packing, exponents);
    },
    [](const void* values, const std::uint8_t* exponents, const std::uint8_t* importance, std::size_t n,
       const Packing& packing, const WordMasks&, BitWriter& levels,
       BitWriter& mantissas) { pack_loop<kDtype>(values, exponents, importance, 0, n, packing, levels, mantissas); },
    [](const std::uint8_t* exponents, std::size_t n, const Packing& packing, const WordMasks&, BitReader& levels, BitReader& mantissas,
       void* values) { unpack_loop<kDtype>(exponents, 0, n, packing, levels, mantissas, values); }};

}  // namespace

const Kernels kKernelsPortable[kDtypes] = {kKernels<Dtype::float32>, kKernels<Dtype::bfloat16>,
                                           kKernels<Dtype::float16>};

}  // namespace gradwire::gcomp
