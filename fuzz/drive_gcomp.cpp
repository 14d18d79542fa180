// Drives fuzz_gcomp_decode and fuzz_switch_packets without libFuzzer, and makes its seeds: mutated encodings of
// random gradients and plain random bytes, from a fixed seed.
#include <cstdint>
#include <random>
#include <vector>

#include "drive.hpp"
#include "gcomp/codec.hpp"
#include "gcomp_importance.hpp"

namespace gcomp = gradwire::gcomp;

namespace {

std::vector<std::uint8_t> make_message(std::mt19937_64& random, int dtype_code) {
  const auto dtype = static_cast<gcomp::Dtype>(dtype_code);
  const auto mode = static_cast<gcomp::Mode>(random() % gcomp::kModes);
  const std::size_t n_values = random() % 4 == 0 ? gcomp::kChunkValues + random() % 600 : random() % 700;
  const auto version = random() % 2 == 0 ? gcomp::Version::levels : gcomp::Version::derived;
  std::vector<std::uint8_t> values(n_values * gcomp::bytes_of(dtype));
  const std::vector<std::uint8_t> importance =
      gradwire::fuzz::importance_bytes(mode == gcomp::Mode::paper ? n_values : 0);
  const bool clustered = random() % 4 != 0;
  for (std::size_t i = 0; i < values.size(); ++i) {
    values[i] = static_cast<std::uint8_t>(random());
    const std::size_t place = i % gcomp::bytes_of(dtype);
    if (clustered && place == gcomp::bytes_of(dtype) - 1) values[i] = static_cast<std::uint8_t>(0x34 + random() % 4);
  }
  const gradwire::HuffmanTable table = gradwire::HuffmanTable::prior(gcomp::exponent_bits_of(dtype, version));
  std::vector<std::uint8_t> out(gcomp::max_message_bytes(n_values, dtype, mode, version));
  const gcomp::EncodeOptions options{dtype, mode, static_cast<int>(random() % 8), gcomp::Rounding::nearest, version};
  out.resize(gcomp::encode(values, importance, options, table, out));
  return out;
}

}  // namespace

int main(int n_arguments, char** arguments) {
  const auto make = [](std::mt19937_64& random, std::uint8_t first, std::uint8_t) {
    return make_message(random, first % gcomp::kDtypes);
  };
  return gradwire::fuzz::drive(n_arguments, arguments, 130, make);
}
