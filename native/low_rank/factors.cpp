#include "low_rank/factors.hpp"

#include <algorithm>
#include <cmath>
#include <vector>

#include "parallel/thread_pool.hpp"

namespace gradwire::low_rank {
namespace {

// Rows a task: with rank 32 and 768 columns 64 rows are some 0.1 ms, long beside waking a thread.
constexpr std::size_t kTaskRows = 64;

// (rank, n_columns) to panels of (rank, width), the last one padded: what the kernel reads, in order.
void pack_panels(ConstFloats right, std::size_t rank, std::size_t n_columns, std::size_t width,
                 std::vector<float>& panels) {
  const std::size_t n_panels = (n_columns + width - 1) / width;
  panels.resize(n_panels * rank * width);
  float* to = panels.data();
  for (std::size_t begin = 0; begin < n_columns; begin += width) {
    const std::size_t n = std::min(width, n_columns - begin);
    for (std::size_t k = 0; k < rank; ++k, to += width)
      std::fill(std::copy_n(right.data() + k * n_columns + begin, n, to), to + width, 0.0f);
  }
}

// By a power of two, so that squares neither overflow nor vanish; spans do not depend on it.
void scale_to_one(Floats factor) {
  float largest = 0;
  for (const float value : factor) largest = std::max(largest, std::fabs(value));
  if (largest == 0) return;
  int exponent;
  std::frexp(largest, &exponent);
  // In two steps: the reciprocal of a subnormal is beyond float32.
  const float first = std::ldexp(1.0f, -exponent / 2), second = std::ldexp(1.0f, -exponent - -exponent / 2);
  for (float& value : factor) value = value * first * second;
}

}  // namespace

void multiply_factors(ConstFloats left, ConstFloats right, std::size_t rank, bool subtract, Floats matrix) {
  const std::size_t n_rows = left.size() / rank, n_columns = right.size() / rank;
  const Kernels& use = kernels();
  // Work space outlives the call, so that nothing is allocated once warm.
  thread_local std::vector<float> packed;
  pack_panels(right, rank, n_columns, use.panel_columns, packed);
  const std::vector<float>& panels = packed;  // the caller's, in all threads
  parallel_for_runs(n_rows, kTaskRows, [&](std::size_t begin, std::size_t n_own) {
    thread_local std::vector<float> block;
    block.resize(rank * use.block_rows);
    for (std::size_t row = begin; row < begin + n_own; row += use.block_rows) {
      const std::size_t n = std::min(use.block_rows, begin + n_own - row);
      for (std::size_t k = 0; k < rank; ++k)
        for (std::size_t i = 0; i < n; ++i) block[k * use.block_rows + i] = left[k * n_rows + row + i];
      use.multiply_block(block.data(), panels.data(), rank, n, n_columns, subtract, matrix.data() + row * n_columns);
    }
  });
}

void orthogonalise_factors(Floats factors, std::size_t n_factors, std::size_t rank) {
  if (n_factors == 0) return;
  const std::size_t size = factors.size() / n_factors;
  const Kernels& use = kernels();
  parallel_for(n_factors, [&](std::size_t i) {
    const Floats factor = factors.subspan(i * size, size);
    scale_to_one(factor);
    use.orthogonalise(factor.data(), rank, size / rank);
  });
}

}  // namespace gradwire::low_rank
