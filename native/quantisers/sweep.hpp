// One sweep over values of any dtype, block by block as float32, on all threads of the pool.
#pragma once

#include <algorithm>
#include <array>
#include <limits>

#include "parallel/thread_pool.hpp"
#include "quantisers/codec.hpp"

namespace gradwire::quantisers {

inline constexpr std::size_t kRunBlocks =
    64;  // whose sums are added up before the next ones: a device has threads for it
inline constexpr std::size_t kTaskBlocks = 16;  // 65,536 values, 256 KiB of float32: some 40 us

inline constexpr float kLargestFloat = std::numeric_limits<float>::max();
inline float narrowed(double value) { return static_cast<float>(std::min<double>(value, kLargestFloat)); }
inline double mean_of(double sum, std::uint64_t count) { return count == 0 ? 0 : sum / static_cast<double>(count); }

// Messages are bytes at any address; words are packed beside them.
struct alignas(32) Codes {
  std::array<std::uint8_t, kBlock> bytes;
  std::uint32_t* words() { return reinterpret_cast<std::uint32_t*>(bytes.data()); }
};

template <typename Body>
void for_block_numbers(std::size_t n_elements, const Body& body) {
  parallel_for_runs(n_elements, kTaskBlocks * kBlock, [&](std::size_t begin, std::size_t n) {
    for (std::size_t at = 0; at < n; at += kBlock) body((begin + at) / kBlock, std::min(kBlock, n - at));
  });
}

// Values [begin, begin + n), in `scratch` if they had to be widened, and the residual where it lies.
inline Terms terms_of(const Source& source, std::size_t begin, std::size_t n, float* scratch) {
  const std::uint8_t* const raw = source.values.data() + begin * bytes_of(source.dtype);
  const float* const residual = source.residual.empty() ? nullptr : source.residual.data() + begin;
  if (source.dtype == Dtype::float32) return {reinterpret_cast<const float*>(raw), residual, source.residual_scale};
  kernels().widen(raw, source.dtype, n, scratch);
  return {scratch, residual, source.residual_scale};
}

// body(block, terms, n)
template <typename Body>
void for_terms(const Source& source, const Body& body) {
  for_block_numbers(source.n_elements(), [&](std::size_t block, std::size_t n) {
    alignas(32) float scratch[kBlock];
    body(block, terms_of(source, block * kBlock, n, scratch), n);
  });
}

// body(block, values, n): values + residual x residual_scale, in L1 or where they lie.
template <typename Body>
void for_blocks(const Source& source, const Body& body) {
  for_terms(source, [&](std::size_t block, const Terms& terms, std::size_t n) {
    if (terms.residual == nullptr) {
      body(block, terms.values, n);
      return;
    }
    alignas(32) float scratch[kBlock];
    kernels().add(terms.values, terms.residual, terms.scale, n, scratch);
    body(block, static_cast<const float*>(scratch), n);
  });
}

// Where a value is not finite, the residual is kept as it was.
inline void keep_residual(const Source& source, Floats new_residual) {
  if (source.residual.empty())
    std::fill(new_residual.begin(), new_residual.end(), 0.0f);
  else if (!new_residual.empty() && new_residual.data() != source.residual.data())
    std::copy(source.residual.begin(), source.residual.end(), new_residual.begin());
}

// read(values) gives values [begin, begin + n) of `out`, or what is added to them there.
template <typename Read>
void write_values(Dtype dtype, Bytes out, std::size_t begin, std::size_t n, bool adds, const Read& read) {
  std::uint8_t* const to = out.data() + begin * bytes_of(dtype);
  auto* const floats = reinterpret_cast<float*>(to);
  if (dtype == Dtype::float32 && !adds) {
    read(floats);
    return;
  }
  alignas(32) float scratch[kBlock];
  read(scratch);
  if (adds)
    kernels().add(floats, scratch, 1, n, floats);
  else
    kernels().narrow(scratch, dtype, n, to);
}

// read(block, values, n) for each block of `out`.
template <typename Read>
void write_blocks(Dtype dtype, Bytes out, bool adds, const Read& read) {
  for_block_numbers(out.size() / bytes_of(dtype), [&](std::size_t block, std::size_t n) {
    write_values(dtype, out, block * kBlock, n, adds, [&](float* values) { read(block, values, n); });
  });
}

}  // namespace gradwire::quantisers
