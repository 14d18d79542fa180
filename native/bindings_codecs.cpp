// Codecs of floats for Python: GComp and its Huffman tables, embedded and truncated floats, quantisers.
#include <cstring>

#include "bindings.hpp"
#include "embedded_float/codec.hpp"
#include "gcomp/importance.hpp"
#include "huffman/table.hpp"
#include "quantisers/codec.hpp"
#include "random/counter.hpp"
#include "truncated_float/codec.hpp"

namespace {

using Counts = std::span<std::int64_t>;
using ConstCounts = std::span<const std::int64_t>;

int exponent_bits_for(std::size_t n_counts) {
  if (n_counts != 256 && n_counts != 32)
    throw InvalidArgument("a histogram has 256 counts (float32, bfloat16) or 32 (float16), not ", n_counts);
  return n_counts == 256 ? 8 : 5;
}

void check_segment(ConstBytes exponents) {
  if (exponents.size() > kMaxSegmentValues) throw InvalidArgument("a segment holds at most 16,384 exponents");
}

void bind_huffman(nb::module_& m) {
  nb::class_<HuffmanTable>(m, "HuffmanTable")
      .def_static("from_histogram",
                  [](ConstCounts histogram) {
                    return HuffmanTable::from_histogram(histogram, exponent_bits_for(histogram.size()));
                  })
      .def_static("prior",
                  [](int exponent_bits) {
                    if (exponent_bits != 8 && exponent_bits != 5) throw InvalidArgument("exponents have 8 or 5 bits");
                    return HuffmanTable::prior(exponent_bits);
                  })
      .def_static("from_bytes",
                  [](const nb::bytes& data) {
                    return HuffmanTable::from_bytes({static_cast<const std::uint8_t*>(data.data()), data.size()});
                  })
      .def("to_bytes",
           [](const HuffmanTable& table) {
             const std::vector<std::uint8_t> data = table.to_bytes();
             return nb::bytes(data.data(), data.size());
           })
      .def("for_kernels",
           [](const HuffmanTable& table) {
             std::vector<std::uint32_t> laid_out(kLookupEntries / 2 + 256);
             std::memcpy(laid_out.data(), table.lookup_single(), 2 * kLookupEntries);
             const std::uint8_t* const low = table.code_planes();
             for (std::size_t i = 0; i < table.n_symbols(); ++i)
               laid_out[kLookupEntries / 2 + i] = static_cast<std::uint32_t>(
                   low[i] | low[256 + i] << 8 | (low[512 + i] & 127u) << 16 | (low[512 + i] & 128u) << 24);
             return nb::bytes(laid_out.data(), 4 * laid_out.size());
           })
      .def_prop_ro("id", &HuffmanTable::id)
      .def_prop_ro("exponent_bits", &HuffmanTable::exponent_bits)
      .def_prop_ro("lengths", [](const HuffmanTable& table) {
        return std::vector<int>(table.lengths().begin(), table.lengths().end());
      });
  m.def("huffman_native_lengths", [](ConstCounts histogram) {
    for (const std::int64_t count : histogram)
      if (count < 0) throw InvalidArgument("a histogram has no negative counts");
    return native_code_lengths(std::vector<std::uint64_t>(histogram.begin(), histogram.end()));
  });
  m.attr("HUFFMAN_SEGMENT_VALUES") = kMaxSegmentValues;
  def_unlocked(m, "huffman_encode_segment", [](const HuffmanTable& table, ConstBytes exponents, Bytes out) {
    check_segment(exponents);
    if (out.size() < max_segment_bytes(exponents.size()) + exponents.size()) throw BufferTooSmall("segment: out");
    for (const std::uint8_t exponent : exponents)
      if (exponent >= table.n_symbols()) throw InvalidArgument("an exponent is out of range");
    return encode_exponents(table, exponents, out.data());
  });
  def_unlocked(m, "huffman_decode_table", [](const HuffmanTable& table, ConstBytes segment, Bytes exponents) {
    check_segment(exponents);
    decode_exponents(table, segment, segment.data() + segment.size(), exponents);
  });
  def_unlocked(m, "huffman_decode_tree", [](const HuffmanTable& table, ConstBytes segment, Bytes exponents) {
    check_segment(exponents);
    decode_exponents_by_tree(table, segment, exponents);
  });
}

void bind_gcomp(nb::module_& m) {
  using OptionalFloats = std::optional<ConstFloats>;
  m.def("gcomp_max_encoded_bytes", &gcomp::max_message_bytes);
  def_unlocked(
      m, "gcomp_encode",
      [](ConstBytes values, OrNone<ConstBytes> importance, Dtype dtype, gcomp::Mode mode, int kept_bits,
         gcomp::Rounding rounding, gcomp::Version version, const HuffmanTable& table, Bytes out, int least_bits) {
        return gcomp::encode(values, importance, {dtype, mode, kept_bits, rounding, version, least_bits}, table, out);
      });
  def_unlocked(m, "gcomp_decode",
               [](ConstBytes message, Dtype dtype, const std::vector<const HuffmanTable*>& known,
                  OrNone<ConstBytes> importance, bool adds, float divisor, Bytes values) {
                 const gcomp::Finish finish{adds ? values.data() : nullptr, divisor};
                 gcomp::decode(message, dtype, gcomp::table_of(message, known), importance, finish, values);
               });
  def_unlocked(m, "gcomp_count_exponents",
               [](ConstBytes values, Dtype dtype, gcomp::Version version, Counts histogram) {
                 if (exponent_bits_for(histogram.size()) != gcomp::exponent_bits_of(dtype, version))
                   throw InvalidArgument("the histogram does not have one count for each exponent of this dtype");
                 gcomp::count_exponents(values, dtype, version, histogram);
               });
  m.def("gcomp_describe", [](ConstBytes message) {
    const gcomp::Description sums = gcomp::describe(message);
    return dict_of("codec", "gcomp", "format_version", sums.header.version, "dtype", gcomp::name_of(sums.header.dtype),
                   "importance", gcomp::name_of(sums.header.mode), "kept_mantissa_bits", sums.header.kept_bits,
                   "least_mantissa_bits", sums.header.least_bits, "table_id", sums.header.table_id, "n_elements",
                   sums.header.n_elements, "n_chunks", sums.header.n_chunks, "n_raw_chunks", sums.n_raw_chunks,
                   "holds_nonfinite", (sums.header.flags & gcomp::kFlagNonfinite) != 0, "message_bytes",
                   sums.header.message_bytes, "header_bytes", sums.header_bytes, "exponent_bytes", sums.exponent_bytes,
                   "level_bytes", sums.level_bytes, "mantissa_bytes", sums.mantissa_bytes);
  });
  def_unlocked(
      m, "importance",
      [](ConstFloats parameter, OptionalFloats second_moment, OptionalFloats first_moment, float a, float b, float c,
         Bytes out) { gcomp::write_importance(parameter, second_moment, first_moment, a, b, c, out); });
}

// Signed words are as good as unsigned ones.
embedded_float::Known known_of(std::span<std::int32_t> codes, Bytes exponents, floats::Dtype dtype,
                               std::size_t partition, int format, int n_known) {
  const embedded_float::Settings settings{partition, format};
  return {{reinterpret_cast<std::uint32_t*>(codes.data()), codes.size()}, exponents, dtype, settings, n_known};
}

void bind_embedded_float(nb::module_& m) {
  using Codes = std::span<std::int32_t>;
  m.def("embedded_float_max_bytes", [](std::uint64_t n_elements, std::size_t partition, int first_bit, int n_bits) {
    embedded_float::check_range({first_bit, n_bits});
    return embedded_float::max_message_bytes(n_elements, partition, {first_bit, n_bits});
  });
  def_unlocked(
      m, "embedded_float_encode",
      [](ConstBytes values, Dtype dtype, std::size_t partition, int format, int first_bit, int n_bits, Bytes out) {
        return embedded_float::encode(values, dtype, {partition, format}, {first_bit, n_bits}, out);
      });
  def_unlocked(m, "embedded_float_decode", &embedded_float::decode);
  def_unlocked(m, "embedded_float_refine",
               [](ConstBytes message, Codes codes, Bytes exponents, Dtype dtype, std::size_t partition, int format,
                  int n_known) {
                 return embedded_float::refine(message, known_of(codes, exponents, dtype, partition, format, n_known));
               });
  def_unlocked(
      m, "embedded_float_write",
      [](Codes codes, Bytes exponents, Dtype dtype, std::size_t partition, int format, int n_known, Bytes values) {
        if (n_known < 1 || values.size() != codes.size() * floats::bytes_of(dtype))
          throw InvalidArgument("embedded-float: write: out has another size, or no plane is known");
        embedded_float::write(known_of(codes, exponents, dtype, partition, format, n_known), values);
      });
  def_unlocked(
      m, "embedded_float_add",
      [](Codes codes, Bytes exponents, Dtype dtype, std::size_t partition, int format, int n_known, Floats sums) {
        if (n_known < 1 || sums.size() != codes.size())
          throw InvalidArgument("embedded-float: add: sums have another size, or no plane is known");
        embedded_float::add(known_of(codes, exponents, dtype, partition, format, n_known), sums);
      });
  def_unlocked(m, "embedded_float_quantise",
               [](ConstBytes values, Dtype dtype, std::size_t partition, int format, int n_known, Bytes out) {
                 embedded_float::quantise(values, dtype, {partition, format}, n_known, out);
               });
  m.def("embedded_float_header", [](ConstBytes message) {
    const embedded_float::Header header = embedded_float::read_header(message);
    return dict_of("codec", "embedded-float", "format_version", header.settings.format, "dtype",
                   floats::name_of(header.dtype), "first_bit", header.range.first, "n_bits", header.range.n,
                   "partition", header.settings.partition, "n_elements", header.n_elements, "holds_nonfinite",
                   (header.flags & embedded_float::kFlagNonfinite) != 0, "message_bytes", message.size());
  });
}

void bind_truncated_float(nb::module_& m) {
  using truncated_float::Format;
  m.def("truncated_float_max_bytes",
        [](std::uint64_t n_elements, Dtype dtype, Format format, int n_bits, std::size_t partition) {
          const truncated_float::Settings settings{dtype, format, n_bits, partition};
          return truncated_float::max_message_bytes(n_elements, settings);
        });
  def_unlocked(m, "truncated_float_encode",
               [](ConstBytes values, Dtype dtype, Format format, int n_bits, std::size_t partition,
                  truncated_float::Rounding rounding, std::uint64_t seed, std::uint64_t stream, Bytes out) {
                 return truncated_float::encode(values, {dtype, format, n_bits, partition}, rounding, {seed, stream},
                                                out);
               });
  def_unlocked(m, "truncated_float_decode", &truncated_float::decode);
  m.def("truncated_float_header", [](ConstBytes message) {
    const truncated_float::Header header = truncated_float::read_header(message);
    return dict_of("codec", "truncated-float", "format_version", 1, "dtype", floats::name_of(header.settings.dtype),
                   "format", truncated_float::name_of(header.settings.format), "bits", header.settings.n_bits,
                   "partition", header.settings.partition, "n_elements", header.n_elements, "holds_nonfinite",
                   header.holds_nonfinite(), "message_bytes", message.size());
  });
}

void bind_quantisers(nb::module_& m) {
  using quantisers::Kind;
  m.def("quantiser_max_bytes",
        [](Kind kind, int levels, std::uint32_t block, std::uint64_t n_elements, std::uint64_t n_cuts) {
          return quantisers::max_message_bytes({.kind = kind, .levels = levels, .block = block}, n_elements, n_cuts);
        });
  def_unlocked(m, "quantiser_encode",
               [](ConstBytes values, Dtype dtype, OrNone<ConstFloats> residual, float residual_scale,
                  OrNone<Floats> new_residual, Kind kind, quantisers::Options::Rule rule, float parameter, int levels,
                  std::uint32_t block, std::uint64_t seed, std::uint64_t step, Bytes out,
                  const std::vector<std::uint32_t>& cuts) {
                 const quantisers::Options options{kind, rule, parameter, levels, block, {seed, step}, cuts};
                 return quantisers::encode(options, {values, dtype, residual, residual_scale}, new_residual, out);
               });
  def_unlocked(m, "quantiser_decode",
               [](ConstBytes message, Kind kind, Dtype dtype, Bytes values, float divisor, bool adds) {
                 quantisers::decode(message, kind, dtype, values, {divisor, adds});
               });
  m.def("quantiser_describe", [](ConstBytes message) {
    const quantisers::Header header = quantisers::read_header(message);
    return dict_of("codec", quantisers::name_of(header.kind), "format_version", header.version, "n_elements",
                   header.n_elements, "message_bytes", message.size(), "is_finite", header.is_finite(), "levels",
                   header.levels, "block", header.block, "first_scale", header.first, "second_scale", header.second);
  });
  def_unlocked(m, "random_numbers", [](std::uint64_t seed, std::uint64_t step, std::uint64_t first_group, Words out) {
    if (out.size() % random::kGroup != 0) throw InvalidArgument("random numbers come in groups of 64");
    for (std::size_t group = 0; group < out.size() / random::kGroup; ++group)
      random::draw({seed, step}, first_group + group, out.data() + group * random::kGroup);
  });
}

}  // namespace

void bind_codecs(nb::module_& m) {
  bind_huffman(m);
  bind_gcomp(m);
  bind_embedded_float(m);
  bind_truncated_float(m);
  bind_quantisers(m);
}
