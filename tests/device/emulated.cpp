// The kernels as a library: one function that does what a driver's launch would do.

#include "kernels.cu"

namespace {

using namespace gradwire::gpu;
using namespace gradwire::gpu::gcomp;
using namespace gradwire::gpu::floats;

thread_local std::string last_error;

struct Launch {
  unsigned blocks, threads;
  std::size_t shared_bytes;
  std::uint64_t seed;

  template <class Parameters>
  void operator()(void (*kernel)(const Parameters&), const void* parameters) const {
    Parameters own;  // at its own address, as the driver copies it
    std::memcpy(&own, parameters, sizeof own);
    emulation::launch(blocks, threads, shared_bytes, seed, [&] { kernel(own); });
  }
};

// GW_ENTRIES: GW_ENTRY(...) of every kernel, from the build.
#define GW_ENTRY(kernel) \
  if (name == #kernel) return launch(&kernel, parameters);

void find_and_launch(const std::string& name, const Launch& launch, const void* parameters) {
  GW_ENTRIES
  throw std::logic_error("no kernel is called " + name);
}

}  // namespace

extern "C" const char* gw_last_error() { return last_error.c_str(); }

extern "C" int gw_emulate(const char* name, unsigned blocks, unsigned threads, unsigned shared_bytes,
                          std::uint64_t seed, const void* parameters) {
  try {
    find_and_launch(name, {blocks, threads, shared_bytes, seed}, parameters);
    return 0;
  } catch (const std::exception& error) {
    last_error = error.what();
    return 1;
  }
}
