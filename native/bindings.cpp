// The Python module: what knows both Python and the core, with bindings_*.cpp.
#include "bindings.hpp"

#include "checksum/crc32c.hpp"
#include "low_rank/factors.hpp"
#include "netlab/relay.hpp"
#include "packing/packing.hpp"
#include "parallel/thread_pool.hpp"
#include "signs/votes.hpp"
#include "simd/dispatch.hpp"
#include "top_k/select.hpp"

namespace {

using quantisers::Dtype;

quantisers::Fields fields_of(int bits) {
  if (bits != 4 && bits != 8) throw InvalidArgument("fields have 4 or 8 bits");
  return static_cast<quantisers::Fields>(bits);
}

// Ternary values by a scale that ranks share; THC: norms of one rank, codes by the norms of all, sums of codes.
void bind_summed_codes(nb::module_& m) {
  m.def(
      "ternary_scale",
      [](ConstBytes values, Dtype dtype, float clip) { return quantisers::ternary_scale({values, dtype, {}}, clip); },
      "values"_a, "dtype"_a, "clip"_a, unlocked);
  m.def(
      "write_ternary_counts",
      [](ConstBytes values, Dtype dtype, float scale, std::uint64_t seed, std::uint64_t step, int field_bits,
         Bytes codes) {
        quantisers::write_ternary_counts({values, dtype, {}}, scale, {seed, step}, fields_of(field_bits), codes);
      },
      "values"_a, "dtype"_a, "scale"_a, "seed"_a, "step"_a, "field_bits"_a, "codes"_a, unlocked);
  m.def(
      "read_ternary_counts",
      [](ConstBytes codes, int field_bits, int n_ranks, float scale, Dtype dtype, Bytes values) {
        quantisers::read_ternary_counts(codes, fields_of(field_bits), n_ranks, scale, dtype, values);
      },
      "codes"_a, "field_bits"_a, "n_ranks"_a, "scale"_a, "dtype"_a, "values"_a, unlocked);
  m.def("thc_padded_elements", &quantisers::padded_elements, "n_elements"_a);
  m.attr("THC_SIGN_SEED") = quantisers::kSignSeed;
  m.def(
      "thc_write_norms",
      [](ConstBytes values, Dtype dtype, ConstFloats residual, float residual_scale, Floats norms) {
        quantisers::write_norms({values, dtype, residual, residual_scale}, norms);
      },
      "values"_a, "dtype"_a, "residual"_a.none(), "residual_scale"_a, "norms"_a, unlocked);
  m.def(
      "thc_write_codes",
      [](ConstBytes values, Dtype dtype, ConstFloats residual, float residual_scale, Floats new_residual,
         ConstFloats norms, float clip, std::uint64_t sign_seed, std::uint64_t sign_step, std::uint64_t seed,
         std::uint64_t step, Bytes codes) {
        const quantisers::Rotation rotation{{sign_seed, sign_step}, {seed, step}, clip};
        quantisers::write_codes({values, dtype, residual, residual_scale}, norms, rotation, new_residual, codes);
      },
      "values"_a, "dtype"_a, "residual"_a.none(), "residual_scale"_a, "new_residual"_a.none(), "norms"_a, "clip"_a,
      "sign_seed"_a, "sign_step"_a, "seed"_a, "step"_a, "codes"_a, unlocked);
  m.def(
      "thc_read_sums",
      [](ConstBytes sums, bool wide, int n_ranks, ConstFloats norms, float clip, std::uint64_t sign_seed,
         std::uint64_t sign_step, Dtype dtype, Bytes values) {
        const quantisers::Rotation rotation{{sign_seed, sign_step}, {}, clip};
        quantisers::read_code_sums(sums, wide, n_ranks, norms, rotation, dtype, values);
      },
      "sums"_a, "wide"_a, "n_ranks"_a, "norms"_a, "clip"_a, "sign_seed"_a, "sign_step"_a, "dtype"_a, "values"_a,
      unlocked);
}

void bind_sketch(nb::module_& m) {
  using sketch::Plan;
  m.def(
      "sketch_write_index",
      [](ConstBytes values, Dtype dtype, Words words) {
        const sketch::IndexFacts facts = sketch::write_index(values, dtype, words);
        return std::pair(facts.n_nonzeros, facts.max_magnitude);
      },
      "values"_a, "dtype"_a, "words"_a, unlocked);
  m.def("sketch_count_index", &sketch::count_index, "words"_a, "n_elements"_a, unlocked);
  m.def("sketch_insert_bloom", &sketch::insert_bloom, "words"_a, "n_elements"_a, "n_hashes"_a, "seed"_a, "filter"_a,
        unlocked);
  m.def("sketch_query_bloom", &sketch::query_bloom, "filter"_a, "n_elements"_a, "n_hashes"_a, "seed"_a, "words"_a,
        unlocked);
  m.def("sketch_pack_bits", &sketch::pack_bits, "words"_a, "among"_a, "packed"_a, unlocked);
  m.def("sketch_keep_bits", &sketch::keep_bits, "packed"_a, "words"_a, unlocked);
  m.def("pack_values", &packing::pack, "values"_a, "item_bytes"_a, "words"_a, "packed"_a, unlocked);
  m.def("unpack_values", &packing::unpack, "packed"_a, "item_bytes"_a, "words"_a, "values"_a, unlocked);
  m.attr("SKETCH_BLOOM_ROW_WORDS") = sketch::kBloomRowWords;
  nb::class_<Plan>(m, "SketchPlan")
      .def(nb::init<>())
      .def(
          "prepare",
          [](Plan& plan, ConstWords words, std::size_t n_elements, std::size_t batch_values, double gamma,
             std::uint64_t seed, std::uint64_t salt,
             std::size_t max_cells) { plan.prepare(words, n_elements, {batch_values, gamma, seed, salt, max_cells}); },
          "words"_a, "n_elements"_a, "batch_values"_a, "gamma"_a, "seed"_a, "salt"_a, "max_cells"_a, unlocked)
      .def("assume", &Plan::assume, "n_elements"_a, "batch_values"_a, "rows"_a, "seed"_a, "salt"_a)
      .def("adopt", &Plan::adopt, "words"_a, unlocked)
      .def("block_nonzeros", &Plan::block_nonzeros)
      .def_prop_ro("n_nonzeros", &Plan::n_nonzeros)
      .def_prop_ro("n_cells", &Plan::n_cells)
      .def_prop_ro("batch_values", &Plan::batch_values)
      .def_prop_ro("n_blocks", &Plan::n_blocks)
      .def_prop_ro("n_rounds", &Plan::n_rounds)
      .def("add", &Plan::add, "values"_a, "dtype"_a, "own_words"_a, "cell_kind"_a, "shift"_a, "limit"_a, "cells"_a,
           unlocked)
      .def("peel", &Plan::peel, "words"_a, unlocked)
      .def("write_core", &Plan::write_core, "positions"_a)
      .def("recover", &Plan::recover, "cells"_a, "cell_kind"_a, "scale"_a, "estimate"_a, "bound"_a, "values"_a,
           "dtype"_a, unlocked);
}

void bind_sums(nb::module_& m) {
  m.def("multiply_factors", &low_rank::multiply_factors, "left"_a, "right"_a, "rank"_a, "subtract"_a, "matrix"_a,
        unlocked);
  m.def("orthogonalise_factors", &low_rank::orthogonalise_factors, "factors"_a, "n_factors"_a, "rank"_a, unlocked);
  m.def("pack_signs", &signs::pack_signs, "values"_a, "dtype"_a, "words"_a, unlocked);
  m.def("write_majority", &signs::write_majority, "words"_a, "n_ranks"_a, "dtype"_a, "scale_bits"_a,
        "ties_are_positive"_a, "values"_a, unlocked);
  m.def("select_largest", &top_k::select_largest, "values"_a, "indices"_a, unlocked);
  m.def("select_from", &top_k::select_from, "values"_a, "threshold"_a, "indices"_a, unlocked);
  bind_summed_codes(m);
  bind_sketch(m);
}

}  // namespace

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
  m.attr("LINE_BYTES") = sizeof(netlab::Line);
  m.def(
      "relay_packets",
      [](const std::vector<int>& devices, Bytes lines, int stop) {
        const std::size_t n = lines.size() / sizeof(netlab::Line);
        if (n != devices.size()) throw InvalidArgument("relay_packets() takes a line for each device");
        netlab::relay(devices, {reinterpret_cast<netlab::Line*>(lines.data()), n}, stop);
      },
      "devices"_a, "lines"_a, "stop"_a, unlocked);
  bind_codecs(m);
  bind_sums(m);
  bind_engine(m);
}
