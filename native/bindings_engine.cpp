// The engine for Python: connections, exchanges and the codecs that they call. Whatever waits or computes releases the
// GIL; codecs and ends that are written in Python are called back with it.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <memory>
#include <optional>
#include <tuple>
#include <vector>

#include "errors.hpp"
#include "exchange/codecs.hpp"
#include "exchange/owners.hpp"
#include "exchange/ring.hpp"
#include "wire/mesh.hpp"

namespace nb = nanobind;
using namespace gradwire;

namespace {

using ByteArray = nb::ndarray<std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using ConstByteArray = nb::ndarray<const std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
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
      : codec_(std::move(codec)), dtype_(std::move(dtype)), is_weighed_(importance != nullptr), weights_(importance) {}

  std::size_t max_message_bytes(std::size_t n_values) const override {
    const nb::gil_scoped_acquire locked;
    return nb::cast<std::size_t>(codec_.attr("max_encoded_bytes")(n_values, dtype_));
  }
  bool weigh(std::size_t first, std::size_t n) override { return weights_.write(first, n); }
  std::size_t encode(const Values& values, std::size_t first, std::span<std::uint8_t> out) override {
    const nb::gil_scoped_acquire locked;
    const nb::object weights = is_weighed_ ? tensor_of(weights_.at(first, values.n)) : nb::none();
    return length_of(codec_.attr("encode")(tensor_of(values), tensor_of(out), weights), out.size());
  }
  void decode(std::span<const std::uint8_t> message, std::size_t, const Values& values) override {
    const nb::gil_scoped_acquire locked;
    codec_.attr("decode")(tensor_of(message), tensor_of(values));
  }

 private:
  const nb::object codec_, dtype_;
  const bool is_weighed_;
  gcomp::Weights weights_;
};

class PythonEnds final : public exchange::Ends {
 public:
  explicit PythonEnds(nb::object ends)
      : ends_(std::move(ends)),
        max_push_bytes_(nb::cast<std::size_t>(ends_.attr("max_push_bytes"))),
        max_pull_bytes_(nb::cast<std::size_t>(ends_.attr("max_pull_bytes"))) {}

  std::size_t max_push_bytes() const override { return max_push_bytes_; }
  std::size_t max_pull_bytes() const override { return max_pull_bytes_; }
  std::size_t encode_push(std::size_t part, std::size_t group, std::span<std::uint8_t> out) override {
    const nb::gil_scoped_acquire locked;
    return length_of(ends_.attr("encode_push")(part, group, tensor_of(out)), out.size());
  }
  void add_pushed(std::size_t source, std::size_t group, exchange::Bytes message) override {
    const nb::gil_scoped_acquire locked;
    ends_.attr("add_pushed")(source, group, tensor_of(message));
  }
  void add_own(std::size_t group) override {
    const nb::gil_scoped_acquire locked;
    ends_.attr("add_own")(group);
  }
  std::size_t encode_pull(std::size_t group, std::span<std::uint8_t> out) override {
    const nb::gil_scoped_acquire locked;
    return length_of(ends_.attr("encode_pull")(group, tensor_of(out)), out.size());
  }
  void adopt(std::size_t part, std::size_t group, exchange::Bytes message) override {
    const nb::gil_scoped_acquire locked;
    ends_.attr("adopt")(part, group, tensor_of(message));
  }
  exchange::Bytes opening() override { return ask("opening", opening_); }
  exchange::Bytes closing() override { return ask("closing", closing_); }
  void take_opening(std::size_t source, exchange::Bytes message) override { tell("take_opening", source, message); }
  void take_closing(std::size_t source, exchange::Bytes message) override { tell("take_closing", source, message); }

 private:
  exchange::Bytes ask(const char* method, std::vector<std::uint8_t>& bytes) {
    const nb::gil_scoped_acquire locked;
    const auto told = nb::cast<nb::bytes>(ends_.attr(method)());
    const auto* data = static_cast<const std::uint8_t*>(told.data());
    bytes.assign(data, data + told.size());
    return bytes;
  }
  void tell(const char* method, std::size_t source, exchange::Bytes message) {
    const nb::gil_scoped_acquire locked;
    ends_.attr(method)(source, nb::bytes(message.data(), message.size()));
  }

  const nb::object ends_;
  const std::size_t max_push_bytes_, max_pull_bytes_;
  std::vector<std::uint8_t> opening_, closing_;
};

nb::tuple account_of(const exchange::Account& account) {
  nb::list spans;
  for (const exchange::Span& span : account.spans)
    spans.append(nb::make_tuple(static_cast<int>(span.kind), span.start_ns, span.end_ns));
  return nb::make_tuple(account.bytes_sent, account.bytes_received, account.n_messages, spans);
}

// An exchange through owners whose ends are written in Python.
class PythonExchange {
 public:
  PythonExchange(wire::Mesh& mesh, std::uint32_t stream, const FactsArray& facts, nb::object ends,
                 std::vector<std::size_t> n_groups, bool has_pull, std::size_t pull_bytes_ahead)
      : ends_(std::move(ends)) {
    if (n_groups.size() != static_cast<std::size_t>(mesh.world_size()))
      throw InvalidArgument("an exchange needs the number of groups of every part");
    const nb::gil_scoped_release unlocked;
    exchange_.emplace(mesh, exchange::Ticket{stream, facts_of(facts)}, ends_, std::move(n_groups), has_pull,
                      pull_bytes_ahead, account_);
  }
  nb::tuple run() {
    {
      const nb::gil_scoped_release unlocked;
      exchange_->run();
    }
    return take_account();
  }
  nb::tuple finish() {
    {
      const nb::gil_scoped_release unlocked;
      exchange_->finish();
    }
    return take_account();
  }

