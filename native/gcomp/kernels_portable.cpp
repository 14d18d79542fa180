#include "gcomp/value_loops.hpp"

namespace gradwire::gcomp {
namespace {

template <Dtype kDtype>
ExponentSummary split_exponents(const void* values, std::size_t n, std::uint8_t* exponents) {
  return split_exponents_loop<kDtype>(values, 0, n, exponents);
}

template <Dtype kDtype>
SegmentBits pack(const void* values, const std::uint8_t* exponents, const std::uint8_t* importance, std::size_t n,
                 const Packing& packing, const WordMasks&, std::uint8_t* levels, std::uint8_t* mantissas) {
  return pack_blocks(
      n, levels, mantissas, [&](std::size_t i, std::size_t n_block, BitWriter& to_levels, BitWriter& to_mantissas) {
        pack_loop<kDtype>(values, exponents, importance, i, i + n_block, packing, to_levels, to_mantissas);
      });
}

template <Dtype kDtype>
SegmentBits unpack(const std::uint8_t* exponents, std::size_t n, const Packing& packing, const WordMasks&,
                   const SegmentSpan& levels, const SegmentSpan& mantissas, void* values) {
  return unpack_blocks(n, levels, mantissas,
                       [&](std::size_t i, std::size_t n_block, BitReader& from_levels, BitReader& from_mantissas) {
                         unpack_loop<kDtype>(exponents, i, i + n_block, packing, from_levels, from_mantissas, values);
                       });
}

template <Dtype kDtype>
constexpr Kernels kKernels = {[](const Packing&, WordMasks&) {},  // value by value: no words, no masks
                              round_loop<kDtype>, split_exponents<kDtype>, pack<kDtype>, unpack<kDtype>};

}  // namespace

const Kernels kKernelsPortable[kDtypes] = {kKernels<Dtype::float32>, kKernels<Dtype::bfloat16>,
                                           kKernels<Dtype::float16>};

}  // namespace gradwire::gcomp
