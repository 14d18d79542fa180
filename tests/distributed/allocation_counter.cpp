// Preloaded: counts what a process asks of malloc in blocks of at least `allocation_threshold` bytes, on all threads.
#include <dlfcn.h>

#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdint>

namespace {

std::atomic<std::size_t> threshold{SIZE_MAX};
std::atomic<std::uint64_t> n_allocations{0};

void count(std::size_t n_bytes) {
  if (n_bytes >= threshold.load(std::memory_order_relaxed)) n_allocations.fetch_add(1);
}

}  // namespace

extern "C" {

void* __libc_malloc(std::size_t);
void* __libc_calloc(std::size_t, std::size_t);
void* __libc_realloc(void*, std::size_t);
void* __libc_memalign(std::size_t, std::size_t);

void* malloc(std::size_t n_bytes) {
  count(n_bytes);
  return __libc_malloc(n_bytes);
}
void* calloc(std::size_t n, std::size_t n_bytes) {
  count(n * n_bytes);
  return __libc_calloc(n, n_bytes);
}
void* realloc(void* memory, std::size_t n_bytes) {
  count(n_bytes);
  return __libc_realloc(memory, n_bytes);
}
void* memalign(std::size_t alignment, std::size_t n_bytes) {
  count(n_bytes);
  return __libc_memalign(alignment, n_bytes);
}
void* aligned_alloc(std::size_t alignment, std::size_t n_bytes) { return memalign(alignment, n_bytes); }
int posix_memalign(void** memory, std::size_t alignment, std::size_t n_bytes) {
  *memory = memalign(alignment, n_bytes);
  return *memory == nullptr ? ENOMEM : 0;
}

// Blocks of at least so many bytes are counted from now on.
void count_allocations_from(std::size_t n_bytes) {
  n_allocations.store(0);
  threshold.store(n_bytes);
}
std::uint64_t allocations_counted() { return n_allocations.load(); }

}  // extern "C"
