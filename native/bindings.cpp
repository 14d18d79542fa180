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

quantisers::Fields fields_of(int bits) {
  if (bits != 4 && bits != 8) throw InvalidArgument("fields have 4 or 8 bits");
  return static_cast<quantisers::Fields>(bits);
}

// Ternary values by a scale that ranks share; THC: norms of one rank, codes by the norms of all, sums of codes.
void bind_summed_codes(nb::module_& m) {
  def_unlocked(m, "ternary_scale", [](ConstBytes values, Dtype dtype, float clip) {
    return quantisers::ternary_scale({values, dtype, {}}, clip);
  });
  def_unlocked(m, "write_ternary_counts",
               [](ConstBytes values, Dtype dtype, float scale, std::uint64_t seed, std::uint64_t step, int field_bits,
                  Bytes codes) {
                 quantisers::write_ternary_counts({values, dtype, {}}, scale, {seed, step}, fields_of(field_bits),
                                                  codes);
               });
  def_unlocked(m, "read_ternary_counts",
               [](ConstBytes codes, int field_bits, int n_ranks, float scale, Dtype dtype, Bytes values) {
                 quantisers::read_ternary_counts(codes, fields_of(field_bits), n_ranks, scale, dtype, values);
               });
  m.def("thc_padded_elements", &quantisers::padded_elements);
  m.attr("THC_SIGN_SEED") = quantisers::kSignSeed;
  def_unlocked(m, "thc_write_norms",
               [](ConstBytes values, Dtype dtype, OrNone<ConstFloats> residual, float residual_scale, Floats norms) {
                 quantisers::write_norms({values, dtype, residual, residual_scale}, norms);
               });
  def_unlocked(m, "thc_write_codes",
               [](ConstBytes values, Dtype dtype, OrNone<ConstFloats> residual, float residual_scale,
                  OrNone<Floats> new_residual, ConstFloats norms, float clip, std::uint64_t sign_seed,
                  std::uint64_t sign_step, std::uint64_t seed, std::uint64_t step, Bytes codes) {
                 const quantisers::Rotation rotation{{sign_seed, sign_step}, {seed, step}, clip};
                 quantisers::write_codes({values, dtype, residual, residual_scale}, norms, rotation, new_residual,
                                         codes);
               });
  def_unlocked(m, "thc_read_sums",
               [](ConstBytes sums, bool wide, int n_ranks, ConstFloats norms, float clip, std::uint64_t sign_seed,
                  std::uint64_t sign_step, Dtype dtype, Bytes values) {
                 const quantisers::Rotation rotation{{sign_seed, sign_step}, {}, clip};
                 quantisers::read_code_sums(sums, wide, n_ranks, norms, rotation, dtype, values);
               });
}

void bind_sketch(nb::module_& m) {
  using sketch::Plan;
  def_unlocked(m, "sketch_write_index", [](ConstBytes values, Dtype dtype, Words words) {
    const sketch::IndexFacts facts = sketch::write_index(values, dtype, words);
    return std::pair(facts.n_nonzeros, facts.max_magnitude);
  });
  def_unlocked(m, "sketch_count_index", &sketch::count_index);
  def_unlocked(m, "sketch_insert_bloom", &sketch::insert_bloom);
  def_unlocked(m, "sketch_query_bloom", &sketch::query_bloom);
  def_unlocked(m, "sketch_pack_bits", &sketch::pack_bits);
  def_unlocked(m, "sketch_keep_bits", &sketch::keep_bits);
  def_unlocked(m, "pack_values", &packing::pack);
  def_unlocked(m, "unpack_values", &packing::unpack);
  m.attr("SKETCH_BLOOM_ROW_WORDS") = sketch::kBloomRowWords;
  nb::class_<Plan> plans(m, "SketchPlan");
  plans.def(nb::init<>())
      .def("assume", &Plan::assume)
      .def("adopt", &Plan::adopt, unlocked)
      .def("block_nonzeros", &Plan::block_nonzeros)
      .def_prop_ro("n_nonzeros", &Plan::n_nonzeros)
      .def_prop_ro("n_cells", &Plan::n_cells)
      .def_prop_ro("batch_values", &Plan::batch_values)
      .def_prop_ro("n_blocks", &Plan::n_blocks)
      .def_prop_ro("n_rounds", &Plan::n_rounds)
      .def("add", &Plan::add, unlocked)
      .def("peel", &Plan::peel, unlocked)
      .def("write_core", &Plan::write_core)
      .def("recover", &Plan::recover, unlocked);
  def_unlocked(plans, "prepare",
               [](Plan& plan, ConstWords words, std::size_t n_elements, std::size_t batch_values, double gamma,
                  std::uint64_t seed, std::uint64_t salt, std::size_t max_cells) {
                 plan.prepare(words, n_elements, {batch_values, gamma, seed, salt, max_cells});
               });
}

void bind_sums(nb::module_& m) {
  def_unlocked(m, "multiply_factors", &low_rank::multiply_factors);
  def_unlocked(m, "orthogonalise_factors", &low_rank::orthogonalise_factors);
  def_unlocked(m, "pack_signs", &signs::pack_signs);
  def_unlocked(m, "write_majority", &signs::write_majority);
  def_unlocked(m, "select_largest", &top_k::select_largest);
  def_unlocked(m, "select_from", &top_k::select_from);
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

  m.def("set_thread_count", &set_thread_count);
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
  def_unlocked(m, "relay_packets", [](const std::vector<int>& devices, Bytes lines, int stop) {
    const std::size_t n = lines.size() / sizeof(netlab::Line);
    if (n != devices.size()) throw InvalidArgument("relay_packets() takes a line for each device");
    netlab::relay(devices, {reinterpret_cast<netlab::Line*>(lines.data()), n}, stop);
  });
  bind_codecs(m);
  bind_sums(m);
  bind_engine(m);
}
