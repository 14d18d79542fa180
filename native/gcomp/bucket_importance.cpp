#include "gcomp/bucket_importance.hpp"

#include <algorithm>
#include <cstring>
#include <mutex>
#include <optional>

#include "errors.hpp"
#include "gcomp/importance.hpp"

namespace gradwire::gcomp {

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

void BucketImportance::write(std::size_t first, std::span<std::uint8_t> out) const {
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

std::span<const std::uint8_t> Weights::at(std::size_t first, std::size_t n) const {
  const auto known = by_first_.find(first);
  if (known == by_first_.end() || known->second.size() != n) return {};
  return known->second;
}

}  // namespace gradwire::gcomp
