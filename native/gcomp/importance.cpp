#include "gcomp/importance.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <string>

#include "errors.hpp"
#include "gcomp/importance_kernel.hpp"
#include "parallel/thread_pool.hpp"
#include "simd/dispatch.hpp"

namespace gradwire::gcomp {
namespace {

// 64 Ki elements: 13 B each are 832 KiB, some 80 us from memory, long beside the microsecond that waking a thread
// costs.
constexpr std::size_t kTileElements = std::size_t{1} << 16;

constexpr std::int32_t kInfinity = 0x7F800000;

// Without a branch and through pointers that do not alias, so that the compiler makes vectors of it.
template <bool has_second_moment, bool has_first_moment>
void write_tile(const ImportanceTile& tile, const ImportanceTerms& terms) {
  const auto [a, b, c] = terms;
  const float* const parameter = tile.parameter;
  const float* const second_moment = tile.second_moment;
  const float* const first_moment = tile.first_moment;
  std::uint8_t* __restrict const out = tile.out;
  const std::size_t n_elements = tile.n_elements;
  for (std::size_t i = 0; i < n_elements; ++i) {
    float factor = b;
    std::int32_t known = -1;
    if constexpr (has_second_moment) {
      factor = a * std::sqrt(second_moment[i]) + b;
      // On the bits, so that a subnormal second moment counts even where the thread flushes subnormals.
      known = std::bit_cast<std::int32_t>(second_moment[i]) > 0 ? -1 : 0;
    }
    float scale = parameter[i] * factor;
    if constexpr (has_first_moment) scale = scale + c * first_moment[i];
    const std::int32_t magnitude = std::bit_cast<std::int32_t>(scale) & 0x7FFFFFFF;
    const std::int32_t is_number = magnitude <= kInfinity ? -1 : 0;
    const std::int32_t code = std::min(std::max((magnitude >> 21) - kImportanceOffset, 0), 255);
    out[i] = static_cast<std::uint8_t>(code & known & is_number);
  }
}

void require_length(const char* name, std::size_t expected, std::size_t got) {
  if (got != expected)
    throw InvalidArgument(std::string("importance: ") + name + " holds " + std::to_string(got) +
                          " elements, the parameter " + std::to_string(expected));
}

}  // namespace

void write_importance_tile_portable(const ImportanceTile& tile, const ImportanceTerms& terms) {
  if (tile.second_moment != nullptr) {
    if (tile.first_moment != nullptr) return write_tile<true, true>(tile, terms);
    return write_tile<true, false>(tile, terms);
  }
  if (tile.first_moment != nullptr) return write_tile<false, true>(tile, terms);
  return write_tile<false, false>(tile, terms);
}

void write_importance(std::span<const float> parameter, std::optional<std::span<const float>> second_moment,
                      std::optional<std::span<const float>> first_moment, float a, float b, float c,
                      std::span<std::uint8_t> out) {
  const std::size_t n_elements = parameter.size();
  require_length("out", n_elements, out.size());
  if (second_moment) require_length("second_moment", n_elements, second_moment->size());
  if (first_moment) require_length("first_moment", n_elements, first_moment->size());

  auto write_tile = write_importance_tile_portable;
#if defined(__x86_64__)
  if (simd_level() >= SimdLevel::avx2) write_tile = write_importance_tile_avx2;
#endif
  const std::size_t n_tiles = (n_elements + kTileElements - 1) / kTileElements;
  parallel_for(n_tiles, [&](std::size_t tile) {
    const std::size_t begin = tile * kTileElements;
    const auto at = [begin](const auto& values) { return values ? values->data() + begin : nullptr; };
    write_tile({parameter.data() + begin, at(second_moment), at(first_moment), out.data() + begin,
                std::min(kTileElements, n_elements - begin)},
               {a, b, c});
  });
}

}  // namespace gradwire::gcomp
