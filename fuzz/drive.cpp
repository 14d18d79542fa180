// Drives a libFuzzer harness where the compiler has no libFuzzer (GCC): mutated encodings of random gradients and plain
// random bytes, from a fixed seed. Usage: fuzz_gcomp_decode [N_RUNS [SEED]]
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "gcomp/codec.hpp"

namespace gcomp = gradwire::gcomp;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);

namespace {

std::vector<std::uint8_t> make_message(std::mt19937_64& random, int dtype_code) {
  const auto dtype = static_cast<gcomp::Dtype>(dtype_code);
  const auto mode = static_cast<gcomp::Mode>(random() % gcomp::kModes);
  const gcomp::DtypeLayout& layout = gcomp::layout_of(dtype);
  const std::size_t n_values = random() % 4 == 0 ? gcomp::kChunkValues + random() % 600 : random() % 700;
  std::vector<std::uint8_t> values(n_values * layout.value_bytes),
      importance(mode == gcomp::Mode::paper ? n_values : 0);
  const bool clustered = random() % 4 != 0;
  for (std::size_t i = 0; i < values.size(); ++i) {
    values[i] = static_cast<std::uint8_t>(random());
    const auto place = static_cast<int>(i % layout.value_bytes);
    if (clustered && place == layout.value_bytes - 1) values[i] = static_cast<std::uint8_t>(0x34 + random() % 4);
  }
  for (std::uint8_t& byte : importance) byte = static_cast<std::uint8_t>(random());
  const gradwire::HuffmanTable table = gradwire::HuffmanTable::prior(layout.exponent_bits);
  std::vector<std::uint8_t> out(gcomp::max_message_bytes(n_values, dtype, mode));
  out.resize(gcomp::encode(values, importance, {dtype, mode, static_cast<int>(random() % 8)}, table, out));
  return out;
}

}  // namespace

int main(int n_arguments, char** arguments) {
  const long n_runs = n_arguments > 1 ? std::atol(arguments[1]) : 10'000;
  std::mt19937_64 random(n_arguments > 2 ? std::strtoull(arguments[2], nullptr, 10) : 1);
  for (long run = 0; run < n_runs; ++run) {
    const int dtype = static_cast<int>(random() % gcomp::kDtypes);
    std::vector<std::uint8_t> input = {static_cast<std::uint8_t>(dtype), static_cast<std::uint8_t>(random())};
    if (run % 8 == 0) {
      for (std::size_t n = random() % 300; n > 0; --n) input.push_back(static_cast<std::uint8_t>(random()));
    } else {
      const std::vector<std::uint8_t> message = make_message(random, dtype);
      input.insert(input.end(), message.begin(), message.end());
      const std::size_t reach = random() % 2 == 0 ? std::min<std::size_t>(input.size(), 130) : input.size();
      for (std::size_t n = random() % 6; n > 0; --n)
        input[2 + random() % (reach - 2)] = static_cast<std::uint8_t>(random());
      if (random() % 8 == 0) input.resize(2 + random() % (input.size() - 1));
    }
    LLVMFuzzerTestOneInput(input.data(), input.size());
  }
  std::printf("%ld runs, nothing found\n", n_runs);
}
