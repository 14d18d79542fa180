// A CUDA block on one host thread: every thread of it is a fiber, and barriers and warp operations switch fibers. So
// the source of the kernels runs under g++, with its sanitizers, in any order of threads: forward, backward, or by
// chance. A kernel whose bytes depend on the order has a race, and one whose threads wait at different places is
// stopped by name.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

namespace gradwire::gpu::emulation {

struct Index {
  unsigned x = 0;
};

class Block {
 public:
  static constexpr unsigned kWarpThreads = 32;
  static constexpr std::size_t kStackBytes = 64 << 10;

  static inline thread_local Block* current = nullptr;
  Index thread, block, threads, blocks;
  unsigned char* shared = nullptr;

  explicit Block(unsigned n_threads) : fibers_(n_threads), seen_(n_threads / kWarpThreads) {
    threads.x = n_threads;
    for (Fiber& fiber : fibers_) fiber.stack = std::make_unique_for_overwrite<char[]>(kStackBytes);
  }

  // One block of a launch. Throws std::logic_error where its threads wait for each other for ever.
  void run(const std::function<void()>& body, unsigned index, std::uint64_t seed) {
    block.x = index;
    body_ = &body;
    current = this;
    std::vector<unsigned> order(fibers_.size());
    for (unsigned i = 0; i < order.size(); ++i) order[i] = seed == 1 ? order.size() - 1 - i : i;
    std::mt19937_64 chance(seed * 1'000'003 + index);
    for (Fiber& fiber : fibers_) {
      if (fiber.waits != Waits::ended || !fiber.has_begun) prepare(fiber);  // what the block before left half-way
      fiber.waits = Waits::no;
    }
    while (true) {
      if (seed > 1) std::shuffle(order.begin(), order.end(), chance);
      bool any = false;
      for (const unsigned i : order)
        if (fibers_[i].waits == Waits::no) resume(i), any = true;
      if (any) continue;
      if (!release()) break;
    }
    current = nullptr;
  }

  void barrier(int line) { wait(Waits::at_barrier, line); }

  // Every lane's value, once all of the warp have come to this line.
  const std::uint64_t* exchange(std::uint64_t value, int line) {
    fibers_[running_].given = value;
    wait(Waits::in_warp, line);
    return seen_[running_ / kWarpThreads].data();  // as it is until all of the warp have come to the next line
  }

 private:
  enum class Waits { no, at_barrier, in_warp, ended };
  // Where a stack goes on. Switching contexts asks the kernel for the mask of signals, which is much dearer than the
  // switch; so they serve where a fiber begins, and under AddressSanitizer, which knows no jumps from stack to stack.
  struct Place {
    ucontext_t context;
    jmp_buf jump;
  };
  struct Fiber {
    Place place;
    std::unique_ptr<char[]> stack;
    bool has_begun = false;
    Waits waits = Waits::ended;
    int line = 0;
    std::uint64_t given = 0;
  };

  // A fiber runs one thread of every block, one after the other.
  static void enter() {
    Block& self = *current;
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(nullptr, &self.main_stack_, &self.main_bytes_);
#endif
    while (true) {
      (*self.body_)();
      self.wait(Waits::ended, 0);
    }
  }

  void prepare(Fiber& fiber) {
    ucontext_t& context = fiber.place.context;
    getcontext(&context);
#if defined(__SANITIZE_ADDRESS__)
    __asan_unpoison_memory_region(fiber.stack.get(), kStackBytes);  // what the thread before left there
#endif
    context.uc_stack.ss_sp = fiber.stack.get();
    context.uc_stack.ss_size = kStackBytes;
    context.uc_link = nullptr;
    makecontext(&context, &Block::enter, 0);
    fiber.has_begun = false;
  }

  void resume(unsigned i) {
    running_ = i;
    thread.x = i;
    Fiber& fiber = fibers_[i];
    const bool begins = !std::exchange(fiber.has_begun, true);
    go(main_, fiber.place, fiber.stack.get(), kStackBytes, begins);
  }

  void wait(Waits waits, int line) {
    Fiber& fiber = fibers_[running_];
    fiber.waits = waits;
    fiber.line = line;
    go(fiber.place, main_, main_stack_, main_bytes_, false);
  }

  static void go(Place& from, Place& to, [[maybe_unused]] const void* stack, [[maybe_unused]] std::size_t n_bytes,
                 [[maybe_unused]] bool begins) {
#if defined(__SANITIZE_ADDRESS__)
    void* own = nullptr;
    __sanitizer_start_switch_fiber(&own, stack, n_bytes);
    swapcontext(&from.context, &to.context);
    __sanitizer_finish_switch_fiber(own, nullptr, nullptr);
#else
    if (_setjmp(from.jump) != 0) return;
    if (begins) setcontext(&to.context);
    _longjmp(to.jump, 1);
#endif
  }

  // Everybody waits or has ended. Whole warps that wait in one operation go on; else the block, if all are at one
  // barrier.
  bool release() {
    bool any = false;
    for (unsigned first = 0; first < fibers_.size(); first += kWarpThreads) {
      if (!agree(first, first + kWarpThreads, Waits::in_warp)) continue;
      for (unsigned i = first; i < first + kWarpThreads; ++i) {
        seen_[first / kWarpThreads][i - first] = fibers_[i].given;
        fibers_[i].waits = Waits::no;
      }
      any = true;
    }
    if (any) return true;
    if (agree(0, fibers_.size(), Waits::ended)) return false;
    if (!agree(0, fibers_.size(), Waits::at_barrier)) {
      std::string lines;
      for (const Fiber& fiber : fibers_)
        if (lines.find(std::to_string(fiber.line)) == std::string::npos) lines += " " + std::to_string(fiber.line);
      throw std::logic_error("threads of a block wait at different places (0: they have ended):" + lines);
    }
    for (Fiber& fiber : fibers_) fiber.waits = Waits::no;
    return true;
  }

