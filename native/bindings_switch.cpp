// The switch emulation and its client for Python. Calls that wait on the network release the GIL.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include "errors.hpp"
#include "switch/client.hpp"
#include "switch/server.hpp"

namespace nb = nanobind;
using namespace gradwire;

void bind_switch(nb::module_& m) {
  using innet::Client;
  using innet::Server;
  using Values = nb::ndarray<std::int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
  using ConstBytes = nb::ndarray<const std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

  m.attr("SWITCH_LANES") = innet::kLanes;
  m.attr("SWITCH_HEADER_BYTES") = innet::kHeaderBytes;
  m.attr("SWITCH_MAX_WORKERS") = innet::kMaxWorkers;

  nb::class_<Server>(m, "SwitchServer")
      .def(nb::init<const std::string&, std::uint16_t, std::size_t, double>(), nb::arg("address"), nb::arg("port"),
           nb::arg("n_slots"), nb::arg("lease_s"))
      .def("run", &Server::run, nb::arg("seconds"), nb::call_guard<nb::gil_scoped_release>())
      .def_prop_ro("port", &Server::port)
      .def_prop_ro("epoch", [](const Server& server) { return server.pipeline().epoch(); })
      .def("counters", [](const Server& server) {
        const innet::Pipeline& pipeline = server.pipeline();
        const innet::PipelineCounters& counters = pipeline.counters();
        nb::dict result;
        result["n_slots"] = pipeline.n_slots();
        result["n_free_slots"] = pipeline.n_free_slots();
        result["n_jobs"] = pipeline.n_jobs();
        result["values"] = counters.values;
        result["results"] = counters.results;
        result["duplicates"] = counters.duplicates;
        result["stale"] = counters.stale;
        result["foreign"] = counters.foreign;
        result["refusals"] = counters.refusals;
        result["jobs_admitted"] = counters.jobs_admitted;
        result["jobs_evicted"] = counters.jobs_evicted;
        result["dropped_at_port"] = server.packets_dropped();
        result["bytes_received"] = server.bytes_received();
        result["bytes_sent"] = server.bytes_sent();
        return result;
      });

  nb::class_<Client>(m, "SwitchClient")
      .def(nb::init<const std::string&, std::uint16_t, std::uint64_t, std::size_t, std::size_t, std::size_t>(),
           nb::arg("address"), nb::arg("port"), nb::arg("job"), nb::arg("worker"), nb::arg("n_workers"),
           nb::arg("wanted_slots"))
      .def("join", &Client::join, nb::arg("timeout_s"), nb::call_guard<nb::gil_scoped_release>())
      .def(
          "reduce",
          [](Client& client, const Values& values, int operation, double timeout_s) {
            if (operation < 1 || operation > 3) throw InvalidArgument("operations are 1 add, 2 or, 3 maximum");
            const std::span<std::int32_t> span(values.data(), values.size());
            const nb::gil_scoped_release unlocked;
            client.reduce(span, static_cast<innet::Operation>(operation), timeout_s);
          },
          nb::arg("values"), nb::arg("operation"), nb::arg("timeout_s"))
      .def("leave", &Client::leave, nb::call_guard<nb::gil_scoped_release>())
      .def("stop", &Client::stop)
      .def_prop_ro("n_slots", &Client::n_slots)
      .def("counters", [](const Client& client) {
        const innet::ClientCounters& counters = client.counters();
        nb::dict result;
        result["packets_sent"] = counters.packets_sent;
        result["packets_resent"] = counters.packets_resent;
        result["results"] = counters.results;
        result["results_again"] = counters.results_again;
        result["foreign"] = counters.foreign;
        result["bytes_sent"] = counters.bytes_sent;
        result["bytes_received"] = counters.bytes_received;
        result["window_packets"] = client.window();
        result["round_trip_s"] = client.round_trip_s();
        return result;
      });

  // What a datagram is, for tests and `inspect`: 0 a packet of this version, 1 foreign or damaged, 2 of another
  // version.
  m.def(
      "switch_check_packet",
      [](const ConstBytes& datagram) {
        innet::Header header;
        return static_cast<int>(innet::read_header({datagram.data(), datagram.size()}, header));
      },
      nb::arg("datagram"));
}
