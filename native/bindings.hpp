// What the bindings share: how Python's arguments become the core's. They arrive checked by gradwire's Python layer;
// what computes or waits is called without the GIL.
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
#include "quantisers/codec.hpp"
#include "sketch/plan.hpp"
#include "switch/udp_socket.hpp"
#include "truncated_float/codec.hpp"

namespace nb = nanobind;
using namespace nb::literals;
using namespace gradwire;

constexpr nb::call_guard<nb::gil_scoped_release> unlocked;

void bind_codecs(nb::module_& m);  // bindings_codecs.cpp
void bind_engine(nb::module_& m);  // bindings_engine.cpp

namespace nanobind::detail {

// A one-dimensional, contiguous CPU buffer, of torch or of numpy, whose owner outlives the call; None, where an
// argument may be that, is an empty one. Never a converted copy, whose changes would be lost.
template <class T>
struct type_caster<std::span<T>> {
  using Array = make_caster<ndarray<T, ndim<1>, c_contig, device::cpu>>;
  NB_TYPE_CASTER(std::span<T>, Array::Name)

  bool from_python(handle src, auto flags, cleanup_list* cleanup) noexcept {
    if (src.is_none()) return true;
    constexpr auto converts = static_cast<decltype(flags)>(cast_flags::convert);
    if (!array_.from_python(src, flags & ~converts, cleanup)) return false;
    value = {array_.value.data(), array_.value.size()};
    return true;
  }

 private:
  Array array_;
};

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

template <>
struct type_caster<floats::Dtype> : CodeCaster<floats::Dtype, floats::kDtypes> {};
template <>
struct type_caster<gcomp::Mode> : CodeCaster<gcomp::Mode, gcomp::kModes> {};
template <>
struct type_caster<gcomp::Version> : CodeCaster<gcomp::Version, 2, 1> {};
template <>
struct type_caster<truncated_float::Format> : CodeCaster<truncated_float::Format, truncated_float::kFormats> {};
template <>
struct type_caster<truncated_float::Rounding> : CodeCaster<truncated_float::Rounding, truncated_float::kRoundings> {};
template <>
struct type_caster<quantisers::Kind> : CodeCaster<quantisers::Kind, quantisers::kKinds> {};
template <>
struct type_caster<quantisers::Options::Rule> : CodeCaster<quantisers::Options::Rule, 3> {};
template <>
struct type_caster<sketch::Cells> : CodeCaster<sketch::Cells, sketch::kCellKinds> {};
template <>
struct type_caster<sketch::Outcome> : CodeCaster<sketch::Outcome, 3> {};
template <>
struct type_caster<innet::Operation> : CodeCaster<innet::Operation, 3, 1> {};
template <>
struct type_caster<innet::Check> : CodeCaster<innet::Check, 3> {};

}  // namespace nanobind::detail
