// Drives fuzz_float_decode without libFuzzer, and makes its seeds: mutated encodings of random gradients and plain
// random bytes, from a fixed seed.
#include <algorithm>
#include <cstdint>
#include <random>
#include <vector>

#include "drive.hpp"
#include "embedded_float/codec.hpp"
#include "truncated_float/codec.hpp"

namespace embedded_float = gradwire::embedded_float;
namespace floats = gradwire::floats;
namespace planes = gradwire::planes;
namespace truncated_float = gradwire::truncated_float;

namespace {

std::vector<std::uint8_t> make_message(std::mt19937_64& random, floats::Dtype dtype, bool is_embedded, int n_known) {
  const std::size_t n_values = random() % 8 == 0 ? 16384 + random() % 600 : random() % 700;
  std::vector<std::uint8_t> values(n_values * floats::bytes_of(dtype));
  const bool clustered = random() % 4 != 0;
  for (std::size_t i = 0; i < values.size(); ++i) {
    values[i] = static_cast<std::uint8_t>(random());
    const bool is_top = i % floats::bytes_of(dtype) == floats::bytes_of(dtype) - 1;
    if (clustered && is_top) values[i] = static_cast<std::uint8_t>(0x34 + random() % 4);
  }
  const std::size_t partition = random() % 2 == 0 ? 256 : std::size_t{32} << random() % 6;
  std::vector<std::uint8_t> out;
  if (is_embedded) {
    const int first = random() % 2 == 0 ? 0 : std::min(n_known, 31);
    const planes::Range range{first, 1 + static_cast<int>(random() % static_cast<unsigned>(32 - first))};
    out.resize(embedded_float::max_message_bytes(n_values, partition, range));
    const embedded_float::Settings settings{partition, 1 + static_cast<int>(random() % 2)};
    out.resize(embedded_float::encode(values, dtype, settings, range, out));
  } else {
    truncated_float::Settings settings{
        dtype, static_cast<truncated_float::Format>(random() % truncated_float::kFormats), 2, partition};
    settings.n_bits += static_cast<int>(random() % static_cast<unsigned>(settings.layout().width - 1));
    out.resize(truncated_float::max_message_bytes(n_values, settings));
    const auto rounding = static_cast<truncated_float::Rounding>(random() % truncated_float::kRoundings);
    out.resize(truncated_float::encode(values, settings, rounding, {random(), random()}, out));
  }
  return out;
}

}  // namespace

int main(int n_arguments, char** arguments) {
  const auto make = [](std::mt19937_64& random, std::uint8_t first, std::uint8_t second) {
    return make_message(random, static_cast<floats::Dtype>(first % floats::kDtypes), first & 0x80, second % 33);
  };
  return gradwire::fuzz::drive(n_arguments, arguments, 60, make);
}
