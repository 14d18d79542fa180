// The main loop of every driver: mutated messages and plain random bytes, from a fixed seed, into a libFuzzer harness
// that a compiler without libFuzzer (GCC) can run too. Arguments of the program: [N_RUNS [SEED [FOLDER]]]; with a
// folder the inputs are written there too, as seeds for libFuzzer.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <random>
#include <string>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);

namespace gradwire::fuzz {

// An input is two bytes that choose what is decoded and how, then the message. `make_message(random, first, second)`
// makes one that decodes under these two. Half the mutations lie in the first `header_bytes`.
template <class MakeMessage>
int drive(int n_arguments, char** arguments, std::size_t header_bytes, MakeMessage make_message) {
  const long n_runs = n_arguments > 1 ? std::atol(arguments[1]) : 10'000;
  std::mt19937_64 random(n_arguments > 2 ? std::strtoull(arguments[2], nullptr, 10) : 1);
  const auto random_byte = [&] { return static_cast<std::uint8_t>(random()); };
  for (long run = 0; run < n_runs; ++run) {
    const std::uint8_t first = random_byte(), second = random_byte();
    std::vector<std::uint8_t> input = {first, second};
    if (run % 8 == 0) {
      for (std::size_t n = random() % 300; n > 0; --n) input.push_back(random_byte());
    } else {
      const std::vector<std::uint8_t> message = make_message(random, first, second);
      input.insert(input.end(), message.begin(), message.end());
      const std::size_t reach = random() % 2 == 0 ? std::min<std::size_t>(input.size(), header_bytes) : input.size();
      for (std::size_t n = random() % 6; n > 0; --n) input[2 + random() % (reach - 2)] = random_byte();
      if (random() % 8 == 0) input.resize(2 + random() % (input.size() - 1));
    }
    if (n_arguments > 3) {
      std::ofstream file(std::string(arguments[3]) + "/" + std::to_string(run), std::ios::binary);
      file.write(reinterpret_cast<const char*>(input.data()), static_cast<std::streamsize>(input.size()));
      if (!file) {
        std::fprintf(stderr, "cannot write into %s\n", arguments[3]);
        return 1;
      }
    }
    LLVMFuzzerTestOneInput(input.data(), input.size());
  }
  std::printf("%ld runs, nothing found\n", n_runs);
  return 0;
}

}  // namespace gradwire::fuzz
