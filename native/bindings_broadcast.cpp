// The broadcast exchange for Python: one call a message, which returns with what its head said.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "errors.hpp"
#include "exchange/broadcast.hpp"

namespace nb = nanobind;
using namespace gradwire;

namespace {

using ByteArray = nb::ndarray<std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using exchange::Broadcast;

floats::Dtype dtype_of(int code) {
  if (code < 0 || code >= floats::kDtypes) throw InvalidArgument("unknown dtype code");
  return static_cast<floats::Dtype>(code);
}

exchange::Values values_of(const ByteArray& bytes, int dtype) {
  const floats::Dtype known = dtype_of(dtype);
  return {bytes.data(), bytes.size() / floats::bytes_of(known), known};
}

nb::object heard_of(const std::optional<exchange::Heard>& heard, std::size_t rank) {
  if (!heard) return nb::none();
  const exchange::Head& head = heard->head;
  const nb::object block = head.block == exchange::kNoBlock ? nb::none() : nb::cast(static_cast<int>(head.block));
  const nb::object remaining_s = head.remaining_s.empty() ? nb::none() : nb::cast(head.remaining_s);
  return nb::make_tuple(static_cast<int>(head.origin), block, head.body_bytes, heard->forwarded_bytes,
                        head.received_bytes[rank], head.receiving_us[rank], remaining_s, head.ceiling_bits,
                        heard->newly_ended, heard->duration_ns, heard->arrived_ns, heard->decoded_ns);
}

}  // namespace

void bind_broadcast(nb::module_& m) {
  using Shapes = std::vector<std::tuple<std::string, std::size_t, int>>;
  nb::class_<Broadcast>(m, "Broadcast")
      .def(
          "__init__",
          [](Broadcast* place, wire::Mesh& mesh, std::uint32_t stream, bool is_ring, const Shapes& shapes,
             std::size_t partition, std::uint32_t configuration, std::uint32_t blocks_hash) {
            std::vector<exchange::BlockShape> blocks;
            for (const auto& [name, n, dtype] : shapes) blocks.push_back({name, n, dtype_of(dtype)});
            const nb::gil_scoped_release unlocked;
            new (place) Broadcast(mesh, stream, is_ring, std::move(blocks), partition, configuration, blocks_hash);
          },
          nb::arg("mesh"), nb::arg("stream"), nb::arg("is_ring"), nb::arg("blocks"), nb::arg("partition"),
          nb::arg("configuration"), nb::arg("blocks_hash"), nb::keep_alive<1, 2>())
      .def_prop_ro("n_copies", &Broadcast::n_copies)
      .def_prop_ro("head_bytes", &Broadcast::head_bytes)
      .def("begin", &Broadcast::begin, nb::arg("step"))
      .def(
          "max_body_bytes",
          [](const Broadcast& broadcast, std::size_t block, int n_bits) {
            return broadcast.max_body_bytes(block, n_bits);
          },
          nb::arg("block"), nb::arg("n_bits"))
      .def(
          "encode",
          [](Broadcast& broadcast, std::size_t block, const ByteArray& gradient, int dtype, int n_bits) {
            const exchange::Values values = values_of(gradient, dtype);
            const nb::gil_scoped_release unlocked;
            return broadcast.encode(block, values, n_bits);
          },
          nb::arg("block"), nb::arg("gradient"), nb::arg("dtype"), nb::arg("n_bits"))
      .def(
          "send",
          [](Broadcast& broadcast, const std::vector<std::size_t>& ended, int ceiling_bits,
             std::optional<std::vector<double>> remaining_s) {
            const nb::gil_scoped_release unlocked;
            broadcast.send(ended, ceiling_bits, std::move(remaining_s).value_or(std::vector<double>()));
          },
          nb::arg("ended"), nb::arg("ceiling_bits"), nb::arg("remaining_s").none())
      .def(
          "receive",
          [](Broadcast& broadcast, std::uint32_t step, std::size_t rank) {
            std::optional<exchange::Heard> heard;
            {
              const nb::gil_scoped_release unlocked;
              heard = broadcast.receive(step);
            }
            return heard_of(heard, rank);
          },
          nb::arg("step"), nb::arg("rank"))
      .def(
          "mean",
          [](Broadcast& broadcast, std::size_t block, const ByteArray& gradient, int dtype,
             const std::optional<ByteArray>& left_out) {
            const exchange::Values values = values_of(gradient, dtype);
            const exchange::Values lost = left_out ? values_of(*left_out, dtype) : exchange::Values{nullptr, 0, {}};
            const nb::gil_scoped_release unlocked;
            broadcast.mean(block, values, lost);
          },
          nb::arg("block"), nb::arg("gradient"), nb::arg("dtype"), nb::arg("left_out").none());
}
