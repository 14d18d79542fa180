// What the bindings share: how Python's arguments, which come by position (gradwire/_native.pyi names them), become the
// core's. They arrive checked by gradwire's Python layer; what computes or waits is called without the GIL.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include "errors.hpp"
#include "gcomp/codec.hpp"
#include "gcomp/importance.hpp"
#include "quantisers/codec.hpp"
#include "sketch/plan.hpp"
#include "switch/udp_socket.hpp"
#include "truncated_float/codec.hpp"

namespace nb = nanobind;
using namespace nb::literals;
using namespace gradwire;
using floats::Dtype;

constexpr nb::call_guard<nb::gil_scoped_release> unlocked;
template <class Scope, class Body>
void def_unlocked(Scope& scope, const char* name, Body&& body) {
  scope.def(name, std::forward<Body>(body), unlocked);
}

// Names and what they stand for, in turn.
template <class Value, class... More>
nb::dict dict_of(const char* name, const Value& value, const More&... more) {
  nb::dict result;
  if constexpr (sizeof...(more) > 0) result = dict_of(more...);
  result[name] = value;
  return result;
}

// A span that may be None, which is an empty one.
template <class Span>
struct OrNone : Span {
  using Span::Span;
};

void bind_codecs(nb::module_& m);  // bindings_codecs.cpp
void bind_engine(nb::module_& m);  // bindings_engine.cpp

namespace nanobind::detail {

// A one-dimensional, contiguous CPU buffer, of torch or of numpy, whose owner outlives the call. Never a converted
// copy, whose changes would be lost.
template <class Span>
struct SpanCaster {
  using Array = make_caster<ndarray<typename Span::element_type, ndim<1>, c_contig, device::cpu>>;
  NB_TYPE_CASTER(Span, Array::Name)

  bool from_python(handle src, auto flags, cleanup_list* cleanup) noexcept {
    if (src.is_none()) return true;
    constexpr auto converts = static_cast<decltype(flags)>(cast_flags::convert);
    if (!array_.from_python(src, flags & ~converts, cleanup)) return false;
    value = Span(array_.value.data(), array_.value.size());
    return true;
  }

 private:
  Array array_;
};
template <class T>
struct type_caster<std::span<T>> : SpanCaster<std::span<T>> {};
template <class Span>
struct type_caster<OrNone<Span>> : SpanCaster<OrNone<Span>> {};
template <class Span>
struct has_arg_defaults<OrNone<Span>> : std::true_type {};
template <>
struct has_arg_defaults<gcomp::BucketImportance> : std::true_type {};

// An enumeration as its number: n of them from `first` on.
template <class Enum, int n, int first = 0>
struct CodeCaster {
  static constexpr auto Name = const_name("int");
  template <class T>
  using Cast = Enum;
  template <class T>
  static constexpr bool can_cast() {
    return true;
  }
  bool from_python(handle src, auto flags, cleanup_list* cleanup) noexcept {
    return code_.from_python(src, flags, cleanup);
  }
  static handle from_cpp(Enum value, rv_policy, cleanup_list*) noexcept {
    return PyLong_FromLong(static_cast<long>(value));
  }
  explicit operator Enum() const {
    if (code_.value < first || code_.value >= first + n) throw InvalidArgument("unknown code ", code_.value);
    return static_cast<Enum>(code_.value);
  }

 private:
  make_caster<int> code_;
};
#define GW_CODES(Enum, ...) \
  template <>               \
  struct type_caster<Enum> : CodeCaster<Enum, __VA_ARGS__> {};
GW_CODES(floats::Dtype, floats::kDtypes)
GW_CODES(gcomp::Mode, gcomp::kModes)
GW_CODES(gcomp::Rounding, 2)
GW_CODES(gcomp::Version, 2, 1)
GW_CODES(truncated_float::Format, truncated_float::kFormats)
GW_CODES(truncated_float::Rounding, truncated_float::kRoundings)
GW_CODES(quantisers::Kind, quantisers::kKinds)
GW_CODES(quantisers::Options::Rule, 3)
GW_CODES(sketch::Cells, sketch::kCellKinds)
GW_CODES(sketch::Outcome, 3)
GW_CODES(innet::Operation, 3, 1)
GW_CODES(innet::Check, 3)

}  // namespace nanobind::detail
