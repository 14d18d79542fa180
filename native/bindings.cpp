// The one file that knows both Python and the core. Arguments arrive checked by gradwire's Python layer; every kernel
// runs with the GIL released.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>

#include <cstdint>
#include <optional>
#include <span>

#include "checksum/crc32c.hpp"
#include "errors.hpp"
#include "gcomp/importance.hpp"
#include "parallel/thread_pool.hpp"
#include "simd/dispatch.hpp"

namespace nb = nanobind;
using namespace gradwire;

namespace {

// A one-dimensional, contiguous CPU buffer: torch tensors and numpy arrays alike.
using Bytes = nb::ndarray<std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using ConstBytes = nb::ndarray<const std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

std::span<const std::uint8_t> span_of(const ConstBytes& array) { return {array.data(), array.size()}; }

// gradwire.errors holds the Python classes, so that errors raised here and there are the same.
void translate_errors() {
  nb::register_exception_translator([](const std::exception_ptr& pointer, void*) {
    const auto raise = [](const char* name, const char* what) {
      const nb::object type = nb::module_::import_("gradwire.errors").attr(name);
      PyErr_SetString(type.ptr(), what);
    };
    try {
      std::rethrow_exception(pointer);
    } catch (const InvalidArgument& error) {
      raise("InvalidArgument", error.what());
    } catch (const BufferTooSmall& error) {
      raise("BufferTooSmall", error.what());
    } catch (const CorruptMessage& error) {
      raise("CorruptMessage", error.what());
    } catch (const IncompatibleVersion& error) {
      raise("IncompatibleVersion", error.what());
    }
  });
}

}  // namespace

NB_MODULE(_native, m) {
  translate_errors();

  m.def("set_thread_count", &set_thread_count, nb::arg("n_threads"));
  m.def("thread_count", &thread_count);
  m.def("simd_level", [] { return simd_level() == SimdLevel::avx2 ? "avx2" : "portable"; });
  m.def(
      "limit_simd_level",
      [](bool allow_avx2) { limit_simd_level(allow_avx2 ? SimdLevel::avx2 : SimdLevel::portable); },
      nb::arg("allow_avx2"));
  m.def(
      "crc32c",
      [](const ConstBytes& data, std::uint32_t crc) {
        const auto bytes = span_of(data);
        const nb::gil_scoped_release unlocked;
        return crc32c(bytes, crc);
      },
      nb::arg("data"), nb::arg("crc") = 0);

  using ConstFloats = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
  m.def(
      "importance",
      [](const ConstFloats& parameter, const std::optional<ConstFloats>& second_moment,
         const std::optional<ConstFloats>& first_moment, double a, double b, double c, const Bytes& out) {
        using Floats = std::span<const float>;
        const auto span = [](const ConstFloats& array) { return Floats(array.data(), array.size()); };
        const auto optional_span = [&](const auto& array) {
          return array ? std::optional(span(*array)) : std::nullopt;
        };
        const Floats parameters = span(parameter);
        const std::optional<Floats> seconds = optional_span(second_moment), firsts = optional_span(first_moment);
        const std::span<std::uint8_t> bytes(out.data(), out.size());
        const nb::gil_scoped_release unlocked;
        gcomp::write_importance(parameters, seconds, firsts, static_cast<float>(a), static_cast<float>(b),
                                static_cast<float>(c), bytes);
      },
      nb::arg("parameter"), nb::arg("second_moment").none(), nb::arg("first_moment").none(), nb::arg("a"), nb::arg("b"),
      nb::arg("c"), nb::arg("out"));
}
