// The engine for Python: connections, exchanges and the codecs that they call. Whatever waits or computes releases the
// GIL; codecs that are written in Python are called back with it.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <cstring>
#include <memory>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "errors.hpp"
#include "exchange/codecs.hpp"
#include "exchange/owners.hpp"
#include "exchange/pieces.hpp"
#include "exchange/quantised.hpp"
#include "exchange/ring.hpp"
#include "wire/mesh.hpp"

namespace nb = nanobind;
using namespace gradwire;

namespace {

using ByteArray = nb::ndarray<std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using ConstByteArray = nb::ndarray<const std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Floats = nb::ndarray<float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Counts = nb::ndarray<std::int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using FactsArray = std::array<std::uint32_t, 4>;
using exchange::Values;

wire::Facts facts_of(const FactsArray& facts) { return {facts[0], facts[1], facts[2], facts[3]}; }

template <class Dtype>
Dtype dtype_of(int code) {
  if (code < 0 || code >= floats::kDtypes) throw InvalidArgument("unknown dtype code");
  return static_cast<Dtype>(code);
}

Values values_of(const ByteArray& bytes, int dtype) {
  const auto known = dtype_of<floats::Dtype>(dtype);
  return {bytes.data(), bytes.size() / floats::bytes_of(known), known};
}

std::span<float> span_of(const Floats& array) { return {array.data(), array.size()}; }
std::span<float> span_of(const std::optional<Floats>& array) { return array ? span_of(*array) : std::span<float>(); }

// Kind, rule, parameter, levels, block, seed: gradwire.codecs.quantised.
using QuantiserArguments = std::tuple<int, int, double, int, std::uint32_t, std::uint64_t>;

quantisers::Options options_of(const QuantiserArguments& arguments) {
  const auto [kind, rule, parameter, levels, block, seed] = arguments;
  if (kind < 0 || kind >= quantisers::kKinds || rule < 0 || rule > 2) throw InvalidArgument("unknown quantiser");
  return {static_cast<quantisers::Kind>(kind),
          static_cast<quantisers::Options::Rule>(rule),
          static_cast<float>(parameter),
          levels,
          block,
          {seed, 0}};
}

// A torch tensor over memory that outlives the call it is made for.
nb::object tensor_of(const void* data, std::size_t n, nb::dlpack::dtype dtype) {
  const std::size_t shape[1] = {n};
  const nb::ndarray<nb::pytorch> array(const_cast<void*>(data), 1, shape, nb::handle(), nullptr, dtype);
  return nb::cast(array, nb::rv_policy::reference);
}

nb::object tensor_of(std::span<const std::uint8_t> bytes) {
  return tensor_of(bytes.data(), bytes.size(), nb::dtype<std::uint8_t>());
}

nb::object tensor_of(const Values& values) {
  constexpr std::uint8_t kFloat = 2, kBfloat = 4;  // DLPack's codes
  const bool is_bfloat16 = values.dtype == floats::Dtype::bfloat16;
  return tensor_of(values.data, values.n,
                   {is_bfloat16 ? kBfloat : kFloat, static_cast<std::uint8_t>(8 * values.element_bytes()), 1});
}

std::size_t length_of(const nb::object& n_bytes, std::size_t room) {
  const auto n = nb::cast<std::size_t>(n_bytes);
  if (n > room)
    throw BufferTooSmall("a codec says it wrote " + std::to_string(n) + " bytes into " + std::to_string(room));
  return n;
}

class PythonCodec final : public exchange::Codec {
 public:
  // `codec`: gradwire.codecs.Codec; `dtype`: the bucket's, as torch calls it.
  PythonCodec(nb::object codec, nb::object dtype, const gcomp::BucketImportance* importance)
      : codec_(std::move(codec)),
        dtype_(std::move(dtype)),
        decodes_by_importance_(nb::hasattr(codec_, "decodes_by_importance")),
        is_weighed_(importance != nullptr),
        weights_(importance) {}

