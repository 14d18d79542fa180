// The Python module: what knows both Python and the core, with bindings_*.cpp.
#include "bindings.hpp"

#include "checksum/crc32c.hpp"
#include "parallel/thread_pool.hpp"
#include "simd/dispatch.hpp"

NB_MODULE(_native, m) {
  // Python modules keep tables of ours in their globals until the process ends; that is no leak worth a warning.
  nb::set_leak_warnings(false);
  // gradwire.errors holds the Python classes, so that errors raised here and there are the same.
  nb::register_exception_translator([](const std::exception_ptr& pointer, void*) {
    try {
      std::rethrow_exception(pointer);
    } catch (const Error& error) {
      const nb::object type = nb::module_::import_("gradwire.errors").attr(error.name);
      PyErr_SetString(type.ptr(), error.what());
    }
  });

  m.def("set_thread_count", &set_thread_count, "n_threads"_a);
  m.def("thread_count", &thread_count);
  m.def("simd_level", [] {
    constexpr const char* names[] = {"portable", "avx2", "avx512"};
    return names[static_cast<int>(simd_level())];
  });
  m.def(
      "limit_simd_level",
      [](bool allow_avx2, bool allow_avx512) {
        limit_simd_level(!allow_avx2 ? SimdLevel::portable : allow_avx512 ? SimdLevel::avx512 : SimdLevel::avx2);
      },
      "allow_avx2"_a, "allow_avx512"_a = true);
  m.def("crc32c", &crc32c, "data"_a, "crc"_a = 0, unlocked);
  bind_codecs(m);
  bind_sums(m);
  bind_engine(m);
}
