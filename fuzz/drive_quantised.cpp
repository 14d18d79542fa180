// Drives fuzz_quantised_decode without libFuzzer, and makes its seeds: mutated encodings of random gradients, with
// and without error feedback, and plain random bytes, from a fixed seed.
#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "drive.hpp"
#include "quantisers/codec.hpp"
#include "simd/dispatch.hpp"

namespace quantisers = gradwire::quantisers;

namespace {

std::vector<std::uint8_t> make_message(std::mt19937_64& random, quantisers::Kind kind) {
  const std::size_t n_values = random() % 8 == 0 ? 65'000 + random() % 2'000 : random() % 1'500;
  std::vector<float> gradient(n_values), residual(n_values), new_residual(n_values);
  for (float& value : gradient) {
    const auto bits = static_cast<std::uint32_t>(random());
    if (random() % 4096 == 0)
      std::memcpy(&value, &bits, sizeof value);  // anything, Inf and NaN too
    else
      value = static_cast<float>(static_cast<std::int32_t>(bits)) * 0x1p-40f;
  }
  const bool feeds_back = random() % 2 == 0;
  const auto* const raw = reinterpret_cast<const std::uint8_t*>(gradient.data());
  quantisers::Source source{{raw, 4 * n_values}, quantisers::Dtype::float32, {}};
  if (feeds_back) source.residual = residual;
  const std::span<float> kept = feeds_back ? std::span<float>(new_residual) : std::span<float>();
  std::vector<std::uint8_t> out;
  quantisers::Options options{kind};
  options.rule = static_cast<quantisers::Options::Rule>(random() % 3);
  options.parameter = kind == quantisers::Kind::thc ? 2.15f : 0.01f;
  options.levels = 1 + static_cast<int>(random() % 127);
  options.block = 128u << random() % 6;
  options.stream = {random(), random()};
  std::vector<std::uint32_t> cuts;
  if (kind == quantisers::Kind::one_bit || kind == quantisers::Kind::two_bit) {
    options.block = options.rule == quantisers::Options::Rule::fixed || random() % 2 == 0 ? 0 : 64u << random() % 7;
    for (std::size_t at = random() % 600; options.block != 0 && at < n_values; at += 1 + random() % 600)
      if (at > 0) cuts.push_back(static_cast<std::uint32_t>(at));
    options.cuts = cuts;
  }
  out.resize(quantisers::max_message_bytes(options, n_values, cuts.size()));
  out.resize(quantisers::encode(options, source, kept, out));
  return out;
}

}  // namespace

int main(int n_arguments, char** arguments) {
  const auto make = [](std::mt19937_64& random, std::uint8_t first, std::uint8_t) {
    return make_message(random, static_cast<quantisers::Kind>(first % quantisers::kKinds));
  };
  return gradwire::fuzz::drive(n_arguments, arguments, 40, make);
}
