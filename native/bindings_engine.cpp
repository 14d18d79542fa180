// The engine for Python: connections, exchanges and the codecs that they call, the switch emulation. Codecs that are
// written in Python are called back with the GIL.
#include <array>
#include <cstring>
#include <memory>

#include "bindings.hpp"
#include "exchange/broadcast.hpp"
#include "exchange/codecs.hpp"
#include "exchange/means.hpp"
#include "exchange/shards.hpp"
#include "switch/client.hpp"
#include "switch/server.hpp"
#include "wire/mesh.hpp"

namespace {

using exchange::Codec;
using exchange::Values;
using wire::Mesh;
using Facts = std::array<std::uint32_t, 4>;

wire::Facts facts_of(const Facts& facts) { return {facts[0], facts[1], facts[2], facts[3]}; }

Values values_of(Bytes bytes, Dtype dtype) { return {bytes.data(), bytes.size() / floats::bytes_of(dtype), dtype}; }

// None for nothing; else as large as `others`.
Values left_out_of(Bytes bytes, const Values& others) {
  if (bytes.data() != nullptr && bytes.size() != others.n * others.element_bytes())
    throw InvalidArgument("left_out has another size than the values");
  return {bytes.data(), others.n, others.dtype};
}

// Kind, rule, parameter, levels, block, seed: gradwire.codecs.quantised.
using Quantiser = std::tuple<quantisers::Kind, quantisers::Options::Rule, float, int, std::uint32_t, std::uint64_t>;

quantisers::Options options_of(const Quantiser& quantiser, std::uint64_t step) {
  const auto [kind, rule, parameter, levels, block, seed] = quantiser;
  return {kind, rule, parameter, levels, block, {seed, step}};
}

// Bytes sent and received, messages, spans (kind, start, end).
using AccountTuple =
    std::tuple<std::uint64_t, std::uint64_t, std::uint64_t, std::vector<std::tuple<int, std::int64_t, std::int64_t>>>;

AccountTuple tuple_of(const exchange::Account& account) {
  std::vector<std::tuple<int, std::int64_t, std::int64_t>> spans;
  for (const exchange::Span& span : account.spans)
    spans.emplace_back(static_cast<int>(span.kind), span.start_ns, span.end_ns);
  return {account.bytes_sent, account.bytes_received, account.n_messages, std::move(spans)};
}

// A torch tensor over memory that outlives the call it is made for, or as long as its owner.
nb::object tensor_of(const void* data, std::size_t n, nb::dlpack::dtype dtype, nb::handle owner = {}) {
  const std::size_t shape[1] = {n};
  const nb::ndarray<nb::pytorch> array(const_cast<void*>(data), 1, shape, owner, nullptr, dtype);
  return nb::cast(array, nb::rv_policy::reference);
}

// ---- connections

void bind_mesh(nb::module_& m) {
  using Place = std::pair<std::string, std::uint16_t>;
  m.attr("MESSAGE_HEADER_BYTES") = wire::kHeaderBytes;
  m.attr("MESSAGE_VERSION") = wire::kVersion;
  m.attr("MESH_SECRET_BYTES") = wire::kSecretBytes;
  m.def("interface_address", &wire::interface_address);
  nb::class_<Mesh> connections(m, "Mesh");
  connections
      .def("__init__",
           [](Mesh* place, int rank, int world_size, const std::vector<std::string>& hosts, double timeout_s,
              std::size_t n_connections, const std::string& congestion) {
             new (place) Mesh(rank, world_size, hosts, timeout_s, {n_connections, congestion});
           })
      .def_prop_ro("endpoints",
                   [](const Mesh& mesh) {
                     std::vector<Place> places;
                     for (const auto& [host, port] : mesh.endpoints()) places.emplace_back(host, port);
                     return places;
                   })
      .def_prop_ro("n_connections", &Mesh::n_connections)
      .def("join",
           [](Mesh& mesh, const std::vector<std::vector<Place>>& places, const nb::bytes& secret) {
             wire::Secret known;
             if (secret.size() != known.size()) throw InvalidArgument("the secret of a mesh has 16 bytes");
             std::memcpy(known.data(), secret.data(), known.size());
             std::vector<wire::Endpoints> endpoints;
             for (const auto& of_rank : places) {
               auto& to = endpoints.emplace_back();
               for (const auto& [host, port] : of_rank) to.push_back({host, port});
             }
             mesh.join(std::move(endpoints), known);
           })
      .def("close", &Mesh::close, unlocked)
      .def("receive_any",
           [](Mesh& mesh, std::uint32_t stream, const std::vector<int>& peers) {
             wire::Arrival arrival;
             {
               const nb::gil_scoped_release released;
               arrival = mesh.receive_any(stream, peers);
             }
             // The tensor keeps the message: its block is not used again before the tensor is gone.
             auto kept = std::make_unique<wire::Message>(arrival.message);
             const nb::capsule owner(kept.get(),
                                     [](void* message) noexcept { delete static_cast<wire::Message*>(message); });
             wire::Message& message = *kept.release();
             const nb::object bytes =
                 tensor_of(message.block->data(), message.n_bytes, nb::dtype<std::uint8_t>(), owner);
             return nb::make_tuple(arrival.peer, bytes, arrival.duration_ns);
           })
      .def("wait_until_all_sent", &Mesh::wait_until_all_sent, unlocked)
      .def("break_off", &Mesh::break_off, unlocked)
      .def("shut", &Mesh::shut, unlocked)
      .def_prop_ro("bytes_held", [](Mesh& mesh) { return mesh.pool().bytes_held(); });
  def_unlocked(connections, "open",
               [](Mesh& mesh, std::uint32_t stream, const Facts& facts, std::uint64_t max_bytes,
                  const std::vector<int>& peers) { mesh.open(stream, facts_of(facts), max_bytes, peers); });
  def_unlocked(
      connections, "send",
      [](Mesh& mesh, const std::vector<int>& peers, std::uint32_t stream, const std::vector<ConstBytes>& parts) {
        std::size_t n_bytes = 0;
        for (const ConstBytes part : parts) n_bytes += part.size();
        wire::Message message = mesh.pool().take(n_bytes);
        auto at = message.room().begin();
        for (const ConstBytes part : parts) at = std::copy(part.begin(), part.end(), at);
        for (const int peer : peers) mesh.send(peer, stream, message);
      });
}

// ---- codecs

nb::object tensor_of(ConstBytes bytes) { return tensor_of(bytes.data(), bytes.size(), nb::dtype<std::uint8_t>()); }

nb::object tensor_of(const Values& values) {
  constexpr std::uint8_t kFloat = 2, kBfloat = 4;  // DLPack's codes
  return tensor_of(
      values.data, values.n,
      {values.dtype == Dtype::bfloat16 ? kBfloat : kFloat, static_cast<std::uint8_t>(8 * values.element_bytes()), 1});
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
  std::size_t encode(const Values& values, std::size_t first, Bytes out) override {
    const nb::gil_scoped_acquire locked;
    const nb::object weights = is_weighed_ ? tensor_of(weights_.at(first, values.n)) : nb::none();
    const auto n = nb::cast<std::size_t>(codec_.attr("encode")(tensor_of(values), tensor_of(out), weights));
    if (n > out.size()) throw BufferTooSmall("a codec says it wrote ", n, " bytes into ", out.size());
    return n;
  }
  void decode(ConstBytes message, std::size_t, const Values& values) override {
    const nb::gil_scoped_acquire locked;
    codec_.attr("decode")(tensor_of(message), tensor_of(values));
  }

 private:
  const nb::object codec_, dtype_;
  const bool is_weighed_;
  gcomp::Weights weights_;
};

void bind_exchange_codecs(nb::module_& m) {
  using gcomp::BucketImportance;
  using Made = std::unique_ptr<Codec>;
  // offset, n, addresses of parameter and moments (0: none), a, b, c, address of bytes that are ready (0: none)
  using Terms = std::tuple<std::size_t, std::size_t, std::uintptr_t, std::uintptr_t, std::uintptr_t, float, float,
                           float, std::uintptr_t>;
  // Python puts what the addresses lie in into an attribute of its own.
  nb::class_<BucketImportance>(m, "BucketImportance", nb::dynamic_attr())
      .def("__init__",
           [](BucketImportance* place, const std::vector<Terms>& terms, std::uint8_t mean_room) {
             const auto floats_at = [](std::uintptr_t address) { return reinterpret_cast<const float*>(address); };
             std::vector<gcomp::Window> windows;
             for (const auto& [offset, n, parameter, second, first, a, b, c, ready] : terms)
               windows.push_back({offset, n, floats_at(parameter), floats_at(second), floats_at(first), a, b, c,
                                  reinterpret_cast<const std::uint8_t*>(ready)});
             new (place) BucketImportance(std::move(windows), mean_room);
           })
      .def("write", &BucketImportance::write, unlocked);

  nb::class_<Codec>(m, "ExchangeCodec");
  // Arguments are kept by whoever makes a codec, for as long as it is used.
  m.def(
      "gcomp_exchange_codec",
      [](Dtype dtype, gcomp::Mode mode, int kept_bits, gcomp::Rounding rounding, gcomp::Version version,
         const HuffmanTable& table, const std::vector<const HuffmanTable*>& known, const BucketImportance* importance,
         OrNone<std::span<std::int64_t>> counts, int least_bits) -> Made {
        const gcomp::EncodeOptions options{dtype, mode, kept_bits, rounding, version, least_bits};
        return std::make_unique<exchange::GCompCodec>(options, table, known, importance, counts);
      },
      nb::keep_alive<0, 6>(), nb::keep_alive<0, 8>());
  m.def("truncated_float_exchange_codec",
        [](Dtype dtype, truncated_float::Format format, int n_bits, std::size_t partition,
           truncated_float::Rounding rounding, std::uint64_t seed, std::uint64_t first_step) -> Made {
          const truncated_float::Settings settings{dtype, format, n_bits, partition};
          return std::make_unique<exchange::TruncatedFloatCodec>(settings, rounding, random::Stream{seed, first_step});
        });
  m.def("embedded_float_exchange_codec",
        [](Dtype dtype, std::size_t partition, int format, std::size_t n_bits) -> Made {
          return std::make_unique<exchange::EmbeddedFloatCodec>(embedded_float::Settings{partition, format}, n_bits,
                                                                dtype);
        });
  m.def("quantiser_exchange_codec", [](const Quantiser& quantiser, std::uint64_t first_step) -> Made {
    return std::make_unique<exchange::QuantiserCodec>(options_of(quantiser, first_step));
  });
  m.def(
      "exact_exchange_codec",
      [](Codec& codec, Dtype dtype) -> Made { return std::make_unique<exchange::ExactCodec>(codec, dtype); },
      nb::keep_alive<0, 1>());
  m.def("bfloat16_exchange_codec", []() -> Made { return std::make_unique<exchange::Bfloat16Codec>(); });
  m.def(
      "python_exchange_codec",
      [](nb::object codec, nb::object dtype, const BucketImportance* importance) -> Made {
        return std::make_unique<PythonCodec>(std::move(codec), std::move(dtype), importance);
      },
      nb::keep_alive<0, 3>());
}

// ---- exchanges

void bind_means(nb::module_& m) {
  def_unlocked(m, "ring_mean",
               [](Mesh& mesh, std::uint32_t stream, const Facts& facts, Codec& codec, Bytes buffer, Dtype dtype,
                  OrNone<Bytes> left_out, std::size_t n_chunks, std::size_t n_ahead) {
                 const Values values = values_of(buffer, dtype);
                 exchange::Account account;
                 exchange::ring_mean(mesh, {stream, facts_of(facts)}, codec, values, left_out_of(left_out, values),
                                     n_chunks, n_ahead, account);
                 return tuple_of(account);
               });
  def_unlocked(m, "direct_mean",
               [](Mesh& mesh, std::uint32_t stream, const Facts& facts, Codec& codec, Bytes buffer, Dtype dtype,
                  OrNone<Bytes> left_out, std::size_t n_chunks) {
                 const Values values = values_of(buffer, dtype);
                 exchange::Account account;
                 exchange::direct_mean(mesh, {stream, facts_of(facts)}, codec, values, left_out_of(left_out, values),
                                       n_chunks, account);
                 return tuple_of(account);
               });
  def_unlocked(m, "quantised_mean",
               [](Mesh& mesh, std::uint32_t stream, const Facts& facts, const Quantiser& quantiser, Bytes gradient,
                  Dtype dtype, OrNone<ConstFloats> residual, OrNone<Floats> unsent, float residual_scale,
                  std::vector<std::pair<std::size_t, std::size_t>> spans, std::vector<bool> is_used,
                  std::size_t n_chunks, std::vector<std::uint64_t> draws, bool pulls_raw, int pull_levels) {
                 const exchange::QuantisedBucket bucket{
                     values_of(gradient, dtype), residual, unsent,           residual_scale, std::move(spans),
                     std::move(is_used),         n_chunks, std::move(draws), pulls_raw,      pull_levels};
                 exchange::Account account;
                 const auto result = exchange::quantised_mean(mesh, {stream, facts_of(facts)}, options_of(quantiser, 0),
                                                              bucket, account);
                 return std::tuple(result.is_used_by_any, result.is_finite, tuple_of(account));
               });
}

void bind_shards(nb::module_& m) {
  def_unlocked(m, "gather_parts",
               [](Mesh& mesh, std::uint32_t stream, const Facts& facts, Codec& codec, Bytes all, Dtype dtype,
                  bool adopts_own, std::size_t n_chunks) {
                 exchange::Account account;
                 exchange::gather_parts(mesh, {stream, facts_of(facts)}, codec, values_of(all, dtype), adopts_own,
                                        n_chunks, account);
                 return tuple_of(account);
               });
  def_unlocked(m, "scatter_sums",
               [](Mesh& mesh, std::uint32_t stream, const Facts& facts, Codec& codec, Bytes all, Dtype dtype,
                  std::size_t divisor, std::size_t n_chunks) {
                 exchange::Account account;
                 exchange::scatter_sums(mesh, {stream, facts_of(facts)}, codec, values_of(all, dtype), divisor,
                                        n_chunks, account);
                 return tuple_of(account);
               });
  // One message, for tests and corrupt ones; what an exchange calls.
  def_unlocked(m, "exchange_codec_encode", [](Codec& codec, Bytes values, Dtype dtype, Bytes out) {
    return codec.encode(values_of(values, dtype), 0, out);
  });
  def_unlocked(m, "exchange_codec_decode", [](Codec& codec, ConstBytes message, Bytes values, Dtype dtype) {
    codec.decode(message, 0, values_of(values, dtype));
  });
  m.def("exchange_codec_max_bytes",
        [](const Codec& codec, std::size_t n_values) { return codec.max_message_bytes(n_values); });
}

struct PieceGroups {
  exchange::Groups by_part;
};

class PieceExchange {
 public:
  PieceExchange(Mesh& mesh, std::uint32_t stream, const Facts& facts, Codec& push, Codec& pull,
                const PieceGroups& groups, Floats values, OrNone<ConstFloats> residual, Floats left_out,
                std::uint64_t first_draw, std::size_t pull_bytes_ahead) {
    if (groups.by_part.size() != static_cast<std::size_t>(mesh.world_size()))
      throw InvalidArgument("an exchange needs the groups of every part");
    const exchange::PieceBucket bucket{values, residual, left_out, first_draw};
    std::vector<std::size_t> n_groups;
    for (const auto& part : groups.by_part) n_groups.push_back(part.size());
    const nb::gil_scoped_release released;
    ends_.emplace(mesh, push, pull, groups.by_part, bucket, account_);
    exchange_.emplace(mesh, exchange::Ticket{stream, facts_of(facts)}, *ends_, std::move(n_groups), true,
                      pull_bytes_ahead, account_);
  }
  AccountTuple run() {
    exchange_->run();
    return tuple_of(std::exchange(account_, {}));
  }
  AccountTuple finish() {
    exchange_->finish();
    return tuple_of(std::exchange(account_, {}));
  }

