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

#define GW_ENTRY(kernel) \
  if (name == #kernel) return launch(&kernel, parameters)

void find_and_launch(const std::string& name, const Launch& launch, const void* parameters) {
  GW_ENTRY(gw_quantised_measure);
  GW_ENTRY(gw_quantised_pack);
  GW_ENTRY(gw_quantised_pack_levels);
  GW_ENTRY(gw_quantised_unpack);
  GW_ENTRY(gw_quantised_unpack_levels);
  GW_ENTRY(gw_truncated_pack);
  GW_ENTRY(gw_truncated_unpack);
  GW_ENTRY(gw_embedded_pack);
  GW_ENTRY(gw_embedded_unpack);
  GW_ENTRY(gw_multiply_factors);
  GW_ENTRY(gw_orthogonalise_factors);
  GW_ENTRY(gw_gcomp_check);
  GW_ENTRY(gw_gcomp_checksums);
  GW_ENTRY(gw_gcomp_streams);
  GW_ENTRY(gw_gcomp_unpack);
  GW_ENTRY(gw_gcomp_measure);
  GW_ENTRY(gw_gcomp_place);
  GW_ENTRY(gw_gcomp_pack);
  GW_ENTRY(gw_gcomp_exponents);
  GW_ENTRY(gw_gcomp_seal);
  GW_ENTRY(gw_gcomp_count);
  GW_ENTRY(gw_grouped_measure);
  GW_ENTRY(gw_grouped_pack);
  GW_ENTRY(gw_grouped_unpack);
  GW_ENTRY(gw_signs_pack);
  GW_ENTRY(gw_signs_vote);
  GW_ENTRY(gw_select_begin);
  GW_ENTRY(gw_select_count);
  GW_ENTRY(gw_select_narrow);
  GW_ENTRY(gw_select_try);
  GW_ENTRY(gw_select_adapt);
  GW_ENTRY(gw_select_measure);
  GW_ENTRY(gw_select_place);
  GW_ENTRY(gw_select_bases);
  GW_ENTRY(gw_select_write);
  GW_ENTRY(gw_select_add);
  GW_ENTRY(gw_index_write);
  GW_ENTRY(gw_index_head);
  GW_ENTRY(gw_index_count);
  GW_ENTRY(gw_index_pack);
  GW_ENTRY(gw_index_unpack);
  GW_ENTRY(gw_ternary_measure);
  GW_ENTRY(gw_ternary_scales);
  GW_ENTRY(gw_ternary_count);
  GW_ENTRY(gw_ternary_mean);
  GW_ENTRY(gw_thc_norms);
  GW_ENTRY(gw_thc_write);
  GW_ENTRY(gw_thc_read);
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
