// A rank's connections for Python: what it opens, sends and receives itself. Whatever waits releases the GIL.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "errors.hpp"
#include "wire/mesh.hpp"

namespace nb = nanobind;
using namespace gradwire;

namespace {

using ConstByteArray = nb::ndarray<const std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using FactsArray = std::array<std::uint32_t, 4>;

wire::Facts facts_of(const FactsArray& facts) { return {facts[0], facts[1], facts[2], facts[3]}; }

}  // namespace

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
