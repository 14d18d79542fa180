#include "gcomp/importance.hpp"

#include <algorithm>
#include <cstring>
#include <mutex>

#include "errors.hpp"
#include "parallel/thread_pool.hpp"

namespace gradwire::gcomp {
namespace {

// 64 Ki elements: 13 B each are 832 KiB, some 80 us from memory, long beside the microsecond that waking a thread
// costs.
constexpr std::size_t kTileElements = std::size_t{1} << 16;

void require_length(const char* name, std::size_t expected, std::size_t got) {
  if (got != expected)
    throw InvalidArgument("importance: ", name, " holds ", got, " elements, the parameter ", expected);
}

}  // namespace

void write_importance(ConstFloats parameter, std::optional<ConstFloats> second_moment,
                      std::optional<ConstFloats> first_moment, float a, float b, float c, Bytes out) {
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

// ---- of a bucket

namespace {

// Memory that past buckets' bytes lay in, at most as much as were alive at a time: a warm step allocates none.
class SpareBytes {
 public:
  std::vector<std::uint8_t> take() {
    const std::lock_guard guard(mutex_);
    if (spare_.empty()) return {};
    std::vector<std::uint8_t> bytes = std::move(spare_.back());
    spare_.pop_back();
    return bytes;
  }
  void keep(std::vector<std::uint8_t> bytes) {
    bytes.clear();
    const std::lock_guard guard(mutex_);
    spare_.push_back(std::move(bytes));
  }

 private:
  std::mutex mutex_;
  std::vector<std::vector<std::uint8_t>> spare_;
};

SpareBytes spare_bytes;

}  // namespace

BucketImportance::BucketImportance(std::vector<Window> windows) : windows_(std::move(windows)) {
  std::size_t end = 0;
  for (const Window& window : windows_) {
    if (window.offset < end || window.n > SIZE_MAX - window.offset)
      throw InvalidArgument("the parameters of a bucket lie in order, and apart");
    end = window.offset + window.n;
  }
}

void BucketImportance::write(std::size_t first, Bytes out) const {
  const std::size_t end = first + out.size();
  auto window = std::partition_point(windows_.begin(), windows_.end(),
                                     [&](const Window& one) { return one.offset + one.n <= first; });
  for (; window != windows_.end() && window->offset < end; ++window) {
    const std::size_t begin = std::max(first, window->offset), stop = std::min(end, window->offset + window->n);
    if (begin >= stop) continue;
    const std::size_t skipped = begin - window->offset, n = stop - begin;
    std::uint8_t* const to = out.data() + (begin - first);
    if (window->ready != nullptr) {
      std::memcpy(to, window->ready + skipped, n);
    } else {
      const auto part = [&](const float* values) { return std::span(values + skipped, n); };
      const auto optional_part = [&](const float* values) {
        return values == nullptr ? std::nullopt : std::optional(part(values));
      };
      write_importance(part(window->parameter), optional_part(window->second_moment),
                       optional_part(window->first_moment), window->a, window->b, window->c, {to, n});
    }
  }
}

Weights::~Weights() {
  for (auto& [first, bytes] : by_first_) spare_bytes.keep(std::move(bytes));
}

bool Weights::write(std::size_t first, std::size_t n) {
  if (importance_ == nullptr || n == 0) return false;
  const auto [place, is_new] = by_first_.try_emplace(first);
  std::vector<std::uint8_t>& bytes = place->second;
  if (is_new) bytes = spare_bytes.take();
  if (bytes.size() == n) return false;
  bytes.assign(n, 0);  // what no parameter says anything of is kept whole
  importance_->write(first, bytes);
  return true;
}

ConstBytes Weights::at(std::size_t first, std::size_t n) const {
  const auto known = by_first_.find(first);
  if (known == by_first_.end() || known->second.size() != n) return {};
  return known->second;
}

}  // namespace gradwire::gcomp
