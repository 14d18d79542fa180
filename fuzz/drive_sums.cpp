// Drives fuzz_sums_decode without libFuzzer, and makes its seeds: indices of many densities with as many packed values,
// mutated, and plain random bytes, from a fixed seed.
#include <bit>
#include <cstdint>
#include <random>
#include <vector>

#include "drive.hpp"

namespace {

std::vector<std::uint8_t> make_message(std::mt19937_64& random, std::size_t item_bytes) {
  const auto n_values = static_cast<std::uint32_t>(random() % 8 == 0 ? random() % 8'000 : random() % 1'200);
  const std::uint32_t n_words = (n_values + 31) / 32;
  const unsigned density = random() % 101;
  std::vector<std::uint8_t> out;
  const auto put = [&](std::uint32_t word, int n_bytes) {
    for (int byte = 0; byte < n_bytes; ++byte) out.push_back(static_cast<std::uint8_t>(word >> (8 * byte)));
  };
  put(n_values, 2);
  put(n_words, 2);
  std::size_t n_set = 0;
  for (std::uint32_t i = 0; i < n_words; ++i) {
    std::uint32_t word = 0;
    for (std::uint32_t bit = 0; bit < 32 && 32 * i + bit < n_values; ++bit)
      word |= static_cast<std::uint32_t>(random() % 100 < density) << bit;
    put(word, 4);
    n_set += static_cast<std::size_t>(std::popcount(word));
  }
  for (std::size_t i = 0; i < n_set * item_bytes; ++i) out.push_back(static_cast<std::uint8_t>(random()));
  return out;
}

}  // namespace

int main(int n_arguments, char** arguments) {
  const auto make = [](std::mt19937_64& random, std::uint8_t first, std::uint8_t) {
    return make_message(random, first / 4 % 2 == 0 ? 2 : 4);
  };
  return gradwire::fuzz::drive(n_arguments, arguments, 40, make);
}
