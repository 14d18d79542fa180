// Sums round a ring for Python, at once or on a thread of their own.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/array.h>

#include <array>
#include <memory>

#include "bindings_account.hpp"
#include "errors.hpp"
#include "exchange/sum.hpp"

namespace nb = nanobind;
using namespace gradwire;

namespace {

using ByteArray = nb::ndarray<std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using FactsArray = std::array<std::uint32_t, 4>;

struct Arguments {
  exchange::Ticket ticket;
  std::span<std::uint8_t> values;
  exchange::Element element;
  exchange::Operation operation;
};

Arguments read(std::uint32_t stream, const FactsArray& facts, const ByteArray& values, int element, int operation) {
  if (element < 0 || element >= exchange::kElements) throw InvalidArgument("unknown element code");
  if (operation < 0 || operation >= exchange::kOperations) throw InvalidArgument("unknown operation code");
  return {{stream, {facts[0], facts[1], facts[2], facts[3]}},
          {values.data(), values.size()},
          static_cast<exchange::Element>(element),
          static_cast<exchange::Operation>(operation)};
}

class SumOnItsWay {
 public:
  SumOnItsWay(wire::Mesh& mesh, std::uint32_t stream, const FactsArray& facts, ByteArray values, int element,
              int operation, std::size_t n_chunks)
      : kept_(std::move(values)) {
    const Arguments arguments = read(stream, facts, kept_, element, operation);
    sum_ = std::make_unique<exchange::RunningSum>(mesh, arguments.ticket, arguments.values, arguments.element,
                                                  arguments.operation, n_chunks);
  }
  ~SumOnItsWay() {
    const nb::gil_scoped_release unlocked;  // it may have to wait for its thread
    sum_.reset();
  }
  nb::tuple wait() {
    const exchange::Account* account;
    {
      const nb::gil_scoped_release unlocked;
      account = &sum_->wait();
    }
    return account_of(*account);
  }

 private:
  const ByteArray kept_;
  std::unique_ptr<exchange::RunningSum> sum_;
};

}  // namespace

void bind_sum(nb::module_& m) {
  m.def(
      "ring_combine",
      [](wire::Mesh& mesh, std::uint32_t stream, const FactsArray& facts, const ByteArray& values, int element,
         int operation, std::size_t n_chunks) {
        const Arguments arguments = read(stream, facts, values, element, operation);
        exchange::Account account;
        {
          const nb::gil_scoped_release unlocked;
          exchange::ring_combine(mesh, arguments.ticket, arguments.values, arguments.element, arguments.operation,
                                 n_chunks, account);
        }
        return account_of(account);
      },
      nb::arg("mesh"), nb::arg("stream"), nb::arg("facts"), nb::arg("values"), nb::arg("element"), nb::arg("operation"),
      nb::arg("n_chunks"));
  nb::class_<SumOnItsWay>(m, "SumOnItsWay")
      .def(nb::init<wire::Mesh&, std::uint32_t, const FactsArray&, ByteArray, int, int, std::size_t>(), nb::arg("mesh"),
           nb::arg("stream"), nb::arg("facts"), nb::arg("values"), nb::arg("element"), nb::arg("operation"),
           nb::arg("n_chunks"), nb::keep_alive<1, 2>())
      .def("wait", &SumOnItsWay::wait);
}
