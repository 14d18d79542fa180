// The kernels of one instruction set, given its index loops.
#pragma once

#include "sketch/loops.hpp"
#include "sketch/peel_loops.hpp"

namespace gradwire::sketch {
namespace {

using Index = IndexFacts (*)(const void* values, std::size_t first, std::size_t end, std::uint32_t* words);

constexpr Kernels kernels_with(Index index_float32, Index index_bfloat16) {
  constexpr Dtype f = Dtype::float32, b = Dtype::bfloat16;
  return {{index_float32, index_bfloat16},
          count_granule_bits,
          {{add_block<float, f>, add_block<float, b>},
           {add_block<std::int32_t, f>, add_block<std::int32_t, b>},
           {add_block<std::int64_t, f>, add_block<std::int64_t, b>}},
          peel_block,
          {{recover_block<float, f>, recover_block<float, b>},
           {recover_block<std::int32_t, f>, recover_block<std::int32_t, b>},
           {recover_block<std::int64_t, f>, recover_block<std::int64_t, b>}}};
}

}  // namespace
}  // namespace gradwire::sketch