 private:
  nb::tuple take_account() {
    const nb::tuple account = account_of(account_);
    account_ = {};
    return account;
  }
  PythonEnds ends_;
  exchange::Account account_;
  std::optional<exchange::OwnersExchange> exchange_;
};

void bind_mesh(nb::module_& m) {
  using Place = std::pair<std::string, std::uint16_t>;
  using wire::Mesh;
  m.attr("MESSAGE_HEADER_BYTES") = wire::kHeaderBytes;
  m.attr("MESSAGE_VERSION") = wire::kVersion;
  m.attr("MESH_SECRET_BYTES") = wire::kSecretBytes;
  m.def("interface_address", &wire::interface_address, nb::arg("name"));
  nb::class_<Mesh>(m, "Mesh")
      .def(nb::init<int, int, const std::string&, double>(), nb::arg("rank"), nb::arg("world_size"), nb::arg("host"),
           nb::arg("timeout_s"))
      .def_prop_ro("endpoint", [](const Mesh& mesh) { return Place(mesh.endpoint().host, mesh.endpoint().port); })
      .def(
          "join",
          [](Mesh& mesh, const std::vector<Place>& places, const nb::bytes& secret) {
            wire::Secret known;
            if (secret.size() != known.size()) throw InvalidArgument("the secret of a mesh has 16 bytes");
            std::memcpy(known.data(), secret.data(), known.size());
            std::vector<wire::Endpoint> endpoints;
            for (const auto& [host, port] : places) endpoints.push_back({host, port});
            mesh.join(std::move(endpoints), known);
          },
          nb::arg("endpoints"), nb::arg("secret"))
      .def(
          "open",
          [](Mesh& mesh, std::uint32_t stream, const FactsArray& facts, std::uint64_t max_bytes,
             const std::vector<int>& peers) {
            const nb::gil_scoped_release unlocked;
            mesh.open(stream, facts_of(facts), max_bytes, peers);
          },
          nb::arg("stream"), nb::arg("facts"), nb::arg("max_bytes"), nb::arg("peers"))
      .def("close", &Mesh::close, nb::arg("stream"), nb::call_guard<nb::gil_scoped_release>())
      .def(
          "send",
          [](Mesh& mesh, const std::vector<int>& peers, std::uint32_t stream,
             const std::vector<ConstByteArray>& parts) {
            std::size_t n_bytes = 0;
            for (const ConstByteArray& part : parts) n_bytes += part.size();
            const nb::gil_scoped_release unlocked;
            wire::Message message = mesh.pool().take(n_bytes);
            std::size_t at = 0;
            for (const ConstByteArray& part : parts) {
              if (part.size() > 0) std::memcpy(message.block->data() + at, part.data(), part.size());
              at += part.size();
            }
            for (const int peer : peers) mesh.send(peer, stream, message);
          },
          nb::arg("peers"), nb::arg("stream"), nb::arg("parts"))
      .def(
          "receive_any",
          [](Mesh& mesh, std::uint32_t stream, const std::vector<int>& peers) {
            wire::Arrival arrival;
            {
              const nb::gil_scoped_release unlocked;
              arrival = mesh.receive_any(stream, peers);
            }
            // The tensor keeps the message: its block is not used again before the tensor is gone.
            auto kept = std::make_unique<wire::Message>(arrival.message);
            const nb::capsule owner(kept.get(),
                                    [](void* message) noexcept { delete static_cast<wire::Message*>(message); });
            wire::Message& message = *kept.release();
            const std::size_t shape[1] = {message.n_bytes};
            const nb::ndarray<nb::pytorch> bytes(message.block->data(), 1, shape, owner, nullptr,
                                                 nb::dtype<std::uint8_t>());
            return nb::make_tuple(arrival.peer, nb::cast(bytes, nb::rv_policy::reference), arrival.duration_ns);
          },
          nb::arg("stream"), nb::arg("peers"))
      .def("wait_until_all_sent", &Mesh::wait_until_all_sent, nb::call_guard<nb::gil_scoped_release>())
      .def("break_off", &Mesh::break_off, nb::call_guard<nb::gil_scoped_release>())
      .def("shut", &Mesh::shut, nb::call_guard<nb::gil_scoped_release>())
      .def_prop_ro("bytes_held", [](Mesh& mesh) { return mesh.pool().bytes_held(); });
}

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
      "python_exchange_codec",
      [](nb::object codec, nb::object dtype, const BucketImportance* importance) -> std::unique_ptr<exchange::Codec> {
        return std::make_unique<PythonCodec>(std::move(codec), std::move(dtype), importance);
      },
      nb::arg("codec"), nb::arg("dtype"), nb::arg("importance").none(), nb::keep_alive<0, 3>());
}

}  // namespace

void bind_engine(nb::module_& m) {
  bind_mesh(m);
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
  nb::class_<PythonExchange>(m, "OwnersExchange")
      .def(nb::init<wire::Mesh&, std::uint32_t, const FactsArray&, nb::object, std::vector<std::size_t>, bool,
                    std::size_t>(),
           nb::arg("mesh"), nb::arg("stream"), nb::arg("facts"), nb::arg("ends"), nb::arg("n_groups"),
           nb::arg("has_pull"), nb::arg("pull_bytes_ahead"), nb::keep_alive<1, 2>())
      .def("run", &PythonExchange::run)
      .def("finish", &PythonExchange::finish);
}
