#include "huffman/code_lengths.hpp"

#include <algorithm>
#include <limits>
#include <numeric>
#include <queue>
#include <tuple>

namespace gradwire {
namespace {

constexpr std::uint64_t kRawBits = 8;  // what follows an escape code

// Positions of the positive weights, lightest first, ties by position.
std::vector<int> sorted_by_weight(std::span<const std::uint64_t> weights) {
  std::vector<int> order;
  for (std::size_t i = 0; i < weights.size(); ++i)
    if (weights[i] > 0) order.push_back(static_cast<int>(i));
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return weights[a] < weights[b]; });
  return order;
}

}  // namespace

std::vector<int> limited_code_lengths(std::span<const std::uint64_t> weights, int limit) {
  const std::vector<int> order = sorted_by_weight(weights);
  const std::size_t n_leaves = order.size();
  // One list a level: leaves and packages (pairs of the list before) merged by weight, a leaf before an equal package.
  std::vector<std::vector<bool>> is_leaf(limit);
  std::vector<std::uint64_t> list;
  for (int level = 0; level < limit; ++level) {
    std::vector<std::uint64_t> merged;
    std::size_t leaf = 0, pair = 0;
    const std::size_t n_pairs = list.size() / 2;
    while (leaf < n_leaves || pair < n_pairs) {
      const std::uint64_t package =
          pair < n_pairs ? list[2 * pair] + list[2 * pair + 1] : std::numeric_limits<std::uint64_t>::max();
      const bool takes_leaf = leaf < n_leaves && weights[order[leaf]] <= package;
      is_leaf[level].push_back(takes_leaf);
      if (takes_leaf) {
        merged.push_back(weights[order[leaf++]]);
      } else {
        merged.push_back(package);
        ++pair;
      }
    }
    list = std::move(merged);
  }
  // The 2n-2 lightest of the last list; a leaf taken on a level adds one bit to its code, and the leaves taken are
  // always the lightest ones.
  std::vector<int> lengths(weights.size(), 0);
  std::size_t n_taken = 2 * n_leaves - 2;
  for (int level = limit - 1; level >= 0; --level) {
    const auto n_taken_leaves =
        static_cast<std::size_t>(std::count(is_leaf[level].begin(), is_leaf[level].begin() + n_taken, true));
    for (std::size_t leaf = 0; leaf < n_taken_leaves; ++leaf) ++lengths[order[leaf]];
    n_taken = 2 * (n_taken - n_taken_leaves);
  }
  return lengths;
}

std::vector<int> native_code_lengths(std::span<const std::uint64_t> weights) {
  std::vector<int> lengths(weights.size(), 0);
  const std::vector<int> order = sorted_by_weight(weights);
  if (order.size() == 1) lengths[order[0]] = 1;
  if (order.size() < 2) return lengths;
  struct Node {
    int left, right;  // below 0: the leaf order[-1 - x]
  };
  std::vector<Node> nodes;
  using Entry = std::tuple<std::uint64_t, int, int>;  // weight, order of creation, node or leaf
  std::priority_queue<Entry, std::vector<Entry>, std::greater<>> queue;
  for (std::size_t i = 0; i < order.size(); ++i)
    queue.emplace(weights[order[i]], static_cast<int>(i), -1 - static_cast<int>(i));
  while (queue.size() > 1) {
    const auto [weight_a, age_a, a] = queue.top();
    queue.pop();
    const auto [weight_b, age_b, b] = queue.top();
    queue.pop();
    nodes.push_back({a, b});
    queue.emplace(weight_a + weight_b, static_cast<int>(order.size() + nodes.size()),
                  static_cast<int>(nodes.size()) - 1);
  }
  std::vector<int> depth(nodes.size(), 0);
  for (int node = static_cast<int>(nodes.size()) - 1; node >= 0; --node)  // parents come after their children
    for (const int child : {nodes[node].left, nodes[node].right}) {
      if (child >= 0)
        depth[child] = depth[node] + 1;
      else
        lengths[order[-1 - child]] = depth[node] + 1;
    }
  return lengths;
}

std::vector<int> escaped_code_lengths(std::span<const std::uint64_t> histogram, int limit) {
  const std::size_t escape = histogram.size();
  const std::vector<int> order = sorted_by_weight(histogram);
  const std::uint64_t total = std::accumulate(histogram.begin(), histogram.end(), std::uint64_t{0});
  std::vector<int> best;
  std::uint64_t best_bits = std::numeric_limits<std::uint64_t>::max();
  std::uint64_t n_escaped = 0;  // values, in the histogram, of the symbols escaped so far
  std::vector<std::uint64_t> weights(histogram.begin(), histogram.end());
  weights.push_back(0);
  for (std::size_t n_symbols_escaped = 0; n_symbols_escaped < order.size(); ++n_symbols_escaped) {
    if (n_symbols_escaped > 0) {
      const int rarest = order[n_symbols_escaped - 1];
      n_escaped += histogram[rarest];
      weights[rarest] = 0;
      if (n_escaped > total / 8) break;  // an escape costs at least 9 bits: it cannot pay for common symbols
    }
    const bool has_escape = order.size() - n_symbols_escaped < histogram.size();
    weights[escape] = has_escape ? std::max<std::uint64_t>(1, n_escaped) : 0;
    std::vector<int> lengths = limited_code_lengths(weights, limit);
    std::uint64_t bits = n_escaped * (lengths[escape] + kRawBits);
    for (std::size_t symbol = 0; symbol < histogram.size(); ++symbol)
      if (weights[symbol] > 0) bits += histogram[symbol] * lengths[symbol];
    if (bits < best_bits) {
      best_bits = bits;
      best = std::move(lengths);
    }
  }
  return best;
}

}  // namespace gradwire