  std::size_t max_message_bytes(std::size_t n_values) const override {
    const nb::gil_scoped_acquire locked;
    return nb::cast<std::size_t>(codec_.attr("max_encoded_bytes")(n_values, dtype_));
  }
  bool weigh(std::size_t first, std::size_t n) override { return weights_.write(first, n); }
  std::size_t encode(const Values& values, std::size_t first, std::span<std::uint8_t> out) override {
    const nb::gil_scoped_acquire locked;
    const nb::object weights = weights_of(first, values.n);
    return length_of(codec_.attr("encode")(tensor_of(values), tensor_of(out), weights), out.size());
  }
  void decode(std::span<const std::uint8_t> message, std::size_t first, const Values& values) override {
    const nb::gil_scoped_acquire locked;
    if (decodes_by_importance_)
      codec_.attr("decode")(tensor_of(message), tensor_of(values), weights_of(first, values.n));
    else
      codec_.attr("decode")(tensor_of(message), tensor_of(values));
  }

 private:
  nb::object weights_of(std::size_t first, std::size_t n) const {
    return is_weighed_ ? tensor_of(weights_.at(first, n)) : nb::none();
  }

  const nb::object codec_, dtype_;
  const bool decodes_by_importance_, is_weighed_;
  gcomp::Weights weights_;
};

nb::tuple account_of(const exchange::Account& account) {
  nb::list spans;
  for (const exchange::Span& span : account.spans)
    spans.append(nb::make_tuple(static_cast<int>(span.kind), span.start_ns, span.end_ns));
  return nb::make_tuple(account.bytes_sent, account.bytes_received, account.n_messages, spans);
}

struct PieceGroups {
  exchange::Groups by_part;
};

class PieceExchange {
 public:
  PieceExchange(wire::Mesh& mesh, std::uint32_t stream, const FactsArray& facts, exchange::Codec& push,
                exchange::Codec& pull, const PieceGroups& groups, Floats values, std::optional<Floats> residual,
                Floats left_out, std::uint64_t first_draw, bool has_pull, std::size_t pull_bytes_ahead)
      : values_(std::move(values)), residual_(std::move(residual)), left_out_(std::move(left_out)) {
    if (groups.by_part.size() != static_cast<std::size_t>(mesh.world_size()))
      throw InvalidArgument("an exchange needs the groups of every part");
    const exchange::PieceBucket bucket{span_of(values_), span_of(residual_), span_of(left_out_), first_draw, has_pull};
    std::vector<std::size_t> n_groups;
    for (const auto& part : groups.by_part) n_groups.push_back(part.size());
    const nb::gil_scoped_release unlocked;
    ends_.emplace(mesh, push, pull, groups.by_part, bucket, account_);
    exchange_.emplace(mesh, exchange::Ticket{stream, facts_of(facts)}, *ends_, std::move(n_groups), has_pull,
                      pull_bytes_ahead, account_);
  }
  nb::tuple run() { return account_of(&exchange::OwnersExchange::run); }
  nb::tuple finish() { return account_of(&exchange::OwnersExchange::finish); }

