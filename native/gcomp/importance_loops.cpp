#include <bit>
#include <cmath>
#include <cstring>
#include <type_traits>

#include "gcomp/importance.hpp"
#include "simd/lanes.hpp"

namespace gradwire::gcomp {
namespace {

// Bytes 0 to n - 1 from value `first` on; without a branch, so that the compiler makes vectors of it.
template <bool has_second_moment, bool has_first_moment, class Count>
void write_run(const ImportanceTile& tile, const ImportanceTerms& terms, std::size_t first, Count n,
               std::int32_t* codes) {
  const float* const parameter = tile.parameter + first;
  const float* const second_moment = has_second_moment ? tile.second_moment + first : nullptr;
  const float* const first_moment = has_first_moment ? tile.first_moment + first : nullptr;
  for (std::size_t i = 0; i < n; ++i) {
    float factor = terms.b;
    std::int32_t known = -1;
    if constexpr (has_second_moment) {
      factor = terms.a * std::sqrt(second_moment[i]) + terms.b;
      // On the bits, so that a subnormal second moment counts even where the thread flushes subnormals.
      known = std::bit_cast<std::int32_t>(second_moment[i]) > 0 ? -1 : 0;
    }
    float scale = parameter[i] * factor;
    if constexpr (has_first_moment) scale = scale + terms.c * first_moment[i];
    const std::int32_t magnitude = std::bit_cast<std::int32_t>(scale) & 0x7FFFFFFF;
    const std::int32_t is_number = magnitude <= std::int32_t{floats::kInfinity} ? -1 : 0;
    codes[i] = ((magnitude >> 21) - kImportanceOffset) & known & is_number;
  }
}

template <bool has_second_moment, bool has_first_moment>
void write_tile(const ImportanceTile& tile, const ImportanceTerms& terms) {
  constexpr std::size_t kRun = 32;
  alignas(32) std::int32_t codes[kRun] = {};
  std::size_t i = 0;
  for (; i + kRun <= tile.n_elements; i += kRun) {
    write_run<has_second_moment, has_first_moment>(tile, terms, i, std::integral_constant<std::size_t, kRun>(), codes);
    write_bytes(codes, tile.out + i);
  }
  if (i == tile.n_elements) return;
  std::uint8_t rest[kRun];
  write_run<has_second_moment, has_first_moment>(tile, terms, i, tile.n_elements - i, codes);
  write_bytes(codes, rest);
  std::memcpy(tile.out + i, rest, tile.n_elements - i);
}

void write_any_tile(const ImportanceTile& tile, const ImportanceTerms& terms) {
  if (tile.second_moment != nullptr) {
    if (tile.first_moment != nullptr) return write_tile<true, true>(tile, terms);
    return write_tile<true, false>(tile, terms);
  }
  if (tile.first_moment != nullptr) return write_tile<false, true>(tile, terms);
  return write_tile<false, false>(tile, terms);
}

}  // namespace

WriteTile& write_tile_at(Level<GW_LEVEL>) { return write_any_tile; }

}  // namespace gradwire::gcomp
