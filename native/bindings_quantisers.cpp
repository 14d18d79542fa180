// Quantisers and the random numbers that they draw. Arguments arrive checked by gradwire's Python layer.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "errors.hpp"
#include "quantisers/codec.hpp"
#include "quantisers/thc.hpp"
#include "random/counter.hpp"
#include "top_k/select.hpp"

namespace nb = nanobind;
using namespace gradwire;

namespace {

using Bytes = nb::ndarray<std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using ConstBytes = nb::ndarray<const std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Floats = nb::ndarray<float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using ConstFloats = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Indices = nb::ndarray<std::int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Numbers = nb::ndarray<std::uint32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

std::span<const std::uint8_t> span_of(const ConstBytes& array) { return {array.data(), array.size()}; }
std::span<std::uint8_t> span_of(const Bytes& array) { return {array.data(), array.size()}; }
std::span<float> span_of(const std::optional<Floats>& array) {
  return array ? std::span<float>(array->data(), array->size()) : std::span<float>();
}

template <typename Enum>
Enum checked(int code, int n_codes, const char* what) {
  if (code < 0 || code >= n_codes) throw InvalidArgument(std::string("unknown ") + what + " code");
  return static_cast<Enum>(code);
}

quantisers::Dtype dtype_of(int code) { return checked<quantisers::Dtype>(code, quantisers::kDtypes, "dtype"); }

quantisers::Source source_of(const ConstBytes& values, int dtype, const std::optional<ConstFloats>& residual = {},
                             double residual_scale = 1) {
  const auto left_out =
      residual ? std::span<const float>(residual->data(), residual->size()) : std::span<const float>();
  return {span_of(values), dtype_of(dtype), left_out, static_cast<float>(residual_scale)};
}

quantisers::Options options_of(int kind, int rule, double parameter, int levels, std::uint32_t block,
                               std::uint64_t seed, std::uint64_t step) {
  using Rule = quantisers::Options::Rule;
  return {checked<quantisers::Kind>(kind, quantisers::kKinds, "quantiser"),
          checked<Rule>(rule, 3, "rule"),
          static_cast<float>(parameter),
          levels,
          block,
          {seed, step}};
}

quantisers::Fields fields_of(int bits) {
  if (bits != 4 && bits != 8) throw InvalidArgument("fields have 4 or 8 bits");
  return static_cast<quantisers::Fields>(bits);
}

// THC: norms of one rank, codes by the norms of all, sums of codes.
void bind_thc(nb::module_& m) {
  m.def("thc_padded_elements", &quantisers::padded_elements, nb::arg("n_elements"));
  m.attr("THC_SIGN_SEED") = quantisers::kSignSeed;
  m.def(
      "thc_write_norms",
      [](const ConstBytes& values, int dtype, const std::optional<ConstFloats>& residual, double residual_scale,
         const Floats& norms) {
        const quantisers::Source source = source_of(values, dtype, residual, residual_scale);
        const nb::gil_scoped_release unlocked;
        quantisers::write_norms(source, {norms.data(), norms.size()});
      },
      nb::arg("values"), nb::arg("dtype"), nb::arg("residual").none(), nb::arg("residual_scale"), nb::arg("norms"));
  m.def(
      "thc_write_codes",
      [](const ConstBytes& values, int dtype, const std::optional<ConstFloats>& residual, double residual_scale,
         const std::optional<Floats>& new_residual, const ConstFloats& norms, double clip, std::uint64_t sign_seed,
         std::uint64_t sign_step, std::uint64_t seed, std::uint64_t step, const Bytes& codes) {
        const quantisers::Source source = source_of(values, dtype, residual, residual_scale);
        const quantisers::Rotation rotation{{sign_seed, sign_step}, {seed, step}, static_cast<float>(clip)};
        const nb::gil_scoped_release unlocked;
        quantisers::write_codes(source, {norms.data(), norms.size()}, rotation, span_of(new_residual), span_of(codes));
      },
      nb::arg("values"), nb::arg("dtype"), nb::arg("residual").none(), nb::arg("residual_scale"),
      nb::arg("new_residual").none(), nb::arg("norms"), nb::arg("clip"), nb::arg("sign_seed"), nb::arg("sign_step"),
      nb::arg("seed"), nb::arg("step"), nb::arg("codes"));
  m.def(
      "thc_read_sums",
      [](const ConstBytes& sums, bool wide, int n_ranks, const ConstFloats& norms, double clip, std::uint64_t sign_seed,
         std::uint64_t sign_step, int dtype, const Bytes& values) {
        const quantisers::Rotation rotation{{sign_seed, sign_step}, {}, static_cast<float>(clip)};
        const quantisers::Dtype type = dtype_of(dtype);
        const nb::gil_scoped_release unlocked;
        quantisers::read_code_sums(span_of(sums), wide, n_ranks, {norms.data(), norms.size()}, rotation, type,
                                   span_of(values));
      },
      nb::arg("sums"), nb::arg("wide"), nb::arg("n_ranks"), nb::arg("norms"), nb::arg("clip"), nb::arg("sign_seed"),
      nb::arg("sign_step"), nb::arg("dtype"), nb::arg("values"));
}

}  // namespace