 private:
  nb::tuple account_of(void (exchange::OwnersExchange::*work)()) {
    {
      const nb::gil_scoped_release unlocked;
      ((*exchange_).*work)();
    }
    return ::account_of(std::exchange(account_, {}));
  }
  const Floats values_;
  const std::optional<Floats> residual_;
  const Floats left_out_;
  exchange::Account account_;
  std::optional<exchange::PieceEnds> ends_;
  std::optional<exchange::OwnersExchange> exchange_;
};

void bind_codecs(nb::module_& m) {
  using gcomp::BucketImportance;
  // offset, n, addresses of parameter and moments (0: none), a, b, c, address of bytes that are ready (0: none)
  using Terms = std::tuple<std::size_t, std::size_t, std::uintptr_t, std::uintptr_t, std::uintptr_t, double, double,
                           double, std::uintptr_t>;
  // Python puts what the addresses lie in into an attribute of its own.
  nb::class_<BucketImportance>(m, "BucketImportance", nb::dynamic_attr())
      .def(
          "__init__",
          [](BucketImportance* place, const std::vector<Terms>& terms) {
            const auto floats_at = [](std::uintptr_t address) { return reinterpret_cast<const float*>(address); };
            std::vector<gcomp::Window> windows;
            windows.reserve(terms.size());
            for (const auto& [offset, n, parameter, second, first, a, b, c, ready] : terms)
              windows.push_back({offset, n, floats_at(parameter), floats_at(second), floats_at(first),
                                 static_cast<float>(a), static_cast<float>(b), static_cast<float>(c),
                                 reinterpret_cast<const std::uint8_t*>(ready)});
            new (place) BucketImportance(std::move(windows));
          },
          nb::arg("terms"))
      .def(
          "write",
          [](const BucketImportance& importance, std::size_t first, const ByteArray& out) {
            const std::span<std::uint8_t> bytes(out.data(), out.size());
            const nb::gil_scoped_release unlocked;
            importance.write(first, bytes);
          },
          nb::arg("first"), nb::arg("out"));

  nb::class_<exchange::Codec>(m, "ExchangeCodec");
  // Arguments are kept by whoever makes a codec, for as long as it is used.
  m.def(
      "gcomp_exchange_codec",
      [](int dtype, int mode, int kept_bits, bool truncates, int version, const HuffmanTable& table,
         const std::vector<const HuffmanTable*>& known, const BucketImportance* importance,
         const std::optional<Counts>& counts) -> std::unique_ptr<exchange::Codec> {
        if (mode < 0 || mode >= gcomp::kModes) throw InvalidArgument("unknown mode code");
        if (version != 1 && version != 2) throw InvalidArgument("unknown format version");
        const auto rounding = truncates ? gcomp::Rounding::truncate : gcomp::Rounding::nearest;
        const auto histogram =
            counts ? std::span<std::int64_t>(counts->data(), counts->size()) : std::span<std::int64_t>();
        return std::make_unique<exchange::GCompCodec>(
            gcomp::EncodeOptions{dtype_of<gcomp::Dtype>(dtype), static_cast<gcomp::Mode>(mode), kept_bits, rounding,
                                 static_cast<gcomp::Version>(version)},
            table, known, importance, histogram);
      },
      nb::arg("dtype"), nb::arg("mode"), nb::arg("kept_bits"), nb::arg("truncates"), nb::arg("version"),
      nb::arg("table"), nb::arg("known"), nb::arg("importance").none(), nb::arg("counts").none(),
      nb::keep_alive<0, 6>(), nb::keep_alive<0, 8>());
  m.def(
      "truncated_float_exchange_codec",
      [](int dtype, int format, int n_bits, std::size_t partition, int rounding, std::uint64_t seed,
         std::uint64_t first_step) -> std::unique_ptr<exchange::Codec> {
        if (rounding < 0 || rounding >= truncated_float::kRoundings) throw InvalidArgument("unknown rounding code");
        if (format < 0 || format >= truncated_float::kFormats) throw InvalidArgument("unknown format code");
        const truncated_float::Settings settings{dtype_of<floats::Dtype>(dtype),
                                                 static_cast<truncated_float::Format>(format), n_bits, partition};
        truncated_float::check_settings(settings);
        return std::make_unique<exchange::TruncatedFloatCodec>(
            settings, static_cast<truncated_float::Rounding>(rounding), random::Stream{seed, first_step});
      },
      nb::arg("dtype"), nb::arg("format"), nb::arg("n_bits"), nb::arg("partition"), nb::arg("rounding"),
      nb::arg("seed"), nb::arg("first_step"));
  m.def(
      "embedded_float_exchange_codec",
      [](int dtype, std::size_t partition, int n_bits) -> std::unique_ptr<exchange::Codec> {
        return std::make_unique<exchange::EmbeddedFloatCodec>(partition, static_cast<std::size_t>(n_bits),
                                                              dtype_of<floats::Dtype>(dtype));
      },
      nb::arg("dtype"), nb::arg("partition"), nb::arg("n_bits"));
  m.def(
      "quantiser_exchange_codec",
      [](const QuantiserArguments& quantiser, std::uint64_t first_step) -> std::unique_ptr<exchange::Codec> {
        quantisers::Options options = options_of(quantiser);
        options.stream.step = first_step;
        return std::make_unique<exchange::QuantiserCodec>(options);
      },
      nb::arg("quantiser"), nb::arg("first_step"));
  m.def(
      "python_exchange_codec",
      [](nb::object codec, nb::object dtype, const BucketImportance* importance) -> std::unique_ptr<exchange::Codec> {
        return std::make_unique<PythonCodec>(std::move(codec), std::move(dtype), importance);
      },
      nb::arg("codec"), nb::arg("dtype"), nb::arg("importance").none(), nb::keep_alive<0, 3>());
}

void bind_pieces(nb::module_& m) {
  using Sizes = std::vector<std::int64_t>;
  m.def(
      "max_group_bytes",
      [](const exchange::Codec& codec, const Sizes& sizes) { return exchange::max_group_bytes(codec, sizes); },
      nb::arg("codec"), nb::arg("sizes"));
  m.def(
      "encode_group",
      [](exchange::Codec& codec, const Floats& values, const std::optional<Floats>& residual, const Sizes& sizes,
         const ByteArray& out, const Floats& left_out, std::uint64_t draw) {
        const nb::gil_scoped_release unlocked;
        return exchange::encode_group(codec, span_of(values), 0, sizes, {span_of(residual), span_of(left_out), draw},
                                      {out.data(), out.size()});
      },
      nb::arg("codec"), nb::arg("values"), nb::arg("residual").none(), nb::arg("sizes"), nb::arg("out"),
      nb::arg("left_out"), nb::arg("draw"));
  m.def(
      "decode_group",
      [](exchange::Codec& codec, const ConstByteArray& message, const Sizes& sizes, std::size_t divisor,
         const Floats& out) {
        const nb::gil_scoped_release unlocked;
        exchange::decode_group(codec, {message.data(), message.size()}, 0, sizes, divisor, span_of(out));
      },
      nb::arg("codec"), nb::arg("message"), nb::arg("sizes"), nb::arg("divisor"), nb::arg("out"));
  m.def(
      "add_group",
      [](exchange::Codec& codec, const ConstByteArray& message, const Sizes& sizes, const Floats& total,
         const Floats& scratch) {
        const nb::gil_scoped_release unlocked;
        exchange::add_group(codec, {message.data(), message.size()}, 0, sizes, span_of(total), span_of(scratch));
      },
      nb::arg("codec"), nb::arg("message"), nb::arg("sizes"), nb::arg("total"), nb::arg("scratch"));
  using Parts = std::vector<std::vector<std::tuple<std::size_t, std::size_t, Sizes>>>;
  nb::class_<PieceGroups>(m, "PieceGroups")
      .def(
          "__init__",
          [](PieceGroups* place, const Parts& parts) {
            exchange::Groups by_part;
            for (const auto& part : parts) {
              auto& groups = by_part.emplace_back();
              for (const auto& [start, end, sizes] : part) groups.push_back({start, end, sizes});
            }
            new (place) PieceGroups{std::move(by_part)};
          },
          nb::arg("groups"));
  nb::class_<PieceExchange>(m, "PieceExchange")
      .def(nb::init<wire::Mesh&, std::uint32_t, const FactsArray&, exchange::Codec&, exchange::Codec&,
                    const PieceGroups&, Floats, std::optional<Floats>, Floats, std::uint64_t, bool, std::size_t>(),
           nb::arg("mesh"), nb::arg("stream"), nb::arg("facts"), nb::arg("push"), nb::arg("pull"), nb::arg("groups"),
           nb::arg("values"), nb::arg("residual").none(), nb::arg("left_out"), nb::arg("first_draw"),
           nb::arg("has_pull"), nb::arg("pull_bytes_ahead"), nb::keep_alive<1, 2>(), nb::keep_alive<1, 5>(),
           nb::keep_alive<1, 6>(), nb::keep_alive<1, 7>())
      .def("run", &PieceExchange::run)
      .def("finish", &PieceExchange::finish);
}

}  // namespace

