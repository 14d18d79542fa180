// Count sketches for Python: arguments arrive checked by gradwire's Python layer, kernels run with the GIL released.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <span>

#include "errors.hpp"
#include "packing/packing.hpp"
#include "sketch/bloom.hpp"
#include "sketch/plan.hpp"

namespace nb = nanobind;
using namespace gradwire;

namespace {

using Bytes = nb::ndarray<std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using ConstBytes = nb::ndarray<const std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Words = nb::ndarray<std::uint32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using ConstWords = nb::ndarray<const std::uint32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Positions = nb::ndarray<std::int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

template <typename Array>
auto span_of(const Array& array) {
  return std::span(array.data(), array.size());
}

sketch::Dtype dtype_of(int code) {
  if (code < 0 || code >= sketch::kDtypes) throw InvalidArgument("unknown dtype code");
  return static_cast<sketch::Dtype>(code);
}

sketch::Cells cells_of(int code) {
  if (code < 0 || code >= sketch::kCellKinds) throw InvalidArgument("unknown cell code");
  return static_cast<sketch::Cells>(code);
}

}  // namespace

void bind_sketch(nb::module_& m) {
  m.def(
      "sketch_write_index",
      [](const ConstBytes& values, int dtype, const Words& words) {
        const sketch::Dtype known = dtype_of(dtype);
        sketch::IndexFacts facts{};
        {
          const nb::gil_scoped_release unlocked;
          facts = sketch::write_index(span_of(values), known, span_of(words));
        }
        return nb::make_tuple(facts.n_nonzeros, facts.max_magnitude);
      },
      nb::arg("values"), nb::arg("dtype"), nb::arg("words"));
  m.def(
      "sketch_count_index",
      [](const ConstWords& words, std::size_t n_elements) {
        const nb::gil_scoped_release unlocked;
        return sketch::count_index(span_of(words), n_elements);
      },
      nb::arg("words"), nb::arg("n_elements"));
  m.def(
      "sketch_insert_bloom",
      [](const ConstWords& words, std::size_t n_elements, int n_hashes, std::uint64_t seed, const Words& filter) {
        const nb::gil_scoped_release unlocked;
        sketch::insert_bloom(span_of(words), n_elements, n_hashes, seed, span_of(filter));
      },
      nb::arg("words"), nb::arg("n_elements"), nb::arg("n_hashes"), nb::arg("seed"), nb::arg("filter"));
  m.def(
      "sketch_query_bloom",
      [](const ConstWords& filter, std::size_t n_elements, int n_hashes, std::uint64_t seed, const Words& words) {
        const nb::gil_scoped_release unlocked;
        return sketch::query_bloom(span_of(filter), n_elements, n_hashes, seed, span_of(words));
      },
      nb::arg("filter"), nb::arg("n_elements"), nb::arg("n_hashes"), nb::arg("seed"), nb::arg("words"));
  m.def(
      "pack_values",
      [](const ConstBytes& values, std::size_t item_bytes, const ConstWords& words, const Bytes& packed) {
        const nb::gil_scoped_release unlocked;
        packing::pack(span_of(values), item_bytes, span_of(words), span_of(packed));
      },
      nb::arg("values"), nb::arg("item_bytes"), nb::arg("words"), nb::arg("packed"));
  m.def(
      "unpack_values",
      [](const ConstBytes& packed, std::size_t item_bytes, const ConstWords& words, const Bytes& values) {
        const nb::gil_scoped_release unlocked;
        packing::unpack(span_of(packed), item_bytes, span_of(words), span_of(values));
      },
      nb::arg("packed"), nb::arg("item_bytes"), nb::arg("words"), nb::arg("values"));
  m.attr("SKETCH_BLOOM_ROW_WORDS") = sketch::kBloomRowWords;

  nb::class_<sketch::Plan>(m, "SketchPlan")
      .def(nb::init<>())
      .def(
          "prepare",
          [](sketch::Plan& plan, const ConstWords& words, std::size_t n_elements, std::size_t batch_values,
             double gamma, std::uint64_t seed, std::uint64_t salt, std::size_t max_cells) {
            const nb::gil_scoped_release unlocked;
            plan.prepare(span_of(words), n_elements, {batch_values, gamma, seed, salt, max_cells});
          },
          nb::arg("words"), nb::arg("n_elements"), nb::arg("batch_values"), nb::arg("gamma"), nb::arg("seed"),
          nb::arg("salt"), nb::arg("max_cells"))
      .def(
          "assume",
          [](sketch::Plan& plan, std::size_t n_elements, std::size_t batch_values, const ConstWords& rows,
             std::uint64_t seed,
             std::uint64_t salt) { plan.assume(n_elements, batch_values, span_of(rows), seed, salt); },
          nb::arg("n_elements"), nb::arg("batch_values"), nb::arg("rows"), nb::arg("seed"), nb::arg("salt"))
      .def(
          "adopt",
          [](sketch::Plan& plan, const ConstWords& words) {
            const nb::gil_scoped_release unlocked;
            plan.adopt(span_of(words));
          },
          nb::arg("words"))
      .def("block_nonzeros", &sketch::Plan::block_nonzeros)
      .def_prop_ro("n_nonzeros", &sketch::Plan::n_nonzeros)
      .def_prop_ro("n_cells", &sketch::Plan::n_cells)
      .def_prop_ro("batch_values", &sketch::Plan::batch_values)
      .def_prop_ro("n_blocks", &sketch::Plan::n_blocks)
      .def_prop_ro("n_rounds", &sketch::Plan::n_rounds)
      .def(
          "add",
          [](const sketch::Plan& plan, const ConstBytes& values, int dtype, const ConstWords& own_words, int cell_kind,
             int shift, std::int64_t limit, const Bytes& cells) {
            const sketch::Dtype known = dtype_of(dtype);
            const sketch::Cells kind = cells_of(cell_kind);
            const nb::gil_scoped_release unlocked;
            plan.add(span_of(values), known, span_of(own_words), kind, shift, limit, span_of(cells));
          },
          nb::arg("values"), nb::arg("dtype"), nb::arg("own_words"), nb::arg("cell_kind"), nb::arg("shift"),
          nb::arg("limit"), nb::arg("cells"))
      .def(
          "peel",
          [](sketch::Plan& plan, const ConstWords& words) {
            const nb::gil_scoped_release unlocked;
            return plan.peel(span_of(words));
          },
          nb::arg("words"))
      .def(
          "write_core",
          [](const sketch::Plan& plan, const Positions& positions) { plan.write_core(span_of(positions)); },
          nb::arg("positions"))
      .def(
          "recover",
          [](const sketch::Plan& plan, const Bytes& cells, int cell_kind, double scale, bool estimate, float bound,
             const Bytes& values, int dtype) {
            const sketch::Dtype known = dtype_of(dtype);
            const sketch::Cells kind = cells_of(cell_kind);
            const nb::gil_scoped_release unlocked;
            return static_cast<int>(plan.recover(span_of(cells), kind, scale, estimate, bound, span_of(values), known));
          },
          nb::arg("cells"), nb::arg("cell_kind"), nb::arg("scale"), nb::arg("estimate"), nb::arg("bound"),
          nb::arg("values"), nb::arg("dtype"));
}
