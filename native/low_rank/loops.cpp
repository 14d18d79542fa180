// Every sum has an order of its own: lanes and their reduction are spelt out, products and sums round separately
// (-ffp-contract=off), so that all machines get the same bits.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "low_rank/factors.hpp"

namespace gradwire::low_rank {
namespace {

// Eight floats; without AVX2 the compiler splits them. Passed by reference: by value their ABI depends on the target.
using Lanes = float __attribute__((vector_size(32)));
constexpr std::size_t kLanes = 8;

inline void load(Lanes& lanes, const float* from) { std::memcpy(&lanes, from, sizeof(Lanes)); }
inline void store(const Lanes& lanes, float* to) { std::memcpy(to, &lanes, sizeof(Lanes)); }

#if defined(__AVX512F__)
constexpr std::size_t kWide = 16, kBlockRows = 8;  // 8 x 2 sums of 32 registers, the rest for operands
#else
constexpr std::size_t kWide = 8, kBlockRows = 4;  // 4 x 2 of AVX2's 16
#endif
using Wide = float __attribute__((vector_size(4 * kWide)));
constexpr std::size_t kPanelColumns = 2 * kWide;

inline void load(Wide& lanes, const float* from, std::size_t index) {
  std::memcpy(&lanes, from + index * kWide, sizeof(Wide));
}

template <bool kSubtract>
void multiply_panels(const float* left, const float* panels, std::size_t rank, std::size_t n_rows,
                     std::size_t n_columns, float* out) {
  for (std::size_t begin = 0; begin < n_columns; begin += kPanelColumns, panels += rank * kPanelColumns) {
    Wide sums[kBlockRows][2] = {};
    for (std::size_t k = 0; k < rank; ++k) {
      Wide low, high;
      load(low, panels + k * kPanelColumns, 0);
      load(high, panels + k * kPanelColumns, 1);
      for (std::size_t i = 0; i < kBlockRows; ++i) {
        sums[i][0] += low * left[k * kBlockRows + i];
        sums[i][1] += high * left[k * kBlockRows + i];
      }
    }
    const std::size_t n = std::min(kPanelColumns, n_columns - begin);
    if (n == kPanelColumns && n_rows == kBlockRows) {
      for (std::size_t i = 0; i < kBlockRows; ++i) {
        float* const row = out + i * n_columns + begin;
        for (std::size_t half = 0; half < 2; ++half) {
          if constexpr (kSubtract) {
            Wide before;
            load(before, row, half);
            sums[i][half] = before - sums[i][half];
          }
          std::memcpy(row + half * kWide, &sums[i][half], sizeof(Wide));
        }
      }
      continue;
    }
    float values[kBlockRows][kPanelColumns];
    std::memcpy(values, sums, sizeof(values));
    for (std::size_t i = 0; i < n_rows; ++i) {
      float* const row = out + i * n_columns + begin;
      for (std::size_t j = 0; j < n; ++j) row[j] = kSubtract ? row[j] - values[i][j] : values[i][j];
    }
  }
}

void multiply_block(const float* left, const float* panels, std::size_t rank, std::size_t n_rows, std::size_t n_columns,
                    bool subtract, float* out) {
  if (subtract)
    multiply_panels<true>(left, panels, rank, n_rows, n_columns, out);
  else
    multiply_panels<false>(left, panels, rank, n_rows, n_columns, out);
}

// sums[c] = sum over i of v[i] rows[c][i]: sixteen running sums, the remainder to the first of them, then halves added.
template <std::size_t kRows>
void dots(const float* v, float* const* rows, std::size_t n, float* sums) {
  Lanes lanes[kRows][2] = {};
  std::size_t i = 0;
  for (; i + 2 * kLanes <= n; i += 2 * kLanes) {
    Lanes low, high;
    load(low, v + i);
    load(high, v + i + kLanes);
    for (std::size_t c = 0; c < kRows; ++c) {
      Lanes a, b;
      load(a, rows[c] + i);
      load(b, rows[c] + i + kLanes);
      lanes[c][0] += low * a;
      lanes[c][1] += high * b;
    }
  }
  for (std::size_t c = 0; c < kRows; ++c) {
    float partial[2 * kLanes];
    store(lanes[c][0], partial);
    store(lanes[c][1], partial + kLanes);
    for (std::size_t t = 0; i + t < n; ++t) partial[t] += v[i + t] * rows[c][i + t];
    for (std::size_t width = kLanes; width > 0; width /= 2)
      for (std::size_t t = 0; t < width; ++t) partial[t] += partial[t + width];
    sums[c] = partial[0];
  }
}

template <std::size_t kRows>
void subtract_multiples(const float* v, const float* weights, std::size_t n, float* const* rows) {
  std::size_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    Lanes a;
    load(a, v + i);
    for (std::size_t c = 0; c < kRows; ++c) {
      Lanes b;
      load(b, rows[c] + i);
      b -= a * weights[c];
      store(b, rows[c] + i);
    }
  }
  for (; i < n; ++i)
    for (std::size_t c = 0; c < kRows; ++c) rows[c][i] -= v[i] * weights[c];
}

// (I - tau v v^T) on rows [first, last) of `factor`, where v = (1, tail) begins at column `pivot`.
template <std::size_t kRows>
void reflect_rows(float* factor, std::size_t n, std::size_t pivot, const float* tail, float tau, std::size_t first) {
  float* rows[kRows];
  float weights[kRows];
  for (std::size_t c = 0; c < kRows; ++c) rows[c] = factor + (first + c) * n + pivot + 1;
  dots<kRows>(tail, rows, n - pivot - 1, weights);
  for (std::size_t c = 0; c < kRows; ++c) {
    weights[c] = tau * (rows[c][-1] + weights[c]);
    rows[c][-1] -= weights[c];
  }
  subtract_multiples<kRows>(tail, weights, n - pivot - 1, rows);
}

void reflect(float* factor, std::size_t rank, std::size_t n, std::size_t pivot, float tau) {
  const float* const tail = factor + pivot * n + pivot + 1;
  std::size_t row = pivot + 1;
  for (; row + 4 <= rank; row += 4) reflect_rows<4>(factor, n, pivot, tail, tau, row);
  for (; row < rank; ++row) reflect_rows<1>(factor, n, pivot, tail, tau, row);
}

// Householder's QR of the transposed factor, without its R. LAPACK's geqr2 and org2r say the same, column by column. A
// zero tail gives H = I, so a zero factor gives the first unit vectors: never a NaN.
void orthogonalise(float* factor, std::size_t rank, std::size_t n) {
  std::vector<float> taus(rank);
  for (std::size_t k = 0; k < rank; ++k) {
    float* const row = factor + k * n;
    float* tail = row + k + 1;
    float tail_squares;
    dots<1>(tail, &tail, n - k - 1, &tail_squares);
    const float head = row[k];
    taus[k] = 0;
    if (tail_squares > 0) {
      const float norm = std::sqrt(head * head + tail_squares);
      const float reflected = head > 0 ? -norm : norm;
      taus[k] = (reflected - head) / reflected;
      const float divisor = head - reflected;
      for (std::size_t i = 0; i < n - k - 1; ++i) tail[i] /= divisor;
      reflect(factor, rank, n, k, taus[k]);
    } else {
      std::fill(tail, row + n, 0.0f);
    }
  }
  for (std::size_t k = rank; k-- > 0;) {
    float* const row = factor + k * n;
    for (std::size_t j = k + 1; j < rank; ++j) factor[j * n + k] = 0;
    reflect(factor, rank, n, k, taus[k]);
    for (std::size_t i = k + 1; i < n; ++i) row[i] *= -taus[k];
    row[k] = 1 - taus[k];
  }
}

}  // namespace

const Kernels& kernels_at(Level<GW_LEVEL>) {
  static constexpr Kernels all = {kBlockRows, kPanelColumns, multiply_block, orthogonalise};
  return all;
}

}  // namespace gradwire::low_rank
