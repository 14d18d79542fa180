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

// All of it, however long.
void write_tiles(const ImportanceTile& all, const ImportanceTerms& terms) {
  WriteTile& write_tile = at_current_level<1>([](auto level) -> WriteTile& { return write_tile_at(level); });
  parallel_for_runs(all.n_elements, kTileElements, [&](std::size_t begin, std::size_t n) {
    const auto at = [begin](const float* values) { return values == nullptr ? nullptr : values + begin; };
    write_tile({all.parameter + begin, at(all.second_moment), at(all.first_moment), all.out + begin, n}, terms);
  });
}

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

void write_importance(ConstFloats parameter, std::optional<ConstFloats> second_moment,
                      std::optional<ConstFloats> first_moment, float a, float b, float c, Bytes out) {
  const std::size_t n_elements = parameter.size();
  require_length("out", n_elements, out.size());
  const auto data_of = [&](const char* name, const std::optional<ConstFloats>& moment) -> const float* {
    if (!moment) return nullptr;
    require_length(name, n_elements, moment->size());
    return moment->data();
  };
  write_tiles({parameter.data(), data_of("second_moment", second_moment), data_of("first_moment", first_moment),
               out.data(), n_elements},
              {a, b, c});
}

BucketImportance::BucketImportance(std::vector<Window> windows, std::uint8_t mean_room)
    : windows_(std::move(windows)), mean_room_(mean_room) {}

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
      const auto part = [&](const float* values) { return values == nullptr ? nullptr : values + skipped; };
      write_tiles({part(window->parameter), part(window->second_moment), part(window->first_moment), to, n},
                  {window->a, window->b, window->c});
    }
  }
}

Weights::~Weights() {
  for (auto& [first, range] : by_first_)
    for (std::vector<std::uint8_t>* bytes : {&range.bytes, &range.of_mean})
      if (bytes->capacity() != 0) spare_bytes.keep(std::move(*bytes));
}

bool Weights::write(std::size_t first, std::size_t n) {
  if (importance_ == nullptr || n == 0) return false;
  const auto [place, is_new] = by_first_.try_emplace(first);
  auto& [bytes, of_mean] = place->second;
  const std::uint8_t room = importance_->mean_room();
  if (is_new) {
    bytes = spare_bytes.take();
    if (room != 0) of_mean = spare_bytes.take();
  }
  if (bytes.size() == n) return false;
  bytes.assign(n, 0);  // what no parameter says anything of is kept whole
  importance_->write(first, bytes);
  if (room == 0) return true;
  of_mean.resize(n);
  for (std::size_t i = 0; i < n; ++i)
    of_mean[i] = bytes[i] == 0 ? 0 : static_cast<std::uint8_t>(std::min(255, bytes[i] + room));
  return true;
}

ConstBytes Weights::at(std::size_t first, std::size_t n, bool of_mean) const {
  const auto known = by_first_.find(first);
  if (known == by_first_.end() || known->second.bytes.size() != n) return {};
  return of_mean && importance_->mean_room() != 0 ? known->second.of_mean : known->second.bytes;
}

}  // namespace gradwire::gcomp
