// One sweep over values of any dtype, block by block as float32, on all threads of the pool.
#pragma once

#include <algorithm>
#include <cstddef>
#include <span>

#include "parallel/thread_pool.hpp"
#include "quantisers/codec.hpp"

namespace gradwire::quantisers {

inline constexpr std::size_t kTaskBlocks = 16;  // 65,536 values, 256 KiB of float32: some 40 us

template <typename Body>
void for_block_numbers(std::size_t n_elements, const Body& body) {
  const std::size_t n_blocks = (n_elements + kBlock - 1) / kBlock;
  parallel_for((n_blocks + kTaskBlocks - 1) / kTaskBlocks, [&](std::size_t task) {
    const std::size_t end = std::min(n_blocks, (task + 1) * kTaskBlocks);
    for (std::size_t block = task * kTaskBlocks; block < end; ++block)
      body(block, std::min(kBlock, n_elements - block * kBlock));
  });
}

// body(block, terms, n): values, in L1 if they had to be widened, and residual where it lies.
template <typename Body>
void for_terms(const Source& source, const Body& body) {
  for_block_numbers(source.n_elements(), [&](std::size_t block, std::size_t n) {
    alignas(32) float scratch[kBlock];
    const std::size_t begin = block * kBlock;
    const std::uint8_t* const raw = source.values.data() + begin * bytes_of(source.dtype);
    const float* values = reinterpret_cast<const float*>(raw);
    if (source.dtype != Dtype::float32) {
      kernels().widen(raw, source.dtype, n, scratch);
      values = scratch;
    }
    const float* const residual = source.residual.empty() ? nullptr : source.residual.data() + begin;
    body(block, Terms{values, residual, source.residual_scale}, n);
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

// body(block, values, n) fills each block of `out`.
template <typename Body>
void write_blocks(Dtype dtype, std::span<std::uint8_t> out, const Body& body) {
  for_block_numbers(out.size() / bytes_of(dtype), [&](std::size_t block, std::size_t n) {
    std::uint8_t* const to = out.data() + block * kBlock * bytes_of(dtype);
    if (dtype == Dtype::float32) {
      body(block, reinterpret_cast<float*>(to), n);
      return;
    }
    alignas(32) float scratch[kBlock];
    body(block, scratch, n);
    kernels().narrow(scratch, dtype, n, to);
  });
}

}  // namespace gradwire::quantisers
