// The Python module: what knows both Python and the core, with bindings_*.cpp, one for each family of formats.
// Arguments arrive checked by gradwire's Python layer; every kernel runs with the GIL released.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "checksum/crc32c.hpp"
#include "errors.hpp"
#include "gcomp/codec.hpp"
#include "gcomp/importance.hpp"
#include "huffman/code_lengths.hpp"
#include "huffman/streams.hpp"
#include "huffman/table.hpp"
#include "low_rank/factors.hpp"
#include "parallel/thread_pool.hpp"
#include "signs/votes.hpp"
#include "simd/dispatch.hpp"
#include "top_k/select.hpp"

namespace nb = nanobind;
using namespace gradwire;

void bind_broadcast(nb::module_& m);   // bindings_broadcast.cpp
void bind_engine(nb::module_& m);      // bindings_engine.cpp
void bind_mesh(nb::module_& m);        // bindings_mesh.cpp
void bind_floats(nb::module_& m);      // bindings_floats.cpp
void bind_quantisers(nb::module_& m);  // bindings_quantisers.cpp
void bind_sketch(nb::module_& m);      // bindings_sketch.cpp
void bind_switch(nb::module_& m);

namespace {

// A one-dimensional, contiguous CPU buffer: torch tensors and numpy arrays alike.
using Bytes = nb::ndarray<std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using ConstBytes = nb::ndarray<const std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

using Counts = nb::ndarray<std::int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using ConstCounts = nb::ndarray<const std::int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

std::span<const std::uint8_t> span_of(const ConstBytes& array) { return {array.data(), array.size()}; }
std::span<std::uint8_t> span_of(const Bytes& array) { return {array.data(), array.size()}; }

nb::bytes bytes_of(const std::vector<std::uint8_t>& data) { return nb::bytes(data.data(), data.size()); }

std::span<const std::uint8_t> span_of(const nb::bytes& data) {
  return {static_cast<const std::uint8_t*>(data.data()), data.size()};
}

int exponent_bits_for(std::size_t n_counts) {
  if (n_counts != 256 && n_counts != 32)
    throw InvalidArgument("a histogram has 256 counts (float32, bfloat16) or 32 (float16), not " +
                          std::to_string(n_counts));
  return n_counts == 256 ? 8 : 5;
}

gcomp::Dtype dtype_of(int code) {
  if (code < 0 || code >= gcomp::kDtypes) throw InvalidArgument("unknown dtype code");
  return static_cast<gcomp::Dtype>(code);
}

gcomp::Mode mode_of(int code) {
  if (code < 0 || code >= gcomp::kModes) throw InvalidArgument("unknown mode code");
  return static_cast<gcomp::Mode>(code);
}

gcomp::Version version_of(int code) {
  if (code != 1 && code != 2) throw InvalidArgument("unknown format version");
  return static_cast<gcomp::Version>(code);
}

void bind_huffman(nb::module_& m) {
  nb::class_<HuffmanTable>(m, "HuffmanTable")
      .def_static(
          "from_histogram",
          [](const ConstCounts& histogram) {
            return HuffmanTable::from_histogram({histogram.data(), histogram.size()},
                                                exponent_bits_for(histogram.size()));
          },
          nb::arg("histogram"))
      .def_static(
          "prior",
          [](int exponent_bits) {
            if (exponent_bits != 8 && exponent_bits != 5) throw InvalidArgument("exponents have 8 or 5 bits");
            return HuffmanTable::prior(exponent_bits);
          },
          nb::arg("exponent_bits"))
      .def_static(
          "from_bytes", [](const nb::bytes& data) { return HuffmanTable::from_bytes(span_of(data)); }, nb::arg("data"))
      .def("to_bytes", [](const HuffmanTable& table) { return bytes_of(table.to_bytes()); })
      .def_prop_ro("id", &HuffmanTable::id)
      .def_prop_ro("exponent_bits", &HuffmanTable::exponent_bits)
      .def_prop_ro("lengths", [](const HuffmanTable& table) {
        return std::vector<int>(table.lengths().begin(), table.lengths().end());
      });
  m.def(
      "huffman_native_lengths",
      [](const ConstCounts& histogram) {
        for (std::size_t i = 0; i < histogram.size(); ++i)
          if (histogram.data()[i] < 0) throw InvalidArgument("a histogram has no negative counts");
        const std::vector<std::uint64_t> weights(histogram.data(), histogram.data() + histogram.size());
        return native_code_lengths(weights);
      },
      nb::arg("histogram"));
  m.attr("HUFFMAN_SEGMENT_VALUES") = kMaxSegmentValues;
  m.def(
      "huffman_encode_segment",
      [](const HuffmanTable& table, const ConstBytes& exponents, const Bytes& out) {
        if (exponents.size() > kMaxSegmentValues) throw InvalidArgument("a segment holds at most 16,384 exponents");
        if (out.size() < max_segment_bytes(exponents.size()) + exponents.size()) throw BufferTooSmall("segment: out");
        for (std::size_t i = 0; i < exponents.size(); ++i)
          if (exponents.data()[i] >= table.n_symbols()) throw InvalidArgument("an exponent is out of range");
        const nb::gil_scoped_release unlocked;
        return encode_exponents(table, span_of(exponents), out.data());
      },
      nb::arg("table"), nb::arg("exponents"), nb::arg("out"));
  const auto bind_decoder = [&m](const char* name, bool by_tree) {
    m.def(
        name,
        [by_tree](const HuffmanTable& table, const ConstBytes& segment, const Bytes& exponents) {
          if (exponents.size() > kMaxSegmentValues) throw InvalidArgument("a segment holds at most 16,384 exponents");
          const nb::gil_scoped_release unlocked;
          if (by_tree)
            decode_exponents_by_tree(table, span_of(segment), span_of(exponents));
          else
            decode_exponents(table, span_of(segment), segment.data() + segment.size(), span_of(exponents));
        },
        nb::arg("table"), nb::arg("segment"), nb::arg("exponents"));
  };
  bind_decoder("huffman_decode_table", false);
  bind_decoder("huffman_decode_tree", true);
}

void bind_gcomp(nb::module_& m) {
  m.attr("GCOMP_CHUNK_VALUES") = gcomp::kChunkValues;
  m.def(
      "gcomp_max_encoded_bytes",
      [](std::uint64_t n_elements, int dtype, int mode, int version) {
        return gcomp::max_message_bytes(n_elements, dtype_of(dtype), mode_of(mode), version_of(version));
      },
      nb::arg("n_elements"), nb::arg("dtype"), nb::arg("mode"), nb::arg("version"));
  m.def(
      "gcomp_encode",
      [](const ConstBytes& values, const std::optional<ConstBytes>& importance, int dtype, int mode, int kept_bits,
         bool truncates, int version, const HuffmanTable& table, const Bytes& out) {
        const auto rounding = truncates ? gcomp::Rounding::truncate : gcomp::Rounding::nearest;
        const gcomp::EncodeOptions options{dtype_of(dtype), mode_of(mode), kept_bits, rounding, version_of(version)};
        const nb::gil_scoped_release unlocked;
        return gcomp::encode(span_of(values), importance ? span_of(*importance) : std::span<const std::uint8_t>(),
                             options, table, span_of(out));
      },
      nb::arg("values"), nb::arg("importance").none(), nb::arg("dtype"), nb::arg("mode"), nb::arg("kept_bits"),
      nb::arg("truncates"), nb::arg("version"), nb::arg("table"), nb::arg("out"));
  m.def(
      "gcomp_decode",
      [](const ConstBytes& message, int dtype, const HuffmanTable& table, const std::optional<ConstBytes>& importance,
         const std::optional<ConstBytes>& addend, float divisor, const Bytes& values) {
        const gcomp::Dtype known = dtype_of(dtype);
        if (addend && addend->size() != values.size()) throw InvalidArgument("addend: another size than the values");
        const nb::gil_scoped_release unlocked;
        gcomp::decode(span_of(message), known, table,
                      importance ? span_of(*importance) : std::span<const std::uint8_t>(),
                      {addend ? addend->data() : nullptr, divisor}, span_of(values));
      },
      nb::arg("message"), nb::arg("dtype"), nb::arg("table"), nb::arg("importance").none(), nb::arg("addend").none(),
      nb::arg("divisor"), nb::arg("values"));
  m.def(
      "gcomp_read_header",
      [](const ConstBytes& message) {
        const gcomp::BlockHeader header = gcomp::read_block_header(span_of(message));
        return nb::make_tuple(header.table_id, static_cast<int>(header.dtype), header.n_elements,
                              (header.flags & gcomp::kFlagNonfinite) != 0,
                              gcomp::exponent_bits_of(header.dtype, header.version));
      },
      nb::arg("message"));
  m.def(
      "gcomp_count_exponents",
      [](const ConstBytes& values, int dtype, int version, const Counts& histogram) {
        const gcomp::Dtype known = dtype_of(dtype);
        const gcomp::Version format = version_of(version);
        if (exponent_bits_for(histogram.size()) != gcomp::exponent_bits_of(known, format))
          throw InvalidArgument("the histogram does not have one count for each exponent of this dtype");
        const nb::gil_scoped_release unlocked;
        gcomp::count_exponents(span_of(values), known, format, {histogram.data(), histogram.size()});
      },
      nb::arg("values"), nb::arg("dtype"), nb::arg("version"), nb::arg("histogram"));
  m.def(
      "gcomp_describe",
      [](const ConstBytes& message) {
        const gcomp::Description sums = gcomp::describe(span_of(message));
        nb::dict result;
        result["codec"] = "gcomp";
        result["format_version"] = static_cast<int>(sums.header.version);
        result["dtype"] = gcomp::name_of(sums.header.dtype);
        result["importance"] = gcomp::name_of(sums.header.mode);
        result["kept_mantissa_bits"] = sums.header.kept_bits;
        result["table_id"] = sums.header.table_id;
        result["n_elements"] = sums.header.n_elements;
        result["n_chunks"] = sums.header.n_chunks;
        result["n_raw_chunks"] = sums.n_raw_chunks;
        result["holds_nonfinite"] = (sums.header.flags & gcomp::kFlagNonfinite) != 0;
        result["message_bytes"] = sums.header.message_bytes;
        result["header_bytes"] = sums.header_bytes;
        result["exponent_bytes"] = sums.exponent_bytes;
        result["level_bytes"] = sums.level_bytes;
        result["mantissa_bytes"] = sums.mantissa_bytes;
        return result;
      },
      nb::arg("message"));
}

// Low-rank factors, sign votes and top-k selection: float32 arrays, words as uint32, indices as int32.
void bind_comparators(nb::module_& m) {
  using Floats = nb::ndarray<float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
  using ConstFloats = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
  using Words = nb::ndarray<std::uint32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
  using Indices = nb::ndarray<std::int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
  const auto dtype_of_signs = [](int code) {
    if (code < 0 || code >= signs::kDtypes) throw InvalidArgument("unknown dtype code");
    return static_cast<signs::Dtype>(code);
  };
  m.def(
      "multiply_factors",
      [](const ConstFloats& left, const ConstFloats& right, std::size_t rank, bool subtract, const Floats& matrix) {
        const nb::gil_scoped_release unlocked;
        low_rank::multiply_factors({left.data(), left.size()}, {right.data(), right.size()}, rank, subtract,
                                   {matrix.data(), matrix.size()});
      },
      nb::arg("left"), nb::arg("right"), nb::arg("rank"), nb::arg("subtract"), nb::arg("matrix"));
  m.def(
      "orthogonalise_factors",
      [](const Floats& factors, std::size_t n_factors, std::size_t rank) {
        const nb::gil_scoped_release unlocked;
        low_rank::orthogonalise_factors({factors.data(), factors.size()}, n_factors, rank);
      },
      nb::arg("factors"), nb::arg("n_factors"), nb::arg("rank"));
  m.def(
      "pack_signs",
      [dtype_of_signs](const ConstBytes& values, int dtype, const Words& words) {
        const signs::Dtype known = dtype_of_signs(dtype);
        const nb::gil_scoped_release unlocked;
        return signs::pack_signs(span_of(values), known, {words.data(), words.size()});
      },
      nb::arg("values"), nb::arg("dtype"), nb::arg("words"));
  m.def(
      "write_majority",
      [dtype_of_signs](const Words& words, std::size_t n_ranks, int dtype, std::uint32_t scale_bits,
                       bool ties_are_positive, const Bytes& values) {
        const signs::Dtype known = dtype_of_signs(dtype);
        const nb::gil_scoped_release unlocked;
        signs::write_majority({words.data(), words.size()}, n_ranks, known, scale_bits, ties_are_positive,
                              span_of(values));
      },
      nb::arg("words"), nb::arg("n_ranks"), nb::arg("dtype"), nb::arg("scale_bits"), nb::arg("ties_are_positive"),
      nb::arg("values"));
  m.def(
      "select_largest",
      [](const ConstFloats& values, const Indices& indices) {
        const nb::gil_scoped_release unlocked;
        return top_k::select_largest({values.data(), values.size()}, {indices.data(), indices.size()});
      },
      nb::arg("values"), nb::arg("indices"));
}

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
    } catch (const PeerLost& error) {
      raise("PeerLost", error.what());
    } catch (const RankMismatch& error) {
      raise("RankMismatch", error.what());
    } catch (const Unsupported& error) {
      raise("Unsupported", error.what());
    }
  });
}

}  // namespace

NB_MODULE(_native, m) {
  // Python modules keep tables of ours in their globals until the process ends; that is no leak worth a warning.
  nb::set_leak_warnings(false);
  translate_errors();

  m.def("set_thread_count", &set_thread_count, nb::arg("n_threads"));
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
      nb::arg("allow_avx2"), nb::arg("allow_avx512") = true);
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
  bind_huffman(m);
  bind_gcomp(m);
  bind_comparators(m);
  bind_floats(m);
  bind_mesh(m);
  bind_engine(m);
  bind_broadcast(m);
  bind_quantisers(m);
  bind_sketch(m);
  bind_switch(m);
}