void bind_quantisers(nb::module_& m) {
  bind_thc(m);
  m.def(
      "select_from",
      [](const ConstFloats& values, double threshold, const Indices& indices) {
        const nb::gil_scoped_release unlocked;
        return top_k::select_from({values.data(), values.size()}, static_cast<float>(threshold),
                                  {indices.data(), indices.size()});
      },
      nb::arg("values"), nb::arg("threshold"), nb::arg("indices"));
  m.def(
      "random_numbers",
      [](std::uint64_t seed, std::uint64_t step, std::uint64_t first_group, const Numbers& out) {
        if (out.size() % random::kGroup != 0) throw InvalidArgument("random numbers come in groups of 64");
        const nb::gil_scoped_release unlocked;
        for (std::size_t group = 0; group < out.size() / random::kGroup; ++group)
          random::draw({seed, step}, first_group + group, out.data() + group * random::kGroup);
      },
      nb::arg("seed"), nb::arg("step"), nb::arg("first_group"), nb::arg("out"));
  m.def(
      "quantiser_max_bytes",
      [](int kind, int levels, std::uint32_t block, std::uint64_t n_elements, std::uint64_t n_cuts) {
        return quantisers::max_message_bytes(options_of(kind, 1, 0, levels, block, 0, 0), n_elements, n_cuts);
      },
      nb::arg("kind"), nb::arg("levels"), nb::arg("block"), nb::arg("n_elements"), nb::arg("n_cuts") = 0);
  m.def(
      "quantiser_encode",
      [](const ConstBytes& values, int dtype, const std::optional<ConstFloats>& residual, double residual_scale,
         const std::optional<Floats>& new_residual, int kind, int rule, double parameter, int levels,
         std::uint32_t block, std::uint64_t seed, std::uint64_t step, const Bytes& out,
         const std::vector<std::uint32_t>& cuts) {
        const quantisers::Source source = source_of(values, dtype, residual, residual_scale);
        quantisers::Options options = options_of(kind, rule, parameter, levels, block, seed, step);
        options.cuts = cuts;
        const nb::gil_scoped_release unlocked;
        return quantisers::encode(options, source, span_of(new_residual), span_of(out));
      },
      nb::arg("values"), nb::arg("dtype"), nb::arg("residual").none(), nb::arg("residual_scale"),
      nb::arg("new_residual").none(), nb::arg("kind"), nb::arg("rule"), nb::arg("parameter"), nb::arg("levels"),
      nb::arg("block"), nb::arg("seed"), nb::arg("step"), nb::arg("out"),
      nb::arg("cuts") = std::vector<std::uint32_t>());
  m.def(
      "quantiser_decode",
      [](const ConstBytes& message, int kind, int dtype, const Bytes& values) {
        const auto known = checked<quantisers::Kind>(kind, quantisers::kKinds, "quantiser");
        const quantisers::Dtype type = dtype_of(dtype);
        const nb::gil_scoped_release unlocked;
        quantisers::decode(span_of(message), known, type, span_of(values));
      },
      nb::arg("message"), nb::arg("kind"), nb::arg("dtype"), nb::arg("values"));
  m.def(
      "quantiser_describe",
      [](const ConstBytes& message) {
        const quantisers::Header header = quantisers::read_header(span_of(message));
        nb::dict result;
        result["codec"] = quantisers::name_of(header.kind);
        result["format_version"] = header.version;
        result["n_elements"] = header.n_elements;
        result["message_bytes"] = message.size();
        result["is_finite"] = header.is_finite;
        result["levels"] = header.levels;
        result["block"] = header.block;
        result["first_scale"] = header.first;
        result["second_scale"] = header.second;
        return result;
      },
      nb::arg("message"));
  m.def(
      "ternary_scale",
      [](const ConstBytes& values, int dtype, double clip) {
        const quantisers::Source source = source_of(values, dtype);
        const nb::gil_scoped_release unlocked;
        return quantisers::ternary_scale(source, static_cast<float>(clip));
      },
      nb::arg("values"), nb::arg("dtype"), nb::arg("clip"));
  m.def(
      "write_ternary_counts",
      [](const ConstBytes& values, int dtype, double scale, std::uint64_t seed, std::uint64_t step, int field_bits,
         const Bytes& codes) {
        const quantisers::Source source = source_of(values, dtype);
        const quantisers::Fields fields = fields_of(field_bits);
        const nb::gil_scoped_release unlocked;
        quantisers::write_ternary_counts(source, static_cast<float>(scale), {seed, step}, fields, span_of(codes));
      },
      nb::arg("values"), nb::arg("dtype"), nb::arg("scale"), nb::arg("seed"), nb::arg("step"), nb::arg("field_bits"),
      nb::arg("codes"));
  m.def(
      "read_ternary_counts",
      [](const ConstBytes& codes, int field_bits, int n_ranks, double scale, int dtype, const Bytes& values) {
        const quantisers::Fields fields = fields_of(field_bits);
        const quantisers::Dtype type = dtype_of(dtype);
        const nb::gil_scoped_release unlocked;
        quantisers::read_ternary_counts(span_of(codes), fields, n_ranks, static_cast<float>(scale), type,
                                        span_of(values));
      },
      nb::arg("codes"), nb::arg("field_bits"), nb::arg("n_ranks"), nb::arg("scale"), nb::arg("dtype"),
      nb::arg("values"));
}