 private:
  exchange::Account account_;
  std::optional<exchange::PieceEnds> ends_;
  std::optional<exchange::OwnersExchange> exchange_;
};

void bind_pieces(nb::module_& m) {
  using Sizes = std::vector<std::int64_t>;
  using Parts = std::vector<std::vector<std::tuple<std::size_t, std::size_t, Sizes>>>;
  m.def("max_group_bytes",
        [](const Codec& codec, const Sizes& sizes) { return exchange::max_group_bytes(codec, sizes); });
  def_unlocked(m, "encode_group",
               [](Codec& codec, Floats values, OrNone<ConstFloats> residual, const Sizes& sizes, Bytes out,
                  Floats left_out, std::uint64_t draw) {
                 return exchange::encode_group(codec, values, 0, sizes, {residual, left_out, draw}, out);
               });
  def_unlocked(m, "decode_group",
               [](Codec& codec, ConstBytes message, const Sizes& sizes, std::size_t divisor, Floats out) {
                 exchange::decode_group(codec, message, 0, sizes, divisor, out);
               });
  def_unlocked(m, "add_group", [](Codec& codec, ConstBytes message, const Sizes& sizes, Floats total, Floats scratch) {
    exchange::add_group(codec, message, 0, sizes, total, scratch);
  });
  nb::class_<PieceGroups>(m, "PieceGroups").def("__init__", [](PieceGroups* place, const Parts& parts) {
    exchange::Groups by_part;
    for (const auto& part : parts) {
      auto& groups = by_part.emplace_back();
      for (const auto& [start, end, sizes] : part) groups.push_back({start, end, sizes});
    }
    new (place) PieceGroups{std::move(by_part)};
  });
  nb::class_<PieceExchange>(m, "PieceExchange")
      .def(nb::init<Mesh&, std::uint32_t, const Facts&, Codec&, Codec&, const PieceGroups&, Floats, OrNone<ConstFloats>,
                    Floats, std::uint64_t, std::size_t>(),
           nb::keep_alive<1, 2>(), nb::keep_alive<1, 5>(), nb::keep_alive<1, 6>(), nb::keep_alive<1, 7>(),
           nb::keep_alive<1, 8>(), nb::keep_alive<1, 9>(), nb::keep_alive<1, 10>())
      .def("run", &PieceExchange::run, unlocked)
      .def("finish", &PieceExchange::finish, unlocked);
}

// What Broadcast.receive gives; gradwire._native says what each part is.
using HeardTuple = std::tuple<int, std::optional<int>, std::uint32_t, std::vector<std::size_t>, std::uint64_t,
                              std::uint64_t, std::optional<std::vector<double>>, int, std::vector<std::size_t>,
                              std::int64_t, std::int64_t, std::int64_t, std::array<std::uint64_t, 2>>;

std::optional<HeardTuple> tuple_of(const std::optional<exchange::Heard>& heard, std::size_t rank) {
  if (!heard) return std::nullopt;
  const exchange::Head& head = heard->head;
  const auto block = head.block == exchange::kNoBlock ? std::nullopt : std::optional<int>(head.block);
  const auto remaining_s = head.remaining_s.empty() ? std::nullopt : std::optional(head.remaining_s);
  return HeardTuple(head.origin, block, head.body_bytes, heard->sent_bytes, head.received_bytes[rank],
                    head.receiving_us[rank], remaining_s, head.ceiling_bits, heard->newly_ended, heard->duration_ns,
                    heard->arrived_ns, heard->decoded_ns, head.hidden_us);
}

void bind_broadcast(nb::module_& m) {
  using exchange::Broadcast;
  using Shapes = std::vector<std::tuple<std::string, std::size_t, Dtype>>;
  nb::class_<Broadcast> broadcast(m, "Broadcast");
  broadcast.def(
      "__init__",
      [](Broadcast* place, Mesh& mesh, std::uint32_t stream, int topology, const Shapes& shapes, std::size_t partition,
         int format, std::uint32_t configuration, std::uint32_t blocks_hash) {
        std::vector<exchange::BlockShape> blocks;
        for (const auto& [name, n, dtype] : shapes) blocks.push_back({name, n, dtype});
        new (place) Broadcast(mesh, stream, static_cast<exchange::Topology>(topology), std::move(blocks),
                              {partition, format}, configuration, blocks_hash);
      },
      nb::keep_alive<1, 2>(), unlocked);
  broadcast.def_prop_ro("n_copies", &Broadcast::n_copies)
      .def_prop_ro("queued_bytes", &Broadcast::queued_bytes)
      .def("begin", &Broadcast::begin)
      .def("max_body_bytes", &Broadcast::max_body_bytes);
  def_unlocked(broadcast, "encode",
               [](Broadcast& broadcast, std::size_t block, Bytes gradient, Dtype dtype, int n_bits) {
                 return broadcast.encode(block, values_of(gradient, dtype), n_bits);
               });
  def_unlocked(broadcast, "send",
               [](Broadcast& broadcast, const std::vector<std::size_t>& ended, int ceiling_bits,
                  std::optional<std::vector<double>> remaining_s, const std::array<std::uint64_t, 2>& hidden_us) {
                 exchange::Sent sent = broadcast.send(
                     ended, ceiling_bits, std::move(remaining_s).value_or(std::vector<double>()), hidden_us);
                 return std::pair(std::move(sent.answers), std::move(sent.ended));
               });
  def_unlocked(broadcast, "receive", [](Broadcast& broadcast, std::uint32_t step, std::size_t rank) {
    return tuple_of(broadcast.receive(step), rank);
  });
  def_unlocked(broadcast, "mean",
               [](Broadcast& broadcast, std::size_t block, Bytes gradient, Dtype dtype, OrNone<Bytes> left_out) {
                 const Values values = values_of(gradient, dtype);
                 broadcast.mean(block, values, left_out_of(left_out, values));
               });
}

// ---- the switch

void bind_switch(nb::module_& m) {
  using innet::Client;
  using innet::Server;
  m.attr("SWITCH_LANES") = innet::kLanes;
  m.attr("SWITCH_HEADER_BYTES") = innet::kHeaderBytes;
  m.attr("SWITCH_MAX_WORKERS") = innet::kMaxWorkers;
  nb::class_<Server>(m, "SwitchServer")
      .def(nb::init<const std::string&, std::uint16_t, std::size_t, double>())
      .def("run", &Server::run, unlocked)
      .def_prop_ro("port", &Server::port)
      .def_prop_ro("epoch", [](const Server& server) { return server.pipeline().epoch(); })
      .def("counters", [](const Server& server) {
        const innet::Pipeline& pipeline = server.pipeline();
        const innet::PipelineCounters& counters = pipeline.counters();
        return dict_of("n_slots", pipeline.n_slots(), "n_free_slots", pipeline.n_free_slots(), "n_jobs",
                       pipeline.n_jobs(), "values", counters.values, "results", counters.results, "duplicates",
                       counters.duplicates, "stale", counters.stale, "foreign", counters.foreign, "refusals",
                       counters.refusals, "jobs_admitted", counters.jobs_admitted, "jobs_evicted",
                       counters.jobs_evicted, "dropped_at_port", server.packets_dropped(), "bytes_received",
                       server.bytes_received(), "bytes_sent", server.bytes_sent());
      });
  nb::class_<Client>(m, "SwitchClient")
      .def(nb::init<const std::string&, std::uint16_t, std::uint64_t, std::size_t, std::size_t, std::size_t>())
      .def("join", &Client::join, unlocked)
      .def("reduce", &Client::reduce, unlocked)
      .def("leave", &Client::leave, unlocked)
      .def("stop", &Client::stop)
      .def_prop_ro("n_slots", &Client::n_slots)
      .def("counters", [](const Client& client) {
        const innet::ClientCounters& counters = client.counters();
        return dict_of("packets_sent", counters.packets_sent, "packets_resent", counters.packets_resent, "results",
                       counters.results, "results_again", counters.results_again, "foreign", counters.foreign,
                       "bytes_sent", counters.bytes_sent, "bytes_received", counters.bytes_received, "window_packets",
                       client.window(), "round_trip_s", client.round_trip_s());
      });
  // What a datagram is, for tests and `inspect`: a packet of this version, foreign or damaged, of another version.
  m.def("switch_check_packet", [](ConstBytes datagram) {
    innet::Header header;
    return innet::read_header(datagram, header);
  });
}

}  // namespace

void bind_engine(nb::module_& m) {
  bind_mesh(m);
  bind_exchange_codecs(m);
  bind_means(m);
  bind_shards(m);
  bind_pieces(m);
  bind_broadcast(m);
  bind_switch(m);
}
