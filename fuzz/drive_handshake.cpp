// Drives fuzz_handshake without libFuzzer, and makes its seeds: nothing altered, or a few bytes.
#include <cstdint>
#include <random>
#include <vector>

#include "drive.hpp"

int main(int n_arguments, char** arguments) {
  const auto make = [](std::mt19937_64& random, std::uint8_t, std::uint8_t) {
    return std::vector<std::uint8_t>(1 + random() % 100, 0);
  };
  return gradwire::fuzz::drive(n_arguments, arguments, 40, make);
}