void bind_engine(nb::module_& m) {
  bind_codecs(m);
  const auto left_out_of = [](const std::optional<ByteArray>& left_out, const Values& buffer) {
    if (!left_out) return Values{nullptr, 0, buffer.dtype};
    if (left_out->size() != buffer.n * buffer.element_bytes())
      throw InvalidArgument("left_out has another size than the buffer");
    return Values{left_out->data(), buffer.n, buffer.dtype};
  };
  m.def(
      "ring_mean",
      [left_out_of](wire::Mesh& mesh, std::uint32_t stream, const FactsArray& facts, exchange::Codec& codec,
                    const ByteArray& buffer, int dtype, const std::optional<ByteArray>& left_out, std::size_t n_chunks,
                    std::size_t n_ahead) {
        const Values values = values_of(buffer, dtype), lost = left_out_of(left_out, values);
        exchange::Account account;
        {
          const nb::gil_scoped_release unlocked;
          exchange::ring_mean(mesh, {stream, facts_of(facts)}, codec, values, lost, n_chunks, n_ahead, account);
        }
        return account_of(account);
      },
      nb::arg("mesh"), nb::arg("stream"), nb::arg("facts"), nb::arg("codec"), nb::arg("buffer"), nb::arg("dtype"),
      nb::arg("left_out").none(), nb::arg("n_chunks"), nb::arg("n_ahead"));
  m.def(
      "direct_mean",
      [left_out_of](wire::Mesh& mesh, std::uint32_t stream, const FactsArray& facts, exchange::Codec& codec,
                    const ByteArray& buffer, int dtype, const std::optional<ByteArray>& left_out,
                    std::size_t n_chunks) {
        const Values values = values_of(buffer, dtype), lost = left_out_of(left_out, values);
        exchange::Account account;
        {
          const nb::gil_scoped_release unlocked;
          exchange::direct_mean(mesh, {stream, facts_of(facts)}, codec, values, lost, n_chunks, account);
        }
        return account_of(account);
      },
      nb::arg("mesh"), nb::arg("stream"), nb::arg("facts"), nb::arg("codec"), nb::arg("buffer"), nb::arg("dtype"),
      nb::arg("left_out").none(), nb::arg("n_chunks"));
  m.def(
      "quantised_mean",
      [](wire::Mesh& mesh, std::uint32_t stream, const FactsArray& facts, const QuantiserArguments& quantiser,
         const ByteArray& gradient, int dtype, const std::optional<Floats>& residual,
         const std::optional<Floats>& unsent, double residual_scale,
         std::vector<std::pair<std::size_t, std::size_t>> spans, std::vector<bool> is_used, std::size_t n_chunks,
         std::vector<std::uint64_t> draws, bool pulls_raw) {
        const quantisers::Options options = options_of(quantiser);
        const exchange::QuantisedBucket bucket{values_of(gradient, dtype),
                                               span_of(residual),
                                               span_of(unsent),
                                               static_cast<float>(residual_scale),
                                               std::move(spans),
                                               std::move(is_used),
                                               n_chunks,
                                               std::move(draws),
                                               pulls_raw};
        exchange::Account account;
        exchange::QuantisedResult result;
        {
          const nb::gil_scoped_release unlocked;
          result = exchange::quantised_mean(mesh, {stream, facts_of(facts)}, options, bucket, account);
        }
        return nb::make_tuple(result.is_used_by_any, result.is_finite, account_of(account));
      },
      nb::arg("mesh"), nb::arg("stream"), nb::arg("facts"), nb::arg("quantiser"), nb::arg("gradient"), nb::arg("dtype"),
      nb::arg("residual").none(), nb::arg("unsent").none(), nb::arg("residual_scale"), nb::arg("spans"),
      nb::arg("is_used"), nb::arg("n_chunks"), nb::arg("draws"), nb::arg("pulls_raw"));
  bind_pieces(m);
}
