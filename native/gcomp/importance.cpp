#include "gcomp/importance.hpp"

#include <algorithm>
#include <string>

#include "errors.hpp"
#include "parallel/thread_pool.hpp"

namespace gradwire::gcomp {
namespace {

// 64 Ki elements: 13 B each are 832 KiB, some 80 us from memory, long beside the microsecond that waking a thread
// costs.
constexpr std::size_t kTileElements = std::size_t{1} << 16;

void require_length(const char* name, std::size_t expected, std::size_t got) {
  if (got != expected)
    throw InvalidArgument(std::string("importance: ") + name + " holds " + std::to_string(got) +
                          " elements, the parameter " + std::to_string(expected));
}

}  // namespace

void write_importance(std::span<const float> parameter, std::optional<std::span<const float>> second_moment,
                      std::optional<std::span<const float>> first_moment, float a, float b, float c,
                      std::span<std::uint8_t> out) {
  const std::size_t n_elements = parameter.size();
  require_length("out", n_elements, out.size());
  if (second_moment) require_length("second_moment", n_elements, second_moment->size());
  if (first_moment) require_length("first_moment", n_elements, first_moment->size());

  WriteTile& write_tile = at_current_level<1>([](auto level) -> WriteTile& { return write_tile_at(level); });
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