  bool agree(unsigned begin, unsigned end, Waits waits) const {
    for (unsigned i = begin; i < end; ++i)
      if (fibers_[i].waits != waits || fibers_[i].line != fibers_[begin].line) return false;
    return true;
  }

  std::vector<Fiber> fibers_;
  std::vector<std::array<std::uint64_t, kWarpThreads>> seen_;
  const std::function<void()>* body_ = nullptr;
  Place main_;
  unsigned running_ = 0;
  const void* main_stack_ = nullptr;
  std::size_t main_bytes_ = 0;
};

inline unsigned char* shared_memory() { return Block::current->shared; }

// Blocks one after the other, in the order that `seed` says as well.
inline void launch(unsigned n_blocks, unsigned n_threads, std::size_t shared_bytes, std::uint64_t seed,
                   const std::function<void()>& body) {
  if (n_threads == 0 || n_threads % Block::kWarpThreads != 0) throw std::logic_error("blocks have whole warps");
  static thread_local std::map<unsigned, Block> kept;  // stacks are dear
  Block& block = kept.try_emplace(n_threads, n_threads).first->second;
  block.blocks.x = n_blocks;
  for (unsigned number = 0; number < n_blocks; ++number) {
    // Of its own, so that AddressSanitizer knows its end; filled, as a device's memory is with what the last one left.
    const auto shared = std::make_unique<std::uint64_t[]>((shared_bytes + 7) / 8);
    std::memset(shared.get(), 0xA5, (shared_bytes + 7) / 8 * 8);
    block.shared = reinterpret_cast<unsigned char*>(shared.get());
    block.run(body, seed == 1 ? n_blocks - 1 - number : number, seed);
  }
}

inline unsigned ballot(bool predicate, int line) {
  const std::uint64_t* const seen = Block::current->exchange(predicate, line);
  unsigned word = 0;
  for (unsigned lane = 0; lane < Block::kWarpThreads; ++lane) word |= static_cast<unsigned>(seen[lane]) << lane;
  return word;
}

inline unsigned largest(unsigned own, int line) {
  const std::uint64_t* const seen = Block::current->exchange(own, line);
  return static_cast<unsigned>(*std::max_element(seen, seen + Block::kWarpThreads));
}

template <class T>
T shuffle_xor(T value, unsigned lanes, int line) {
  const unsigned lane = (Block::current->thread.x ^ lanes) % Block::kWarpThreads;
  std::uint64_t word = 0;
  std::memcpy(&word, &value, sizeof value);
  std::memcpy(&value, &Block::current->exchange(word, line)[lane], sizeof value);
  return value;
}

// A word's next value, by atomic steps; returns the one before.
template <class Next>
unsigned replace(unsigned* at, Next next) {
  std::atomic_ref<unsigned> word(*at);
  unsigned before = word.load();
  while (!word.compare_exchange_weak(before, next(before))) {
  }
  return before;
}

}  // namespace gradwire::gpu::emulation

#define __device__
#define __forceinline__ inline
#define __noinline__ inline
#define threadIdx (::gradwire::gpu::emulation::Block::current->thread)
#define blockIdx (::gradwire::gpu::emulation::Block::current->block)
#define blockDim (::gradwire::gpu::emulation::Block::current->threads)
#define gridDim (::gradwire::gpu::emulation::Block::current->blocks)
#define __syncthreads() (::gradwire::gpu::emulation::Block::current->barrier(__LINE__))
#define __ballot_sync(warp, predicate) (::gradwire::gpu::emulation::ballot(predicate, __LINE__))
#define __threadfence() ((void)0)  // blocks run one after the other
#define __reduce_max_sync(warp, value) (::gradwire::gpu::emulation::largest(value, __LINE__))
#define __shfl_xor_sync(warp, value, lanes) (::gradwire::gpu::emulation::shuffle_xor(value, lanes, __LINE__))

inline unsigned __float_as_uint(float value) {
  unsigned bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}
inline float __uint_as_float(unsigned bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
inline int __popc(unsigned word) { return std::popcount(word); }
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned n) {
  return static_cast<unsigned>((static_cast<std::uint64_t>(high) << 32 | low) >> n % 32);
}
inline int __clz(unsigned word) { return std::countl_zero(word); }
inline double __dsqrt_rn(double value) { return std::sqrt(value); }
inline unsigned atomicOr(unsigned* at, unsigned bits) { return std::atomic_ref<unsigned>(*at).fetch_or(bits); }
template <class T>
T atomicAdd(T* at, T value) {
  return std::atomic_ref<T>(*at).fetch_add(value);
}
inline unsigned atomicInc(unsigned* at, unsigned most) {
  return gradwire::gpu::emulation::replace(at, [=](unsigned word) { return word >= most ? 0 : word + 1; });
}
inline unsigned atomicMax(unsigned* at, unsigned value) {
  return gradwire::gpu::emulation::replace(at, [=](unsigned word) { return std::max(word, value); });
}
