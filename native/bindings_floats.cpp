// Python's face of the float codecs: embedded-float and truncated-float.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>

#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include "embedded_float/codec.hpp"
#include "errors.hpp"
#include "truncated_float/codec.hpp"

namespace nb = nanobind;
using namespace gradwire;

namespace {

using Bytes = nb::ndarray<std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using ConstBytes = nb::ndarray<const std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Words = nb::ndarray<std::int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Floats = nb::ndarray<float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

std::span<const std::uint8_t> span_of(const ConstBytes& array) { return {array.data(), array.size()}; }
std::span<std::uint8_t> span_of(const Bytes& array) { return {array.data(), array.size()}; }

floats::Dtype dtype_of(int code) {
  if (code < 0 || code >= floats::kDtypes) throw InvalidArgument("unknown dtype code");
  return static_cast<floats::Dtype>(code);
}

embedded_float::Known known_of(const Words& codes, const Bytes& exponents, int dtype, std::size_t partition,
                               int n_known) {
  embedded_float::check_settings(partition, {0, 1});
  if (exponents.size() != embedded_float::partitions_of(codes.size(), partition))
    throw InvalidArgument("embedded-float: one exponent for every partition");
  if (n_known < 0 || n_known > embedded_float::kPlanes) throw InvalidArgument("embedded-float: 0 to 32 known planes");
  // Signed and unsigned words may stand for each other.
  return {{reinterpret_cast<std::uint32_t*>(codes.data()), codes.size()},
          span_of(exponents),
          dtype_of(dtype),
          partition,
          n_known};
}

void bind_embedded_float(nb::module_& m) {
  m.def(
      "embedded_float_max_bytes",
      [](std::uint64_t n_elements, std::size_t partition, int first_bit, int n_bits) {
        embedded_float::check_settings(partition, {first_bit, n_bits});
        return embedded_float::max_message_bytes(n_elements, partition, {first_bit, n_bits});
      },
      nb::arg("n_elements"), nb::arg("partition"), nb::arg("first_bit"), nb::arg("n_bits"));
  m.def(
      "embedded_float_encode",
      [](const ConstBytes& values, int dtype, std::size_t partition, int first_bit, int n_bits, const Bytes& out) {
        const floats::Dtype known = dtype_of(dtype);
        const nb::gil_scoped_release unlocked;
        return embedded_float::encode(span_of(values), known, partition, {first_bit, n_bits}, span_of(out));
      },
      nb::arg("values"), nb::arg("dtype"), nb::arg("partition"), nb::arg("first_bit"), nb::arg("n_bits"),
      nb::arg("out"));
  m.def(
      "embedded_float_decode",
      [](const ConstBytes& message, int dtype, const Bytes& values) {
        const floats::Dtype known = dtype_of(dtype);
        const nb::gil_scoped_release unlocked;
        embedded_float::decode(span_of(message), known, span_of(values));
      },
      nb::arg("message"), nb::arg("dtype"), nb::arg("values"));
  m.def(
      "embedded_float_refine",
      [](const ConstBytes& message, const Words& codes, const Bytes& exponents, int dtype, std::size_t partition,
         int n_known) {
        const embedded_float::Known known = known_of(codes, exponents, dtype, partition, n_known);
        const nb::gil_scoped_release unlocked;
        return embedded_float::refine(span_of(message), known);
      },
      nb::arg("message"), nb::arg("codes"), nb::arg("exponents"), nb::arg("dtype"), nb::arg("partition"),
      nb::arg("n_known"));
  m.def(
      "embedded_float_write",
      [](const Words& codes, const Bytes& exponents, int dtype, std::size_t partition, int n_known,
         const Bytes& values) {
        const embedded_float::Known known = known_of(codes, exponents, dtype, partition, n_known);
        if (n_known < 1 || values.size() != codes.size() * floats::bytes_of(known.dtype))
          throw InvalidArgument("embedded-float: write: out has another size, or no plane is known");
        const nb::gil_scoped_release unlocked;
        embedded_float::write(known, span_of(values));
      },
      nb::arg("codes"), nb::arg("exponents"), nb::arg("dtype"), nb::arg("partition"), nb::arg("n_known"),
      nb::arg("values"));
  m.def(
      "embedded_float_add",
      [](const Words& codes, const Bytes& exponents, int dtype, std::size_t partition, int n_known,
         const Floats& sums) {
        const embedded_float::Known known = known_of(codes, exponents, dtype, partition, n_known);
        if (n_known < 1 || sums.size() != codes.size())
          throw InvalidArgument("embedded-float: add: sums have another size, or no plane is known");
        const nb::gil_scoped_release unlocked;
        embedded_float::add(known, {sums.data(), sums.size()});
      },
      nb::arg("codes"), nb::arg("exponents"), nb::arg("dtype"), nb::arg("partition"), nb::arg("n_known"),
      nb::arg("sums"));
  m.def(
      "embedded_float_quantise",
      [](const ConstBytes& values, int dtype, std::size_t partition, int n_known, const Bytes& out) {
        const floats::Dtype known = dtype_of(dtype);
        const nb::gil_scoped_release unlocked;
        embedded_float::quantise(span_of(values), known, partition, n_known, span_of(out));
      },
      nb::arg("values"), nb::arg("dtype"), nb::arg("partition"), nb::arg("n_known"), nb::arg("out"));
  m.def(
      "embedded_float_header",
      [](const ConstBytes& message) {
        const embedded_float::Header header = embedded_float::read_header(span_of(message));
        nb::dict result;
        result["codec"] = "embedded-float";
        result["format_version"] = embedded_float::kVersion;
        result["dtype"] = floats::name_of(header.dtype);
        result["first_bit"] = header.range.first;
        result["n_bits"] = header.range.n;
        result["partition"] = header.partition;
        result["n_elements"] = header.n_elements;
        result["holds_nonfinite"] = (header.flags & embedded_float::kFlagNonfinite) != 0;
        result["message_bytes"] = header.message_bytes;
        return result;
      },
      nb::arg("message"));
}

truncated_float::Settings settings_of(int dtype, int format, int n_bits, std::size_t partition) {
  if (format < 0 || format >= truncated_float::kFormats) throw InvalidArgument("unknown format code");
  const truncated_float::Settings settings{dtype_of(dtype), static_cast<truncated_float::Format>(format), n_bits,
                                           partition};
  truncated_float::check_settings(settings);
  return settings;
}

void bind_truncated_float(nb::module_& m) {
  m.def(
      "truncated_float_max_bytes",
      [](std::uint64_t n_elements, int dtype, int format, int n_bits, std::size_t partition) {
        return truncated_float::max_message_bytes(n_elements, settings_of(dtype, format, n_bits, partition));
      },
      nb::arg("n_elements"), nb::arg("dtype"), nb::arg("format"), nb::arg("n_bits"), nb::arg("partition"));
  m.def(
      "truncated_float_encode",
      [](const ConstBytes& values, int dtype, int format, int n_bits, std::size_t partition, int rounding,
         std::uint64_t seed, std::uint64_t stream, const Bytes& out) {
        const truncated_float::Settings settings = settings_of(dtype, format, n_bits, partition);
        if (rounding < 0 || rounding >= truncated_float::kRoundings) throw InvalidArgument("unknown rounding code");
        const nb::gil_scoped_release unlocked;
        return truncated_float::encode(span_of(values), settings, static_cast<truncated_float::Rounding>(rounding),
                                       {seed, stream}, span_of(out));
      },
      nb::arg("values"), nb::arg("dtype"), nb::arg("format"), nb::arg("n_bits"), nb::arg("partition"),
      nb::arg("rounding"), nb::arg("seed"), nb::arg("stream"), nb::arg("out"));
  m.def(
      "truncated_float_decode",
      [](const ConstBytes& message, int dtype, const Bytes& values) {
        const floats::Dtype known = dtype_of(dtype);
        const nb::gil_scoped_release unlocked;
        truncated_float::decode(span_of(message), known, span_of(values));
      },
      nb::arg("message"), nb::arg("dtype"), nb::arg("values"));
  m.def(
      "truncated_float_header",
      [](const ConstBytes& message) {
        const truncated_float::Header header = truncated_float::read_header(span_of(message));
        nb::dict result;
        result["codec"] = "truncated-float";
        result["format_version"] = truncated_float::kVersion;
        result["dtype"] = floats::name_of(header.settings.dtype);
        result["format"] = truncated_float::name_of(header.settings.format);
        result["bits"] = header.settings.n_bits;
        result["partition"] = header.settings.partition;
        result["n_elements"] = header.n_elements;
        result["holds_nonfinite"] = header.holds_nonfinite();
        result["message_bytes"] = message.size();
        return result;
      },
      nb::arg("message"));
}

}  // namespace

void bind_floats(nb::module_& m) {
  bind_embedded_float(m);
  bind_truncated_float(m);
}
